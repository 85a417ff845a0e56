"""Exported graphs, run by onnxruntime, against the models that they were exported from.

An export takes seconds, so a model is exported once for all the tests that use it.
"""

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checks import unchecked
from torch import Tensor, nn

from manyheads.decode.beam import BeamSearch, Decode, DecoderSession, LogitsConstraints
from manyheads.decode.decoder import GptSession, Seq2SeqSession
from manyheads.errors import DataError, UserError
from manyheads.exchange import onnx as exchange
from manyheads.exchange.onnx import Graph, OnnxEncoder, OnnxGpt, OnnxSeq2Seq, write_onnx
from manyheads.models.bert import BertConfig, NextSentence
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify, Detect, Masked, Pooler, Tag
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig
from manyheads.nn.attention import Dense, Fused, SelfAttention
from manyheads.nn.layers import EmbeddingConfig, Gated, Norm, Plain
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    Position,
    Relative,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.scores import Additive, Bilinear, Dot, ReducedRank, ScaledDot
from manyheads.nn.tiled import Tiled

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)

VOCABULARY, START, END = 23, 1, 2
MAX_LENGTH = 40
SIZES: dict[str, Any] = {"dim": 16, "heads": 4, "kv_heads": 2, "ffn_dim": 24}
SIZES |= {"vocab_size": VOCABULARY, "max_length": MAX_LENGTH}
MODERN: dict[str, Any] = {"norm": Norm(form="rms"), "feedforward": Gated(), "bias": False}
OLDER: dict[str, Any] = {"norm": Norm(placement="post"), "feedforward": Plain(activation="gelu")}
# Rows and lengths other than those of the examples; 1 is where an axis can get lost.
SHAPES = [(1, 1, 1), (3, 17, 2), (1, 2, 17), (3, 1, 4)]
Pair = tuple[Any, Any]


def exported(model: nn.Module, folder: Path) -> Path:
    with unchecked():  # shapes are symbols while a graph is traced
        write_onnx(model, folder)
    return folder


def strong(model: Any) -> Any:
    """Larger weights, so that attention matters and distributions have peaks."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def words(*shape: int) -> Tensor:
    return torch.randint(7, VOCABULARY, shape)


def padding_mask(rows: int, length: int) -> Tensor:
    return torch.arange(length)[None] < torch.randint(1, length + 1, (rows, 1))


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two layers, so that an exchange of their tensors shows."""
    torch.manual_seed(38)  # translations of many lengths
    model = strong(
        Seq2SeqConfig(layers=2, position=Rotary(), tie="none", **SIZES, **MODERN).build()
    )
    return model, OnnxSeq2Seq(exported(model, tmp_path_factory.mktemp("onnx")))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(4)
    model = strong(GptConfig(layers=2, position=Learned(), **SIZES, **OLDER).build())
    return model, OnnxGpt(exported(model, tmp_path_factory.mktemp("onnx")))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(5)
    embed = EmbeddingConfig(segments=2, norm=Norm())
    model = strong(BertConfig(layers=2, position=Buckets(), embed=embed, **SIZES, **OLDER).build())
    return model, OnnxEncoder(exported(model, tmp_path_factory.mktemp("onnx")))


def decode_text(graphs: OnnxGpt, tokens: Tensor) -> Tensor:
    """Logits at all positions, in one pass."""
    past, at = graphs.decoder.empty_past(len(tokens)), torch.arange(tokens.shape[1])
    return graphs.decoder.step(tokens[:, None], at, past, {})[0][:, 0]


def translate(
    graphs: OnnxSeq2Seq, source: Tensor, target: Tensor, real: Tensor | None = None
) -> Tensor:
    """Teacher forcing."""
    session = graphs.begin(source, torch.ones_like(source).bool() if real is None else real)
    at = torch.arange(target.shape[1])
    return graphs.decoder.step(target[:, None], at, session.past, session.others)[0][:, 0]


