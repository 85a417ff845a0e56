"""The translators that the Transformer was compared with: computations and common properties."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.decode.toys import LONGEST, PAD, same, searched, toy_source
from tests.train.small_runs import trainer, write_recipe
from tiny import VOCAB, words
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from manyheads.baselines.baseline import LuongAttention
from manyheads.baselines.convolution import ByteNet, ByteNetConfig, ConvS2S, ConvS2SConfig
from manyheads.baselines.rnn import Gnmt, GnmtConfig, RnnConfig
from manyheads.cli import app
from manyheads.config import dump, parse
from manyheads.decode.kv_cache import KVCache
from manyheads.errors import UserError
from manyheads.evaluate.alignment import alignment_error
from manyheads.lab.figures.maps import attention_maps
from manyheads.loading import load_torch_run
from manyheads.models.capture import capture, has_cross_attention
from manyheads.models.decoder_only_seq2seq import EncoderDecoder
from manyheads.nn.attention import Dense
from manyheads.phrasebook import Pair
from manyheads.presets import ModelConfig
from manyheads.recipes import read_recipe
from manyheads.run import model_digest
from manyheads.summary import summarize

CONFIGS: dict[str, Any] = {
    config.kind: config for config in (ConvS2SConfig, ByteNetConfig, GnmtConfig, RnnConfig)
}
ATTENTIONS = {"convs2s": 3, "bytenet": 0, "gnmt": 1, "rnn": 1}
SMALL = ["model.dim=16", "model.layers=2", "model.max_length=64"]
kinds = pytest.mark.parametrize("kind", CONFIGS)
# test_rnn.py and test_summary.py test "rnn" with every score.
others = pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "rnn"])


def tiny_model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": 8, "layers": 3, "dropout": 0.0}
    return CONFIGS[kind](**{**sizes, "max_length": 40, **changes}).build().double()


def agree(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


# --- what each computes ---


def convolved(layer: Any, x: Tensor, place: int, step: int = 1) -> Tensor:
    """y_t = b + Σ_j W_j x_{t + (j − a) δ} of one text, with zeros beyond its ends."""
    weight, y = layer.inner.weight, layer.inner.bias
    for j in range(weight.shape[2]):
        at = place + j * step - layer.before
        if 0 <= at < len(x):
            y = y + weight[:, :, j] @ x[at]
    return y


def gated(layer: Any, x: Tensor) -> Tensor:
    both = torch.stack([convolved(layer, x, place) for place in range(len(x))])
    a, b = both.chunk(2, dim=-1)
    return a * torch.sigmoid(b)


def convs2s_by_hand(model: ConvS2S, source: Tensor, target: Tensor) -> Tensor:
    half, m = math.sqrt(0.5), len(source)
    e = model.tokens.weight[source] + model.encoder_position.table.weight[:m]
    h = model.encoder.enter(e)
    for layer in model.encoder.layers:
        h = half * (gated(layer, h) + h)
    z = model.encoder.leave(h)
    g = model.target_table.weight[target] + model.decoder_position.table.weight[: len(target)]
    h = model.decoder.enter(g)
    for layer, attention in zip(model.decoder.layers, model.decoder.attentions, strict=True):
        v = gated(layer, h)
        weights = ((attention.query(v) + g) @ z.T).softmax(-1)  # type: ignore[operator]
        c = math.sqrt(m) * weights @ (z + e)
        h = half * (half * (v + attention.output(c)) + h)  # type: ignore[operator]
    return model.decoder.leave(h) @ model.head.matrix(model.target_table).T


def bytenet_by_hand(model: ByteNet, source: Tensor, target: Tensor) -> Tensor:
    def through(stack: Any, x: Tensor) -> Tensor:
        for number, block in enumerate(stack.blocks):
            first, second, third = block.norms
            y = second(block.enter(first(x).relu())).relu()
            places = range(len(y))
            step = 2 ** (number % 5)
            y = torch.stack([convolved(block.convolution, y, place, step) for place in places])
            x = x + block.leave(third(y).relu())
        return x

    scale, config = math.sqrt(model.config.dim), model.config
    room = math.ceil(config.length_ratio * len(source) + config.length_extra)
    empty = model.beyond.weight.expand(room - len(source), -1)
    states = through(model.encoder, torch.cat([model.tokens.weight[source], empty]) * scale)
    heard = torch.cat([states, states.new_zeros(len(target), config.dim)])[: len(target)]
    y = model.target_table.weight[target] * scale
    x = through(model.decoder, model.enter(torch.cat([y, heard], dim=-1)))
    return model.leave(model.norm(x).relu()) @ model.head.matrix(model.target_table).T


def gnmt_by_hand(model: Gnmt, source: Tensor, target: Tensor) -> Tensor:
    scale = math.sqrt(model.config.dim)
    x, _ = model.both_ways(model.tokens.weight[source][None] * scale)
    x, _ = model.encoder[0](x)
    x = x + model.encoder[1](x)[0]
    y, _ = model.lowest(model.target_table.weight[target][None] * scale)
    score: Any = model.attention.score
    pairs = torch.tanh((y @ score.query[0].T)[:, :, None] + (x @ score.key[0].T)[:, None])
    c = (pairs @ score.weight[0]).softmax(-1) @ x
    y, _ = model.decoder[0](torch.cat([y, c], dim=-1))
    y = y + model.decoder[1](torch.cat([y, c], dim=-1))[0]
    return y[0] @ model.head.matrix(model.target_table).T


BY_HAND: dict[str, Any] = {
    "convs2s": convs2s_by_hand,
    "bytenet": bytenet_by_hand,
    "gnmt": gnmt_by_hand,
}


@others
@pytest.mark.parametrize("tie", ["all", "none"])
def test_a_padded_batch_is_each_pair_by_hand(kind: str, tie: str) -> None:
    model = tiny_model(kind, tie=tie)
    source, target = words(3, 7), words(3, 9)
    real = torch.arange(7) < torch.tensor([[7], [4], [1]])
    actual = model(source, target, real)
    for row, length in enumerate((7, 4, 1)):
        agree(actual[row], BY_HAND[kind](model, source[row, :length], target[row]))


def test_dilations_begin_anew_after_five() -> None:
    model = tiny_model("bytenet", layers=7)
    reach = [block.convolution.before for block in model.decoder.blocks]
    assert reach == [2, 4, 8, 16, 32, 2, 4]
    source, target = words(1, 6), words(1, 5)
    agree(model(source, target)[0], bytenet_by_hand(model, source[0], target[0]))


@pytest.mark.parametrize(("stretch", "more", "room"), [(1.2, 0, 12), (1.0, 0, 10), (1.5, 3, 18)])
def test_a_source_is_heard_as_far_as_it_is_unfolded(stretch: float, more: int, room: int) -> None:
    """The representation has a |s| + b places, and a later one hears only what was written."""
    model = tiny_model("bytenet", layers=1, length_ratio=stretch, length_extra=more)
    memory = model.encode(words(1, 10))
    assert memory.states.shape[1] == room
    memory.states.retain_grad()
    model.decode(words(1, 24), memory)[:, room + 2].sum().backward()
    assert not memory.states.grad.any()  # a kernel of 3 reads two places before its own
    memory = model.encode(words(1, 10))
    memory.states.retain_grad()
    model.decode(words(1, 24), memory)[:, room - 1].sum().backward()
    assert memory.states.grad[:, room - 1].any()
    assert not memory.states.grad[:, : room - 3].any()


# --- what all share ---


@kinds
def test_padding_changes_nothing(kind: str) -> None:
    """Content and amount of padding change neither states nor logits nor gradients."""
    model, target = tiny_model(kind), words(2, 4)
    source = words(2, 9)
    real = torch.arange(9) < torch.tensor([[6], [3]])
    actual = []
    for padding, length in ((0, 9), (5, 9), (5, 6)):
        model.zero_grad()
        padded = source.masked_fill(~real, padding)[:, :length]
        memory = model.encode(padded, real[:, :length])
        logits = model.logits(model.decode(target, memory))
        logits.square().sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        actual.append((memory.states[memory.mask.padding_mask], logits, torch.cat(grads)))
    for other in actual[1:]:
        for one, two in zip(actual[0], other, strict=True):
            agree(one, two)
    agree(model(source[1:, :3], target[1:]), actual[0][1][1:])


@kinds
def test_padding_elsewhere_is_refused(kind: str) -> None:
    model = tiny_model(kind)
    for real in ([False, True, True], [True, False, True], [False] * 3):
        with pytest.raises(UserError, match="padding at the end"):
            model(words(1, 3), words(1, 2), torch.tensor([real]))
        with pytest.raises(UserError, match="padding at the end"):
            model(words(1, 3), words(1, 3), None, torch.tensor([real]))


def hears_no_future(model: Any) -> None:
    """By the gradients of a model that has a table of its own for targets."""
    entered: list[Tensor] = []
    model.target_tokens.register_forward_hook(lambda _, __, out: entered.append(out))
    logits = model(words(2, 4), words(2, 6))
    for place in range(6):
        [grad] = torch.autograd.grad(logits[:, place].sum(), entered[0], retain_graph=True)
        assert grad[:, : place + 1].abs().sum(-1).min() > 0
        assert not grad[:, place + 1 :].any()


@kinds
def test_no_gradient_from_the_future(kind: str) -> None:
    hears_no_future(tiny_model(kind, tie="none"))


@kinds
@pytest.mark.parametrize("chunks", [(1,) * 9, (4, 1, 4)], ids=len)
def test_cached_is_full(kind: str, chunks: tuple[int, ...]) -> None:
    """Place by place, also where a source is not heard any more."""
    model, tokens, source = tiny_model(kind), words(2, 9), words(2, 5)
    real = torch.arange(5) < torch.tensor([[5], [3]])
    cache, memory = KVCache(), model.encode(source, real)
    with torch.no_grad():
        actual = [
            model.logits(model.decode(chunk, memory, cache=cache))
            for chunk in tokens.split(list(chunks), dim=1)
        ]
        agree(torch.cat(actual, dim=1), model(source, tokens, real))
    assert cache.length == 9


@kinds
@pytest.mark.parametrize("beam", [1, 3])
def test_a_batch_is_searched_as_one_sentence_at_a_time(kind: str, beam: int) -> None:
    model = tiny_model(kind, vocab_size=15, tie="none", max_length=LONGEST).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # a next token is likely or unlikely, and the source matters
    torch.manual_seed(1)
    lengths, limits = (9, 2, 6, 1, 4, 9), [12, 3, 9, 6, 8, 14]
    source, real = toy_source(*lengths)
    actual = searched(model, source, real, limits, beam=beam)
    for row, length in enumerate(lengths):
        sentence = source[row : row + 1, :length]
        same(
            actual[row : row + 1],
            searched(model, sentence, sentence != PAD, limits[row : row + 1], beam=beam),
        )
    assert len({len(line[0].tokens) for line in actual}) > 2
    if ATTENTIONS[kind]:  # what asks a source begins otherwise for another one
        assert len({tuple(line[0].tokens[:1]) for line in actual}) > 1


@kinds
def test_attention_is_captured_where_there_is_any(kind: str) -> None:
    model = tiny_model(kind)
    real = torch.arange(5) < torch.tensor([[5], [2]])
    with torch.no_grad(), capture(model) as maps:
        model(words(2, 5), words(2, 4), real)
    assert [*maps] == ["cross"] * has_cross_attention(model)
    layers = maps.get("cross", [])
    assert len(layers) == ATTENTIONS[kind]
    for weights in layers:
        assert weights.shape == (2, 1, 4, 5)
        agree(weights.sum(-1), torch.ones(2, 1, 4).double())
        assert not weights[1, ..., 2:].any()
    with pytest.raises(KeyError):
        maps["self"]
    cores = [part.core for part in model.modules() if isinstance(part, LuongAttention)]
    assert cores == [Dense()] * ATTENTIONS[kind]


@others
@pytest.mark.parametrize("tie", ["all", "none"])
def test_parameters_and_products_are_counted(kind: str, tie: str) -> None:
    """Parameters by part, FLOPs as the kernels count them, and the memory of decoding."""
    model = tiny_model(kind, tie=tie)
    counted, tokens = summarize(model.config, length=10, batch=2), words(2, 10)
    assert sum(counted.parts.values()) == counted.parameters
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    assert counted.parts["head"] == (0 if tie == "all" else VOCAB * 8)
    assert bool(counted.parts["cross-attention"]) == has_cross_attention(model)
    counter, cache = FlopCounterMode(display=False), KVCache()
    with counter, torch.no_grad():
        memory = model.encode(tokens)
        model.logits(model.decode(tokens, memory, cache=cache))
    assert 2 * counted.sequence_flops == counter.get_total_flops()
    held = counted.inference["float32"]
    assert 2 * held.cache == cache.bytes() + memory.states.nbytes
    assert 2 * 2 * held.state == cache.bytes()


# --- learning ---


@others
def test_a_batch_is_learned_by_heart(kind: str) -> None:
    """Sources copied; every weight has a gradient."""
    model = tiny_model(kind, dim=24, dropout=0.1).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    source = words(6, 5)
    losses = []
    for _ in range(60):
        logits = model(source, source.roll(1, 1))
        loss = F.cross_entropy(logits.flatten(0, 1), source.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2
    assert losses[-1] < losses[0] / 3
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.fixture(scope="module", params=CONFIGS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the mirror language."""
    folder = tmp_path_factory.mktemp(request.param)
    trainer(write_recipe(folder), folder / "run", f"model={request.param}", *SMALL).run()
    return folder / "run"


