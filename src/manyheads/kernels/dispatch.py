"""Which implementation of an operation runs: the first one that supports the call and is correct.

Every operation has a plain tuple of implementations in order of preference; the last one is
PyTorch's own and supports everything. A Triton kernel compares itself with a float64 reference
once on each device before it is used, and is left out with a warning if it fails: the device may be
too old, or have no compiler.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

HAS_TRITON = find_spec("triton") is not None
HALF_PRECISION = (torch.bfloat16, torch.float16)
TOLERANCE = 0.02  # relative error in the Frobenius norm, in bfloat16

Call = TypeVar("Call")
Comparison = tuple[Tensor, Tensor]  # what a kernel computed, and the float64 reference
SelfTest = Callable[[torch.device], Sequence[Comparison]]


@dataclass(frozen=True)
class Implementation(Generic[Call]):
    """One way to compute an operation.

    `supports` is a pure function of shapes, dtypes and device. Kernels have a `selftest`; PyTorch's
    own operations need none.
    """

    name: str
    supports: Callable[[Call], bool]
    run: Callable[[Call], Any]
    selftest: SelfTest | None = None

    def __post_init__(self) -> None:
        if self.selftest is not None:
            register_selftest(self.name, self.selftest)


def first_supported(
    implementations: tuple[Implementation[Call], ...], call: Call, device: torch.device
) -> Implementation[Call]:
    """The first implementation that supports the call and has passed its self-test."""
    for implementation in implementations:
        if implementation.supports(call) and (
            implementation.selftest is None or verified(implementation.name, device.index)
        ):
            return implementation
    raise AssertionError("the last implementation supports every call")


_SELFTESTS: dict[str, SelfTest] = {}
_VERIFIED: dict[tuple[str, int], bool] = {}  # by name and device index


def register_selftest(name: str, selftest: SelfTest) -> None:
    """Register a self-test under a name: compiled code can pass strings, not functions."""
    _SELFTESTS[name] = selftest


def verified(name: str, index: int) -> bool:
    """True if a kernel passed its self-test on a CUDA device; tested at the first call."""
    if (name, index) not in _VERIFIED:
        device = torch.device("cuda", index)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            _VERIFIED[name, index] = passes(lambda: _SELFTESTS[name](device), name)
    return _VERIFIED[name, index]


# The effect of `torch.compiler.assume_constant_result`, which would import the compiler (a second).
verified._dynamo_marked_constant = True  # type: ignore[attr-defined]


def passes(selftest: Callable[[], Sequence[Comparison]], name: str) -> bool:
    """True if every result of a self-test is near its reference; warns if not."""
    try:
        errors = [
            float((result.detach().double() - expected.detach()).norm() / expected.detach().norm())
            for result, expected in selftest()
        ]
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except Exception as error:  # PyTorch's own implementation takes over
        warnings.warn(f"kernel {name} is not used: {error}", stacklevel=2)
        return False
    if not all(error < TOLERANCE for error in errors):  # also false for NaN
        warnings.warn(f"kernel {name} is not used: relative errors {errors}", stacklevel=2)
        return False
    return True


def runs_triton(x: Tensor) -> bool:
    """True if the tensor is on a device that Triton compiles for."""
    return HAS_TRITON and x.device.type == "cuda"


def has_hooks(*modules: nn.Module) -> bool:
    """True if any of these modules has hooks; a kernel that replaces several would skip them."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in modules for kind in kinds)


def device_guard(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the device of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
