"""Language models of both directions, and a classifier that mixes the vectors of their layers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tasks.small_texts import NUMBERS
from tiny import VOCAB, words
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from manyheads.baselines.elmo import Elmo, ElmoConfig, attend_across
from manyheads.cli import app
from manyheads.errors import UserError
from manyheads.loading import load_run
from manyheads.models.heads import Classify
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.summary import summarize
from manyheads.train.cuda_graphs import tensors_of

CPU = torch.device("cpu")
LABELS = Classify(labels=("a", "b", "c"))
SMALL = [
    *("model.dim=16", "model.max_length=16", "tokens=words"),
    *("train.steps=12", "train.batch_rows=8", "train.validate_every=6", "train.save_every=6"),
    *("train.warmup_steps=2", "train.learning_rate=0.02"),
]
CLASSIFY = [
    *("train.steps=4", "train.epochs=none", "train.warmup_ratio=none", "train.warmup_steps=0"),
    *("train.batch_rows=8", "train.learning_rate=0.01"),
]


def tiny_elmo(head: Classify | None = None, **changes: Any) -> Elmo:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": 8, "layers": 3, "dropout": 0.0}
    return ElmoConfig(**{**sizes, "max_length": 12, "head": head, **changes}).build().double()


def agree(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


# --- what it computes ---


def read_in_order(lstms: Any, x: Tensor) -> list[Tensor]:
    layers = [x]
    for number, lstm in enumerate(lstms):
        read = lstm(x)[0]
        x = read + x if number else read
        layers.append(x)
    return layers


def test_each_direction_is_a_language_model_of_its_own() -> None:
    model, tokens = tiny_elmo(), words(1, 6)
    ahead, back = model.directions(tokens)
    x = model.tokens.weight[tokens] * 8**0.5
    for actual, expected in zip(ahead, read_in_order(model.ahead, x), strict=True):
        agree(actual, expected)
    for actual, expected in zip(back, read_in_order(model.back, x.flip(1)), strict=True):
        agree(actual, expected.flip(1))


def test_neither_direction_hears_the_other() -> None:
    """Forward states know nothing of later tokens, backward ones nothing of earlier tokens."""
    model = tiny_elmo()
    entered: list[Tensor] = []
    model.tokens.register_forward_hook(lambda _, __, out: entered.append(out))
    ahead, back = model.directions(words(2, 6))
    for place in range(6):
        [item] = torch.autograd.grad(ahead[-1, :, place].sum(), entered[0], retain_graph=True)
        [two] = torch.autograd.grad(back[-1, :, place].sum(), entered[0], retain_graph=True)
        for grad, heard in ((item, slice(0, place + 1)), (two, slice(place, 6))):
            deaf = torch.ones(6, dtype=torch.bool)
            deaf[heard] = False
            assert grad[:, heard].abs().sum(-1).min() > 0
            assert not grad[:, deaf].any()


@pytest.mark.parametrize("head", [None, LABELS], ids=["vectors", "labels"])
def test_a_padded_batch_is_each_text_alone(head: Classify | None) -> None:
    model, tokens = tiny_elmo(head), words(3, 7)
    real = torch.arange(7) < torch.tensor([[7], [4], [1]])
    actual = model(tokens.masked_fill(~real, 5), real)
    for row, length in enumerate((7, 4, 1)):
        local = actual[row] if head else actual[row, :length]
        agree(local, model(tokens[row : row + 1, :length])[0])
    with pytest.raises(UserError, match="padding at the end"):
        model(words(1, 3), torch.tensor([[False, True, True]]))


def test_layers_are_mixed_by_learned_shares() -> None:
    """γ Σ_j s_j h_j: a mean at first, and a single layer where its weight is far above."""
    model, tokens = tiny_elmo(LABELS), words(2, 5)
    layers = model.contexts(tokens)
    agree(model.hidden(tokens), layers.mean(0))
    with torch.no_grad():
        model.head.weights.copy_(torch.tensor([0.0, 0.0, 99.0, 0.0]))
        model.head.gamma.fill_(3.0)
    agree(model.hidden(tokens), 3 * layers[2])
    x = model.head.reader(3 * layers[2])[0].amax(1)
    agree(model(tokens), model.head.output(x))


@pytest.mark.parametrize("head", [None, LABELS], ids=["vectors", "labels"])
@pytest.mark.parametrize("tie", ["all", "none"])
def test_parameters_and_products_are_counted(head: Classify | None, tie: Any) -> None:
    model, tokens = tiny_elmo(head, tie=tie), words(2, 10)
    counted = summarize(model.config, length=10, batch=2)
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    assert counted.parts["recurrent"] == sum(
        weight.numel()
        for part in model.modules()
        if isinstance(part, torch.nn.LSTM)
        for weight in part.parameters()
    )
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        if head is None:
            for layers in model.directions(tokens):
                model.output(layers[-1], model.tokens)
        else:
            model.contexts(tokens)
            model.head.reader(model.contexts(tokens)[-1])
    expected = counter.get_total_flops()
    if head is not None:  # the contexts were computed twice
        once = FlopCounterMode(display=False)
        with once, torch.no_grad():
            model.contexts(tokens)
        expected -= once.get_total_flops()
    assert 2 * counted.sequence_flops == expected


# --- training ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that counts, and a table of whether what was counted begins low or high."""
    made = tmp_path_factory.mktemp("texts")
    draw = np.random.default_rng(1)
    starts = draw.integers(0, 6, 300)
    lines = [" ".join(NUMBERS[start : start + 4]) for start in starts]
    (made / "text").mkdir()
    (made / "text" / "all.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [f"{line}\t{'low' if s < 3 else 'high'}" for line, s in zip(lines, starts, strict=True)]
    table = "\n".join(["text\tlabel", *rows[:120]]) + "\n"
    (made / "rows.tsv").write_text(table, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def pretrained(folder: Path) -> Path:
    out = folder / "elmo"
    run = read_recipe("elmo-mini", [f"data.folder={folder / 'text'}", *SMALL])
    make_trainer(run, out, CPU).run()
    return out


def table_of(folder: Path) -> list[str]:
    return [f"data.train={folder / 'rows.tsv'}", "data.text=text", "data.label=label"]


def test_each_token_is_predicted_twice_and_never_seen(folder: Path) -> None:
    """−log P from all before and from all after; frame tokens are only context."""
    run = read_recipe("elmo-mini", [f"data.folder={folder / 'text'}", *SMALL])
    trainer = make_trainer(run, folder / "once", CPU)
    task: Any = trainer.task
    batch = task.batches(0)[0]
    assert list(tensors_of(batch)) == ["tokens"]  # as what is sent to a GPU ahead asks for
    tokens = batch.tokens
    model: Any = trainer.saved_model.eval()
    loss = task.losses(model, batch)["tokens"]
    ahead, back = model.directions(tokens)
    matrix, total = model.tokens.weight, torch.zeros(())
    for place in range(1, tokens.shape[1] - 1):
        for states in (ahead[-1, :, place - 1], back[-1, :, place + 1]):
            total = total + F.cross_entropy(states @ matrix.T, tokens[:, place], reduction="sum")
    torch.testing.assert_close(loss.objective, total, rtol=1e-4, atol=1e-2)
    assert loss.count == 2 * len(tokens) * 14 == sum(task.counts(batch).values())


def test_pretraining_learns_and_is_scored(pretrained: Path) -> None:
    opened = load_run(pretrained)
    assert isinstance(opened.run.model, ElmoConfig)
    actual = CliRunner().invoke(app, ["evaluate", str(pretrained), "--split", "valid", "--json"])
    assert actual.exit_code == 0, actual.output
    assert '"perplexity"' in actual.stdout
    assert opened.encoder().embed(["one two", "three"]).shape == (2, 32)
    metrics = (pretrained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [item["loss"] for item in map(json.loads, metrics) if item["split"] == "valid"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_a_classifier_begins_with_the_language_models(
    frozen: str, folder: Path, pretrained: Path, tmp_path: Path
) -> None:
    """Frozen weights do not change; the head has learned, and labels lines."""
    settings = [*table_of(folder), f"model={pretrained}", f"model.frozen={frozen}", *CLASSIFY]
    run = read_recipe("classify", settings)
    assert isinstance(run.model, ElmoConfig)
    trainer = make_trainer(run, tmp_path / "run", CPU)
    began = load_run(pretrained)
    before = began.model.state_dict()
    for name, weight in trainer.saved_model.state_dict().items():
        assert name.startswith("head.") or torch.equal(weight, before[name])
    trainer.run()
    opened = load_run(tmp_path / "run")
    after = opened.model.state_dict()
    same = [torch.equal(after[name], before[name]) for name in before]
    assert all(same) if frozen == "true" else not any(same)
    lines = ["one two three four", "five six seven"]
    answers = opened.encoder().classify(lines)
    assert [item.label for [item] in answers] == [
        opened.encoder().classify([line])[0][0].label for line in lines
    ]
    assert set(opened.encoder().labels) == {"low", "high"}


# --- attention between the two texts of a pair ---


def test_each_text_of_a_pair_attends_to_the_other() -> None:
    model = tiny_elmo(LABELS, attention="pair")
    tokens, segments = words(2, 7), torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0]])
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    context = attend_across(x, real, segments)
    for row, first, last in ((0, range(3), range(3, 7)), (1, range(2), range(2, 4))):
        for queries, keys in ((first, last), (last, first)):
            others = x[row, list(keys)]
            weights = (x[row, list(queries)] @ others.T).softmax(-1)
            agree(context[row, list(queries)], weights @ others)
    alone = model(tokens[1:, :4], None, segments[1:, :4])
    agree(model(tokens, real, segments)[1:], alone)  # padding changes nothing
    assert not torch.allclose(alone, model(tokens[1:, :4], None, None))
    assert not attend_across(x, real, torch.zeros_like(segments)).any()
