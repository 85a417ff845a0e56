"""Choose the implementation of an operation: the first that supports the call and is verified.

An operation has a plain tuple of implementations in order of preference. The last one is PyTorch's
and supports every call. A Triton kernel runs its self-test once on each device before its first
use. If the test fails, a warning names the kernel and the next implementation runs: the device may
be too old, or have no compiler.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

HAS_TRITON = find_spec("triton") is not None
HALF_PRECISION = (torch.bfloat16, torch.float16)
ACTIVATION_KINDS = ("relu", "gelu", "gelu-tanh")  # the index is the constant KIND of kernels
TOLERANCE = 0.02  # relative error in the Frobenius norm, in bfloat16

Call = TypeVar("Call")
Comparison = tuple[Tensor, Tensor]  # the result of a kernel, and the float64 reference


@dataclass(frozen=True)
class Implementation(Generic[Call]):
    """One way to compute an operation.

    `supports` is a pure function of shapes and dtypes. `selftest` names an entry of `SELFTESTS`
    (kernels/selftests.py); every Triton kernel has one, PyTorch's own operations need none.
    """

    name: str
    supports: Callable[[Call], bool]
    run: Callable[[Call], Any]
    selftest: str | None = None


def first_supported(
    implementations: tuple[Implementation[Call], ...], call: Call, x: Tensor
) -> Implementation[Call]:
    """The first implementation that runs on the device of x and supports the call."""
    for implementation in implementations:
        selftest = implementation.selftest
        if selftest is not None and not runs_triton(x):
            continue
        if implementation.supports(call) and (
            selftest is None or verified(selftest, x.device.index)
        ):
            return implementation
    raise AssertionError("the last implementation supports every call")


def runs_triton(x: Tensor) -> bool:
    """True if the tensor is on a device that Triton compiles for."""
    return HAS_TRITON and x.device.type == "cuda"


_VERIFIED: dict[tuple[str, int], bool] = {}  # by name and device index


def verified(name: str, index: int) -> bool:
    """True if a kernel passed its self-test on a CUDA device; tested at the first call.

    The kernel has a name because compiled code can pass strings, not functions.
    """
    if (name, index) not in _VERIFIED:
        from manyheads.kernels.selftests import run_selftest

        device = torch.device("cuda", index)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cuda", enabled=False),
        ):
            _VERIFIED[name, index] = passes(lambda: run_selftest(name, device), name)
    return _VERIFIED[name, index]


# The effect of `torch.compiler.assume_constant_result`, which would import the compiler (a second).
verified._dynamo_marked_constant = True  # type: ignore[attr-defined]


def passes(selftest: Callable[[], Sequence[Comparison]], name: str) -> bool:
    """True if every result of a self-test is near its reference; warns if not."""
    try:
        errors = [relative_error(result, expected) for result, expected in selftest()]
    except torch.OutOfMemoryError:  # the kernel may still be correct
        raise
    except Exception as error:  # PyTorch's own implementation takes over
        warnings.warn(f"kernel {name} is not used: {error}", stacklevel=2)
        return False
    if not all(error < TOLERANCE for error in errors):  # also false for NaN
        warnings.warn(f"kernel {name} is not used: relative errors {errors}", stacklevel=2)
        return False
    return True


def relative_error(result: Tensor, expected: Tensor) -> float:
    """‖result − expected‖ / ‖expected‖, computed in float64."""
    result, expected = result.detach().double(), expected.detach().double()
    return float((result - expected).norm() / expected.norm())


def has_hooks(*modules: nn.Module) -> bool:
    """True if any of these modules has hooks; a kernel that replaces several would skip them."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in modules for kind in kinds)
