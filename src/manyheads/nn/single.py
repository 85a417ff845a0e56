# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: a matrix times one row, as every step of writing one text asks.

    y = x Wᵀ + b

Its time is that of reading W once. Libraries are made for many rows, and leave most of a GPU idle
over one: here each program reads a few rows of W, as many bytes at once as it has room for.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.nn.trusted import launched_at

OUTPUTS, INPUTS, WARPS = 4, 1024, 4  # of W at once: 32 numbers a thread


@triton.jit
def _product(
    X, W, B, Y, outputs, inputs, HAS_BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    first, there = rows[:, None].to(tl.int64) * inputs, (rows < outputs)[:, None]
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, inputs, C):
        at = start + tl.arange(0, C)
        known = at < inputs
        x = tl.load(X + at, mask=known, other=0.0).to(tl.float32)
        w = tl.load(W + first + at[None, :], mask=there & known[None, :], other=0.0)
        total += w.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(B + rows, mask=rows < outputs, other=0.0).to(tl.float32)
    tl.store(Y + rows, y.to(Y.dtype.element_ty), mask=rows < outputs)


@torch.library.custom_op("manyheads::single_product", mutates_args=())
def single_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [… d] of one row, weight [v d], bias [v]; no gradients."""
    outputs, inputs = weight.shape
    x, y = x.contiguous(), x.new_empty(*x.shape[:-1], outputs)
    with launched_at(x):
        _product[(triton.cdiv(outputs, OUTPUTS),)](
            x, weight, x if bias is None else bias, y, outputs, inputs,
            HAS_BIAS=bias is not None, R=OUTPUTS, C=INPUTS, num_warps=WARPS,
        )  # fmt: skip
    return y


@single_product.register_fake
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class Single(nn.Module):
    """x Wᵀ + b, by our kernel where x is one row."""

    def __init__(self, weight: Float[Tensor, "v d"], bias: Float[Tensor, " v"] | None) -> None:
        super().__init__()
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        fits = x.dtype == self.weight.dtype != torch.float64  # it sums in float32
        if fits and x.numel() == x.shape[-1]:
            found: Tensor = single_product(x, self.weight, self.bias)
            return found
        return F.linear(x, self.weight, self.bias)


def trial(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel gives for a few numbers, and what is right."""
    given = torch.Generator(device).manual_seed(1)
    pairs = []
    for outputs, inputs in ((7, 40), (130, 1100)):
        x, weight, bias = (
            torch.randn(size, generator=given, device=device, dtype=torch.bfloat16)
            for size in ((1, 1, inputs), (outputs, inputs), (outputs,))
        )
        for one in (None, bias):
            exact = None if one is None else one.double()
            wanted = F.linear(x.double(), weight.double(), exact)
            pairs.append((single_product(x, weight, one), wanted))
    return pairs
