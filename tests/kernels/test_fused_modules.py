"""Fused modules compute what the plain ones do: as near to float64 in bfloat16, and they fall back.

The same as on a GPU, with autocast, but on CPU tensors.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads import optimize
from manyheads.kernels.selftest import relative_error
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import CrossAttention, Dense, SelfAttention
from manyheads.nn.layers import FeedForward, GatedFeedForward, Norm, Plain, Residual
from manyheads.nn.masks import Window, causal, full, make_mask
from manyheads.nn.positions import Position, PositionSizes, Rotary
from manyheads.nn.scores import Bilinear
from manyheads.optimize.fused import FUSED, FusedLayerNorm, FusedResidual

pytestmark = [
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's sigmoid
]
PADDING = torch.arange(12) < torch.tensor([[12], [5]])


def fused_copy(module: nn.Module) -> Any:
    fused: Any = copy.deepcopy(module)
    optimize.optimize(fused)
    return fused


def dense_copy(module: nn.Module) -> Any:
    """Without the kernels that `ops.attention` would choose."""
    dense: Any = copy.deepcopy(module)
    for part in dense.modules():
        if isinstance(part, SelfAttention | CrossAttention):
            part.core = Dense()
    return dense


def compare(plain: nn.Module, run: Callable[[Any, Tensor], Tensor], x: Tensor) -> None:
    """Outputs and gradients of the fused copy in bfloat16, as near to float64 as PyTorch's."""
    fused, dense = fused_copy(plain), dense_copy(plain)

    def results(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        inputs = x.to(dtype).requires_grad_()
        half = dtype != torch.float64
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = run(module, inputs)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
        return [out, *torch.autograd.grad(out, [inputs, *module.parameters()], grad)]

    ours, theirs = results(fused, torch.float32), results(dense, torch.float32)
    exact = results(dense.double(), torch.float64)
    for result, other, reference in zip(ours, theirs, exact, strict=True):
        limit = max(1.25 * relative_error(other, reference), 0.02)
        assert relative_error(result, reference) < limit


def attention_config(**settings: Any) -> Any:
    return Seq2SeqConfig(vocab_size=9, **{"dim": 32, "heads": 2, **settings}).attention_config()


ROTARY = Rotary().build(PositionSizes(dim=32, heads=2, head_dim=16, max_length=64, causal=True))
SELF: list[tuple[dict[str, Any], Position, Any, int, bool]] = [
    ({}, Position(), causal, 12, True),
    ({"qkv_bias": False}, Position(), full, 12, True),
    ({}, Position(), Window(3), 12, False),
    ({}, Position(), causal, 130, False),
    ({"kv_heads": 1}, Position(), causal, 12, False),
    ({"score": Bilinear()}, Position(), causal, 12, False),
    ({}, ROTARY, causal, 12, False),
]


@pytest.mark.parametrize(("settings", "position", "rule", "length", "fuses"), SELF)
def test_self_attention(
    settings: Any, position: Position, rule: Any, length: int, fuses: bool, calls: list[str]
) -> None:
    plain = SelfAttention(attention_config(**settings), causal=True).train()
    padding_mask = PADDING if length == 12 else None

    def run(module: nn.Module, x: Tensor) -> Tensor:
        mask = make_mask(rule, length, padding_mask=padding_mask)
        out: Tensor = module(x, mask, position)
        return out

    compare(plain, run, torch.randn(2, length, 32))
    assert calls == ["short_attention"] * fuses


@pytest.mark.parametrize("queries", [12, 7])
def test_cross_attention(queries: int, calls: list[str]) -> None:
    plain = CrossAttention(attention_config(), 32).train()
    memory = torch.randn(2, 12, 32)

    def run(module: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = module(x, memory.to(x.dtype), make_mask(full, 12, padding_mask=PADDING))
        return out

    compare(plain, run, torch.randn(2, queries, 32))
    assert calls == ["short_attention"]


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu-tanh", "silu"])
def test_feed_forward(activation: str, calls: list[str]) -> None:
    plain = FeedForward(16, 48, activation, bias=True, dropout=0.0).train()
    compare(plain, lambda module, x: module(x), torch.randn(2, 5, 16))
    assert ("fused_mlp" in calls) == (activation != "silu")


def test_feed_forward_falls_back(calls: list[str]) -> None:
    x = torch.randn(2, 5, 16)
    hooked = fused_copy(FeedForward(16, 48, "relu", bias=True, dropout=0.0))
    hooked.inner.register_forward_hook(lambda *args: None)
    others = [
        fused_copy(FeedForward(16, 48, "relu", bias=False, dropout=0.0)),
        fused_copy(FeedForward(16, 48, "relu", bias=True, dropout=0.1)),
        fused_copy(FeedForward(16, 48, "relu", bias=True, dropout=0.0)).eval(),
        fused_copy(GatedFeedForward(16, 48, "relu", bias=True, dropout=0.0)),
        hooked,
    ]
    with torch.autocast("cpu", torch.bfloat16):
        for module in others:
            module(x)
    fused_copy(FeedForward(16, 48, "relu", bias=True, dropout=0.0))(x)  # without autocast
    assert not calls


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("form", ["layer", "rms"])
def test_residual(placement: Any, form: Any, calls: list[str]) -> None:
    plain = Residual(32, Norm(placement=placement, form=form), 0.0).train()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    sublayer = nn.Linear(32, 32)

    def run(module: nn.Module, x: Tensor) -> Tensor:
        weight = sublayer.weight.detach().to(x.dtype)
        out: Tensor = module(x, lambda y: nn.functional.linear(y, weight.to(y.dtype)))
        return out

    compare(plain, run, torch.randn(2, 5, 32))
    kernel = "prenorm" if placement == "pre" else "add_norm"
    assert calls == ([kernel] if form == "layer" else [])


def test_residual_dropout_is_the_same_in_both_passes() -> None:
    fused = fused_copy(Residual(64, Norm(placement="post"), 0.25).train())
    f = torch.randn(2, 25, 64).bfloat16().requires_grad_()
    masks = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = fused(torch.zeros(2, 25, 64), lambda x: f)
        [grad] = torch.autograd.grad(out, f, torch.randn_like(out))
        mask = grad != 0
        expected = nn.functional.layer_norm(f.double() * mask / 0.75, (64,))
        assert (out.double() - expected).norm() < 0.01 * expected.norm()
        assert abs(float(mask.double().mean()) - 0.75) < 0.04
        masks.append(mask)
    assert not torch.equal(*masks)
    fused.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = fused(torch.zeros(2, 25, 64), lambda x: f)
    expected = nn.functional.layer_norm(f.double(), (64,))
    assert (out.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_models(placement: Any, calls: list[str]) -> None:
    config = GptConfig(
        vocab_size=20, dim=32, heads=2, layers=2, ffn_dim=64, max_length=16, dropout=0.0,
        norm=Norm(placement=placement), feedforward=Plain(activation="gelu"),
    )  # fmt: skip
    plain: Any = config.build().train()
    fused = fused_copy(plain)
    assert [*fused.state_dict()] == [*plain.state_dict()]
    assert all(
        isinstance(a, type(b)) for a, b in zip(fused.modules(), plain.modules(), strict=True)
    )
    assert {type(part) for part in fused.modules()} >= {*FUSED.values()} - {FUSED[CrossAttention]}
    assert isinstance(fused.decoder.last_norm, FusedLayerNorm) == (placement == "pre")
    assert type(fused.decoder.blocks[0].attention_residual) is FusedResidual

    def run(stack: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = stack(x, make_mask(causal, 12, padding_mask=PADDING))
        return out

    compare(plain.decoder, run, torch.randn(2, 12, 32))
    norms = {"pre": ["prenorm"] * 5, "post": ["add_norm"] * 4}[placement]
    assert sorted(calls) == sorted([*norms, *["short_attention", "fused_mlp"] * 2])
