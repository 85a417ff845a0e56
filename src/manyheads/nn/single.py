# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: a matrix times one row, as every step of writing one text asks.

    y = act(norm(x) Wᵀ + b) + s        each of norm, b, act and s where there is one

Its time is that of reading W once. Libraries are made for many rows, and leave most of a GPU idle
over one: here each program reads a few rows of W, as many bytes at once as it has room for, before
what it is multiplied with is there. Between two products lie a norm, an activation or a sum over
one row, and a kernel for each would take as long to begin as a product to end. So the products do
these themselves, every program the norm of the whole row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.nn.block import Block
from manyheads.nn.early import is_early, launched, wait_for_others
from manyheads.nn.fed import KINDS, value_and_slope
from manyheads.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from manyheads.nn.replaced import M, OwnHead, with_products_of
from manyheads.nn.trusted import launched_at

AT_ONCE, WIDEST, WARPS = 4096, 2048, 4  # numbers of W, and of a row of it, that a program holds
WIDEST_NORM = 8192  # row that every program holds beside them


@triton.jit
def _product(
    X, W, B, GAIN, SHIFT, ADDED, Y, outputs, inputs, eps,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, ADDS: tl.constexpr,
    EARLY: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    rows, at = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, C)
    first, there = rows[:, None].to(tl.int64) * inputs, rows < outputs
    known = at < inputs
    w = tl.load(W + first + at[None, :], mask=there[:, None] & known[None, :], other=0.0)
    wait_for_others(EARLY)
    mean, inverse = 0.0, 1.0
    if NORM != 0:
        real = tl.arange(0, D) < inputs
        whole = tl.load(X + tl.arange(0, D), mask=real, other=0.0).to(tl.float32)
        if NORM == 1:
            mean = tl.sum(whole, 0) / inputs
            whole = tl.where(real, whole - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(whole * whole, 0) / inputs + eps)
    x = _read(X, GAIN, SHIFT, at, known, mean, inverse, NORM, W.dtype.element_ty)
    total = w.to(tl.float32) * x[None, :]
    for start in range(C, inputs, C):
        known = start + at < inputs
        w = tl.load(
            W + first + start + at[None, :], mask=there[:, None] & known[None, :], other=0.0
        )
        x = _read(X, GAIN, SHIFT, start + at, known, mean, inverse, NORM, W.dtype.element_ty)
        total += w.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(B + rows, mask=there, other=0.0).to(tl.float32)
    if KIND == 0:
        y = tl.maximum(y, 0.0)
    if KIND > 0:
        y, _ = value_and_slope(y, KIND)
    if ADDS:
        y += tl.load(ADDED + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(Y + rows, y.to(Y.dtype.element_ty), mask=there)


@triton.jit
def _read(
    X, GAIN, SHIFT, at, known, mean, inverse, NORM: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Some of x, normed and rounded as if it had been written."""
    x = tl.load(X + at, mask=known, other=0.0).to(tl.float32)
    if NORM != 0:
        x = (x - mean) * inverse * tl.load(GAIN + at, mask=known, other=0.0).to(tl.float32)
    if NORM == 1:
        x += tl.load(SHIFT + at, mask=known, other=0.0).to(tl.float32)
    return x.to(TYPE).to(tl.float32)


@torch.library.custom_op("manyheads::single_product", mutates_args=())
def single_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, shift: Tensor | None,
    eps: float, kind: int, added: Tensor | None,
) -> Tensor:  # fmt: skip
    """x [… d] of one row, weight [v d], bias [v], added [… v]; no gradients.

    With a gain [d] the row is normed: with a shift [d] by mean and deviation, else by its length.
    `kind` is that of an activation, −1 for none.
    """
    outputs, inputs = weight.shape
    x, y = x.contiguous(), x.new_empty(*x.shape[:-1], outputs)
    norm, early = 0 if gain is None else 2 if shift is None else 1, is_early(x)
    columns = min(WIDEST, triton.next_power_of_2(inputs))
    several = max(1, AT_ONCE // columns)
    given = (x if one is None else one for one in (bias, gain, shift))
    with launched_at(x):
        _product[(triton.cdiv(outputs, several),)](
            x, weight, *given, x if added is None else added.contiguous(), y,
            outputs, inputs, eps,
            HAS_BIAS=bias is not None, NORM=norm, KIND=kind, ADDS=added is not None, EARLY=early,
            R=several, C=columns, D=triton.next_power_of_2(inputs), num_warps=WARPS,
            **launched(early),
        )  # fmt: skip
    return y


@single_product.register_fake
def _(x, weight, bias, gain, shift, eps, kind, added):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class Single(nn.Module):
    """act(norm(x) Wᵀ + b) + s, by our kernel where x is one row.

    It begins as x Wᵀ + b. `norm` and `activation` are given to it by whoever takes them away from
    elsewhere, and `added` is what `Summed` lends it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach()
        self.norm: nn.Module | None = None
        self.activation: str | None = None
        self.added: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        fits = x.dtype == self.weight.dtype != torch.float64  # it sums in float32
        if fits and x.numel() == x.shape[-1]:
            norm: Any = self.norm
            gain, shift = (None, None) if norm is None else (norm.weight, _shift(norm))
            found: Tensor = single_product(
                x, self.weight, self.bias, gain, shift, 0.0 if norm is None else norm.eps,
                -1 if self.activation is None else KINDS.index(self.activation), self.added,
            )  # fmt: skip
            return found
        x = F.linear(x if self.norm is None else self.norm(x), self.weight, self.bias)
        x = x if self.activation is None else ACTIVATIONS[self.activation](x)
        return x if self.added is None else self.added + x


class Summed(nn.Module):
    """A residual connection whose norm and sum are done by the products of its part."""

    def __init__(self, last: Single) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor, part: Any) -> Tensor:
        self.last.added = x
        try:
            found: Tensor = part(x)
            return found
        finally:
            self.last.added = None


def for_one_row(model: M) -> M:
    """A copy for writing whose products are ours, with the norms, activations and sums beside."""
    other: Any = with_products_of(model, Single)
    for block in other.modules():
        if not isinstance(block, Block):
            continue
        part: Any = block.feedforward
        if type(part) is FeedForward and part.named in KINDS:
            inner: Any = part.inner
            inner.activation, part.activation = part.named, _same
        entries = {"attention": ["project"], "cross": ["query"]}
        if isinstance(part, FeedForward | GatedFeedForward):
            entries["feedforward"] = ["inner"] if type(part) is FeedForward else ["inner", "gate"]
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
    for entry in first:
        getattr(part, entry).norm = residual.norm
    setattr(block, f"{name}_residual", Summed(last))


def _has_kernel(norm: Any) -> bool:
    kinds = type(norm) is nn.RMSNorm or (type(norm) is nn.LayerNorm and norm.bias is not None)
    return kinds and norm.weight.numel() <= WIDEST_NORM


def _shift(norm: nn.Module) -> Tensor | None:
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def _same(x: Tensor) -> Tensor:
    return x


def trial(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel gives for a few numbers, and what is right."""
    given = torch.Generator(device).manual_seed(1)
    pairs = []
    for outputs, inputs in ((7, 40), (130, 1100), (60, 2500)):
        x, weight, bias, gain, shift, added = (
            torch.randn(size, generator=given, device=device, dtype=torch.bfloat16)
            for size in ((1, 1, inputs), (outputs, inputs), outputs, inputs, inputs, outputs)
        )
        plain = single_product(x, weight, None, None, None, 0.0, -1, None)
        pairs.append((plain, F.linear(x.double(), weight.double())))
        # After one another, each from what the one before it wrote.
        square = weight[: min(weight.shape), : min(weight.shape)].contiguous()
        row, exact = added[None, : len(square)], added[None, : len(square)].double()
        for _ in range(5):
            row = single_product(row, square, None, gain[: len(square)], None, 1e-5, -1, None)
            exact = F.rms_norm(exact, exact.shape[-1:], gain[: len(square)].double(), 1e-5)
            exact = F.linear(exact, square.double())
        pairs.append((row, exact))
        normed = F.layer_norm(x.double(), (inputs,), gain.double(), shift.double(), 1e-5)
        inner = F.linear(normed, weight.double(), bias.double())
        for kind, name in enumerate(KINDS):
            found = single_product(x, weight, bias, gain, shift, 1e-5, kind, added[None, None])
            pairs.append((found, ACTIVATIONS[name](inner) + added.double()))
    return pairs
