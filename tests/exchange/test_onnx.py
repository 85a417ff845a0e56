"""Exported graphs, run by onnxruntime, against the models that they came from.

A model is exported once for all the tests that look at it: an export takes seconds.
"""

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tests.checks import unchecked
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn

from manyheads.decode.beam import BeamSearch, Decode, DecoderSession, LogitsConstraints
from manyheads.decode.decoder import GptSession, Seq2SeqSession
from manyheads.errors import DataError, UserError
from manyheads.exchange import onnx as exchange
from manyheads.exchange.onnx import (
    Graph,
    GraphCore,
    OnnxEncoder,
    OnnxGpt,
    OnnxGptSession,
    OnnxSeq2Seq,
    OnnxSeq2SeqSession,
    write_onnx,
)
from manyheads.models.bert import BertConfig, NextSentence
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify, Detect, Masked, Pooler, Tag
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vit import VitConfig
from manyheads.nn.attention import Dense, Fused, SelfAttention
from manyheads.nn.layers import EmbeddingConfig, Gated, Norm, Plain
from manyheads.nn.masks import causal, full, make_mask
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    Position,
    PositionConfig,
    Relative,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.scores import Additive, Bilinear, Dot, ReducedRank, ScaledDot, ScoreConfig
from manyheads.nn.tiled import Tiled
from manyheads.tokenizer.tokenizer import SPECIALS, Tokenizer

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)

