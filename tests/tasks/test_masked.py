"""Masked language models: the loss at the hidden places alone, and what a pass tells."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.tiny import VOCAB, tiny, words
from tests.tasks.small_texts import trainer, write_texts
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.mlm import MaskedBatch
from manyheads.models.bert import Bert, BertConfig, NextSentence
from manyheads.models.electra import Electra
from manyheads.models.heads import Detect, Masked, Pooler
from manyheads.nn.embedding import EmbeddingConfig
from manyheads.tasks import masked
from manyheads.tasks.masked import MaskedTask, masked_loss, masked_pass, replaced_pass

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "a matrix of its own": {"head": Masked(tie="none")},
    "a narrow table": {"embed": EmbeddingConfig(dim=4, segments=2)},
}


def a_batch(rows: int = 3, length: int = 7, *, padded: bool = False) -> MaskedBatch:
    """Random words of which every fourth is hidden; the last row may be shorter."""
    tokens, wanted = words(rows, length), words(rows * length)
    places = torch.arange(1, rows * length, 4)
    real = None
    if padded:
        real = torch.ones(rows, length, dtype=torch.bool)
        real[-1, length // 2 :] = False
        places = places[real.flatten()[places]]
    size = rows * length if real is None else int(real.sum())
    other = torch.arange(rows) % 2
    return MaskedBatch(tokens, real, tokens % 2, places, wanted[places], other, size)


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_at_the_places_is_that_of_all_logits(shape: str, smoothing: float) -> None:
    model: Bert = tiny(BertConfig, **SHAPES[shape]).build().double()
    batch = a_batch(padded=True)
    labels = torch.full_like(batch.tokens.flatten(), -100)
    labels[batch.places] = batch.wanted
    logits = model(batch.tokens, batch.real, batch.segments)
    assert logits.shape == (3, 7, VOCAB)
    usual = F.cross_entropy(
        logits.flatten(0, 1), labels, label_smoothing=smoothing, reduction="sum"
    )
    hidden = model.hidden(batch.tokens, batch.real, batch.segments)
    ours = masked_loss(model, hidden, batch, smoothing)
    assert ours.count == len(batch.places) == int((labels >= 0).sum())
    torch.testing.assert_close(ours.objective, usual, rtol=0, atol=1e-12)
    mine, theirs = gradients(ours.objective, model), gradients(usual, model)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert all(bool(one.any()) for one in mine if one.ndim == 2 and one.shape[0] == VOCAB)


def test_places_that_want_nothing_change_nothing() -> None:
    model: Bert = tiny(BertConfig).build().double()
    batch = a_batch(padded=True)
    wide = batch.padded(16)
    assert len(wide.places) == len(wide.wanted) == 16 > len(batch.places)
    both = [(model.hidden(batch.tokens, batch.real), one) for one in (batch, wide)]
    losses = [masked_loss(model, hidden, one, 0.1) for hidden, one in both]
    assert losses[0].count == losses[1].count == len(batch.places)
    torch.testing.assert_close(losses[0].objective, losses[1].objective, rtol=1e-12, atol=0)
    for one, other in zip(*(gradients(loss.objective, model) for loss in losses), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_only_the_places_enter_the_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Bert = tiny(BertConfig).build()
    batch, entered = a_batch(), []
    model.head.project.register_forward_hook(lambda module, given, out: entered.append(given[0]))  # type: ignore[union-attr]
    usual = masked.cross_entropy

    def watched(hidden: Tensor, *rest: Any, **settings: Any) -> Any:
        entered.append(hidden)
        return usual(hidden, *rest, **settings)

    monkeypatch.setattr(masked, "cross_entropy", watched)
    hidden = model.hidden(batch.tokens)
    masked_loss(model, hidden, batch).objective.backward()
    assert [len(rows) for rows in entered] == [len(batch.places)] * 2
    assert torch.equal(entered[0], hidden.flatten(0, 1)[batch.places])


def test_a_pair_has_two_terms() -> None:
    paired = {
        "pooler": Pooler(),
        "next_sentence": NextSentence(),
        "embed": EmbeddingConfig(segments=2),
    }
    model: Bert = tiny(BertConfig, **paired).build().double()
    batch = a_batch(padded=True)
    found = masked_pass(model, batch)
    assert found.losses.keys() == {"masked", "next_sentence"}
    assert (found.losses["masked"].count, found.losses["next_sentence"].count) == (
        len(batch.places),
        3,
    )
    hidden = model.hidden(batch.tokens, batch.real, batch.segments)
    logits = model.next_sentence_logits(hidden, batch.real)
    assert batch.other is not None
    expected = F.cross_entropy(logits, batch.other, reduction="sum")
    torch.testing.assert_close(found.losses["next_sentence"].objective.double(), expected)
    assert int(found.right["next_sentence"]) == int((logits.argmax(1) == batch.other).sum())


# --- ELECTRA ---


def electra(**changes: Any) -> Electra:
    settings = {"head": Detect(), "embed": EmbeddingConfig(segments=2), **changes}
    return Electra(tiny(BertConfig, heads=4, **settings).build(), 0.5)


@pytest.mark.parametrize("padded", [False, True])
def test_what_was_replaced_is_where_the_drawn_token_differs(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = electra().double(), a_batch(padded=padded)
    other = (batch.wanted + 1) % VOCAB
    # Right, wrong, right, wrong …: the generator may well draw the token that was there.
    drawn = torch.where(torch.arange(len(batch.wanted)) % 2 == 0, batch.wanted, other)
    monkeypatch.setattr(torch, "multinomial", lambda chances, count: drawn[:, None])
    read: list[Tensor] = []
    model.model.register_forward_hook(lambda module, given, out: read.extend([given[0], out]))
    found = replaced_pass(model, batch, weight=50.0)
    tokens, logits = read
    expected = batch.tokens.flatten().clone()
    expected[batch.places] = drawn
    assert torch.equal(tokens.flatten(), expected)
    wrong = torch.zeros(tokens.numel())
    wrong[batch.places[1::2]] = 1.0
    real = torch.ones_like(tokens, dtype=torch.bool) if batch.real is None else batch.real
    total = F.binary_cross_entropy_with_logits(
        logits.float()[real], wrong.view_as(tokens)[real], reduction="sum"
    )
    loss = found.losses["replaced"]
    torch.testing.assert_close(loss.objective, total)
    assert (loss.count, loss.weight) == (int(real.sum()), 50.0)
    right = ((logits > 0) == (wrong.view_as(tokens) > 0))[real]
    assert int(found.right["replaced"]) == int(right.sum())
    assert found.losses["masked"].count == len(batch.places)
    assert found.losses["masked"].weight == 1.0


def test_the_detector_does_not_train_the_generator() -> None:
    """Its loss reaches the shared tables, and nothing else of the generator."""
    model, batch = electra(), a_batch()
    loss = replaced_pass(model, batch, weight=50.0).losses["replaced"].objective
    own = list(model.generator.parameters())
    reached = torch.autograd.grad(loss, own, allow_unused=True, retain_graph=True)
    assert own
    assert all(gradient is None for gradient in reached)
    [shared] = torch.autograd.grad(loss, [model.model.tokens.weight])
    assert bool(shared.any())


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    model, batch = electra().eval(), a_batch(8, 9)
    hidden = model.generator.hidden(batch.tokens, batch.real, batch.segments)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model.fill(batch.tokens, batch.places, hidden)[1])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_the_generator_draws_by_its_probabilities() -> None:
    model, tokens = electra().eval(), words(1, 7)
    hidden = model.generator.hidden(tokens)
    with torch.no_grad():
        chances = (3 * model.generator.logits(hidden[0, 3:4])).softmax(-1)[0]
        model.generator.head.output.bias.copy_(chances.log() - model.generator.logits(hidden)[0, 3])  # type: ignore[union-attr, operator]
    count = 20_000
    places = torch.full((count,), 3)
    _, drawn = model.fill(tokens, places, hidden)
    found = np.bincount(drawn.numpy(), minlength=VOCAB) / count
    error = (chances * (1 - chances) / count).sqrt().numpy()
    assert (np.abs(found - chances.numpy()) < 4 * error + 1e-4).all()


@pytest.mark.parametrize("name", ["masked pairs", "replaced"])
def test_held_out_scores_are_of_all_rows_and_hang_on_no_other_draw(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trainer(
        name, write_texts(tmp_path / "texts", 120), tmp_path / "run", "data.held_out=0.5"
    )
    assert isinstance(found.task, MaskedTask)
    passes: list[tuple[MaskedBatch, masked.Found]] = []

    def one_pass(model: nn.Module, batch: MaskedBatch, *given: Any) -> masked.Found:
        passes.append((batch, masked_or_replaced(model, batch, *given)))
        return passes[-1][1]

    masked_or_replaced = masked.one_pass
    monkeypatch.setattr(masked, "one_pass", one_pass)
    torch.manual_seed(1)
    first = found.task.validate(found.model)
    assert len(passes) > 1
    places = [batch.places.tolist() for batch, _ in passes[:2]]
    assert places[0] != places[1]
    [(term, _)] = passes[0][1].right.items()
    right = sum(int(one.right[term]) for _, one in passes)
    count = sum(one.losses[term].count for _, one in passes)
    assert first[f"{term}_accuracy"] == right / count
    torch.manual_seed(2)
    assert found.task.validate(found.model) == first
