# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The feed-forward sub-layer: its backward pass in few kernels, and GELU by tanh.

    h = x W₁ᵀ + b₁,  a = act(h),  y = a W₂ᵀ + b₂
    dh = dy W₂ ∘ act′(h),   db₁ = Σ dh,   dW₂ = dyᵀ a,   dW₁ = dhᵀ x,   dx = dh W₁

h is four times as wide as the model, and a plain training step moves it many times. Here ReLU is
the epilogue of the product before it, and its backward needs only a. For GELU only h is saved, and
one kernel reads it once for dh, Σ dh and a.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.common import device_guard, sum_rows
from manyheads.kernels.selftest import FUSED_ACTIVATIONS, Comparison, Inputs, compare

ROWS, COLUMNS, WARPS = 16, 128, 4  # block of a program: 16 elements per thread
ROWS_PER_PROGRAM = 256
ACTIVATION_BLOCK = 2048  # elements of a program of `_activate`


@triton.jit
def _activation_and_grad(h, KIND: tl.constexpr):
    """(act(h), act′(h)); for ReLU, whose h is not saved, of a."""
    if KIND == "relu":
        return h, tl.where(h > 0, 1.0, 0.0)
    if KIND == "gelu":
        cdf = 0.5 + 0.5 * tl.erf(h * 0.7071067811865476)
        return h * cdf, cdf + h * 0.3989422804014327 * tl.exp(-0.5 * h * h)
    # ½ (1 + tanh u) = 1 / (1 + e^(−2u))
    squared = h * h
    cdf = tl.sigmoid(1.5957691216057308 * h * (1.0 + 0.044715 * squared))
    inner = 1.5957691216057308 * (1.0 + 0.134145 * squared)
    return h * cdf, cdf + h * cdf * (1.0 - cdf) * inner


@triton.jit(do_not_specialize=["n"])
def _backward(
    DA, SAVED, DH, A, SUMS, n, width,
    KIND: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * C + tl.arange(0, C)
    in_row, total = columns < width, tl.zeros([M, C], tl.float32)
    first = tl.program_id(1) * ROWS_PER_PROGRAM
    for start in range(0, ROWS_PER_PROGRAM, M):
        rows = first + start + tl.arange(0, M)
        offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
        mask = (rows < n)[:, None] & in_row[None, :]
        h = tl.load(SAVED + offsets, mask=mask, other=0.0).to(tl.float32)
        a, grad = _activation_and_grad(h, KIND)
        dh = tl.load(DA + offsets, mask=mask, other=0.0).to(tl.float32) * grad
        tl.store(DH + offsets, dh.to(DH.dtype.element_ty), mask=mask)
        if KIND != "relu":
            tl.store(A + offsets, a.to(A.dtype.element_ty), mask=mask)
        total += dh
    sums = SUMS + tl.program_id(1) * width + columns
    tl.store(sums, tl.sum(total, 0), mask=in_row)


@triton.jit
def _activate(H, A, n, KIND: tl.constexpr, C: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    a, _ = _activation_and_grad(tl.load(H + at, mask=at < n, other=0.0).to(tl.float32), KIND)
    tl.store(A + at, a.to(A.dtype.element_ty), mask=at < n)


def _gelu(h: Tensor, kind: str) -> Tensor:
    """GELU. PyTorch's own is as fast for the exact form and slower for tanh."""
    if kind == "gelu":
        return F.gelu(h)
    a, n = torch.empty_like(h), h.numel()
    with device_guard(h):
        _activate[(triton.cdiv(n, ACTIVATION_BLOCK),)](h, a, n, KIND=kind, C=ACTIVATION_BLOCK)
    return a


@torch.library.custom_op("manyheads::fused_mlp", mutates_args=())
def fused_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, kind: str) -> list[Tensor]:
    """y, and what the backward pass needs: a for ReLU, h otherwise; all of one dtype."""
    flat = x.reshape(-1, x.shape[-1])
    if kind == "relu":
        saved = a = torch._addmm_activation(b1, flat, w1.T)
    else:
        saved = torch.addmm(b1, flat, w1.T)
        a = _gelu(saved, kind)
    return [torch.addmm(b2, a, w2.T).view(*x.shape[:-1], len(w2)), saved]


@torch.library.custom_op("manyheads::fused_mlp_backward", mutates_args=())
def fused_mlp_backward(da: Tensor, saved: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """dh [n f], a [n f] (empty for ReLU: it was saved) and Σ dh [f]."""
    da, (n, width) = da.contiguous(), saved.shape
    dh, a = torch.empty_like(da), saved.new_empty(0) if kind == "relu" else torch.empty_like(saved)
    grid = (triton.cdiv(width, COLUMNS), triton.cdiv(n, ROWS_PER_PROGRAM))
    sums = torch.empty(grid[1], width, device=da.device, dtype=torch.float32)
    with device_guard(da):
        _backward[grid](
            da, saved, dh, a, sums, n, width, KIND=kind,
            ROWS_PER_PROGRAM=ROWS_PER_PROGRAM, M=ROWS, C=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return dh, a, sum_rows(sums).to(da.dtype)


@fused_mlp.register_fake
def _(x, w1, b1, w2, b2, kind):
    rows = x.numel() // x.shape[-1]
    return [x.new_empty(*x.shape[:-1], w2.shape[0]), x.new_empty(rows, w1.shape[0])]


@fused_mlp_backward.register_fake
def _(da, saved, kind):
    a = saved.new_empty(0) if kind == "relu" else torch.empty_like(saved)
    return da.new_empty(da.shape), a, da.new_empty(da.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w1, _, w2, _, ctx.kind = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w2, output[1])


def _autograd_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    x, w1, w2, saved = ctx.saved_tensors
    assert grads[0] is not None
    needs_x, needs_w1, _, needs_w2, needs_b2, _ = ctx.needs_input_grad
    dy = grads[0].reshape(-1, len(w2))
    dh, a, db1 = fused_mlp_backward(dy @ w2, saved, ctx.kind)
    a = saved if ctx.kind == "relu" else a
    return (
        (dh @ w1).view(x.shape) if needs_x else None,
        dh.T @ x.reshape(-1, x.shape[-1]) if needs_w1 else None,
        db1,
        dy.T @ a if needs_w2 else None,
        dy.sum(0) if needs_b2 else None,
        None,
    )


fused_mlp.register_autograd(_autograd_backward, setup_context=_setup_context)


def case(new: Inputs, kind: str, *shape: int) -> Iterator[Comparison]:
    """One activation; 72 hidden channels."""

    def formula(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(FUSED_ACTIVATIONS[kind](F.linear(x, w1, b1)), w2, b2)

    shapes = shape, (72, shape[-1]), (72,), (16, 72), (16,)
    yield from compare(lambda *x: fused_mlp(*x, kind)[0], formula, new.randn(*shapes))


SELFTEST = [(kind, 40, 16) for kind in FUSED_ACTIVATIONS]
