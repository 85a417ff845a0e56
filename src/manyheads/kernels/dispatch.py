"""Which of our own kernels are used: those that a device has tried out and found right.

Triton comes with PyTorch for a GPU alone, and a device may be too old or have no compiler beside
it: then PyTorch's own kernels are there. (Those of kernels/biased_attention and kernels/cross_entropy are taken untried.)
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

TRITON = find_spec("triton") is not None
HALF = (torch.bfloat16, torch.float16)
# Places whose pairs one program of kernels/short_attention holds, by the channels of a head: more would not fit
# into the memory that its threads share.
SHORT = {16: 128, 32: 128, 64: 128, 128: 64}
FOUND: dict[tuple[str, str, int], bool] = {}  # by room, what of it, and the device's number
NEAR = 0.02  # of the norm of what it should be, in bfloat16


def trusted(room: str, index: int, what: str = "trial") -> bool:
    """Tried out once on each device. Not by `functools.cache`, which would be compiled."""
    if (room, what, index) not in FOUND:
        trial = getattr(import_module(f"manyheads.kernels.{room}"), what)
        device = torch.device("cuda", index)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            FOUND[room, what, index] = agrees(lambda: trial(device), room)
    return FOUND[room, what, index]


# What `torch.compiler.assume_constant_result` does; asking it would import the compiler, a second.
trusted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def agrees(trial: Callable[[], Sequence[tuple[Tensor, Tensor]]], room: str) -> bool:
    """Whether all pairs of a trial, what a kernel gave and what is right, are near each other."""
    try:
        pairs = trial()
        apart = [
            float((one.detach().double() - other.detach()).norm() / other.detach().norm())
            for one, other in pairs
        ]
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except Exception as error:  # whatever it is, there is another way
        warnings.warn(f"without our kernel in kernels/{room}.py: {error}", stacklevel=2)
        return False
    if not all(one < NEAR for one in apart):  # also what is no number
        warnings.warn(
            f"without our kernel in kernels/{room}.py: it is off by {apart}", stacklevel=2
        )
        return False
    return True


def unheard(*parts: nn.Module) -> bool:
    """Whether nobody listens to these parts, which a kernel for several of them would not call."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not any(getattr(part, kind) for part in parts for kind in kinds)


def launched_at(x: Tensor) -> AbstractContextManager[object]:
    """The device of a tensor as the one where kernels are launched."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
