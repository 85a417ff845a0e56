"""The recurrent baseline: equal to a loop by hand, and good for all that a Transformer is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.decode.toys import LONGEST, PAD, same, searched, toy_source
from tests.train.small_runs import WORDS, assert_same_bits, trainer, write_recipe
from tiny import VOCAB, words
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from manyheads.cli import app
from manyheads.config import dump, parse
from manyheads.data.phrasebook import Pair
from manyheads.decode.cache import KeyValueCache
from manyheads.errors import Mistake
from manyheads.evaluate.alignment import alignment_error
from manyheads.models.joined import EncoderDecoder
from manyheads.models.rnn import Rnn, RnnConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.cores import Dense, Fused
from manyheads.nn.scores import Additive, Bilinear, Dot, ReducedRank, ScaledDot, ScoreConfig
from manyheads.nn.tiled import Tiled
from manyheads.opened import open_run
from manyheads.presets import ModelConfig
from manyheads.training import read_recipe
from manyheads.view.capture import capture

SCORES: dict[str, ScoreConfig] = {
    score.kind: score
    for score in (Dot(), ScaledDot(), Bilinear(), ReducedRank(rank=3), Additive(width=5))
}
SMALL = ["model=rnn", "model.dim=16", "model.layers=1", "model.max_length=64"]
scores = pytest.mark.parametrize("score", SCORES)


def tiny_rnn(score: str = "bilinear", **changes: Any) -> Rnn:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": 8, "layers": 2, "dropout": 0.0}
    return RnnConfig(**{**sizes, "score": SCORES[score], **changes}).build().double()


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# --- what it computes ---


def cell_of(lstm: nn.LSTM, layer: int, direction: str = "") -> nn.LSTMCell:
    """One layer and direction of an LSTM, which takes one step at a time."""
    width = getattr(lstm, f"weight_ih_l{layer}{direction}").shape[1]
    cell = nn.LSTMCell(width, lstm.hidden_size).double()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(lstm, f"{name}_l{layer}{direction}"))
    return cell


def read_on(cell: nn.LSTMCell, inputs: list[Tensor]) -> list[Tensor]:
    """The states of a cell that begins with zeros."""
    h = c = torch.zeros(cell.hidden_size).double()
    found = []
    for x in inputs:
        h, c = cell(x, (h, c))
        found.append(h)
    return found


def by_hand(model: Rnn, source: list[int], target: list[int]) -> Tensor:
    """The logits of one pair, a position after the other."""
    dim, layers = model.config.dim, model.config.layers
    x = [model.tokens.weight[token] * math.sqrt(dim) for token in source]
    for layer in range(layers):
        there = read_on(cell_of(model.encoder, layer), x)
        back = read_on(cell_of(model.encoder, layer, "_reverse"), x[::-1])[::-1]
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
    found = model(source, target, real)
    for row, length in enumerate((7, 4, 1)):
        agree(found[row], by_hand(model, source[row, :length].tolist(), target[row].tolist()))


def test_padding_changes_nothing() -> None:
    """Neither what stands there nor how much: of the states, the logits and the gradients."""
    model, target = tiny_rnn(), words(2, 4)
    source = words(2, 9)
    real = torch.arange(9) < torch.tensor([[6], [3]])
    found = []
    for padding, length in ((0, 9), (5, 9), (5, 6)):
        model.zero_grad()
        padded = source.masked_fill(~real, padding)[:, :length]
        memory = model.encode(padded, real[:, :length])
        logits = model.logits(model.decode(target, memory))
        logits.square().sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((memory.states[real[:, :length]], logits, grads))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            agree(one, two)
    agree(model(source[1:, :3], target[1:]), found[0][1][1:])


def test_padding_elsewhere_is_refused() -> None:
    model = tiny_rnn()
    for real in ([False, True, True], [True, False, True], [False] * 3):
        with pytest.raises(Mistake, match="padding behind"):
            model(words(1, 3), words(1, 2), torch.tensor([real]))
        with pytest.raises(Mistake, match="padding behind"):
            model(words(1, 3), words(1, 3), None, torch.tensor([real]))


@scores
def test_no_gradient_from_the_future(score: str) -> None:
    model = tiny_rnn(score, tie="none")
    entered: list[Tensor] = []
    model.target_tokens.register_forward_hook(lambda _, __, out: entered.append(out))
    logits = model(words(2, 4), words(2, 6))
    for place in range(6):
        [grad] = torch.autograd.grad(logits[:, place].sum(), entered[0], retain_graph=True)
        assert grad[:, : place + 1].abs().sum(-1).min() > 0
        assert not grad[:, place + 1 :].any()


@pytest.mark.parametrize("core", [Fused(), Tiled(block=4)], ids=lambda core: core.kind)
def test_another_core_is_the_dense_one(core: Any) -> None:
    one, other = tiny_rnn(core=Dense()), tiny_rnn(core=core)
    source, target, real = words(2, 6), words(2, 5), torch.arange(6) < torch.tensor([[6], [2]])
    agree(other(source, target, real), one(source, target, real))


# --- writing ---


@pytest.mark.parametrize("chunks", [(1,) * 9, (4, 1, 4)], ids=len)
def test_cached_is_full(chunks: tuple[int, ...]) -> None:
    model, tokens, source = tiny_rnn(), words(2, 9), words(2, 5)
    real = torch.arange(5) < torch.tensor([[5], [3]])
    cache, memory = KeyValueCache(), model.encode(source, real)
    with torch.no_grad():
        found = [
            model.logits(model.decode(chunk, memory, cache=cache))
            for chunk in tokens.split(list(chunks), dim=1)
        ]
        agree(torch.cat(found, dim=1), model(source, tokens, real))
    assert cache.length == 9


def test_cached_hypotheses_can_be_reordered() -> None:
    """Beams of one memory go on from the hypothesis they were copied from."""
    model, source, start = tiny_rnn(), words(2, 5), words(6, 3)
    rows, step = torch.tensor([1, 1, 0, 5, 3, 5]), words(6, 2)
    with torch.no_grad():
        cache, memory = KeyValueCache(), model.encode(source)
        model.decode(start, memory, cache=cache)
        cache.reorder(rows)
        found = model.logits(model.decode(step, memory, cache=cache))
        grown = torch.cat([start[rows], step], dim=1)
        agree(found, model(source.repeat_interleave(3, 0), grown)[:, 3:])
        cache.reorder(torch.tensor([3, 4, 5]))
        cache.keep_sentences(torch.tensor([1]))
        found = model.logits(model.decode(step[:3], model.encode(source[1:]), cache=cache))
        full = model(source[1:].expand(3, -1), torch.cat([grown[3:], step[:3]], dim=1))
        agree(found, full[:, 5:])
    assert cache.bytes() == 2 * 2 * 3 * 8 * 8  # h and c · layers · rows · width · bytes


@pytest.mark.parametrize("beam", [1, 3])
def test_a_batch_is_searched_as_one_sentence_at_a_time(beam: int) -> None:
    model = tiny_rnn(vocab_size=15, tie="none", max_length=LONGEST).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)  # a next token is likely or unlikely, and the source matters
    torch.manual_seed(1)
    lengths, limits = (9, 2, 6, 1, 4, 9), [12, 3, 9, 6, 8, 14]
    source, real = toy_source(*lengths)
    found = searched(model, source, real, limits, beam=beam)  # type: ignore[arg-type]
    for row, length in enumerate(lengths):
        one = source[row : row + 1, :length]
        alone = searched(model, one, one != PAD, limits[row : row + 1], beam=beam)  # type: ignore[arg-type]
        same(found[row : row + 1], alone)
    assert len({len(line[0].tokens) for line in found}) > 2
    assert len({tuple(line[0].tokens[:1]) for line in found}) > 1


def test_attention_is_captured() -> None:
    model = tiny_rnn()
    real = torch.arange(5) < torch.tensor([[5], [2]])
    with torch.no_grad(), capture(model) as maps:
        model(words(2, 5), words(2, 4), real)
    [weights] = maps["cross"]
    assert weights.shape == (2, 1, 4, 5)
    agree(weights.sum(-1), torch.ones(2, 1, 4).double())
    assert not weights[1, ..., 2:].any()
    assert model.attention.core == Dense()
    with pytest.raises(KeyError):
        maps["self"]


# --- learning ---


@scores
def test_every_score_learns(score: str) -> None:
    """A batch by heart; every weight has a gradient."""
    model = tiny_rnn(score, dim=16, dropout=0.1).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    source = words(6, 5)
    target, wanted = source.flip(1).roll(1, 1), source.flip(1)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(source, target).flatten(0, 1), wanted.flatten())
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

    out = tmp_path / "run"
    found = trainer(recipe, out, *SMALL)
    batches = found.task.batches

    def asked(step: int) -> list[Any]:
        if step == 15:
            raise Killed
        return batches(step)

    found.task.batches = asked  # type: ignore[method-assign]
    with pytest.raises(Killed):
        found.run()
    again = trainer(recipe, out, *SMALL)
    assert again.progress.step == 12
    again.run()
    assert_same_bits(out, whole)


def test_a_run_is_used_like_any_other(whole: Path) -> None:
    """Opened it translates, embeds, and its one head has an alignment error."""
    opened = open_run(whole)
    model: Any = opened.model
    assert isinstance(model, EncoderDecoder)
    lines = ["red dog", "small big green tree", "cat"]
    together = opened.translator(beam=3).translate(lines)
    assert together == [opened.translator(beam=3).translate([line])[0] for line in lines]
    vectors = opened.encoder().embed(lines)
    assert vectors.shape == (3, 16)
    pair = Pair(
        *("red dog", "dog red", ((0, 3), (4, 7)), ((0, 3), (4, 7)), frozenset({(0, 1), (1, 0)}))
    )
    error = alignment_error(model, opened.tokenizer, [pair])
    assert len(error.rates) == len(error.rates[0]) == 1
    assert 0 <= error.best <= 1


@pytest.mark.parametrize("to", ["huggingface", "ctranslate2", "onnx"])
def test_export_is_refused_in_a_line(to: str, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = CliRunner().invoke(app, ["export", str(whole), "--to", to, "--out", str(out)])
    assert isinstance(found.exception, Mistake)
    assert "\n" not in str(found.exception)
    assert any(word in str(found.exception) for word in ("LSTM", "Rnn", "rnn"))
    assert not out.exists()


# --- settings ---


def test_a_switch_of_kind_begins_with_defaults() -> None:
    """What only a Transformer has is left behind; the recipe's own kind keeps its settings."""
    run = read_recipe("phrasebook", ["model=rnn", "model.score=additive", "model.score.width=7"])
    assert run.model == RnnConfig(score=Additive(width=7))
    kept = read_recipe("phrasebook", ["model=seq2seq"]).model
    assert kept == read_recipe("phrasebook").model
    assert isinstance(kept, Seq2SeqConfig)
    assert kept.dim == 128


@scores
def test_settings_survive_a_file(score: str) -> None:
    config = RnnConfig(vocab_size=9, dim=10, layers=1, score=SCORES[score], tie="none", dropout=0.3)
    assert parse(ModelConfig, dump(config)) == config


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.dim=15", "must be even"),
        ("model.heads=4", "no setting 'model.heads'"),
        ("model.dropout=1", "dropout=1"),
        ("model.layers=0", "layers=0"),
    ],
)
def test_what_makes_no_sense_is_refused(setting: str, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        read_recipe("phrasebook", ["model=rnn", setting])


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Mistake, match="key_size=3"):
        RnnConfig(score=Bilinear(key_size=3))
    with pytest.raises(Mistake, match="choose the dense"):
        tiny_rnn("additive", core=Fused())
    with pytest.raises(Mistake, match="task=pretraining"):
        read_recipe("t5-mini", ["model=rnn"])
    with pytest.raises(Mistake, match="vocab_size is needed"):
        RnnConfig().build()