@torch.no_grad()
def check_translator(model: Any, graphs: OnnxSeq2Seq) -> None:
    """Teacher forcing, and one position at a time after pasts of any length."""
    for rows, source_length, length in SHAPES:
        source, target = words(rows, source_length), words(rows, length)
        real = padding_mask(rows, source_length)
        expected = model(source, target, real)
        close(translate(graphs, source, target, real), expected)
        close(translate(graphs, source, target), model(source, target))
        session = graphs.begin(source, real)
        for position in range(length):
            close(session.step(target[:, position, None])[:, 0], expected[:, position])


@torch.no_grad()
def check_decoder(model: Any, graphs: OnnxGpt) -> None:
    """All at once, and a step after prompts of every length."""
    for rows, length, _ in SHAPES:
        tokens = words(rows, length)
        expected = model(tokens)
        close(decode_text(graphs, tokens), expected)
        for position in range(length):
            session = graphs.begin(tokens[:, : position + 1])
            close(session.step(tokens[:, position, None])[:, 0], expected[:, position])


@torch.no_grad()
def check_encoder(model: Any, graphs: OnnxEncoder) -> None:
    for rows, length, _ in SHAPES:
        inputs = [words(rows, length), padding_mask(rows, length)]
        if model.embedding.segment is not None:
            inputs.append(torch.randint(2, (rows, length)))
        close(graphs(*inputs), model(*inputs))
        close(graphs.hidden(*inputs), model.hidden(*inputs))
        close(graphs(inputs[0]), model(inputs[0]))


def test_exported_models_equal_ours(translator: Pair, decoder: Pair, encoder: Pair) -> None:
    check_translator(*translator)
    check_decoder(*decoder)
    check_encoder(*encoder)


@torch.no_grad()
def test_an_exported_image_encoder_equals_ours(tmp_path: Path) -> None:
    config = VitConfig(
        dim=16, heads=2, layers=1, image_size=12, patch_size=4, head=Classify(labels=("a", "b"))
    )
    model = strong(config.build())
    graphs = OnnxEncoder(exported(model, tmp_path))
    for rows in (1, 3):
        images = torch.randn(rows, 3, 12, 12)
        close(graphs(images), model(images))
        close(graphs.hidden(images.numpy()), model.hidden(images))


@torch.no_grad()
def test_padding(translator: Pair, encoder: Pair) -> None:
    """It changes nothing; a row of nothing but padding gives what our model gives, and no NaN."""
    tokens, target = words(2, 9), words(2, 4)
    real = torch.arange(9)[None] < torch.tensor([[5], [0]])
    (model, graphs), (bert, encoder_graphs) = translator, encoder
    for expected, actual, unpadded in (
        (
            model(tokens, target, real),
            translate(graphs, tokens, target, real),
            translate(graphs, tokens[:1, :5], target[:1]),
        ),
        (bert(tokens, real), encoder_graphs(tokens, real), encoder_graphs(tokens[:1, :5])),
    ):
        assert expected.isfinite().all()
        close(actual, expected)
        close(actual[:1, : unpadded.shape[1]], unpadded)


@torch.no_grad()
def test_hypotheses_share_the_keys_of_their_source(translator: Pair) -> None:
    model, graphs = translator
    source, real, target = words(2, 7), padding_mask(2, 7), words(6, 5)
    expected = model(source.repeat_interleave(3, 0), target, real.repeat_interleave(3, 0))
    session = graphs.begin(source, real)
    session.reorder(torch.zeros(2, 3, dtype=torch.long))
    assert {len(x) for x in session.others.values()} == {2}
    for position in range(5):
        logits = session.step(target[:, position].view(2, 3))
        close(logits.flatten(0, 1), expected[:, position])


@torch.no_grad()
def test_only_requested_positions_have_logits(decoder: Pair) -> None:
    model, graphs = decoder
    tokens, past = words(2, 6), graphs.decoder.empty_past(2)
    logits, present = graphs.decoder.step(tokens[:, None], torch.tensor([4, 1]), past, {})
    close(logits[:, 0], model(tokens)[:, [4, 1]])
    assert {x.shape[3] for x in present} == {6}


