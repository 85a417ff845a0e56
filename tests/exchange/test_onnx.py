"""Exported graphs in onnxruntime against the models that they were exported from.

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

from manyheads.errors import DataError, UserError
from manyheads.exchange import onnx as exchange
from manyheads.exchange.onnx import Graph, write_onnx
from manyheads.models.bert import BertConfig, NextSentence
from manyheads.models.gpt import GptConfig
from manyheads.models.heads import Classify, Detect, Masked, Pooler, Tag
from manyheads.models.seq2seq import Seq2SeqConfig, StackOverrides
from manyheads.models.vit import VitConfig
from manyheads.nn.attention import Dense, Fused, SelfAttention
from manyheads.nn.layers import EmbeddingConfig, Gated, Norm, Plain
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    Relative,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.scores import Additive, Bilinear, Dot, ReducedRank, ScaledDot
from manyheads.nn.tiled import Tiled

for package in ("onnx", "onnxscript"):
    pytest.importorskip(package)
onnxruntime = pytest.importorskip("onnxruntime")

VOCABULARY = 23
MAX_LENGTH = 40
SIZES: dict[str, Any] = {"dim": 16, "heads": 4, "kv_heads": 2, "ffn_dim": 24}
SIZES |= {"vocab_size": VOCABULARY, "max_length": MAX_LENGTH}
MODERN: dict[str, Any] = {"norm": Norm(form="rms"), "feedforward": Gated(), "bias": False}
OLDER: dict[str, Any] = {"norm": Norm(placement="post"), "feedforward": Plain(activation="gelu")}
# Rows and lengths other than those of the examples; 1 is where an axis can get lost.
SHAPES = [(1, 1, 1), (3, 17, 2), (1, 2, 17), (3, 1, 4)]


class Graphs:
    """An exported folder in onnxruntime: tensors in, tensors out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sessions = {
            path.stem: onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            for path in folder.glob("*.onnx")
        }

    def run(self, name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        session = self.sessions[name]
        outputs = session.run(None, {key: x.contiguous().numpy() for key, x in inputs.items()})
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, map(torch.from_numpy, outputs), strict=True))

    def cross(self, source: Tensor, real: Tensor) -> dict[str, Tensor]:
        """The inputs of the decoder that depend on the source."""
        return {"real": real, **self.run("encoder", {"source": source, "real": real})}

    def past(self, *rows: int) -> dict[str, Tensor]:
        """The cache before the first token of each row."""
        return {
            x.name: torch.zeros(*rows, x.shape[-3], 0, x.shape[-1])
            for x in self.sessions["decoder"].get_inputs()
            if x.name.startswith("past")
        }

    def step(
        self, tokens: Tensor, past: dict[str, Tensor], **others: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits at all new tokens, and the cache that includes them."""
        at = torch.arange(tokens.shape[-1])
        outputs = self.run("decoder", {"tokens": tokens, "at": at, **others, **past})
        logits = outputs.pop("logits")
        return logits, {name.replace("present", "past"): x for name, x in outputs.items()}


Pair = tuple[Any, Graphs]


def exported(model: nn.Module, folder: Path) -> Graphs:
    with unchecked():  # shapes are symbols while a graph is traced
        write_onnx(model, folder)
    return Graphs(folder)


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
    """Two layers of the decoder, so that an exchange of their tensors shows."""
    torch.manual_seed(38)
    encoder = StackOverrides(layers=1)
    sizes = {"layers": 2, "encoder": encoder, **SIZES}
    model = strong(Seq2SeqConfig(position=Rotary(), tie="none", **sizes, **MODERN).build())
    return model, exported(model, tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(4)
    model = strong(GptConfig(layers=1, position=Learned(), **SIZES, **OLDER).build())
    return model, exported(model, tmp_path_factory.mktemp("onnx"))


def translate(graphs: Graphs, source: Tensor, target: Tensor, real: Tensor) -> Tensor:
    """Teacher forcing."""
    past = graphs.past(len(source), 1)
    return graphs.step(target[:, None], past, **graphs.cross(source, real))[0][:, 0]


@torch.no_grad()
def check_translator(model: Any, graphs: Graphs) -> None:
    """Teacher forcing, and one position at a time after pasts of any length."""
    for rows, source_length, length in SHAPES:
        source, target = words(rows, source_length), words(rows, length)
        real = padding_mask(rows, source_length)
        expected = model(source, target, real)
        close(translate(graphs, source, target, real), expected)
        cross, past = graphs.cross(source, real), graphs.past(rows, 1)
        for position in range(length):
            logits, past = graphs.step(target[:, None, position, None], past, **cross)
            close(logits[:, 0, 0], expected[:, position])


@torch.no_grad()
def check_decoder(model: Any, graphs: Graphs) -> None:
    """All at once, and a step after prompts of every length."""
    for rows, length, _ in SHAPES:
        tokens = words(rows, length)
        expected = model(tokens)
        for position in range(length):
            first, past = graphs.step(tokens[:, :position], graphs.past(rows))
            rest, _ = graphs.step(tokens[:, position:], past)
            close(torch.cat([first, rest], dim=1), expected)


@torch.no_grad()
def check_encoder(model: Any, graphs: Graphs) -> None:
    for rows, length, _ in SHAPES:
        inputs = {"tokens": words(rows, length), "real": padding_mask(rows, length)}
        if model.embedding.segment is not None:
            inputs["segments"] = torch.randint(2, (rows, length))
        outputs = graphs.run("encoder", inputs)
        close(outputs["hidden"], model.hidden(*inputs.values()))
        close(outputs.get("logits", outputs["hidden"]), model(*inputs.values()))


def test_exported_models_equal_ours(translator: Pair, decoder: Pair) -> None:
    """`test_an_exported_encoder_equals_ours_which_is_unchanged` has an encoder."""
    check_translator(*translator)
    check_decoder(*decoder)


@torch.no_grad()
def test_an_exported_image_encoder_equals_ours(tmp_path: Path) -> None:
    config = VitConfig(
        dim=16, heads=2, layers=1, image_size=12, patch_size=4, head=Classify(labels=("a", "b"))
    )
    model = strong(config.build())
    graphs = exported(model, tmp_path)
    for rows in (1, 3):
        images = torch.randn(rows, 3, 12, 12)
        outputs = graphs.run("encoder", {"images": images})
        close(outputs["logits"], model(images))
        close(outputs["hidden"], model.hidden(images))


@torch.no_grad()
def test_padding_changes_nothing(translator: Pair) -> None:
    """A row of nothing but padding gives what our model gives, and no NaN."""
    model, graphs = translator
    source, target = words(2, 9), words(2, 4)
    real = torch.arange(9)[None] < torch.tensor([[5], [0]])
    expected = model(source, target, real)
    assert expected.isfinite().all()
    close(translate(graphs, source, target, real), expected)
    close(translate(graphs, source[:1, :5], target[:1], real[:1, :5]), expected[:1])


@torch.no_grad()
def test_hypotheses_share_the_keys_of_their_source(translator: Pair) -> None:
    model, graphs = translator
    source, real, target = words(2, 7), padding_mask(2, 7), words(6, 5)
    expected = model(source.repeat_interleave(3, 0), target, real.repeat_interleave(3, 0))
    cross, past = graphs.cross(source, real), graphs.past(2, 3)
    assert {len(x) for x in cross.values()} == {2}
    for tokens, logits in zip(
        target.split([1, 3, 1], 1), expected.split([1, 3, 1], 1), strict=True
    ):
        step, past = graphs.step(tokens.unflatten(0, (2, 3)), past, **cross)
        close(step.flatten(0, 1), logits)


@torch.no_grad()
def test_the_example_of_the_documentation_searches_greedily(
    translator: Pair, decoder: Pair
) -> None:
    """Functions of docs/models.md against the argmax of our models."""
    page = Path(__file__).parents[2] / "docs" / "models.md"
    example: dict[str, Any] = {}
    exec(page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], example)
    source, limit = words(1, 6), 9
    for (model, graphs), start in ((translator, [1]), (decoder, [7, 8, 9])):
        encoded = model.encode(source) if model is translator[0] else None
        tokens = list(start)
        while len(tokens) < len(start) + limit:
            row = torch.tensor([tokens])
            hidden = model.hidden(row) if encoded is None else model.decode(row, encoded)
            tokens.append(int(model.logits(hidden)[0, -1].argmax()))
        expected = tokens[len(start) :]
        for end in (VOCABULARY, expected[4]):
            if encoded is None:
                actual = example["generate"](graphs.folder, start, end, limit)
            else:
                actual = example["translate"](graphs.folder, source[0], start[0], end, limit)
            assert actual == expected[: (expected.index(end) if end in expected else limit) + 1]


def test_an_exported_encoder_equals_ours_which_is_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is float32 without dropout, whatever the model's mode and dtype are; no output.

    Large weights are in a file of their own; the folder can be moved and keeps other files.
    """
    monkeypatch.setattr(exchange, "MAX_INLINE_BYTES", 1000)
    embed = EmbeddingConfig(segments=2, norm=Norm())
    sizes = {"layers": 1, "dropout": 0.5, **SIZES}
    config = BertConfig(position=Buckets(), embed=embed, **sizes, **OLDER)
    model = strong(config.build()).double().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text("there before")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported(model, folder)
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == logging.NOTSET
    assert model.training
    assert [m.core for m in model.modules() if isinstance(m, SelfAttention)] == [Fused()]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    graph, weights = folder / "encoder.onnx", folder / "encoder.onnx.data"
    assert {path.name for path in folder.iterdir()} == {"run.toml", graph.name, weights.name}
    assert weights.stat().st_size >= sum(4 * x.numel() for x in model.parameters() if x.ndim > 1)
    assert str(Path(exchange.__file__).parents[1]).encode() not in graph.read_bytes()
    shutil.move(folder, tmp_path / "elsewhere")
    check_encoder(model.eval().float(), Graphs(tmp_path / "elsewhere"))


def test_refusals_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="Linear"):
        write_onnx(nn.Linear(2, 2), folder)
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, "onnxscript", None)
        with pytest.raises(UserError, match=r"manyheads\[exchange\]"):
            write_onnx(nn.Linear(2, 2), folder)

    def depends_on_the_data(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        return [inputs["x"] if bool(inputs["x"].sum() > 0) else -inputs["x"]]

    inputs = {"x": (torch.zeros(2, 3), {0: exchange.BATCH, 1: exchange.NEW})}
    graph = Graph(nn.Identity(), depends_on_the_data, inputs, ["y"])
    monkeypatch.setattr(exchange, "_graphs", lambda model: {"encoder.onnx": graph})
    with pytest.raises(UserError, match="exporter") as refusal:
        exported(nn.Identity(), folder)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(exchange, "_graphs", lambda model: {})
    folder.write_text("a file in the place of the folder")
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
    "mean": {"head": Classify(labels=("a", "b", "c")), "pooler": Pooler(over="mean")},
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
FAMILIES: dict[str, tuple[Any, Callable[[Any, Graphs], None], dict[str, dict[str, Any]]]] = {
    "seq2seq": (Seq2SeqConfig, check_translator, PARTS | TIES),
    "gpt": (GptConfig, check_decoder, PARTS),
    "bert": (BertConfig, check_encoder, PARTS | HEADS),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parts"), [(family, parts) for family in FAMILIES for parts in FAMILIES[family][2]]
)
def test_every_part_can_be_exported(tmp_path: Path, family: str, parts: str) -> None:
    config, check, cases = FAMILIES[family]
    model = strong(config(**{"layers": 1, "attention": Dense(), **SIZES, **cases[parts]}).build())
    check(model, exported(model, tmp_path / "run"))
