# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of our own for the norms of residual parts.

`add_norm`, for a norm after the sum: what a part gives is dropped, added to the stream and normed
in one pass.

    h = x + m ∘ f / (1 − p),    y = γ ĥ + β,  ĥ = (h − μ) / √(σ² + ε)
    dh = (γ dy − mean(γ dy) − ĥ mean(γ dy ∘ ĥ)) / √(σ² + ε),    dx = dh,  df = m ∘ dh / (1 − p)

`fork`, for a norm before a part: the stream goes on, and its norm into the part; forward as PyTorch
has it. What comes back from both is added at once.

    y = γ ĥ + β,  s = h,    dh = ds + (γ dy − mean(γ dy) − ĥ mean(γ dy ∘ ĥ)) / √(σ² + ε)

Only h is kept for the backward pass: mean and deviation of a row are there as soon as the row is,
and the mask m is drawn again from its seed (kernels/philox.py). The gradients of γ and β
are summed by each program over its rows on the way.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.dispatch import device_guard
from manyheads.kernels.philox import dropout_scale
from manyheads.kernels.reduce import sum_rows

NUMBERS = 16  # that a thread holds at once
FEWEST = 1024  # that a program holds
WARPS = 16  # of a backward pass for each multiprocessor


@triton.jit
def _forward(
    X, PART, W, B, SEED, Y, H, n, width, eps, share,
    DROPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    at = rows[:, None].to(tl.int64) * width + columns[None, :]
    real = columns < width
    there = (rows < n)[:, None] & real[None, :]
    f = tl.load(PART + at, mask=there, other=0.0).to(tl.float32)
    if DROPS:
        f = f * dropout_scale(SEED, rows, share, D)
    h = (tl.load(X + at, mask=there, other=0.0).to(tl.float32) + f).to(H.dtype.element_ty)
    tl.store(H + at, h, mask=there)
    normed, _ = _normed(h.to(tl.float32), width, eps, real)  # as the backward pass reads it
    w = tl.load(W + columns, mask=real, other=0.0)
    b = tl.load(B + columns, mask=real, other=0.0)
    tl.store(Y + at, (normed * w[None, :] + b[None, :]).to(Y.dtype.element_ty), mask=there)


@triton.jit
def _normed(h, width, eps, real):
    """Rows with mean 0 and variance 1, and one over their deviation."""
    centred = tl.where(real[None, :], h - (tl.sum(h, 1) / width)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    return centred * inverse[:, None], inverse


@triton.jit
def _backward(
    DY, DS, H, W, SEED, DX, DF, SUMS, n, width, eps, share, steps,
    ADDS: tl.constexpr, DROPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, D)
    real = columns < width
    w = tl.load(W + columns, mask=real, other=0.0)
    dw, db = tl.zeros([M, D], tl.float32), tl.zeros([M, D], tl.float32)
    for step in range(steps):
        rows = (step * tl.num_programs(0) + tl.program_id(0)) * M + tl.arange(0, M)
        at = rows[:, None].to(tl.int64) * width + columns[None, :]
        there = (rows < n)[:, None] & real[None, :]
        dy = tl.load(DY + at, mask=there, other=0.0).to(tl.float32)
        h = tl.load(H + at, mask=there, other=0.0).to(tl.float32)
        if ADDS:
            ds = tl.load(DS + at, mask=there, other=0.0).to(tl.float32)
        normed, inverse = _normed(h, width, eps, real)
        dw += dy * normed
        db += dy
        dn = dy * w[None, :]
        level = tl.sum(dn, 1) / width
        along = tl.sum(dn * normed, 1) / width
        dh = (dn - level[:, None] - normed * along[:, None]) * inverse[:, None]
        if ADDS:
            dh += ds
        tl.store(DX + at, dh.to(DX.dtype.element_ty), mask=there)
        if DROPS:
            df = dh * dropout_scale(SEED, rows, share, D)
            tl.store(DF + at, df.to(DF.dtype.element_ty), mask=there)
    sums = SUMS + tl.program_id(0) * 2 * width
    tl.store(sums + columns, tl.sum(dw, 0), mask=real)
    tl.store(sums + width + columns, tl.sum(db, 0), mask=real)


def _blocks(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    numbers = max(FEWEST, padded)
    return {"M": numbers // padded, "D": padded, "num_warps": numbers // (32 * NUMBERS)}


@torch.library.custom_op("manyheads::add_norm", mutates_args=())
def add_norm(
    x: Tensor, f: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + dropout(f)), x + dropout(f)); x and f [… d] of one type, weight and bias [d]."""
    x, f = x.contiguous(), f.contiguous()
    y, h, width = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    n, blocks = x.numel() // width, _blocks(width)
    with device_guard(x):
        _forward[(triton.cdiv(n, blocks["M"]),)](
            x, f, weight, bias, x if seed is None else seed, y, h, n, width, eps, p,
            DROPS=seed is not None, **blocks,
        )  # fmt: skip
    return y, h


@torch.library.custom_op("manyheads::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    dy: Tensor, ds: Tensor | None, h: Tensor, weight: Tensor, seed: Tensor | None, p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, of f (empty where nothing is dropped: the same), of weight and bias."""
    dy, h, width = dy.contiguous(), h.contiguous(), h.shape[-1]
    adds, ds = ds is not None, dy if ds is None else ds.contiguous()
    n, blocks = h.numel() // width, _blocks(width)
    wanted = triton.cdiv(n, blocks["M"])
    programs = min(wanted, max(1, WARPS // blocks["num_warps"]) * _processors(h))
    dx, df = torch.empty_like(h), torch.empty_like(h) if seed is not None else h.new_empty(0)
    sums = torch.empty(programs, 2, width, device=h.device, dtype=torch.float32)
    with device_guard(h):
        _backward[(programs,)](
            dy, ds, h, weight, h if seed is None else seed, dx, df, sums, n, width, eps, p,
            triton.cdiv(wanted, programs), ADDS=adds, DROPS=seed is not None, **blocks,
        )  # fmt: skip
    return dx, df, sum_rows(sums.view(programs, -1)).view(2, width)


def _like(x: Tensor) -> Tensor:
    """What comes out lies row by row, whatever goes in."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


@add_norm.register_fake
def _(x, f, weight, bias, seed, p, eps):
    return _like(x), _like(x)


@layer_norm_backward.register_fake
def _(dy, ds, h, weight, seed, p, eps):
    df = _like(h) if seed is not None else h.new_empty(0)
    return _like(h), df, weight.new_empty(2, h.shape[-1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, _, seed, ctx.p, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, seed)


def _slopes(ctx: Any, dy: Tensor, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dh is None  # the sum is there to be kept, not to be used
    h, weight, seed = ctx.saved_tensors
    dx, df, sums = layer_norm_backward(dy, None, h, weight, seed, ctx.p, ctx.eps)
    dw, db = sums.to(weight.dtype)
    return dx, dx if seed is None else df, dw, db, None, None, None


add_norm.register_autograd(_slopes, setup_context=_keep)


class _Fork(torch.autograd.Function):
    """Forward in PyTorch's words, so that a compiler joins it with the sum before."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Any:
        normed = F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps)
        return normed.to(dtype), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.eps, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if dy is None:
            return ds, None, None, None, None
        dx, _, sums = layer_norm_backward(dy, ds, x, weight, None, 0.0, ctx.eps)
        dw, db = sums.to(weight.dtype)
        return dx, dw, db, None, None


def prenorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(norm(x) in that type, x). Of its gradients there are no further ones."""
    found: tuple[Tensor, Tensor] = _Fork.apply(x, weight, bias, eps, dtype)  # type: ignore[no-untyped-call]
    return found


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel gives for a few numbers, and what is right."""
    given = torch.Generator(device).manual_seed(1)
    x, f, direction = (
        torch.randn(37, 48, generator=given, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    weight, bias = torch.randn(2, 48, generator=given, device=device).unbind()
    pairs = []
    for seed, p in ((None, 0.0), (torch.ones(1, dtype=torch.int64, device=device), 0.25)):
        rough = [one.clone().requires_grad_() for one in (x, f, weight, bias)]
        y, h = add_norm(*rough, seed, p, 1e-5)
        slopes = torch.autograd.grad(y, rough, direction)
        exact = [one.double().requires_grad_() for one in (x, f, weight, bias)]
        kept = (slopes[1] != 0).double() / (1 - p)
        summed = exact[0] + kept * exact[1]
        wanted = F.layer_norm(summed, (48,), exact[2], exact[3])
        expected = torch.autograd.grad(wanted, exact, direction.double())
        share = torch.stack([(kept > 0).double().mean(), kept.new_tensor(1 - p)])
        pairs += [(y, wanted), (h, summed), *zip(slopes, expected, strict=True)]
        if not (share[0] - share[1]).abs() < 0.05:
            raise ValueError(f"{1 - share[0]:.2f} is dropped instead of {p}")
    rough = [one.clone().requires_grad_() for one in (x, weight, bias)]
    exact = [one.double().requires_grad_() for one in (x, weight, bias)]
    y, stream = prenorm(rough[0], rough[1], rough[2], 1e-5, x.dtype)
    wanted = F.layer_norm(exact[0], (48,), exact[1], exact[2])
    slopes = torch.autograd.grad((y, stream), rough, (direction, f))
    expected = torch.autograd.grad((wanted, exact[0]), exact, (direction.double(), f.double()))
    return [*pairs, (y, wanted), *zip(slopes, expected, strict=True)]