WORDS = 16
VOCABULARY = len(SPECIALS) + WORDS
PAD, START, END = 0, 1, 2
BANNED = [0, 1, 3, 4, 5, 6]
SIZES: dict[str, Any] = {"dim": 16, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_length": 40}
MODERN: dict[str, Any] = {
    "norm": Norm(placement="pre", form="rms"),
    "feedforward": Gated(),
    "bias": False,
}
OLDER: dict[str, Any] = {"norm": Norm(placement="post"), "feedforward": Plain(activation="gelu")}
# Lengths that are not those of the export's examples; 1 is where an axis can get lost.
SHAPES = [(1, 1, 1), (3, 17, 2), (1, 2, 17), (3, 1, 4)]


def exported(model: nn.Module, folder: Path) -> Path:
    with unchecked():
        write_onnx(model, folder)
    return folder


def strong(model: Any) -> Any:
    """Weights larger than usual, so that what is seen matters and distributions have peaks."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def words(*shape: int) -> Tensor:
    return torch.randint(len(SPECIALS), VOCABULARY, shape)


def ragged(rows: int, length: int, least: int = 1) -> Tensor:
    """What is real of rows of several lengths."""
    return torch.arange(length)[None] < torch.randint(least, length + 1, (rows, 1))


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


Pair = tuple[Any, Any]
Folder = pytest.TempPathFactory


@pytest.fixture(scope="module")
def translator(tmp_path_factory: Folder) -> Pair:
    """Two layers: what belongs to the first must not come to the second."""
    torch.manual_seed(38)  # sentences of many lengths
    config = Seq2SeqConfig(
        vocab_size=VOCABULARY, layers=2, position=Rotary(), tie="none", **SIZES, **MODERN
    )
    model = strong(config.build())
    model.tokenizer = toy_tokenizer()  # as a loaded model has one
    return model, OnnxSeq2Seq(exported(model, tmp_path_factory.mktemp("onnx") / "translator"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: Folder) -> Pair:
    torch.manual_seed(4)
    config = GptConfig(vocab_size=VOCABULARY, layers=2, position=Learned(), **SIZES, **OLDER)
    model = strong(config.build())
    return model, OnnxGpt(exported(model, tmp_path_factory.mktemp("onnx") / "decoder"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: Folder) -> Pair:
    torch.manual_seed(5)
    embed = EmbeddingConfig(segments=2, norm=Norm())
    config = BertConfig(
        vocab_size=VOCABULARY, layers=2, position=Buckets(), embed=embed, **SIZES, **OLDER
    )
    model = strong(config.build())
    return model, OnnxEncoder(exported(model, tmp_path_factory.mktemp("onnx") / "encoder"))


@torch.no_grad()
def check_translator(model: Any, found: OnnxSeq2Seq) -> None:
    """Teacher forcing, and one position at a time after pasts of any length."""
    for rows, source_length, length in SHAPES:
        source, target = words(rows, source_length), words(rows, length)
        real = ragged(rows, source_length)
        wanted = model(source, target, real)
        close(found(source, target, real), wanted)
        close(found(source, target), model(source, target))
        session = OnnxSeq2SeqSession(found, source, real)
        for place in range(length):
            close(session.step(target[:, place, None])[:, 0], wanted[:, place])


@torch.no_grad()
def check_decoder(model: Any, found: OnnxGpt) -> None:
    """Whole passes, steps, and a chunk after a past."""
    for rows, length, _ in [*SHAPES, (2, 17, 0)]:
        tokens = words(rows, length)
        wanted = model(tokens)
        close(found(tokens), wanted)
        for place in range(1, length + 1):
            session = OnnxGptSession(found, tokens[:, :place])
            close(session.step(tokens[:, place - 1, None])[:, 0], wanted[:, place - 1])


@torch.no_grad()
def check_encoder(model: Any, found: OnnxEncoder) -> None:
    for rows, length, _ in SHAPES:
        tokens, real = words(rows, length), ragged(rows, length)
        given = [tokens, real]
        if model.embedding.segment is not None:
            given.append(torch.randint(2, (rows, length)))
        close(found(*given), model(*given))
        close(found.hidden(*given), model.hidden(*given))
        close(found(tokens), model(tokens))


def test_an_encoder_decoder_is_itself(translator: Pair) -> None:
    check_translator(*translator)


def test_a_decoder_is_itself(decoder: Pair) -> None:
    check_decoder(*decoder)


def test_an_encoder_is_itself(encoder: Pair) -> None:
    check_encoder(*encoder)


@torch.no_grad()
def test_an_image_encoder_is_itself(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"dim": 16, "heads": 2, "layers": 1, "image_size": 12, "patch_size": 4}
    model = strong(VitConfig(**sizes, head=Classify(labels=("a", "b", "c"))).build())
    found = OnnxEncoder(exported(model, tmp_path / "images"))
    for rows in (1, 3):
        images = torch.randn(rows, 3, 12, 12)
        close(found(images), model(images))
        close(found.hidden(images.numpy()), model.hidden(images))


@torch.no_grad()
def test_who_sees_nothing_is_no_nan(translator: Pair, encoder: Pair) -> None:
    """A row of padding alone: our cores give zeros there, and the graphs too."""
    real = torch.tensor([[True, True, False], [False, False, False]])
    tokens, target = words(2, 3), words(2, 4)
    for (model, found), given in ((encoder, [tokens, real]), (translator, [tokens, target, real])):
        wanted = model(*given)
        assert wanted.isfinite().all()
        close(found(*given), wanted)


@torch.no_grad()
def test_padding_changes_nothing(translator: Pair, encoder: Pair) -> None:
    _, found = translator
    source, target = words(2, 5), words(2, 3)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[:, 5:] = False
    padded = torch.cat([source, words(2, 4)], dim=1)
    close(found(padded, target, real), found(source, target))
    _, found = encoder
    close(found(padded, real)[:, :5], found(source))


@torch.no_grad()
def test_hypotheses_share_what_they_look_at(translator: Pair) -> None:
    """Three rows a sentence through one set of keys: as if each had a sentence of its own."""
    model, found = translator
    source, real, target = words(2, 7), ragged(2, 7), words(6, 5)
    wanted = model(source.repeat_interleave(3, 0), target, real.repeat_interleave(3, 0))
    session = OnnxSeq2SeqSession(found, source, real)
    session.reorder(torch.zeros(2, 3, dtype=torch.long))
    assert session.cross[0].shape[0] == 2
    for place in range(5):
        found_logits = session.step(target[:, place].view(2, 3))
        close(found_logits.flatten(0, 1), wanted[:, place])


@torch.no_grad()
def test_only_wanted_positions_have_logits(translator: Pair, decoder: Pair) -> None:
    model, found = decoder
    tokens, past = words(2, 6), found.graph.nothing("past", 2)
    logits, present = found.graph.step(tokens, torch.tensor([4, 1]), past)
    close(logits, model(tokens)[:, [4, 1]])
    assert {x.shape[2] for x in present} == {6}


def hypotheses(
    session: DecoderSession, limits: list[int], beam: int
) -> list[list[tuple[Any, ...]]]:
    decode = Decode(beam=beam)
    constraints = LogitsConstraints(decode, END, BANNED, torch.device("cpu"))
    found = BeamSearch(decode, constraints)(session, START, torch.tensor(limits))
    return [[(*h.tokens, round(h.score, 3)) for h in line] for line in found]


@pytest.mark.parametrize("beam", [1, 4])
@torch.no_grad()
def test_beam_search_finds_the_same(translator: Pair, beam: int) -> None:
    """Sentences that end at different steps, so that rows are reordered and leave."""
    model, found = translator
    source, real, limits = words(8, 9), ragged(8, 9), [3, 25, 12, 25, 1, 25, 7, 25]
    wanted = hypotheses(Seq2SeqSession(model, source, real), limits, beam)
    assert len({len(line[0]) for line in wanted}) > 3
    assert hypotheses(OnnxSeq2SeqSession(found, source, real), limits, beam) == wanted


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("length", [1, 6])
@torch.no_grad()
def test_beam_search_after_prompts_finds_the_same(decoder: Pair, length: int, beam: int) -> None:
    model, found = decoder
    prompts = words(4, length)
    prompts[:, -1] = START  # the search begins with it
    wanted = hypotheses(GptSession(model, prompts), [9, 4, 12, 12], beam)
    assert hypotheses(OnnxGptSession(found, prompts), [9, 4, 12, 12], beam) == wanted


def toy_tokenizer() -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(SPECIALS)}
    vocabulary |= {chr(ord("a") + number): len(SPECIALS) + number for number in range(WORDS)}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(SPECIALS)
    return Tokenizer(inner)


def test_an_export_is_quiet_and_leaves_the_model_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its core, its mode, its precision; the graph is float32 without dropout whatever they are."""
    config = BertConfig(vocab_size=VOCABULARY, layers=1, dropout=0.5, head=None, **SIZES)
    model = config.build().double().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = OnnxEncoder(exported(model, tmp_path / "run"))
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == logging.NOTSET
    assert model.training
    assert [m.core for m in model.modules() if isinstance(m, SelfAttention)] == [Fused()]
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)
    tokens = words(2, 5)
    with torch.no_grad():
        close(found(tokens), model.eval()(tokens).float())