def search(session: DecoderSession, limits: list[int], beam: int) -> list[list[tuple[Any, ...]]]:
    decode = Decode(beam=beam)
    constraints = LogitsConstraints(decode, END, [0, 1, 3, 4, 5, 6], torch.device("cpu"))
    results = BeamSearch(decode, constraints)(session, START, torch.tensor(limits))
    return [[(*h.tokens, round(h.score, 3)) for h in hypotheses] for hypotheses in results]


@pytest.mark.parametrize("beam", [1, 4])
@torch.no_grad()
def test_beam_search_gives_the_same(translator: Pair, decoder: Pair, beam: int) -> None:
    """Sentences end at different steps, so that rows are reordered and leave."""
    model, graphs = translator
    source, real, limits = words(8, 9), padding_mask(8, 9), [3, 25, 12, 25, 1, 25, 7, 25]
    expected = search(Seq2SeqSession(model, source, real), limits, beam)
    assert len({len(hypotheses[0]) for hypotheses in expected}) > 3
    assert search(graphs.begin(source, real), limits, beam) == expected
    model, graphs = decoder
    for length in (1, 6):
        prompts = words(4, length)
        prompts[:, -1] = START  # the search begins with it
        limits = [9, 4, 12, 12]
        expected = search(GptSession(model, prompts), limits, beam)
        assert search(graphs.begin(prompts), limits, beam) == expected


def test_learned_positions_end(decoder: Pair, translator: Pair) -> None:
    _, graphs = decoder
    assert decode_text(graphs, words(1, MAX_LENGTH)).shape == (1, MAX_LENGTH, VOCABULARY)
    with pytest.raises(UserError, match=f"{MAX_LENGTH + 1} positions"):
        decode_text(graphs, words(1, MAX_LENGTH + 1))
    session = graphs.begin(words(1, MAX_LENGTH))
    session.step(words(1, 1))
    with pytest.raises(UserError, match="positions"):
        session.step(words(1, 1))
    _, graphs = translator  # rotary positions do not end
    logits = translate(graphs, words(1, MAX_LENGTH + 1), words(1, MAX_LENGTH + 2))
    assert logits.isfinite().all()


def test_an_export_prints_nothing_and_leaves_the_model_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The graph is float32 without dropout, whatever the model's mode and dtype are."""
    model = BertConfig(layers=1, dropout=0.5, head=None, **SIZES).build().double().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs = OnnxEncoder(exported(model, tmp_path / "run"))
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == logging.NOTSET
    assert model.training
    assert [m.core for m in model.modules() if isinstance(m, SelfAttention)] == [Fused()]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    tokens = words(2, 5)
    with torch.no_grad():
        close(graphs(tokens), model.eval()(tokens).float())


