# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""LayerNorm of residual connections, fused with dropout and sum.

`add_norm`, for post-norm: dropout of the sub-layer's output, sum and norm in one pass.

    h = x + m ∘ f / (1 − p),    y = γ ĥ + β,  ĥ = (h − μ) / √(σ² + ε)
    dh = (γ dy − mean(γ dy) − ĥ mean(γ dy ∘ ĥ)) / √(σ² + ε),    dx = dh,  df = m ∘ dh / (1 − p)

`prenorm`, for pre-norm: returns the norm for the sub-layer and the residual stream s. The forward
is PyTorch's; one kernel adds the gradients of both.

    y = γ ĥ + β,  s = h,    dh = ds + (γ dy − mean(γ dy) − ĥ mean(γ dy ∘ ĥ)) / √(σ² + ε)

Only h is saved for the backward pass: it recomputes μ and σ from the row that it holds anyway, and
the mask m from its seed (kernels/common.py). Each program sums the gradients of γ and β over its
rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.common import device_guard, dropout_scale, empty_contiguous, sum_rows
from manyheads.kernels.selftest import EPS, Comparison, Inputs, check_dropped, compare

ELEMENTS_PER_THREAD = 16
MIN_ELEMENTS = 1024  # per program
WARPS_PER_PROCESSOR = 16  # in the backward pass