def test_a_run_is_used_like_any_other(run: Path) -> None:
    """It learns; the loaded run translates and embeds independently of the batch, and aligns."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [r["loss"] for r in map(json.loads, lines) if r["split"] == "valid"]
    assert losses[-1] < losses[0]
    opened = load_torch_run(run)
    model, kind = opened.model, opened.run.model.kind
    assert isinstance(model, EncoderDecoder)
    texts = ["red dog", "small big green tree", "cat"]
    together = opened.translator(beam=3).translate(texts)
    assert together == [opened.translator(beam=3).translate([text])[0] for text in texts]
    vectors = opened.encoder().embed(texts)
    assert vectors.shape == (3, 32 if kind == "convs2s" else 16)  # z and e side by side, or states
    single = opened.encoder().embed(texts[:1])
    torch.testing.assert_close(torch.tensor(vectors[:1]), torch.tensor(single))
    if has_cross_attention(model):
        drawn = attention_maps(opened, "red dog", "dog red")["decoder.cross"]
        assert drawn.weights.shape[2:] == (len(drawn.rows), len(drawn.columns))
        spans = ((0, 3), (4, 7))
        pair = Pair("red dog", "dog red", spans, spans, frozenset({(0, 1), (1, 0)}))
        error = alignment_error(model, opened.tokenizer, [pair])
        assert [len(row) for row in error.rates] == [1] * (2 if kind == "convs2s" else 1)
        assert 0 <= error.best <= 1
    else:
        with pytest.raises(UserError, match="a model with attention"):
            attention_maps(opened, "red dog")


@pytest.mark.parametrize("to", ["huggingface", "ctranslate2", "onnx"])
def test_export_is_refused_in_a_line(to: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    actual = CliRunner().invoke(app, ["export", str(run), "--to", to, "--out", str(out)])
    assert isinstance(actual.exception, UserError)
    said = str(actual.exception).lower()
    assert "\n" not in said
    assert load_torch_run(run).run.model.kind in said
    assert not out.exists()


# --- settings ---


@kinds
def test_settings_survive_a_file(kind: str) -> None:
    config = CONFIGS[kind](vocab_size=9, dim=10, layers=3, tie="none", dropout=0.3)
    assert parse(ModelConfig, dump(config)) == config
    assert read_recipe("phrasebook", [f"model={kind}"]).model == CONFIGS[kind]()
    assert model_digest(config) != model_digest(CONFIGS[kind](vocab_size=9, dim=10, layers=3))
