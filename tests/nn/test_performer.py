"""Performer: unbiased, its error falls as 1/√features, precise for keys of different length.

tests/nn/test_attention.py compares it with dense attention that has its kernel as score.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.config import parse
from manyheads.models.bert import BertConfig
from manyheads.nn import performer
from manyheads.nn.attend import AttentionFunctionConfig, attend
from manyheads.nn.attention import AttentionInputs, AttentionSizes
from manyheads.nn.linformer import Linformer
from manyheads.nn.masks import Rule, causal, full, make_mask
from manyheads.nn.performer import Performer, PerformerAttention, draw_projection, exponents
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore

SIZES = AttentionSizes(heads=4, kv_heads=2, head_dim=4, key_dim=4, max_length=64, causal=True)
rules = pytest.mark.parametrize("rule", [causal, full], ids=str)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer, "CHUNK", 4)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def build(settings: Performer | None = None) -> PerformerAttention:
    return (settings or Performer(features=16)).build(SIZES).double()


def draw(length: int = 11) -> list[Tensor]:
    return [normal(2, heads, length, 4) for heads in (4, 2, 2)]


def call(
    function: PerformerAttention,
    tensors: Any,
    rule: Rule = causal,
    real: Tensor | None = None,
    scale: float = 0.5,
) -> Tensor:
    q, k, v = tensors
    start = k.shape[2] - q.shape[2]
    mask = make_mask(rule, q.shape[2], start=start, padding_mask=real)
    return function(AttentionInputs(q, k, v, mask, InnerScore(scale), Position()))


def estimates(features: int, draws: int, q: Tensor, k: Tensor) -> Tensor:
    """φ(q)ᵀ φ(k) of each pair, draw by draw: [draws, pairs]."""
    samples = []
    for _ in range(draws):
        projection = draw_projection(features, q.shape[-1]).double()
        samples.append((exponents(q, projection) + exponents(k, projection)).exp().mean(-1))
    return torch.stack(samples)


def test_the_kernel_is_unbiased() -> None:
    """Over many draws φ(q)ᵀ φ(k) averages to exp(q · k), of whichever sign that product is."""
    q = torch.tensor([[0.9, 0.0, 0.0], [0.9, 0.0, 0.0], [0.3, 0.5, -0.7]], dtype=torch.float64)
    k = torch.tensor([[0.8, 0.2, 0.0], [-0.8, 0.2, 0.0], [0.6, 0.3, -0.4]], dtype=torch.float64)
    samples = estimates(5, 4000, q, k)
    error = (samples.mean(0) - (q * k).sum(-1).exp()).abs()
    assert (error < 4 * samples.std(0) / math.sqrt(len(samples))).all()


def test_each_feature_is_gaussian() -> None:
    """ω ~ N(0, I): mean 0 and variance 1 in every channel; orthogonal inside a block."""
    drawn = torch.stack([draw_projection(5, 3) for _ in range(3000)])
    assert (drawn.mean(0).abs() < 4 / math.sqrt(3000)).all()
    assert ((drawn.square().mean(0) - 1).abs() < 4 * math.sqrt(2 / 3000)).all()
    assert ((drawn[:, 0] * drawn[:, 1]).sum(-1).abs() < 1e-5).all()
    assert not ((drawn[:, 0] * drawn[:, 3]).sum(-1).abs() < 1e-5).any()  # another block


def test_the_error_falls_with_the_root_of_the_features() -> None:
    """The slope of log error against log features is −½.

    Of short vectors, as the tails of longer ones are too heavy for so few draws.
    """
    q, k = (torch.nn.functional.normalize(normal(16, 8), dim=-1) / 2 for _ in range(2))
    exact, errors = (q * k).sum(-1).exp(), {}
    for features, draws in ((8, 2000), (32, 500), (128, 500), (512, 500)):
        error = estimates(features, draws, q, k) - exact
        errors[features] = float(error.square().mean().sqrt())
    x, y = (torch.tensor([*values]).log() for values in (errors, errors.values()))
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert abs(slope + 0.5) < 0.1


def test_many_features_come_near_dense() -> None:
    q, k, v = draw()
    q, k = q / 2, k / 2
    for rule, scale in ((causal, 0.5), (full, 0.5), (full, -0.5)):
        exact = attend(q, k, v, rule=rule, scale=scale)
        errors = [
            (call(build(Performer(features=count)), (q, k, v), rule, scale=scale) - exact).abs()
            for count in (20_000, 8)
        ]
        assert errors[0].max() < 0.1 < 0.2 < errors[1].max()


def uneven(change: int, early: float, late: float) -> list[Tensor]:
    """Rows in float32 whose keys are of another length from position `change` on."""
    q, k, v = (torch.randn(1, 2, 40, 64) for _ in range(3))
    lengths = torch.where(torch.arange(40) < change, early, late)
    return [q, k * lengths[:, None], v]


def by_logarithms(function: PerformerAttention, tensors: list[Tensor], scale: float) -> Tensor:
    """The causal formula from the logarithm of every pair's kernel, which cannot overflow."""
    q, k, v = tensors
    a, b = (exponents(x * math.sqrt(scale), function.projection) for x in (q, k))
    kernel = (a.unsqueeze(3) + b.unsqueeze(2)).logsumexp(-1)
    later = torch.ones(kernel.shape[-2:], dtype=torch.bool).triu(1)
    return kernel.masked_fill(later, -torch.inf).softmax(-1) @ v


