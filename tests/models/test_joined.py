"""One stack for source and target: a language model inside, an encoder–decoder to use."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.decode.toys import (
    LONGEST,
    PAD,
    START,
    Recomputing,
    beam_search,
    full_pass,
    same,
    searched,
    toy_source,
)
from tests.train.small_runs import WORDS, trainer, write_recipe
from tiny import VOCAB, words
from torch import Tensor
from torch.nn import functional as F

from manyheads.decode.beam import Decode
from manyheads.decode.kv_cache import KVCache
from manyheads.loading import load_torch_run
from manyheads.models.decoder_only_seq2seq import (
    DecoderOnlySeq2Seq,
    DecoderOnlySeq2SeqConfig,
    EncoderDecoder,
)
from manyheads.models.gpt import GptConfig
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense, Fused
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.experts import Experts
from manyheads.nn.local import Longformer
from manyheads.nn.positions import Alibi, Buckets, Learned, PositionConfig, Rotary
from manyheads.nn.tiled import Tiled
from manyheads.summary import summarize

CORES: dict[str, AttentionFunctionConfig] = {
    "dense": Dense(),
    "fused": Fused(),
    "tiled": Tiled(block=4),
    "compressed": MemoryCompressed(stride=2, layers="M"),
    "local-compressed": MemoryCompressed(stride=2, size=4),
    "longformer": Longformer(window=3),
}
PLACED: list[PositionConfig] = [Learned(), Rotary(), Alibi(), Buckets(buckets=6, max_distance=5)]
LENGTHS = (6, 2, 5)
cores = pytest.mark.parametrize("core", CORES)


def sized(kind: Any, **changes: Any) -> Any:
    """The settings of a model of two layers of two heads, without dropout."""
    sizes = {"vocab_size": VOCAB, "dim": 8, "layers": 2, "heads": 2, "ffn_dim": 12}
    return kind(**{**sizes, "max_length": 32, "dropout": 0.0, **changes})


def joined(core: str = "fused", **changes: Any) -> DecoderOnlySeq2Seq:
    torch.manual_seed(3)
    model: DecoderOnlySeq2Seq = (
        sized(DecoderOnlySeq2SeqConfig, attention=CORES[core], **changes).build().double().eval()
    )
    return model


def pairs(target: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Sources of different lengths, their targets, and what of the sources is real."""
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return words(*real.shape), words(len(LENGTHS), target), real


