# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Parts that several Triton kernels share: launches, strides, loads and stores."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # e^x = 2^(x log₂ e), and exp2 is one instruction


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