UNEVEN = pytest.mark.parametrize(
    ("early", "late"), [(4.0, 0.1), (4.0, 0.0), (0.1, 8.0), (4.0, 4.0)]
)
WIDE = replace(SIZES, heads=2, head_dim=64, key_dim=64)


@UNEVEN
@pytest.mark.parametrize("change", [16, 23, 1])
def test_precise_for_uneven_keys(change: int, early: float, late: float) -> None:
    """Exponents may differ by a hundred, between chunks and inside one: float32 is as float64."""
    function = Performer(features=32).build(WIDE)
    tensors = [x.requires_grad_() for x in uneven(change, early, late)]
    out = call(function, tensors, scale=1 / 8)
    assert not (out == 0).all(-1).any()
    part = call(function, [x[:, :, :change] for x in tensors], scale=1 / 8)
    torch.testing.assert_close(out[:, :, :change], part, rtol=0, atol=1e-5)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    double = [x.detach().double().requires_grad_() for x in tensors]
    exact = by_logarithms(function.double(), double, 1 / 8)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-4)
    for a, b in zip(grads, torch.autograd.grad(exact.square().sum(), double), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@UNEVEN
def test_uneven_keys_through_a_cache(early: float, late: float) -> None:
    """Chunks and single steps, and their weights, equal the full pass in float32 too."""
    function = Performer(features=32).build(WIDE)
    q, k, v = uneven(23, early, late)
    full_pass = call(function, (q, k, v), scale=1 / 8)
    start = 0
    for length in (18, 12, 1, 9):
        end = start + length
        step = q[:, :, start:end], k[:, :, :end], v[:, :, :end]
        out = call(function, step, scale=1 / 8)
        torch.testing.assert_close(out, full_pass[:, :, start:end], rtol=0, atol=1e-4)
        mask = make_mask(causal, length, start=start)
        inputs = AttentionInputs(*step, mask, InnerScore(1 / 8), Position())
        torch.testing.assert_close(function.weights(inputs) @ step[2], out, rtol=0, atol=1e-4)
        start = end


def test_uneven_keys_with_padding() -> None:
    """Padding before, between and behind them changes nothing, and gives no gradient."""
    function = Performer(features=32).build(WIDE)
    real = torch.ones(1, 40, dtype=torch.bool)
    real[:, :3], real[:, 20:25], real[:, 38:] = False, False, False
    tensors = [x.requires_grad_() for x in uneven(30, 4.0, 0.1)]
    out = call(function, tensors, real=real, scale=1 / 8)
    index = real[0].nonzero()[:, 0]
    without = call(function, [x[:, :, index] for x in tensors], scale=1 / 8)
    torch.testing.assert_close(out[:, :, index], without, rtol=0, atol=1e-4)
    for grad in torch.autograd.grad(out[:, :, index].sum(), tensors):
        assert grad.isfinite().all()
        assert not grad[:, :, ~real[0]].any()


@rules
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_large_vectors_stay_finite(rule: Rule, size: float) -> None:
    """Exponents of thousands give averages of values (or zeros) and finite gradients."""
    function = Performer(features=16).build(SIZES)
    tensors = [(size * x).float().requires_grad_() for x in draw()]
    out = call(function, tensors, rule)
    assert (out.abs().amax(2) <= tensors[2].abs().amax(2).repeat_interleave(2, 1) * 1.001).all()
    assert (out != 0).all() or (rule is causal and size > 1)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), tensors))


@rules
def test_half_precision_is_rounded_once(rule: Rule) -> None:
    """bfloat16 in and out, with autocast: the float64 result, with the rounding of the output."""
    function = Performer(features=16).build(SIZES)
    tensors = [x.bfloat16() for x in draw()]
    with torch.autocast("cpu", torch.bfloat16):
        out = call(function, tensors, rule)
    assert out.dtype == torch.bfloat16
    exact = call(function.double(), [x.double() for x in tensors], rule)
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-8, atol=1e-5)


def test_an_encoder_trains_in_half_precision() -> None:
    config = BertConfig(
        vocab_size=13, dim=16, layers=2, heads=4, max_length=9, attention=Performer(features=16)
    )
    model, tokens = config.build(), torch.randint(13, (4, 9))
    real = torch.arange(9) < torch.tensor([[9], [7], [4], [1]])
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, real)[real].float().logsumexp(-1).sum().backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    assert len(grads) > 10
    assert all(grad.isfinite().all() for grad in grads)


def test_settings_of_0_1_are_read() -> None:
    """Run folders of 0.1 name the removed settings with their defaults."""
    table = {"kind": "performer", "features": 64, "draw": "orthogonal", "chunk": 128}
    assert parse(AttentionFunctionConfig, table) == Performer(features=64)
    table = {"kind": "linformer", "rank": 64, "share": "all"}
    assert parse(AttentionFunctionConfig, table) == Linformer(rank=64)
