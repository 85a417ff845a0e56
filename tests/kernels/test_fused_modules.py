"""Fused attention computes what the plain one does: as near to float64 in bfloat16; it falls back.

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
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import CrossAttention, Dense, SelfAttention
from manyheads.nn.masks import Window, causal, full, make_mask
from manyheads.nn.positions import Position, PositionSizes, Rotary
from manyheads.nn.scores import Bilinear
from manyheads.optimize.fused import FUSED

pytestmark = pytest.mark.usefixtures("on_cpu")
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


def test_models_keep_parameters_and_classes(calls: list[str]) -> None:
    config = Seq2SeqConfig(
        vocab_size=20, dim=32, heads=2, layers=2, ffn_dim=64, max_length=16, dropout=0.0
    )
    plain: Any = config.build().train()
    fused = fused_copy(plain)
    assert [*fused.state_dict()] == [*plain.state_dict()]
    assert all(
        isinstance(a, type(b)) for a, b in zip(fused.modules(), plain.modules(), strict=True)
    )
    assert {type(part) for part in fused.modules()} >= {*FUSED.values()}
    with torch.autocast("cpu", torch.bfloat16):
        fused(*torch.randint(3, 20, (2, 2, 12)))
    assert calls == ["short_attention"] * 6
