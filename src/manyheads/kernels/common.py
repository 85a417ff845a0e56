# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Parts that several Triton kernels share: launches, strides, rows of a matrix.

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


def device_guard(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the device of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def contiguous_channels(x: Tensor) -> Tensor:
    """x with any strides, except that the last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


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