def test_large_weights_are_in_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder can be moved; files that are no graphs stay in it."""
    monkeypatch.setattr(exchange, "MAX_INLINE_BYTES", 1000)
    model = BertConfig(layers=1, head=None, **SIZES).build().eval()
    (tmp_path / "run").mkdir()
    for name in ("run.toml", "head.onnx", "decoder.onnx.data"):  # graphs of another model
        (tmp_path / "run" / name).write_text("there before")
    exported(model, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"encoder.onnx", "encoder.onnx.data", "run.toml"}
    graph, weights = (tmp_path / "run" / name for name in ("encoder.onnx", "encoder.onnx.data"))
    assert weights.stat().st_size >= sum(4 * x.numel() for x in model.parameters() if x.ndim > 1)
    assert str(Path(exchange.__file__).parents[1]).encode() not in graph.read_bytes()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    tokens = words(2, 5)
    with torch.no_grad():
        close(OnnxEncoder(tmp_path / "elsewhere")(tokens), model(tokens))


def fixes_a_size(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    return [inputs["x"] + torch.zeros(len(inputs["x"]), 1)]


def depends_on_the_data(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    return [inputs["x"] if bool(inputs["x"].sum() > 0) else -inputs["x"]]


@pytest.mark.parametrize("function", [fixes_a_size, depends_on_the_data])
def test_what_the_exporter_cannot_take_is_refused(
    function: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"x": (torch.zeros(2, 3), {0: exchange.BATCH, 1: exchange.NEW})}
    graph = Graph(nn.Identity(), function, inputs, ["y"], 4, Position())
    monkeypatch.setattr(exchange, "_graphs", lambda model: {"encoder.onnx": graph})
    with pytest.raises(UserError, match="exporter") as refusal:
        exported(nn.Identity(), tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_refusals_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="Linear"):
        write_onnx(nn.Linear(2, 2), folder)
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, "onnxscript", None)
        with pytest.raises(UserError, match=r"manyheads\[exchange\]"):
            write_onnx(nn.Linear(2, 2), folder)
    with pytest.raises(UserError, match="there is no"):
        OnnxGpt(folder)
    assert not list(tmp_path.iterdir())
    for content in (b"", b"no graph"):
        (tmp_path / "decoder.onnx").write_bytes(content)
        with pytest.raises(DataError, match="export it again") as refusal:
            OnnxGpt(tmp_path)
        assert "\n" not in str(refusal.value)
    folder.write_text("a file in the place of the folder")
    monkeypatch.setattr(exchange, "_graphs", lambda model: {})
    with pytest.raises(DataError, match="could not be written"):
        write_onnx(nn.Identity(), folder)


POSITIONS: list[Any] = [
    NoPosition(),
    Sinusoidal(),
    Sinusoidal(layout="halves"),
    Learned(),
    Rotary(),
    Rotary(layout="interleaved"),
    Shaw(max_distance=3),
    Buckets(buckets=6, max_distance=9),
    Alibi(),
    Relative(max_distance=3),
]
SCORES: list[Any] = [Dot(), ScaledDot(scale=0.3), Bilinear(key_size=6), ReducedRank(rank=2)]
PARTS: dict[str, dict[str, Any]] = {
    **{f"{p.kind}-{getattr(p, 'layout', '')}": {"position": p} for p in POSITIONS},
    **{score.kind: {"score": score} for score in (*SCORES, Additive(width=5))},
    "modern": {"position": Rotary(), **MODERN},
    "older": {**OLDER, "embed": EmbeddingConfig(norm=Norm(), scale="sqrt-dim")},
    "tiled": {"attention": Tiled(block=3)},
    "narrow": {"head_dim": 6, "kv_heads": 1},
    "gated-gelu": {"feedforward": Gated(activation="gelu-tanh"), "kv_heads": 4},
}
HEADS: dict[str, dict[str, Any]] = {
    "classify": {"head": Classify(labels=("a", "b", "c")), "pooler": Pooler()},
    "tag": {"head": Tag(labels=("a", "b", "c"))},
    "detect": {"head": Detect(), "embed": EmbeddingConfig(dim=8)},
    "untied": {"head": Masked(tie="none"), "position": Learned(offset=2)},
    "next": {"head": None, "pooler": Pooler(), "next_sentence": NextSentence()},
    "bare": {"head": None},
}
TIES: dict[str, dict[str, Any]] = {
    "tied inputs": {"tie": "inputs"},
    "tied target": {"tie": "target", "target_vocab_size": VOCABULARY + 9},
    "untied": {"tie": "none", "target_vocab_size": VOCABULARY + 9},
}
FAMILIES: dict[str, tuple[Any, Any, Callable[[Any, Any], None], dict[str, dict[str, Any]]]] = {
    "seq2seq": (Seq2SeqConfig, OnnxSeq2Seq, check_translator, PARTS | TIES),
    "gpt": (GptConfig, OnnxGpt, check_decoder, PARTS),
    "bert": (BertConfig, OnnxEncoder, check_encoder, PARTS | HEADS),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parts"), [(family, parts) for family in FAMILIES for parts in FAMILIES[family][3]]
)
def test_every_part_can_be_exported(tmp_path: Path, family: str, parts: str) -> None:
    config, runner, check, cases = FAMILIES[family]
    model = strong(config(**{"layers": 1, "attention": Dense(), **SIZES, **cases[parts]}).build())
    check(model, runner(exported(model, tmp_path / "run")))
