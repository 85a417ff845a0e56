# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of our own for one row, as every step of writing one text asks.

    y = act(norm(x) Wᵀ + b) + s        each of norm, b, act and s where there is one

The time of a product is that of reading W once. Libraries are made for many rows, and leave most of
a GPU idle over one: here each program reads a few rows of W, as many bytes at once as it has room
for, and before what they are multiplied with is there (kernels/pdl.py). The activation or the sum
behind a product is over one row too. A kernel for it would take as long to begin as the product to
end, so the product does it. The norm before it has a kernel of its own, or is inside the product as
well where the matrix is small (`INSIDE`): beside a large one every program would do too much.
Inside, every program needs the mean μ and the deviation σ. To norm x first would be to wait for
them first, so a program multiplies with x as it is, and all that it needs is summed at once:

    norm(x) Wᵀ = (Σ w g x − μ Σ w g) / σ + Σ w h,    μ = Σ x / d,    σ² = Σ x² / d − μ² + ε

with gain g and shift h. Nothing of this changes when a number is taken from all x; the first of
them is, so that a mean far from zero leaves something of σ².
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.dispatch import device_guard
from manyheads.kernels.mlp import KINDS, activation_and_grad
from manyheads.kernels.pdl import grid_wait, launch_dependents, pdl_options, supports_pdl

