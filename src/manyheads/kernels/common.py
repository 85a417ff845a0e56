# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Parts that several Triton kernels share: launches, strides, dropout masks, and sums."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # e^x = 2^(x log₂ e), and exp2 is one instruction
PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass the tests of the authors of Philox 4×32
SUM_ROWS, SUM_COLUMNS = 64, 16  # block of one program of `sum_rows`


def device_guard(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the device of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def contiguous_channels(x: Tensor) -> Tensor:
    """x with any strides, except that the last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_contiguous(like: Tensor) -> Tensor:
    """An empty tensor of the same shape, contiguous whatever the strides of the other."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def empty_heads_inner(like: Tensor) -> Tensor:
    """An empty [b h n c] with the memory layout [b n h c], as projections need it."""
    rows, heads, length, width = like.shape
    return like.new_empty(rows, length, heads, width).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[b h n c] as [b n hc]."""
    return x.transpose(1, 2).flatten(2)


@triton.jit
def load_rows(x, positions, step, n, D: tl.constexpr):
    """Rows of a matrix of n rows, zero past its end."""
    channels = tl.arange(0, D)
    return tl.load(
        x + positions[:, None] * step + channels[None, :], mask=positions[:, None] < n, other=0.0
    )


@triton.jit
def store_rows(x, positions, step, n, values, D: tl.constexpr):
    channels = tl.arange(0, D)
    tl.store(
        x + positions[:, None] * step + channels[None, :],
        values.to(x.dtype.element_ty),
        mask=positions[:, None] < n,
    )


@triton.jit
def dropout_scale(SEED, rows, p, D: tl.constexpr):
    """1 / (1 − p) where an element is kept, 0 where it is dropped: D columns of these rows.

    The mask is a function of a seed and of the element's index (Philox). The forward and the
    backward pass compute the same mask, so none is stored.
    """
    quarter = tl.arange(0, D // 4)
    counters = rows[:, None] * (D // 4) + quarter[None, :]
    a, b, c, d = tl.randint4x(tl.load(SEED), counters, PHILOX_ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows.shape[0], D)
    # The upper 24 bits, which float32 holds exactly.
    uniform = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216)
    return tl.where(uniform >= p, 1.0 / (1.0 - p), 0.0)


@triton.jit
def _sum_rows(PARTIAL, TOTAL, rows, width, M: tl.constexpr, C: tl.constexpr):
    columns = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([M, C], tl.float32)
    for start in range(0, rows, M):
        row = start + tl.arange(0, M)
        mask = (row < rows)[:, None] & (columns < width)[None, :]
        total += tl.load(PARTIAL + row[:, None] * width + columns[None, :], mask=mask, other=0.0)
    tl.store(TOTAL + columns, tl.sum(total, 0), mask=columns < width)


def sum_rows(partial: Tensor) -> Tensor:
    """Σ over the rows of partial sums [n d] that programs wrote, float32 and contiguous.

    PyTorch's own sum of so few rows takes longer, and clears a semaphore first.
    """
    rows, width = partial.shape
    total = partial.new_empty(width)
    with device_guard(partial):
        _sum_rows[(triton.cdiv(width, SUM_COLUMNS),)](
            partial, total, rows, width, M=SUM_ROWS, C=SUM_COLUMNS
        )
    return total