@triton.jit(do_not_specialize=["n"])
def _forward(
    X, UPDATE, W, B, SEED, Y, H, n, width, eps, p,
    DROPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
    in_row = columns < width
    mask = (rows < n)[:, None] & in_row[None, :]
    f = tl.load(UPDATE + offsets, mask=mask, other=0.0).to(tl.float32)
    if DROPS:
        f = f * dropout_scale(SEED, rows, p, D)
    h = (tl.load(X + offsets, mask=mask, other=0.0).to(tl.float32) + f).to(H.dtype.element_ty)
    tl.store(H + offsets, h, mask=mask)
    # The norm of the rounded sum, which the backward pass reads.
    normed, _ = _normed(h.to(tl.float32), width, eps, in_row)
    w = tl.load(W + columns, mask=in_row, other=0.0)
    b = tl.load(B + columns, mask=in_row, other=0.0)
    tl.store(Y + offsets, (normed * w[None, :] + b[None, :]).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _normed(h, width, eps, in_row):
    """Rows with mean 0 and variance 1, and 1 / √(σ² + ε)."""
    centred = tl.where(in_row[None, :], h - (tl.sum(h, 1) / width)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    return centred * inverse[:, None], inverse


@triton.jit(do_not_specialize=["n", "steps"])
def _backward(
    DY, DS, H, W, SEED, DX, DF, SUMS, n, width, eps, p, steps,
    ADDS: tl.constexpr, DROPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, D)
    in_row = columns < width
    w = tl.load(W + columns, mask=in_row, other=0.0)
    dw, db = tl.zeros([M, D], tl.float32), tl.zeros([M, D], tl.float32)
    for step in range(steps):
        rows = (step * tl.num_programs(0) + tl.program_id(0)) * M + tl.arange(0, M)
        offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
        mask = (rows < n)[:, None] & in_row[None, :]
        dy = tl.load(DY + offsets, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(H + offsets, mask=mask, other=0.0).to(tl.float32)
        if ADDS:
            ds = tl.load(DS + offsets, mask=mask, other=0.0).to(tl.float32)
        normed, inverse = _normed(h, width, eps, in_row)
        dw += dy * normed
        db += dy
        dn = dy * w[None, :]
        mean = tl.sum(dn, 1) / width
        projection = tl.sum(dn * normed, 1) / width
        dh = (dn - mean[:, None] - normed * projection[:, None]) * inverse[:, None]
        if ADDS:
            dh += ds
        tl.store(DX + offsets, dh.to(DX.dtype.element_ty), mask=mask)
        if DROPS:
            df = dh * dropout_scale(SEED, rows, p, D)
            tl.store(DF + offsets, df.to(DF.dtype.element_ty), mask=mask)
    sums = SUMS + tl.program_id(0) * 2 * width
    tl.store(sums + columns, tl.sum(dw, 0), mask=in_row)
    tl.store(sums + width + columns, tl.sum(db, 0), mask=in_row)


def _blocks(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    elements = max(MIN_ELEMENTS, padded)
    warps = elements // (32 * ELEMENTS_PER_THREAD)
    return {"M": elements // padded, "D": padded, "num_warps": warps}


@torch.library.custom_op("manyheads::add_norm", mutates_args=())
def add_norm(
    x: Tensor, f: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + dropout(f)), x + dropout(f)); x and f [… d] of one dtype, weight and bias [d]."""
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
    """The gradients of x, of f (empty without dropout: the same), of weight and bias [2 d]."""
    dy, h, width = dy.contiguous(), h.contiguous(), h.shape[-1]
    adds, ds = ds is not None, dy if ds is None else ds.contiguous()
    n, blocks = h.numel() // width, _blocks(width)
    row_blocks = triton.cdiv(n, blocks["M"])
    per_processor = max(1, WARPS_PER_PROCESSOR // blocks["num_warps"])
    programs = min(row_blocks, per_processor * _processors(h))
    dx, df = torch.empty_like(h), torch.empty_like(h) if seed is not None else h.new_empty(0)
    sums = torch.empty(programs, 2, width, device=h.device, dtype=torch.float32)
    with device_guard(h):
        _backward[(programs,)](
            dy, ds, h, weight, h if seed is None else seed, dx, df, sums, n, width, eps, p,
            triton.cdiv(row_blocks, programs), ADDS=adds, DROPS=seed is not None, **blocks,
        )  # fmt: skip
    return dx, df, sum_rows(sums.view(programs, -1)).view(2, width)


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


@add_norm.register_fake
def _(x, f, weight, bias, seed, p, eps):
    return empty_contiguous(x), empty_contiguous(x)


@layer_norm_backward.register_fake
def _(dy, ds, h, weight, seed, p, eps):
    df = empty_contiguous(h) if seed is not None else h.new_empty(0)
    return empty_contiguous(h), df, weight.new_empty(2, h.shape[-1], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, _, seed, ctx.p, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, seed)


def _autograd_backward(ctx: Any, dy: Tensor, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dh is None  # the sum is an output only to be saved
    h, weight, seed = ctx.saved_tensors
    dx, df, sums = layer_norm_backward(dy, None, h, weight, seed, ctx.p, ctx.eps)
    dw, db = sums.to(weight.dtype)
    return dx, dx if seed is None else df, dw, db, None, None, None


add_norm.register_autograd(_autograd_backward, setup_context=_setup_context)


class _Prenorm(torch.autograd.Function):
    """The forward is written in PyTorch, so that the compiler fuses it with the sum before."""

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
    """(norm(x) in that dtype, x); not differentiable twice."""
    normed, stream = _Prenorm.apply(x, weight, bias, eps, dtype)  # type: ignore[no-untyped-call]
    return normed, stream


def case(new: Inputs, p: float, *shape: int) -> Iterator[Comparison]:
    """`add_norm`, whose dropout mask is where the update reaches the sum, and `prenorm`."""
    x, f = new.randn(shape, shape)
    weight, bias = new.randn(shape[-1:], shape[-1:], dtype=torch.float32)
    seed = torch.tensor([2**40 + 7], device=new.device) if p else None
    mask = (add_norm(0 * x, f, weight, bias, seed, p, EPS)[1] != 0).double()
    check_dropped(mask, p)

    def formula(x: Tensor, f: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + mask / (1 - p) * f, weight.shape, weight, bias, EPS)

    yield from compare(
        lambda *inputs: add_norm(*inputs, seed, p, EPS)[0], formula, (x, f, weight, bias)
    )
    yield from compare(
        lambda x, weight, bias: torch.stack(prenorm(x, weight, bias, EPS, x.dtype)),
        lambda x, weight, bias: torch.stack([formula(x, torch.zeros_like(x), weight, bias), x]),
        (x, weight, bias),
    )


SELFTEST = [(0.0, 37, 48), (0.25, 37, 48)]
