"""The recurrent baseline: with every score a loop by hand; the rest is in test_baselines.py."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_baselines import agree, hears_no_future, tiny_model
from tests.train.small_runs import WORDS, assert_same_bits, hurt, trainer, write_recipe
from tiny import words
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.baselines.rnn import Rnn
from manyheads.decode.kv_cache import KVCache
from manyheads.nn.scores import Additive, Bilinear, Dot, ReducedRank, ScaledDot, ScoreConfig

SCORES: dict[str, ScoreConfig] = {
    score.kind: score
    for score in (Dot(), ScaledDot(), Bilinear(), ReducedRank(rank=3), Additive(width=5))
}
SMALL = ["model=rnn", "model.dim=16", "model.layers=1", "model.max_length=64"]
scores = pytest.mark.parametrize("score", SCORES)


def tiny_rnn(score: str = "bilinear", **changes: Any) -> Rnn:
    model: Rnn = tiny_model("rnn", **{"layers": 2, "score": SCORES[score], **changes})
    return model


# --- what it computes ---


def cell_of(lstm: nn.LSTM, layer: int, direction: str = "") -> nn.LSTMCell:
    """One layer and direction of an LSTM, which takes one step at a time."""
    width = getattr(lstm, f"weight_ih_l{layer}{direction}").shape[1]
    cell = nn.LSTMCell(width, lstm.hidden_size).double()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(lstm, f"{name}_l{layer}{direction}"))
    return cell


def run_lstm(cell: nn.LSTMCell, inputs: list[Tensor]) -> list[Tensor]:
    """The states of a cell that begins with zeros."""
    h = c = torch.zeros(cell.hidden_size).double()
    actual = []
    for x in inputs:
        h, c = cell(x, (h, c))
        actual.append(h)
    return actual


def by_hand(model: Rnn, source: list[int], target: list[int]) -> Tensor:
    """The logits of one pair, a position after the other."""
    dim, layers = model.config.dim, model.config.layers
    x = [model.tokens.weight[token] * math.sqrt(dim) for token in source]
    for layer in range(layers):
        there = run_lstm(cell_of(model.encoder, layer), x)
        back = run_lstm(cell_of(model.encoder, layer, "_reverse"), x[::-1])[::-1]
        x = [torch.cat(pair) for pair in zip(there, back, strict=True)]
    memory = torch.stack(x)
    ends = torch.cat([memory[-1, : dim // 2], memory[0, dim // 2 :]])
    first = model.first(ends).view(2, layers, dim)
    h, c = list(first[0].tanh()), list(first[1])
    cells = [cell_of(model.decoder, layer) for layer in range(layers)]
    logits = []
    for token in target:
        y = model.target_table.weight[token] * math.sqrt(dim)
        for layer, cell in enumerate(cells):
            h[layer], c[layer] = cell(y, (h[layer], c[layer]))
            y = h[layer]
        weights = model.attention.score(y.view(1, 1, 1, -1), memory[None, None])[0, 0, 0].softmax(0)
        mixed = torch.tanh(model.attention.combine.weight @ torch.cat([weights @ memory, y]))
        logits.append(model.head.matrix(model.target_table) @ mixed)
    return torch.stack(logits)


@scores
@pytest.mark.parametrize("tie", ["all", "none"])
def test_a_padded_batch_is_each_pair_by_hand(score: str, tie: str) -> None:
    model = tiny_rnn(score, tie=tie)
    source, target = words(3, 7), words(3, 5)
    real = torch.arange(7) < torch.tensor([[7], [4], [1]])
    actual = model(source, target, real)
    for row, length in enumerate((7, 4, 1)):
        agree(actual[row], by_hand(model, source[row, :length].tolist(), target[row].tolist()))


@scores
def test_no_gradient_from_the_future(score: str) -> None:
    hears_no_future(tiny_rnn(score, tie="none"))


def test_a_cache_holds_the_states_of_each_hypothesis() -> None:
    """However much it has read: h and c · layers · rows · width · bytes."""
    model, cache = tiny_rnn(), KVCache()
    memory = model.encode(words(2, 5))
    for length in (3, 2):
        model.decode(words(6, length), memory, cache=cache)
        assert cache.bytes() == 2 * 2 * 6 * 8 * 8
    cache.select_rows(torch.tensor([3, 4, 5]))
    assert cache.bytes() == 2 * 2 * 3 * 8 * 8


# --- learning ---


@scores
def test_every_score_learns(score: str) -> None:
    """A batch by heart; every weight has a gradient."""
    model = tiny_rnn(score, dim=16, dropout=0.1).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    source = words(6, 5)
    target, expected = source.flip(1).roll(1, 1), source.flip(1)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(source, target).flatten(0, 1), expected.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2
    assert losses[-1] < losses[0] / 3
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the mirror language that was never stopped."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    trainer(recipe, out, *SMALL).run()
    return out


def test_a_run_learns(tmp_path: Path) -> None:
    """The mirror image of a list of words: far better than by knowing which words there are."""
    trainer(
        write_recipe(tmp_path, pairs=800),
        tmp_path / "run",
        *("model=rnn", "model.dim=32", "model.layers=1", "model.dropout=0"),
        *("train.steps=120", "train.schedule=constant", "train.learning_rate=0.01"),
        *("train.validate_every=40", "train.label_smoothing=0", "train.batch_tokens=500"),
    ).run()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [r["loss"] for r in map(json.loads, lines) if r["split"] == "valid"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < math.log(len(WORDS)) / 2


def test_killed_and_started_again_ends_with_the_same_bits(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    out = tmp_path / "run"
    actual = trainer(recipe, out, *SMALL)
    hurt(actual, 15, kill)
    with pytest.raises(Killed):
        actual.run()
    again = trainer(recipe, out, *SMALL)
    assert again.progress.step == 12
    again.run()
    assert_same_bits(out, whole)
