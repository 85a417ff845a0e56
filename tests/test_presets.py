"""Every preset against its paper: its size, its shape, and that it runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.models.bert import Bert
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vit import Vit
from manyheads.nn.layers import Norm
from manyheads.nn.positions import RotaryPosition
from manyheads.presets import build, preset, presets
from manyheads.recipes import read_recipe
from manyheads.train.optimizer import learning_rate

# Millions of parameters as the papers print them.
PUBLISHED = {
    "transformer-base": 65,
    "transformer-big": 213,
    "bert-base": 110,
    "bert-large": 340,
    "roberta-base": 125,
    "electra-base": 110,
    "gpt1": 117,  # `gpt` is a kind of model
    "gpt2": 124,  # printed as 117; the released weights have 124
    "gpt3-small": 125,
    "gpt3-medium": 350,
    "gpt3-large": 760,
    "gpt3-xl": 1_300,
    "gpt3-2.7b": 2_700,
    "gpt3-6.7b": 6_700,
    "gpt3-13b": 13_000,
    "gpt3-175b": 175_000,
    "palm-8b": 8_630,
    "t5-base": 220,
    "bart-base": 140,  # fairseq's README; the paper prints none
    "music-transformer": 12.8,  # not in the paper: computed from its table of sizes
    "vit-tiny": 5.7,  # printed as 5
    "vit-small": 22,
    "vit-base": 86,
    "vit-large": 307,
}

# Those of images to the last one, with learned positions and a head for a thousand classes. The
# papers round, and leave the head out or not: 85.8 and 303.3 million are without it.
EXACT = {
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
}

# Layers (of each stack), width, heads, head size, feed-forward width. XL's heads are those that
# fit its printed parameters; the paper prints 24 (see the test below).
SHAPES = {
    "transformer-base": (6, 512, 8, 64, 2048),
    "transformer-big": (6, 1024, 16, 64, 4096),
    "bert-base": (12, 768, 12, 64, 3072),
    "bert-large": (24, 1024, 16, 64, 4096),
    **dict.fromkeys(("roberta-base", "electra-base", "gpt1", "gpt2"), (12, 768, 12, 64, 3072)),
    "gpt3-small": (12, 768, 12, 64, 4 * 768),
    "gpt3-medium": (24, 1024, 16, 64, 4 * 1024),
    "gpt3-large": (24, 1536, 16, 96, 4 * 1536),
    "gpt3-xl": (24, 2048, 16, 128, 4 * 2048),
    "gpt3-2.7b": (32, 2560, 32, 80, 4 * 2560),
    "gpt3-6.7b": (32, 4096, 32, 128, 4 * 4096),
    "gpt3-13b": (40, 5140, 40, 128, 4 * 5140),
    "gpt3-175b": (96, 12288, 96, 128, 4 * 12288),
    "palm-8b": (32, 4096, 16, 256, 16384),
    "t5-base": (12, 768, 12, 64, 3072),
    "bart-base": (6, 768, 12, 64, 3072),
    "music-transformer": (6, 384, 8, 64, 1024),
    "vit-tiny": (12, 192, 3, 64, 768),
    "vit-small": (12, 384, 6, 64, 1536),
    "vit-base": (12, 768, 12, 64, 3072),
    "vit-large": (24, 1024, 16, 64, 4096),
}

TINY: dict[str, Any] = {"layers": 2, "dim": 24, "heads": 2, "vocab_size": 50, "max_length": 12}


def weightless(name: str, **overrides: Any) -> nn.Module:
    with torch.device("meta"):
        return build(name, **overrides)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def stacks(model: nn.Module) -> list[Any]:
    return [getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)]


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens, tokens) if isinstance(model, Seq2Seq) else model(tokens)


def test_no_preset_is_missing_from_the_tables() -> None:
    assert presets() == list(PUBLISHED) == list(SHAPES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_match_the_paper(name: str) -> None:
    assert size(weightless(name)) == pytest.approx(PUBLISHED[name] * 10**6, rel=0.03)


@pytest.mark.parametrize("name", EXACT)
def test_parameters_of_image_models_to_the_last_one(name: str) -> None:
    model = weightless(name)
    assert isinstance(model, Vit)
    assert size(model) == EXACT[name]
    assert model.config.positions == 14 * 14 + 1
    without = weightless(name, head=None)
    assert size(model) - size(without) == 1000 * (model.config.dim + 1)


@pytest.mark.parametrize("name", SHAPES)
def test_shape_matches_the_paper(name: str) -> None:
    layers, dim, heads, head_dim, hidden = SHAPES[name]
    for stack in stacks(weightless(name)):
        assert len(stack.blocks) == layers
        for block in stack.blocks:
            kv_heads = 1 if name == "palm-8b" else heads
            rows = (heads + 2 * kv_heads) * head_dim
            assert block.attention.project.weight.shape == (rows, dim)
            assert block.attention.output.weight.shape == (dim, heads * head_dim)
            assert block.attention.config.heads == heads
            assert block.feedforward.inner.weight.shape == (hidden, dim)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in EXACT])
def test_tiny_version_runs_and_learns(name: str) -> None:
    tiny = {**TINY, "head_dim": 12} if preset(name).head_dim else TINY
    model = build(name, **tiny)
    tokens = torch.randint(50, (3, 12))
    out = logits(model, tokens)
    assert out.shape == ((3, 12) if name == "electra-base" else (3, 12, 50))
    out.logsumexp(-1).mean().backward()
    used = [p for key, p in model.named_parameters() if not key.startswith(("pooler", "next_"))]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in used)


def test_words_tables_and_objects_change_one_part() -> None:
    model = build(
        "bert-base",
        **TINY,
        position="rotary",
        norm="pre",
        embed={"segments": 3},
        feedforward={"kind": "gated", "activation": "gelu"},
        next_sentence=None,
        attention="dense",
    )
    assert isinstance(model, Bert)
    assert isinstance(model.encoder.position, RotaryPosition)
    assert model.config.norm == Norm(placement="pre", eps=1e-12)  # the rest of the preset's stays
    assert model.config.embed.norm == Norm(placement="post", eps=1e-12)
    assert model.config.embed.segments == 3
    assert model.config.feedforward.kind == "gated"
    assert model.config.next_sentence is None
    rms = build("gpt3-small", **TINY, norm=Norm(form="rms"))
    assert isinstance(rms.get_submodule("decoder.last_norm"), nn.RMSNorm)
    sides = build("transformer-base", **TINY | {"layers": 1}, decoder={"layers": 3})
    assert [len(stack.blocks) for stack in stacks(sides)] == [1, 3]


def test_the_recipe_transformer_base_is_the_published_model_and_schedule() -> None:
    run = read_recipe("transformer-base")
    assert replace(run.model, ffn_dim=None) == replace(preset("transformer-base"), vocab_size=None)
    assert run.model.ffn_dim == 4 * run.model.dim
    train = run.train
    assert (train.beta1, train.beta2, train.eps) == (0.9, 0.98, 1e-9)
    assert (train.schedule, train.warmup_steps, train.label_smoothing) == ("transformer", 4000, 0.1)
    rates = [learning_rate(train, run.model.dim, step) for step in (1, 4000, 16_000)]
    assert rates == pytest.approx([512**-0.5 * x for x in (4000**-1.5, 4000**-0.5, 16_000**-0.5)])


@pytest.mark.parametrize(
    ("recipe", "name", "settings"),
    [
        ("translation", "transformer-big", []),
        ("bert-mini", "bert-base", []),
        ("bert-mini", "roberta-base", ["objective.pairs=none"]),
        ("electra-mini", "electra-base", []),
        ("classify", "bert-base", []),
        ("language", "palm-8b", []),
        ("midi", "music-transformer", []),
        ("t5-mini", "t5-base", []),
        ("t5-mini", "bart-base", ["objective=denoising"]),
        ("images", "vit-small", []),
    ],
)
def test_a_recipe_trains_a_preset_with_settings_on_top(
    recipe: str, name: str, settings: list[str]
) -> None:
    run = read_recipe(recipe, ["model.layers=1", f"model={name}", "model.dropout=0.2", *settings])
    published: Any = preset(name)
    for field in ("dim", "heads", "norm", "position", "feedforward", "embed"):
        assert getattr(run.model, field) == getattr(published, field)
    assert (run.model.layers, run.model.dropout, run.model.vocab_size) == (1, 0.2, None)
    plain = read_recipe(recipe, settings)
    assert (run.train, run.data, run.objective) == (plain.train, plain.data, plain.objective)


def test_gpt3_xl_as_printed_is_possible() -> None:
    model = weightless("gpt3-xl", heads=24, head_dim=128)
    assert size(model) == pytest.approx(1.52e9, rel=0.01)
    with pytest.raises(UserError, match="head_dim"):
        weightless("gpt3-xl", heads=24)
