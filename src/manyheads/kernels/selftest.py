"""Self-tests: a kernel compared with its formula in float64, on the device that will run it.

The module of a kernel has `case(new, *sizes)`, which yields pairs (result, reference), and
`SELFTEST`, the sizes with which it must pass before it is used on a device: the variants that are
compiled separately, with the smallest and the largest blocks. `tests/kernels/` runs the same cases
with more sizes.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

TOLERANCE = 0.02  # relative error in the Frobenius norm, in bfloat16
SCALE, EPS = 0.2, 0.1  # of attention scores and of norms in self-tests

FUSED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # that kernels compute
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
}

Comparison = tuple[Tensor, Tensor]  # the result of a kernel, and the float64 reference
Lengths = tuple[int, ...] | None  # of padded sequences


class Inputs:
    """Random tensors on a device; their sizes and order determine the values."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(1)

    def randn(self, *shapes: Sequence[int], dtype: torch.dtype | None = None) -> list[Tensor]:
        settings: Any = {"generator": self.generator, "device": self.device}
        return [torch.randn(*shape, dtype=dtype or self.dtype, **settings) for shape in shapes]

    def masks(
        self, queries: int, keys: int, causal: bool, lengths: Lengths
    ) -> tuple[Tensor | None, Tensor]:
        """The padding mask [b s] of sequences of these lengths, and the allowed pairs [b 1 t s]."""
        allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=self.device)
        allowed = allowed.tril() if causal else allowed
        if lengths is None:
            return None, allowed
        ends = torch.tensor(lengths, device=self.device)[:, None]
        padding_mask = torch.arange(keys, device=self.device) < ends
        return padding_mask, allowed & padding_mask[:, None, None]


def run_selftest(kernel: str, device: torch.device) -> list[Comparison]:
    """The results of a kernel in bfloat16, with their references."""
    module = import_module(f"manyheads.kernels.{kernel}")
    return [pair for sizes in module.SELFTEST for pair in module.case(Inputs(device), *sizes)]


def passes(selftest: Callable[[], Sequence[Comparison]], kernel: str) -> bool:
    """True if every result of a self-test is near its reference; warns if not."""
    try:
        errors = [relative_error(result, expected) for result, expected in selftest()]
    except torch.OutOfMemoryError:  # the kernel may still be correct
        raise
    except Exception as error:  # PyTorch's own implementation takes over
        warnings.warn(f"kernel {kernel} is not used: {error}", stacklevel=2)
        return False
    if not all(error < TOLERANCE for error in errors):  # also false for NaN
        warnings.warn(f"kernel {kernel} is not used: relative errors {errors}", stacklevel=2)
        return False
    return True


def relative_error(result: Tensor, expected: Tensor) -> float:
    """‖result − expected‖ / ‖expected‖, computed in float64."""
    result, expected = result.detach().double(), expected.detach().double()
    return float((result - expected).norm() / expected.norm())


def compare(
    kernel: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> Iterator[Comparison]:
    """Output and gradients of a kernel, and of its formula computed in float64."""
    rounded = [x.detach().clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    result, expected = kernel(*rounded), formula(*exact)
    grad = torch.linspace(-2, 1, result.numel()).sin().view(result.shape).to(result)
    yield result, expected
    yield from zip(
        torch.autograd.grad(result, rounded, grad),
        torch.autograd.grad(expected, exact, grad.double()),
        strict=True,
    )


def check_dropped(mask: Tensor, p: float) -> None:
    """Raise an error if the fraction of zeros in a dropout mask is not about p."""
    dropped = (mask == 0).double().mean()
    if not (dropped - p).abs() < 0.05 + mask.numel() ** -0.5:
        raise ValueError(f"dropout drops {dropped:.2f} instead of {p}")


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Any = 0.0, dropout: Any = 1.0
) -> Tensor:
    """(softmax(q kᵀ · scale + bias) ∘ dropout) v over allowed pairs; 0 for a query without keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * SCALE + bias
    if allowed is None:
        return (scores.softmax(-1) * dropout) @ v
    empty = ~allowed.any(-1, keepdim=True)
    weights = scores.masked_fill(~(allowed | empty), -torch.inf).softmax(-1)
    return (weights.masked_fill(empty, 0.0) * dropout) @ v
