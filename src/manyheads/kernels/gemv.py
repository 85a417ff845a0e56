# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Matrix–vector products for decoding one sequence, with norm, activation and residual sum.

    y = act(norm(x) Wᵀ + b) + s        norm, b, act and s are optional

The time of the product is that of reading W once. Libraries are tuned for many rows and leave most
of a GPU idle for one. Here each program reads a few rows of W with as many bytes in flight as
possible, and before x is available (kernels/common.py). The activation or sum after the product is
over one row too; a kernel of its own would take as long to launch as the product takes, so the
product computes it. The norm before it is a kernel of its own (`norm_row`), or part of the product
if the matrix is small (`MAX_FUSED_NORM_ELEMENTS`): every program repeats it.

In the fused norm every program needs the mean μ and the deviation σ. To avoid waiting for them, it
multiplies with x before the norm, and all sums are computed in one reduction:

    norm(x) Wᵀ = (Σ w g x − μ Σ w g) / σ + Σ w h,    μ = Σ x / d,    σ² = Σ x² / d − μ² + ε

with gain g and shift h. The formula is invariant to a constant added to x; x₀ is subtracted, so
that a mean far from zero does not cancel σ².
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.common import (
    device_guard,
    empty_contiguous,
    grid_wait,
    launch_dependents,
    pdl_options,
)
from manyheads.kernels.selftest import EPS, FUSED_ACTIVATIONS, Comparison, Inputs