def agree(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


# --- what it computes ---


@cores
@pytest.mark.parametrize("tie", ["all", "none"])
def test_it_is_a_language_model_of_the_joined_sequence(core: str, tie: str) -> None:
    model = joined(core, tie=tie)
    gpt = sized(GptConfig, attention=CORES[core], tie=tie, max_length=64).build().double().eval()
    gpt.load_state_dict(model.state_dict())
    source, target, real = pairs()
    with torch.no_grad():
        actual = model(source, target, real)
        for row, length in enumerate(LENGTHS):
            sequence = torch.cat([source[row, :length], target[row]])[None]
            agree(actual[row], gpt(sequence)[0, length:])
        full = model(source[:1], target[:1])
        agree(full, actual[:1])


@cores
def test_padding_changes_nothing(core: str) -> None:
    """Content and amount of padding change neither logits nor gradients."""
    model, (source, target, real) = joined(core), pairs()
    actual = []
    for padding, more in ((0, 0), (5, 0), (5, 4)):
        model.zero_grad()
        padded = F.pad(source.masked_fill(~real, padding), (0, more), value=padding)
        logits = model(padded, target, F.pad(real, (0, more)))
        logits.square().sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        actual.append((logits, torch.cat(grads)))
    for other in actual[1:]:
        for one, two in zip(actual[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("core", ["fused", "compressed", "local-compressed", "longformer"])
def test_no_gradient_from_the_future(core: str) -> None:
    """A place of the target sees itself, the target before it and the source, and nothing else."""
    model, (source, target, real) = joined(core, tie="none"), pairs(6)
    entered: list[Tensor] = []
    model.tokens.register_forward_hook(lambda _, __, out: entered.append(out))
    logits = model(source, target, real)
    for row, length in enumerate(LENGTHS):
        for place in range(6):
            [grad] = torch.autograd.grad(logits[row, place].sum(), entered[0], retain_graph=True)
            assert not grad[row, length + place + 1 :].any()
            assert grad[row, length + place].any()
            others = [other for other in range(len(LENGTHS)) if other != row]
            assert not grad[others].any()
        if core == "fused":
            assert grad[row, : length + 6].abs().sum(-1).min() > 0


# --- writing ---


@cores
@pytest.mark.parametrize("chunks", [(1,) * 9, (4, 1, 4)], ids=len)
def test_cached_is_full(core: str, chunks: tuple[int, ...]) -> None:
    model, (source, target, real) = joined(core), pairs()
    for inputs in (real, None):
        cache, memory = KVCache(), model.encode(source, inputs)
        with torch.no_grad():
            actual = [
                model.logits(model.decode(chunk, memory, cache=cache))
                for chunk in target.split(list(chunks), dim=1)
            ]
            agree(torch.cat(actual, dim=1), model(source, target, inputs))
        assert cache.length == source.shape[1] + 9


@pytest.mark.parametrize("position", PLACED, ids=lambda position: position.kind)
def test_a_step_stands_where_it_would_without_padding(position: PositionConfig) -> None:
    model, (source, target, real) = joined(position=position), pairs()
    cache, memory = KVCache(), model.encode(source, real)
    with torch.no_grad():
        actual = [model.decode(one, memory, cache=cache) for one in target.split(1, dim=1)]
        agree(model.logits(torch.cat(actual, dim=1)), model(source, target, real))


@pytest.mark.parametrize(
    ("beam", "core"), [(3, "fused"), (3, "local-compressed"), (1, "compressed")]
)
def test_a_batch_is_searched_as_one_sentence_at_a_time(beam: int, core: str) -> None:
    model = joined(core, vocab_size=15, tie="none", max_length=LONGEST)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)  # a next token is likely or unlikely, and the source matters
    torch.manual_seed(1)
    lengths, limits = (9, 2, 6, 1, 4, 9), [12, 3, 9, 6, 8, 14]
    source, real = toy_source(*lengths)
    actual = searched(model, source, real, limits, beam=beam)  # type: ignore[arg-type]
    for row, length in enumerate(lengths):
        sentence = source[row : row + 1, :length]
        single = searched(model, sentence, sentence != PAD, limits[row : row + 1], beam=beam)  # type: ignore[arg-type]
        same(actual[row : row + 1], single)
    search = beam_search(Decode(beam=beam))
    without = Recomputing(full_pass(model, source, real), len(lengths))  # type: ignore[arg-type]
    same(actual, search(without, START, torch.tensor(limits)))
    assert len({len(line[0].tokens) for line in actual}) > 1
    assert len({tuple(line[0].tokens[:1]) for line in actual}) > 1


# --- learning ---


@pytest.mark.parametrize("core", ["fused", "local-compressed"])
def test_it_learns(core: str) -> None:
    """A batch by heart: copies of sources of different lengths."""
    model = joined(core, dim=16, dropout=0.1, feedforward=Experts(experts=2)).float().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    source, _, real = pairs()
    target, losses = source.roll(1, 1), []
    for _ in range(30):
        logits = model(source, target, real)
        loss = F.cross_entropy(logits[real], source[real])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2
    assert losses[-1] < losses[0] / 3
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


SMALL = [
    *("model=joined", "model.dim=32", "model.layers=2", "model.heads=4", "model.ffn_dim=64"),
    *("model.max_length=64", "model.dropout=0", "train.schedule=constant", "train.steps=60"),
    *("train.learning_rate=0.005", "train.validate_every=20", "train.label_smoothing=0"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the mirror language, with compressed memory."""
    folder = tmp_path_factory.mktemp("runs")
    core = [
        "model.attention=memory-compressed",
        "model.attention.size=8",
        "model.attention.stride=2",
    ]
    trainer(write_recipe(folder, pairs=300), folder / "run", *SMALL, *core).run()
    return folder / "run"


def test_a_run_learns_and_is_used_like_any_other(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [r["loss"] for r in map(json.loads, lines) if r["split"] == "valid"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < math.log(len(WORDS))
    opened = load_torch_run(run)
    model: Any = opened.model
    assert isinstance(model, EncoderDecoder)
    lines = ["red dog", "small big green tree", "cat"]
    together = opened.translator(beam=3).translate(lines)
    assert together == [opened.translator(beam=3).translate([line])[0] for line in lines]
    vectors = opened.encoder().embed(lines)
    assert vectors.shape == (3, 32)
    torch.testing.assert_close(vectors[0], opened.encoder().embed(lines[:1])[0], atol=1e-5, rtol=0)


# --- settings, and what it costs ---


def test_the_account_is_that_of_a_decoder_over_both() -> None:
    config = sized(
        DecoderOnlySeq2SeqConfig, position=Learned(), attention=MemoryCompressed(layers="M")
    )
    actual = summarize(config)
    model = config.build()
    assert actual.parameters == sum(p.numel() for p in model.parameters())
    kernels = sum(p.numel() for name, p in model.named_parameters() if ".core." in name)
    exact = summarize(sized(DecoderOnlySeq2SeqConfig, position=Learned()))
    assert actual.parts["attention"] - exact.parts["attention"] == kernels
    gpt = summarize(sized(GptConfig, position=Learned(), max_length=64))
    assert exact.parts == gpt.parts
    assert exact.tokens == {"source": 32, "target": 32}
    assert exact.flops["target"] == gpt.flops["token"]
    unread = {part: n for part, n in gpt.flops["token"].items() if part != "head"}
    assert exact.flops["source"] == unread
    assert exact.inference["float32"].cache == gpt.inference["float32"].cache
    mixed, met = (account_.flops["target"]["attention mixing"] for account_ in (actual, exact))
    assert mixed == met * math.ceil(64 / 3) // 64
    more = actual.flops["source"]["attention"] - exact.flops["source"]["attention"]
    assert more == 2 * kernels // 3