def test_large_weights_lie_beside_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder can still be moved, and what was in it stays."""
    monkeypatch.setattr(exchange, "LARGEST", 1000)
    model = BertConfig(vocab_size=VOCABULARY, layers=1, head=None, **SIZES).build().eval()
    (tmp_path / "run").mkdir()
    for name in ("run.toml", "head.onnx", "decoder.onnx.data"):  # the graphs are another model's
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


class Fixing(nn.Module):
    """A part that asks for a size as a number."""

    def forward(self, given: dict[str, Tensor]) -> list[Tensor]:
        return [given["x"] + torch.zeros(len(given["x"]), 1)]


class Failing(nn.Module):
    """A part that hangs on the data."""

    def forward(self, given: dict[str, Tensor]) -> list[Tensor]:
        return [given["x"] if bool(given["x"].sum() > 0) else -given["x"]]


@pytest.mark.parametrize(
    ("part", "reason"), [(Fixing(), "fixes axis 0 of x"), (Failing(), "refuses this model")]
)
def test_what_the_exporter_cannot_take_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    part: nn.Module,
    reason: str,
) -> None:
    """In one line, and no folder is left behind."""
    inputs = {"x": (torch.zeros(2, 3), {0: exchange.BATCH, 1: exchange.NEW})}
    monkeypatch.setattr(
        exchange,
        "_graphs",
        lambda model: {"encoder.onnx": Graph(part, inputs, ["y"], 4, Position())},
    )
    with pytest.raises(UserError, match=reason) as refusal:
        exported(nn.Identity(), tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_positions_end_where_they_ended(decoder: Pair, translator: Pair) -> None:
    """A learned table has an end, in a pass and in steps; rotary positions have none."""
    _, found = decoder
    longest = SIZES["max_length"]
    assert found(words(1, longest)).shape == (1, longest, VOCABULARY)
    with pytest.raises(UserError, match=f"{longest + 1} positions, but the learned ones end"):
        found(words(1, longest + 1))
    session = OnnxGptSession(found, words(1, longest))
    session.step(words(1, 1))
    with pytest.raises(UserError, match="learned ones end"):
        session.step(words(1, 1))
    _, found = translator
    assert found(words(1, longest + 1), words(1, longest + 2)).isfinite().all()


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no ONNX graph for a Linear"):
        write_onnx(nn.Linear(2, 2), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder should."""
    monkeypatch.setattr(exchange, "_graphs", lambda model: {})
    (tmp_path / "run").write_text("a file")
    with pytest.raises(DataError, match="could not be written") as refusal:
        write_onnx(nn.Identity(), tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"onnxscript.*manyheads\[exchange\]"):
        write_onnx(nn.Linear(2, 2), tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"no graph", None])
def test_a_broken_graph_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        with pytest.raises(UserError, match="there is no") as refusal:
            OnnxGpt(tmp_path)
    else:
        (tmp_path / "decoder.onnx").write_bytes(content)
        with pytest.raises(DataError, match="export it again") as refusal:
            OnnxGpt(tmp_path)
    assert "\n" not in str(refusal.value)


