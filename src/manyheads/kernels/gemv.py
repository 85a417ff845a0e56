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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.kernels.dispatch import launched_at
from manyheads.kernels.mlp import KINDS, value_and_slope
from manyheads.kernels.pdl import is_early, launched, let_others_begin, wait_for_others
from manyheads.nn.block import Block
from manyheads.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from manyheads.nn.replaced import (
    M,
    OwnHead,
    Product,
    with_activations_inside,
    with_products_of,
)

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
    CENTRES: tl.constexpr, EARLY: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    let_others_begin(EARLY)
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
    wait_for_others(EARLY)
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
        y, _ = value_and_slope(y, KIND)
    if ADDS:
        y += tl.load(ADDED + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(Y + rows, y.to(Y.dtype.element_ty), mask=there)


@triton.jit
def _norm(
    X, GAIN, SHIFT, Y, width, eps, CENTRES: tl.constexpr, EARLY: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    let_others_begin(EARLY)
    at = tl.arange(0, D)
    real = at < width
    gain = tl.load(GAIN + at, mask=real, other=0.0).to(tl.float32)
    shift = tl.load(SHIFT + at, mask=real, other=0.0).to(tl.float32) if CENTRES else 0.0
    wait_for_others(EARLY)
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


@torch.library.custom_op("manyheads::single_product", mutates_args=())
def single_product(
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
    x, y, early = x.contiguous(), x.new_empty(*x.shape[:-1], outputs), is_early(x)
    columns = min(WIDEST, triton.next_power_of_2(inputs))
    several = max(1, AT_ONCE // columns)
    assert gain is None or inputs <= columns
    given = [x if one is None else one for one in (bias, added, gain, shift)]
    given[1] = given[1].contiguous()
    few = early and (gain is None or columns <= NORMED)  # else they would not do
    with launched_at(x):
        _product[(triton.cdiv(outputs, several),)](
            x, weight, *given, y, outputs, inputs, eps,
            HAS_BIAS=bias is not None, KIND=kind, ADDS=added is not None, NORMS=gain is not None,
            CENTRES=shift is not None, EARLY=early,
            R=several, C=columns, num_warps=WARPS, **launched(early),
            **({"maxnreg": REGISTERS} if few else {}),
        )  # fmt: skip
    return y


@torch.library.custom_op("manyheads::single_norm", mutates_args=())
def single_norm(x: Tensor, gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """A row x [… d] by mean and deviation with a shift [d], else by its length; no gradients."""
    width, early = x.shape[-1], is_early(x)
    x = x.contiguous()
    y, padded = torch.empty_like(x), triton.next_power_of_2(width)
    with launched_at(x):
        _norm[(1,)](
            x, gain, gain if shift is None else shift, y, width, eps,
            CENTRES=shift is not None, EARLY=early, D=padded,
            num_warps=max(1, min(16, padded // 256)), **launched(early),
        )  # fmt: skip
    return y


@single_product.register_fake
def _(x, weight, bias, kind, added, gain=None, shift=None, eps=0.0):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@single_norm.register_fake
def _(x, gain, shift, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class Single(Product):
    """act(norm(x) Wᵀ + b) + s, by our kernels where x is one row.

    `norm` is given to it by whoever takes it away from elsewhere, and `added` is what `Summed`
    lends it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.contiguous(), bias)
        self.norm: nn.Module | None = None
        self.added: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if _is_ours(x, self.weight):
            inside = _norms_inside(self.norm, self.weight)
            x = x if self.norm is None or inside else _normed(self.norm, x)
            kind = -1 if self.activation is None else KINDS.index(self.activation)
            given = (x, self.weight, self.bias, kind, self.added)
            found: Tensor = single_product(*given, *inside)
            return found
        y = self.plain(x if self.norm is None else self.norm(x))
        return y if self.added is None else self.added + y


class Summed(nn.Module):
    """A residual connection whose sum is done by the last product of its part.

    So is its norm by the first one, unless there are several first ones.
    """

    def __init__(self, last: Single, norm: nn.Module | None) -> None:
        super().__init__()
        self.last, self.norm = last, norm

    def forward(self, x: Tensor, part: Any) -> Tensor:
        self.last.added = x
        try:
            found: Tensor = part(x if self.norm is None else _normed(self.norm, x))
            return found
        finally:
            self.last.added = None


def for_one_row(model: M) -> M:
    """A copy for writing whose products are ours, with the norms, activations and sums beside."""
    other: Any = with_activations_inside(with_products_of(model, Single), KINDS)
    for block in other.modules():
        if not isinstance(block, Block):
            continue
        part: Any = block.feedforward
        entries = {"attention": ["project"], "cross": ["query"]}
        if isinstance(part, FeedForward | GatedFeedForward):
            gated = isinstance(part, GatedFeedForward)
            entries["feedforward"] = ["inner", "gate"] if gated else ["inner"]
        for name, first in entries.items():
            if name in block._modules:
                _join(block, name, first)
    stack, head = other.decoder, other.head
    if isinstance(head, OwnHead) and head.scale == 1.0 and _has_kernel(stack.last_norm):
        head.product.norm, stack.last_norm = stack.last_norm, nn.Identity()
    return other


def _join(block: Any, name: str, first: list[str]) -> None:
    """Give the norm and the sum of a residual connection to the products of its part."""
    part, residual = getattr(block, name), getattr(block, f"{name}_residual")
    last = part.outer if name == "feedforward" else part.output
    if residual.placement != "pre" or not _has_kernel(residual.norm):
        return
    once = len(first) == 1
    if once:
        getattr(part, first[0]).norm = residual.norm
    setattr(block, f"{name}_residual", Summed(last, None if once else residual.norm))


def _has_kernel(norm: Any) -> bool:
    kinds = type(norm) is nn.RMSNorm or (type(norm) is nn.LayerNorm and norm.bias is not None)
    sized = kinds and norm.weight is not None and norm.weight.numel() <= WIDEST_NORM
    return sized and norm.eps is not None


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one row, in the type of the weights and one that is summed in float32."""
    return x.numel() == x.shape[-1] and x.dtype == weight.dtype != torch.float64


def _normed(norm: Any, x: Tensor) -> Tensor:
    if not _is_ours(x, norm.weight):
        return norm(x)
    found: Tensor = single_norm(x, norm.weight, _shift(norm), norm.eps)
    return found


def _norms_inside(norm: Any, weight: Tensor) -> tuple[Any, ...]:
    """Gain, shift and ε of a norm that the product behind it does; nothing where it does none."""
    small = weight.numel() <= INSIDE and weight.shape[1] <= WIDEST
    if norm is None or not small or norm.weight.dtype != weight.dtype:
        return ()
    return norm.weight, _shift(norm), norm.eps


def _shift(norm: nn.Module) -> Tensor | None:
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def _trial_inside(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Of products that norm by themselves."""
    exact, by, width = x.double(), gain.double(), gain.shape
    normed = F.layer_norm(exact, width, by, shift.double(), 0.1)
    others = F.rms_norm(exact, width, by, 0.1)
    return [
        (single_product(x, weight, None, -1, None, gain, shift, 0.1), normed @ weight.double().mT),
        (single_product(x, weight, None, -1, None, gain, None, 0.1), others @ weight.double().mT),
    ]


def trial(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernels give for a few numbers, and what is right."""
    given = torch.Generator(device).manual_seed(1)
    pairs = []
    for outputs, inputs in ((7, 40), (130, 1100), (60, WIDEST + 500)):
        x, weight, bias, gain, shift, added = (
            torch.randn(size, generator=given, device=device, dtype=torch.bfloat16)
            for size in ((1, 1, inputs), (outputs, inputs), outputs, inputs, inputs, outputs)
        )
        exact = x.double()
        pairs.append((single_product(x, weight, None, -1, None), exact @ weight.double().mT))
        normed = F.layer_norm(exact, (inputs,), gain.double(), shift.double(), 1e-5)
        pairs.append((single_norm(x, gain, shift, 1e-5), normed))
        if inputs <= WIDEST:
            pairs += _trial_inside(x + 100.0, weight[:7].contiguous(), gain, shift)
        for kind, name in enumerate(KINDS):
            inner = F.linear(exact / inputs**0.5, weight.double(), bias.double())
            found = single_product(x / inputs**0.5, weight, bias, kind, added[None, None])
            pairs.append((found, ACTIVATIONS[name](inner) + added.double()))
        # After one another, each from what the one before it wrote.
        size = min(outputs, inputs)
        row, square, gain = added[None, :size], weight[:size, :size].contiguous(), gain[:size]
        exact = row.double()
        for _ in range(5):
            row = single_product(single_norm(row, gain, None, 1e-5), square, None, -1, None)
            exact = F.rms_norm(exact, exact.shape[-1:], gain.double(), 1e-5) @ square.double().mT
        pairs.append((row, exact))
    return pairs
