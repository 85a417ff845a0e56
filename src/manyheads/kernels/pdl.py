# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels that begin while the one ahead of them still ends, as NVIDIA's from Hopper on can.

A step of writing is a chain of kernels of a few microseconds each, and what lies between two of
them is as long. One that is pdl_options pdl reads what does not change, its weights, and waits with
the rest until all before it is written. It lets the next one begin first of all: so weights are
read ahead through several kernels, as far as there is room for their programs. Whatever changes
weights is no such kernel, and between it and the first that reads ahead lies another that is none:
a step begins with an embedding. By the same reason kernels/append_attention.py may read ahead what the last step
has left, keys, values and how many there are: no two of its calls for one cache and one module come
without such a kernel between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = (9, 0)


def supports_pdl(x: Tensor) -> bool:
    """Whether kernels at the device of x can be pdl_options so."""
    waits = getattr(getattr(tl.extra, "cuda", None), "gdc_wait", None) is not None
    nvidia = x.is_cuda and torch.version.hip is None
    return nvidia and waits and torch.cuda.get_device_capability(x.device) >= HOPPER


def pdl_options(early: bool) -> dict[str, bool]:
    """What a launch is told."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """The next kernel may begin when all programs of this one have come here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def grid_wait(PDL: tl.constexpr):
    """From here on all that came before can be read, and what it read be written over."""
    if PDL:
        tl.extra.cuda.gdc_wait()