BLOCK_ELEMENTS, MAX_COLUMNS, WARPS = 4096, 4096, 4  # of W in a program; columns of that block
MAX_REGISTERS = 64  # per thread: eight programs then fit on a multiprocessor of an H200
MAX_CAPPED_NORM_COLUMNS = 1024  # with a fused norm, wider blocks need more registers
MAX_ROW_NORM_WIDTH = 8192  # that the one program of `norm_row` holds
MAX_FUSED_NORM_ELEMENTS = 2**22  # largest matrix whose product also computes the norm


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _gemv(
    X, W, B, RESIDUAL, GAIN, SHIFT, Y, outputs, inputs, eps,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, PDL: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    rows, at = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, C)
    first, row_mask = rows[:, None].to(tl.int64) * inputs, rows < outputs
    column_mask = at < inputs
    w = tl.load(W + first + at[None, :], mask=row_mask[:, None] & column_mask[None, :], other=0.0)
    if HAS_NORM:
        gain = tl.load(GAIN + at, mask=column_mask, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        shift = tl.load(SHIFT + at, mask=column_mask, other=0.0).to(tl.float32)
        products = (w.to(tl.float32) * gain[None, :], w.to(tl.float32) * shift[None, :])
        gain_sum, shift_sum = tl.reduce(products, 1, _add2)
    grid_wait(PDL)
    x = tl.load(X + at, mask=column_mask, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        x = tl.where(column_mask, x - tl.load(X).to(tl.float32), 0.0)
        all_x = tl.zeros([R, C], tl.float32) + x[None, :]
        product = w.to(tl.float32) * (x * gain)[None, :]
        y, mean, square = tl.reduce((product, all_x, all_x * all_x), 1, _add3)
        mean /= inputs
        inverse = tl.rsqrt(tl.maximum(square / inputs - mean * mean, 0.0) + eps)
        y = (y - mean * gain_sum) * inverse + shift_sum
    elif HAS_NORM:
        all_x = tl.zeros([R, C], tl.float32) + (x * x)[None, :]
        y, square = tl.reduce((w.to(tl.float32) * (x * gain)[None, :], all_x), 1, _add2)
        y *= tl.rsqrt(square / inputs + eps)
    else:
        total = w.to(tl.float32) * x[None, :]
        for start in range(C, inputs, C):
            column = start + at
            column_mask = column < inputs
            mask = row_mask[:, None] & column_mask[None, :]
            w = tl.load(W + first + column[None, :], mask=mask, other=0.0)
            x = tl.load(X + column, mask=column_mask, other=0.0).to(tl.float32)
            total += w.to(tl.float32) * x[None, :]
        y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(B + rows, mask=row_mask, other=0.0).to(tl.float32)
    if ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # NaN stays NaN
    elif ACTIVATION == "gelu":
        y *= 0.5 + 0.5 * tl.erf(y * 0.7071067811865476)
    elif ACTIVATION == "gelu-tanh":  # ½ (1 + tanh u) = 1 / (1 + e^(−2u))
        y *= tl.sigmoid(1.5957691216057308 * y * (1.0 + 0.044715 * y * y))
    if HAS_RESIDUAL:
        y += tl.load(RESIDUAL + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(Y + rows, y.to(Y.dtype.element_ty), mask=row_mask)


@triton.jit
def _norm(
    X, GAIN, SHIFT, Y, width, eps, HAS_SHIFT: tl.constexpr, PDL: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    launch_dependents(PDL)
    at = tl.arange(0, D)
    in_row = at < width
    gain = tl.load(GAIN + at, mask=in_row, other=0.0).to(tl.float32)
    shift = tl.load(SHIFT + at, mask=in_row, other=0.0).to(tl.float32) if HAS_SHIFT else 0.0
    grid_wait(PDL)
    x = tl.load(X + at, mask=in_row, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        x = tl.where(in_row, x - tl.load(X).to(tl.float32), 0.0)
        mean, square = tl.reduce((x, x * x), 0, _add2)
        mean /= width
        square = tl.maximum(square - mean * mean * width, 0.0)
        x -= mean
    else:
        square = tl.sum(x * x, 0)
    y = x * tl.rsqrt(square / width + eps) * gain + shift
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=in_row)


@torch.library.custom_op("manyheads::gemv", mutates_args=())
def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "",
    residual: Tensor | None = None,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """One row x [… d], weight [v d], bias [v], residual [… v]; no gradients.

    `activation` is relu, gelu, gelu-tanh or empty. With gain [d] and shift [d] the product is of
    LayerNorm(x), with a gain only of RMSNorm(x).
    """
    outputs, inputs = weight.shape
    x, y = x.contiguous(), x.new_empty(*x.shape[:-1], outputs)
    columns = min(MAX_COLUMNS, triton.next_power_of_2(inputs))
    rows = max(1, BLOCK_ELEMENTS // columns)
    assert gain is None or inputs <= columns
    optional = [x if tensor is None else tensor for tensor in (bias, residual, gain, shift)]
    optional[1] = optional[1].contiguous()
    options = pdl_options(x)
    cap_registers = options["PDL"] and (gain is None or columns <= MAX_CAPPED_NORM_COLUMNS)
    with device_guard(x):
        _gemv[(triton.cdiv(outputs, rows),)](
            x, weight, *optional, y, outputs, inputs, eps,
            HAS_BIAS=bias is not None, ACTIVATION=activation, HAS_RESIDUAL=residual is not None,
            HAS_NORM=gain is not None, HAS_SHIFT=shift is not None,
            R=rows, C=columns, num_warps=WARPS, **options,
            **({"maxnreg": MAX_REGISTERS} if cap_registers else {}),
        )  # fmt: skip
    return y


@torch.library.custom_op("manyheads::norm_row", mutates_args=())
def norm_row(x: Tensor, gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of one row x [… d] with gain and shift [d], RMSNorm without; no gradients."""
    x, width = x.contiguous(), x.shape[-1]
    y, padded = torch.empty_like(x), triton.next_power_of_2(width)
    with device_guard(x):
        _norm[(1,)](
            x, gain, gain if shift is None else shift, y, width, eps,
            HAS_SHIFT=shift is not None, D=padded,
            num_warps=max(1, min(16, padded // 256)), **pdl_options(x),
        )  # fmt: skip
    return y


@gemv.register_fake
def _(x, weight, bias=None, activation="", residual=None, gain=None, shift=None, eps=0.0):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@norm_row.register_fake
def _(x, gain, shift, eps):
    return empty_contiguous(x)


@torch.no_grad()
def case(new: Inputs, outputs: int, inputs: int) -> Iterator[Comparison]:
    """Products with norms, activations and sums, and a chain of launches."""
    shapes = (1, 1, inputs), (outputs, inputs), (outputs,), (inputs,), (inputs,), (1, 1, outputs)
    x, weight, bias, gain, shift, residual = new.randn(*shapes)
    y, exact, norm_shape = x / inputs**0.5, weight.double().mT, (inputs,)
    yield gemv(x, weight), x.double() @ exact
    for name, activation in FUSED_ACTIVATIONS.items():
        product = activation(y.double() @ exact + bias.double())
        yield gemv(y, weight, bias, name, residual), product + residual.double()
    x = x + 100.0  # a mean far from zero must not cancel the deviation
    layer_norm = F.layer_norm(x.double(), norm_shape, gain.double(), shift.double(), EPS)
    rms_norm = F.rms_norm(x.double(), norm_shape, gain.double(), EPS)
    for expected, bias_or_none in ((layer_norm, shift), (rms_norm, None)):
        yield norm_row(x, gain, bias_or_none, EPS), expected
        if inputs <= MAX_COLUMNS:
            result = gemv(x, weight, None, "", None, gain, bias_or_none, EPS)
            yield result, expected @ exact
    # A chain: each kernel reads what its predecessor wrote.
    size = min(outputs, inputs)
    row, weight, gain = residual[..., :size], weight[:size, :size].contiguous(), gain[:size]
    expected = row.double()
    for _ in range(5):
        row = gemv(norm_row(row, gain, None, EPS), weight)
        expected = F.rms_norm(expected, (size,), gain.double(), EPS) @ weight.double().mT
    yield row, expected


SELFTEST = [(7, 40), (130, 1100), (60, 4600)]
