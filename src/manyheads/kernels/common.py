# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Parts that several Triton kernels share: launches, strides, rows, dropout masks and sums.

Programmatic dependent launch (PDL, Hopper and later): a kernel starts while its predecessor ends. A
decoding step is a chain of kernels of a few microseconds, with gaps as long as the kernels. A
kernel launched this way first lets its successor start, loads what does not change (weights), and
calls `grid_wait` before it reads anything that its predecessors write. Weights are thus prefetched
through several kernels, as far as multiprocessors have space for the programs.

This is safe only if no kernel in flight writes what is prefetched. Kernels that change weights do
not use it, and a step begins with another kernel that does not (the embedding). For the same reason
kernels/append_attention.py may prefetch the keys, values and position that the last step wrote: two
of its calls for one cache and one module always have such a kernel between them.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # e^x = 2^(x log₂ e), and exp2 is one instruction
HOPPER = (9, 0)  # compute capability
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
def dropout_scale(SEED, rows, p, N: tl.constexpr):
    """1 / (1 − p) where an element is kept, 0 where it is dropped: N columns of these rows.

    The mask is a function of a seed and of the element's index (Philox). The forward and the
    backward pass compute the same mask, so none is stored.
    """
    quarter = tl.arange(0, N // 4)
    counters = rows[:, None] * (N // 4) + quarter[None, :]
    a, b, c, d = tl.randint4x(tl.load(SEED), counters, PHILOX_ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows.shape[0], N)
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


def pdl_options(x: Tensor) -> dict[str, bool]:
    """The constant PDL of a kernel, and the launch option, by device."""
    is_nvidia = x.is_cuda and torch.version.hip is None
    if is_nvidia and torch.cuda.get_device_capability(x.device) >= HOPPER:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start once every program of this one has come here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def grid_wait(PDL: tl.constexpr):
    """Wait for the predecessors: their results can be read and their inputs overwritten."""
    if PDL:
        tl.extra.cuda.gdc_wait()
