"""Choose the implementation of an operation: the first that supports the call and is verified.

An operation has a plain tuple of implementations in order of preference. The last one is PyTorch's
and supports every call. A Triton kernel runs its self-test (kernels/selftest.py) once on each
device before its first use. If the test fails, a warning names the kernel and the next
implementation runs: the device may be too old, or have no compiler. A passed test leaves an empty
file in the user's cache folder, so that the next process starts without it.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from manyheads.kernels.selftest import passes, run_selftest

HAS_TRITON = find_spec("triton") is not None
HALF_PRECISION = (torch.bfloat16, torch.float16)

Call = TypeVar("Call")


@dataclass(frozen=True)
class Implementation(Generic[Call]):
    """One way to compute an operation.

    `supports` is a pure function of shapes and dtypes. `kernel` names the module of `kernels/` with
    the Triton kernel and its self-test; PyTorch's own operations have none.
    """

    supports: Callable[[Call], bool]
    run: Callable[[Call], Any]
    kernel: str | None = None


def first_supported(
    implementations: tuple[Implementation[Call], ...], call: Call, x: Tensor
) -> Implementation[Call]:
    """The first implementation that runs on the device of x and supports the call."""
    for implementation in implementations:
        kernel = implementation.kernel
        if kernel is not None and not runs_triton(x):
            continue
        if implementation.supports(call) and (kernel is None or verified(kernel, x.device.index)):
            return implementation
    raise AssertionError("the last implementation supports every call")


def runs_triton(x: Tensor) -> bool:
    """True if the tensor is on a device that Triton compiles for."""
    return HAS_TRITON and x.device.type == "cuda"


_VERIFIED: dict[tuple[str, int], bool] = {}  # by kernel and device index


def verified(kernel: str, index: int) -> bool:
    """True if a kernel passed its self-test on a CUDA device; tested at the first call.

    The kernel is a name because compiled code can pass strings, not functions.
    """
    if (kernel, index) not in _VERIFIED:
        passed = passed_tests(index) / kernel
        _VERIFIED[kernel, index] = passed.exists() or _run_selftest(kernel, index)
        if _VERIFIED[kernel, index]:
            with contextlib.suppress(OSError):  # without a cache every process runs the tests
                passed.parent.mkdir(parents=True, exist_ok=True)
                passed.touch()
    return _VERIFIED[kernel, index]


def _run_selftest(kernel: str, index: int) -> bool:
    device = torch.device("cuda", index)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        return passes(lambda: run_selftest(kernel, device), kernel)


@cache
def passed_tests(index: int) -> Path:
    """The folder of passed self-tests: one for each device, driver, compiler and kernel source."""
    import triton

    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    parts = (
        torch.cuda.get_device_name(index),
        torch.cuda.get_device_capability(index),
        getattr(torch._C, "_cuda_getDriverVersion", int)(),  # AMD's build lacks it
        torch.__version__,
        triton.__version__,
        hashlib.sha256(sources).hexdigest(),
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "manyheads" / "kernels" / hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# The effect of `torch.compiler.assume_constant_result`, which would import the compiler (a second).
verified._dynamo_marked_constant = True  # type: ignore[attr-defined]
