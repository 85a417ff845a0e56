# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of our own for the feed-forward part: its backward pass, and gelu by tanh.

    h = x W₁ᵀ + b₁,  a = act(h),  y = a W₂ᵀ + b₂
    dh = dy W₂ ∘ act′(h),   db₁ = Σ dh,   dW₂ = dyᵀ a,   dW₁ = dhᵀ x,   dx = dh W₁

What is inside is four times as wide as the model, and a step moves it many times. Here relu is done
by the product that it follows, and a tells where it was; of gelu only h is kept, and one kernel
reads it once to give dh, Σ dh and a again.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.dispatch import device_guard
from manyheads.kernels.reduce import sum_rows

ROWS, COLUMNS, WARPS = 16, 128, 4  # that a program holds at once: 16 numbers a thread
EACH = 256  # rows of a program
AT_ONCE = 2048  # numbers that a program of `_activate` holds
KINDS = ("relu", "gelu", "gelu-tanh")


@triton.jit
def activation_and_grad(h, KIND: tl.constexpr):
    """(act(h), act′(h)); of relu, whose h is not kept, for a."""
    if KIND == 0:
        return h, tl.where(h > 0, 1.0, 0.0)
    if KIND == 1:
        below = 0.5 + 0.5 * tl.erf(h * 0.7071067811865476)
        return h * below, below + h * 0.3989422804014327 * tl.exp(-0.5 * h * h)
    # ½ (1 + tanh u) = 1 / (1 + e^(−2u))
    squared = h * h
    below = tl.sigmoid(1.5957691216057308 * h * (1.0 + 0.044715 * squared))
    inner = 1.5957691216057308 * (1.0 + 0.134145 * squared)
    return h * below, below + h * below * (1.0 - below) * inner


@triton.jit(do_not_specialize=["n"])
def _backward(
    DA, KEPT, DH, A, SUMS, n, width,
    KIND: tl.constexpr, EACH: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * C + tl.arange(0, C)
    real, total = columns < width, tl.zeros([M, C], tl.float32)
    first = tl.program_id(1) * EACH
    for start in range(0, EACH, M):
        rows = first + start + tl.arange(0, M)
        at = rows[:, None].to(tl.int64) * width + columns[None, :]
        there = (rows < n)[:, None] & real[None, :]
        h = tl.load(KEPT + at, mask=there, other=0.0).to(tl.float32)
        a, slope = activation_and_grad(h, KIND)
        dh = tl.load(DA + at, mask=there, other=0.0).to(tl.float32) * slope
        tl.store(DH + at, dh.to(DH.dtype.element_ty), mask=there)
        if KIND != 0:
            tl.store(A + at, a.to(A.dtype.element_ty), mask=there)
        total += dh
    sums = SUMS + tl.program_id(1) * width + columns
    tl.store(sums, tl.sum(total, 0), mask=real)


@triton.jit
def _activate(H, A, n, KIND: tl.constexpr, C: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    a, _ = activation_and_grad(tl.load(H + at, mask=at < n, other=0.0).to(tl.float32), KIND)
    tl.store(A + at, a.to(A.dtype.element_ty), mask=at < n)


def _activated(h: Tensor, kind: str) -> Tensor:
    """gelu(h). PyTorch's own is as fast for the exact form, and slower for tanh."""
    if kind == "gelu":
        return F.gelu(h)
    a, n = torch.empty_like(h), h.numel()
    with device_guard(h):
        _activate[(triton.cdiv(n, AT_ONCE),)](h, a, n, KIND=KINDS.index(kind), C=AT_ONCE)
    return a


def _approximate(kind: str) -> str:
    return "tanh" if kind == "gelu-tanh" else "none"


@torch.library.custom_op("manyheads::fused_mlp", mutates_args=())
def fused_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, kind: str) -> list[Tensor]:
    """y, and what of the inside is kept: a of relu, h of the others; all of one type."""
    flat = x.reshape(-1, x.shape[-1])
    if kind == "relu":
        kept = inside = torch._addmm_activation(b1, flat, w1.T)
    else:
        kept = torch.addmm(b1, flat, w1.T)
        inside = _activated(kept, kind)
    return [torch.addmm(b2, inside, w2.T).view(*x.shape[:-1], len(w2)), kept]


@torch.library.custom_op("manyheads::fused_mlp_backward", mutates_args=())
def fused_mlp_backward(da: Tensor, kept: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """dh, a (empty for relu: it is what was kept) and Σ dh; all [n hidden]."""
    da, (n, width) = da.contiguous(), kept.shape
    dh, a = torch.empty_like(da), kept.new_empty(0) if kind == "relu" else torch.empty_like(kept)
    grid = (triton.cdiv(width, COLUMNS), triton.cdiv(n, EACH))
    sums = torch.empty(grid[1], width, device=da.device, dtype=torch.float32)
    with device_guard(da):
        _backward[grid](
            da, kept, dh, a, sums, n, width,
            KIND=KINDS.index(kind), EACH=EACH, M=ROWS, C=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return dh, a, sum_rows(sums).to(da.dtype)


@fused_mlp.register_fake
def _(x, w1, b1, w2, b2, kind):
    rows = x.numel() // x.shape[-1]
    return [x.new_empty(*x.shape[:-1], w2.shape[0]), x.new_empty(rows, w1.shape[0])]


@fused_mlp_backward.register_fake
def _(da, kept, kind):
    a = kept.new_empty(0) if kind == "relu" else torch.empty_like(kept)
    return da.new_empty(da.shape), a, da.new_empty(da.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w1, _, w2, _, ctx.kind = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w2, output[1])


def _slopes(ctx: Any, given: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    x, w1, w2, kept = ctx.saved_tensors
    assert given[0] is not None
    wants_x, wants_w1, _, wants_w2, wants_b2, _ = ctx.needs_input_grad
    dy = given[0].reshape(-1, len(w2))
    dh, a, db1 = fused_mlp_backward(dy @ w2, kept, ctx.kind)
    a = kept if ctx.kind == "relu" else a
    return (
        (dh @ w1).view(x.shape) if wants_x else None,
        dh.T @ x.reshape(-1, x.shape[-1]) if wants_w1 else None,
        db1,
        dy.T @ a if wants_w2 else None,
        dy.sum(0) if wants_b2 else None,
        None,
    )


fused_mlp.register_autograd(_slopes, setup_context=_keep)


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel gives for a few numbers, and what is right."""
    given = torch.Generator(device).manual_seed(1)
    sizes = ((40, 16), (72, 16), (72,), (16, 72), (16,), (40, 16))
    *inputs, direction = (
        torch.randn(size, generator=given, device=device, dtype=torch.bfloat16) for size in sizes
    )
    pairs = []
    for kind in KINDS:
        rough = [one.clone().requires_grad_() for one in inputs]
        found = fused_mlp(*rough, kind)[0]
        slopes = torch.autograd.grad(found, rough, direction)
        x, w1, b1, w2, b2 = exact = [one.double().requires_grad_() for one in inputs]
        h = F.linear(x, w1, b1)
        a = F.relu(h) if kind == "relu" else F.gelu(h, approximate=_approximate(kind))
        wanted = F.linear(a, w2, b2)
        expected = torch.autograd.grad(wanted, exact, direction.double())
        pairs += [(found, wanted), *zip(slopes, expected, strict=True)]
    return pairs