AT_ONCE, WIDEST, WARPS = 4096, 4096, 4  # numbers of W, and of a row of it, that a program holds
# Of a thread, with which eight programs fit on a processor of an H200; a norm inside leaves it so
# many numbers of a row.
REGISTERS, NORMED = 64, 1024
WIDEST_NORM = 8192  # row that one program holds
INSIDE = 2**22  # numbers of a matrix up to which its product norms, too


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _all_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _product(
    X, W, B, ADDED, GAIN, SHIFT, Y, outputs, inputs, eps,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr,
    CENTRES: tl.constexpr, PDL: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    rows, at = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, C)
    first, there = rows[:, None].to(tl.int64) * inputs, rows < outputs
    known = at < inputs
    w = tl.load(W + first + at[None, :], mask=there[:, None] & known[None, :], other=0.0)
    if NORMS:
        gain = tl.load(GAIN + at, mask=known, other=0.0).to(tl.float32)
    if CENTRES:
        shift = tl.load(SHIFT + at, mask=known, other=0.0).to(tl.float32)
        parts = (w.to(tl.float32) * gain[None, :], w.to(tl.float32) * shift[None, :])
        mass, moved = tl.reduce(parts, 1, _both)
    grid_wait(PDL)
    x = tl.load(X + at, mask=known, other=0.0).to(tl.float32)
    if CENTRES:
        x = tl.where(known, x - tl.load(X).to(tl.float32), 0.0)
        every = tl.zeros([R, C], tl.float32) + x[None, :]
        product = w.to(tl.float32) * (x * gain)[None, :]
        y, mean, square = tl.reduce((product, every, every * every), 1, _all_three)
        mean /= inputs
        inverse = tl.rsqrt(tl.maximum(square / inputs - mean * mean, 0.0) + eps)
        y = (y - mean * mass) * inverse + moved
    elif NORMS:
        every = tl.zeros([R, C], tl.float32) + (x * x)[None, :]
        y, square = tl.reduce((w.to(tl.float32) * (x * gain)[None, :], every), 1, _both)
        y *= tl.rsqrt(square / inputs + eps)
    else:
        total = w.to(tl.float32) * x[None, :]
        for start in range(C, inputs, C):
            here = start + at
            known = here < inputs
            w = tl.load(W + first + here[None, :], mask=there[:, None] & known[None, :], other=0.0)
            x = tl.load(X + here, mask=known, other=0.0).to(tl.float32)
            total += w.to(tl.float32) * x[None, :]
        y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(B + rows, mask=there, other=0.0).to(tl.float32)
    if KIND == 0:
        y = tl.where(y < 0.0, 0.0, y)  # what is no number stays none
    if KIND > 0:
        y, _ = activation_and_grad(y, KIND)
    if ADDS:
        y += tl.load(ADDED + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(Y + rows, y.to(Y.dtype.element_ty), mask=there)


@triton.jit
def _norm(
    X, GAIN, SHIFT, Y, width, eps, CENTRES: tl.constexpr, PDL: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    launch_dependents(PDL)
    at = tl.arange(0, D)
    real = at < width
    gain = tl.load(GAIN + at, mask=real, other=0.0).to(tl.float32)
    shift = tl.load(SHIFT + at, mask=real, other=0.0).to(tl.float32) if CENTRES else 0.0
    grid_wait(PDL)
    x = tl.load(X + at, mask=real, other=0.0).to(tl.float32)
    if CENTRES:
        x = tl.where(real, x - tl.load(X).to(tl.float32), 0.0)
        mean, square = tl.reduce((x, x * x), 0, _both)
        mean /= width
        square = tl.maximum(square - mean * mean * width, 0.0)
        x -= mean
    else:
        square = tl.sum(x * x, 0)
    y = x * tl.rsqrt(square / width + eps) * gain + shift
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=real)


@torch.library.custom_op("manyheads::gemv", mutates_args=())
def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: int,
    added: Tensor | None,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """x [… d] of one row, weight [v d], bias [v], added [… v]; no gradients.

    `kind` is that of an activation, −1 for none. With a gain [d] the row is normed before: by mean
    and deviation where there is a shift [d], else by its length.
    """
    outputs, inputs = weight.shape
    x, y, pdl = x.contiguous(), x.new_empty(*x.shape[:-1], outputs), supports_pdl(x)
    columns = min(WIDEST, triton.next_power_of_2(inputs))
    several = max(1, AT_ONCE // columns)
    assert gain is None or inputs <= columns
    given = [x if one is None else one for one in (bias, added, gain, shift)]
    given[1] = given[1].contiguous()
    few = pdl and (gain is None or columns <= NORMED)  # else they would not do
    with device_guard(x):
        _product[(triton.cdiv(outputs, several),)](
            x, weight, *given, y, outputs, inputs, eps,
            HAS_BIAS=bias is not None, KIND=kind, ADDS=added is not None, NORMS=gain is not None,
            CENTRES=shift is not None, PDL=pdl,
            R=several, C=columns, num_warps=WARPS, **pdl_options(pdl),
            **({"maxnreg": REGISTERS} if few else {}),
        )  # fmt: skip
    return y


@torch.library.custom_op("manyheads::norm_row", mutates_args=())
def norm_row(x: Tensor, gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """A row x [… d] by mean and deviation with a shift [d], else by its length; no gradients."""
    width, pdl = x.shape[-1], supports_pdl(x)
    x = x.contiguous()
    y, padded = torch.empty_like(x), triton.next_power_of_2(width)
    with device_guard(x):
        _norm[(1,)](
            x, gain, gain if shift is None else shift, y, width, eps,
            CENTRES=shift is not None, PDL=pdl, D=padded,
            num_warps=max(1, min(16, padded // 256)), **pdl_options(pdl),
        )  # fmt: skip
    return y


@gemv.register_fake
def _(x, weight, bias, kind, added, gain=None, shift=None, eps=0.0):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@norm_row.register_fake
def _(x, gain, shift, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


REFERENCE = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _trial_inside(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Of products that norm by themselves."""
    exact, by, width = x.double(), gain.double(), gain.shape
    normed = F.layer_norm(exact, width, by, shift.double(), 0.1)
    others = F.rms_norm(exact, width, by, 0.1)
    return [
        (gemv(x, weight, None, -1, None, gain, shift, 0.1), normed @ weight.double().mT),
        (gemv(x, weight, None, -1, None, gain, None, 0.1), others @ weight.double().mT),
    ]


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernels give for a few numbers, and what is right."""
    given = torch.Generator(device).manual_seed(1)
    pairs = []
    for outputs, inputs in ((7, 40), (130, 1100), (60, WIDEST + 500)):
        x, weight, bias, gain, shift, added = (
            torch.randn(size, generator=given, device=device, dtype=torch.bfloat16)
            for size in ((1, 1, inputs), (outputs, inputs), outputs, inputs, inputs, outputs)
        )
        exact = x.double()
        pairs.append((gemv(x, weight, None, -1, None), exact @ weight.double().mT))
        normed = F.layer_norm(exact, (inputs,), gain.double(), shift.double(), 1e-5)
        pairs.append((norm_row(x, gain, shift, 1e-5), normed))
        if inputs <= WIDEST:
            pairs += _trial_inside(x + 100.0, weight[:7].contiguous(), gain, shift)
        for kind, name in enumerate(KINDS):
            inner = F.linear(exact / inputs**0.5, weight.double(), bias.double())
            found = gemv(x / inputs**0.5, weight, bias, kind, added[None, None])
            pairs.append((found, REFERENCE[name](inner) + added.double()))
        # After one another, each from what the one before it wrote.
        size = min(outputs, inputs)
        row, square, gain = added[None, :size], weight[:size, :size].contiguous(), gain[:size]
        exact = row.double()
        for _ in range(5):
            row = gemv(norm_row(row, gain, None, 1e-5), square, None, -1, None)
            exact = F.rms_norm(exact, exact.shape[-1:], gain.double(), 1e-5) @ square.double().mT
        pairs.append((row, exact))
    return pairs
