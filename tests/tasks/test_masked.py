"""Masked language models and ELECTRA: losses at the masked positions, and what they count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.tiny import VOCAB, tiny, words
from tests.tasks.small_texts import trainer, write_texts
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.models.bert import Bert, BertConfig, NextSentence
from manyheads.models.electra import Electra
from manyheads.models.heads import Detect, Masked, Pooler
from manyheads.nn.layers import EmbeddingConfig
from manyheads.tasks.pretraining import (
    MaskedBatch,
    MaskedTask,
    MaskedWindows,
    masked_loss,
    masked_losses,
    replaced_losses,
)
from manyheads.train.step import Loss

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"head": Masked(tie="none")},
    "factorized": {"embed": EmbeddingConfig(dim=4, segments=2)},
}


def make_batch(rows: int = 3, length: int = 7, *, padded: bool = False) -> MaskedBatch:
    """Random words of which every fourth is masked; the last row may be shorter."""
    tokens, labels = words(rows, length), words(rows * length)
    positions = torch.arange(1, rows * length, 4)
    mask = None
    if padded:
        mask = torch.ones(rows, length, dtype=torch.bool)
        mask[-1, length // 2 :] = False
        positions = positions[mask.flatten()[positions]]
    size = rows * length if mask is None else int(mask.sum())
    other = torch.arange(rows) % 2
    labels, count = labels[positions], len(positions)
    return MaskedBatch(tokens, mask, tokens % 2, positions, labels, other, size, count)


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_at_the_positions_is_that_of_all_logits(shape: str, smoothing: float) -> None:
    """Also with padded positions, which have no label."""
    model: Bert = tiny(BertConfig, **SHAPES[shape]).build().double()
    batch = make_batch(padded=True)
    labels = torch.full_like(batch.tokens.flatten(), -100)
    labels[batch.positions] = batch.labels
    logits = model(batch.tokens, batch.real, batch.segments).flatten(0, 1)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    for some in (batch, batch.padded(16)):
        hidden = model.hidden(batch.tokens, batch.real, batch.segments)
        loss = masked_loss(model, hidden, some, smoothing)
        assert loss.count == len(batch.positions)
        torch.testing.assert_close(loss.objective, expected, rtol=0, atol=1e-12)
        ours = gradients(loss.objective, model)
        theirs = torch.autograd.grad(
            expected, list(model.parameters()), materialize_grads=True, retain_graph=True
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_only_masked_positions_enter_the_output_layer() -> None:
    model: Bert = tiny(BertConfig).build()
    batch, inputs = make_batch(), []
    model.head.project.register_forward_hook(lambda module, given, out: inputs.append(given[0]))  # type: ignore[union-attr]
    hidden = model.hidden(batch.tokens)
    masked_loss(model, hidden, batch)
    assert torch.equal(inputs[0], hidden.flatten(0, 1)[batch.positions])


def test_a_pair_has_two_terms() -> None:
    embed = EmbeddingConfig(segments=2)
    config = tiny(BertConfig, pooler=Pooler(), next_sentence=NextSentence(), embed=embed)
    model: Bert = config.build().double()
    batch = make_batch(padded=True)
    losses = masked_losses(model, batch)
    counts = {name: loss.count for name, loss in losses.items()}
    assert counts == {"masked": len(batch.positions), "next_sentence": 3}
    hidden = model.hidden(batch.tokens, batch.real, batch.segments)
    logits = model.next_sentence_logits(hidden, batch.real)
    assert batch.other is not None
    expected = F.cross_entropy(logits, batch.other, reduction="sum")
    torch.testing.assert_close(losses["next_sentence"].objective.double(), expected)
    assert losses["next_sentence"].correct == (logits.argmax(1) == batch.other).sum()


# --- ELECTRA ---


def electra() -> Electra:
    embed = EmbeddingConfig(segments=2)
    return Electra(tiny(BertConfig, heads=4, head=Detect(), embed=embed).build(), 0.5)


@pytest.mark.parametrize("padded", [False, True])
def test_a_token_is_replaced_if_the_sample_differs(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = electra().double(), make_batch(padded=padded)
    # Every second sample is the original token, which does not count as replaced.
    is_original = torch.arange(len(batch.labels)) % 2 == 0
    samples = torch.where(is_original, batch.labels, (batch.labels + 1) % VOCAB)
    monkeypatch.setattr(torch, "multinomial", lambda chances, count: samples[:, None])
    seen: list[Tensor] = []
    model.model.register_forward_hook(lambda module, inputs, out: seen.extend([inputs[0], out]))
    losses = replaced_losses(model, batch, weight=50.0)
    tokens, logits = seen
    expected = batch.tokens.flatten().clone()
    expected[batch.positions] = samples
    assert torch.equal(tokens.flatten(), expected)
    is_replaced = torch.zeros(tokens.numel())
    is_replaced[batch.positions[1::2]] = 1.0
    mask = torch.ones_like(tokens, dtype=torch.bool) if batch.real is None else batch.real
    outputs, targets = logits.float()[mask], is_replaced.view_as(tokens)[mask]
    loss = losses["replaced"]
    total = F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")
    torch.testing.assert_close(loss.objective, total)
    assert (loss.count, loss.weight) == (int(mask.sum()), 50.0)
    assert loss.correct == ((outputs > 0) == (targets > 0)).sum()
    generator = losses["masked"]
    assert (generator.count, generator.weight) == (len(batch.positions), 1.0)


def test_the_detector_trains_only_shared_tables_of_the_generator() -> None:
    model, batch = electra(), make_batch()
    loss = replaced_losses(model, batch, weight=50.0)["replaced"].objective
    parameters = list(model.generator.parameters())
    assert parameters
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    assert all(gradient is None for gradient in grads)
    [shared] = torch.autograd.grad(loss, [model.model.tokens.weight])
    assert bool(shared.any())


def test_the_generator_samples_by_its_probabilities() -> None:
    model, tokens = electra().eval(), words(1, 7)
    hidden = model.generator.hidden(tokens)
    with torch.no_grad():
        logits = model.generator.logits(hidden)[0, 3]
        model.generator.head.output.bias.add_(2 * logits)  # type: ignore[union-attr, operator]
        probabilities = (3 * logits).softmax(-1).numpy()
    count = 20_000
    torch.manual_seed(1)
    _, samples = model.fill(tokens, torch.full((count,), 3), hidden)
    frequencies = np.bincount(samples.numpy(), minlength=VOCAB) / count
    error = np.sqrt(probabilities * (1 - probabilities) / count)
    assert (np.abs(frequencies - probabilities) < 4 * error + 1e-4).all()


@pytest.mark.parametrize("name", ["masked pairs", "replaced"])
def test_validation_counts_all_rows_and_does_not_depend_on_the_seed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts", 120)
    actual = trainer(name, texts, tmp_path / "run", "data.held_out=0.5")
    assert isinstance(actual.task, MaskedTask)
    passes: list[tuple[MaskedBatch, dict[str, Loss]]] = []
    losses_of = MaskedWindows.losses

    def record(self: MaskedWindows, model: nn.Module, batch: MaskedBatch) -> dict[str, Loss]:
        passes.append((batch, losses_of(self, model, batch)))
        return passes[-1][1]

    monkeypatch.setattr(MaskedWindows, "losses", record)
    torch.manual_seed(1)
    first = actual.task.validate(actual.model)
    assert len(passes) > 1
    assert passes[0][0].positions.tolist() != passes[1][0].positions.tolist()
    [term] = [name for name, loss in passes[0][1].items() if loss.correct is not None]
    terms = [losses[term] for _, losses in passes]
    correct = sum(int(loss.correct) for loss in terms if loss.correct is not None)
    count = sum(loss.count for loss in terms)
    assert first[f"{term}_accuracy"] == correct / count
    torch.manual_seed(2)
    assert actual.task.validate(actual.model) == first


@pytest.mark.parametrize("name", ["masked static", "masked pairs static"])
def test_static_rows_differ_and_repeat_every_epoch(name: str, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")

    def task_of(rows: int) -> Any:
        folder = tmp_path / str(rows)
        return trainer(name, texts, folder, f"train.batch_rows={rows}").task

    def rows_of(task: Any, steps: range) -> set[tuple[int, ...]]:
        """Inputs, masked positions and labels of each row."""
        rows = set()
        for step in steps:
            [batch] = task.batches(step)
            labels = torch.zeros_like(batch.tokens).flatten()
            labels = labels.scatter(0, batch.positions, batch.labels + 1).view_as(batch.tokens)
            lengths = [batch.tokens.shape[1]] * len(labels)
            if batch.real is not None:
                lengths = batch.real.sum(1).tolist()
            for row, length in enumerate(lengths):
                rows.add((*batch.tokens[row, :length].tolist(), *labels[row, :length].tolist()))
        return rows

    single, several = task_of(1), task_of(3)
    count = single.per_epoch
    epoch = rows_of(single, range(count))
    assert rows_of(single, range(count, 2 * count)) == epoch
    assert rows_of(several, range(-(-count // 3))) == epoch  # padded to one width
    assert len(epoch) > 0.9 * count


def test_dynamic_masking_differs_in_every_step(tmp_path: Path) -> None:
    task = trainer("masked", write_texts(tmp_path / "texts"), tmp_path / "run").task
    positions = [tuple(task.batches(step)[0].positions.tolist()) for step in range(5)]
    assert len(set(positions)) == 5