POSITIONS: list[PositionConfig] = [
    NoPosition(),
    Sinusoidal(),
    Sinusoidal(layout="halves"),
    Learned(),
    Rotary(),
    Rotary(layout="interleaved"),
    Shaw(max_distance=3),
    Buckets(buckets=6, max_distance=9),
    Alibi(),
    Relative(max_distance=3, period=2),
]
SCORES: list[ScoreConfig] = [
    Dot(),
    ScaledDot(scale=0.3),
    Bilinear(key_size=6),
    ReducedRank(rank=2),
    Additive(width=5),
]

# A matrix between rotated queries and keys is refused when a model is built.
CELLS = [
    (position, score)
    for position in POSITIONS
    for score in SCORES
    if not isinstance(position, Rotary) or isinstance(score, Dot | ScaledDot)
]


@pytest.mark.parametrize(("position", "score"), CELLS, ids=lambda part: part.kind)
@torch.no_grad()
def test_the_core_of_graphs_is_dense(position: PositionConfig, score: ScoreConfig) -> None:
    """Any score and position, masks, queries that see nothing, fewer key heads (no export)."""
    model = strong(
        GptConfig(
            vocab_size=VOCABULARY,
            layers=1,
            position=position,
            score=score,
            attention=Dense(),
            **SIZES,
        ).build()
    ).double()
    attention, placed = model.decoder.blocks[0].attention, model.decoder.position
    real = torch.tensor([[True] * 5, [False] * 3 + [True] * 2])
    for sight in (
        make_mask(causal, 5, padding_mask=real),
        make_mask(full, 5, padding_mask=real),
        make_mask(full, 5),
    ):
        x = torch.randn(2, 5, SIZES["dim"], dtype=torch.double)
        attention.core = Dense()
        wanted = attention(x, sight, placed)
        attention.core = GraphCore()
        torch.testing.assert_close(attention(x, sight, placed), wanted, atol=1e-12, rtol=0)


Check = Callable[[Any, Any], None]
FAMILIES: dict[str, tuple[Any, Any, Check]] = {
    "seq2seq": (Seq2SeqConfig, OnnxSeq2Seq, check_translator),
    "gpt": (GptConfig, OnnxGpt, check_decoder),
    "bert": (BertConfig, OnnxEncoder, check_encoder),
}
PARTS: dict[str, dict[str, Any]] = {
    **{f"{p.kind}-{getattr(p, 'layout', '')}": {"position": p} for p in POSITIONS},
    **{score.kind: {"score": score} for score in SCORES},
    "modern": {"position": Rotary(), **MODERN},
    "older": {
        "position": Learned(),
        **OLDER,
        "embed": EmbeddingConfig(norm=Norm(), scale="sqrt-dim"),
    },
    "tiled": {"core": Tiled(block=3)},
    "narrow": {"head_dim": 6, "kv_heads": 1},
    "gated-gelu": {"feedforward": Gated(activation="gelu-tanh"), "kv_heads": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", PARTS)
def test_every_part_can_be_exported(tmp_path: Path, family: str, parts: str) -> None:
    config, runner, check = FAMILIES[family]
    changes = {"attention": Dense(), **SIZES, **PARTS[parts]}
    model = strong(config(vocab_size=VOCABULARY, layers=1, **changes).build())
    check(model, runner(exported(model, tmp_path / "run")))


HEADS: dict[str, dict[str, Any]] = {
    "classify": {"head": Classify(labels=("a", "b", "c")), "pooler": Pooler()},
    "tag": {"head": Tag(labels=("a", "b", "c"))},
    "detect": {"head": Detect(), "embed": EmbeddingConfig(dim=8)},
    "untied": {"head": Masked(tie="none"), "position": Learned(offset=2)},
    "next": {"head": None, "pooler": Pooler(), "next_sentence": NextSentence()},
    "bare": {"head": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_every_head_can_be_exported(tmp_path: Path, head: str) -> None:
    config = BertConfig(vocab_size=VOCABULARY, layers=1, **SIZES, **HEADS[head])
    model = strong(config.build())
    check_encoder(model, OnnxEncoder(exported(model, tmp_path / "run")))


@pytest.mark.slow
@pytest.mark.parametrize("tie", ["all", "inputs", "target", "none"])
def test_every_tie_can_be_exported(tmp_path: Path, tie: Any) -> None:
    """Shared tables are in a graph once."""
    other = {} if tie in ("all", "inputs") else {"target_vocab_size": VOCABULARY + 9}
    model = strong(
        Seq2SeqConfig(vocab_size=VOCABULARY, layers=1, tie=tie, **other, **SIZES).build()
    )
    check_translator(model, OnnxSeq2Seq(exported(model, tmp_path / "run")))
