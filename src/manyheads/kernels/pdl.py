# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Programmatic dependent launch (Hopper and later): a kernel starts while its predecessor ends.

A decoding step is a chain of kernels of a few microseconds, with gaps as long as the kernels. A
kernel launched this way first lets its successor start, loads what does not change (weights), and
calls `grid_wait` before it reads anything that its predecessors write. Weights are thus prefetched
through several kernels, as far as multiprocessors have space for the programs.

This is safe only if no kernel in flight writes what is prefetched. Kernels that change weights do
not use it, and a step begins with another kernel that does not (the embedding). For the same reason
kernels/append_attention.py may prefetch the keys, values and position that the last step wrote: two
of its calls for one cache and one module always have such a kernel between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = (9, 0)  # compute capability


def supports_pdl(x: Tensor) -> bool:
    """True if the device of x and this version of Triton support dependent launches."""
    has_wait = getattr(getattr(tl.extra, "cuda", None), "gdc_wait", None) is not None
    is_nvidia = x.is_cuda and torch.version.hip is None
    return is_nvidia and has_wait and torch.cuda.get_device_capability(x.device) >= HOPPER


def pdl_options(x: Tensor) -> dict[str, bool]:
    """The constant PDL of a kernel, and the launch option."""
    return {"PDL": True, "launch_pdl": True} if supports_pdl(x) else {"PDL": False}


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
