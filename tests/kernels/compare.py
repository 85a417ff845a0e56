"""Comparison of kernels with formulas, outputs and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def output_and_grads(
    f: Callable[..., Any], inputs: Sequence[Tensor], grad: Tensor | None = None
) -> list[Tensor]:
    """f of copies of the inputs, and their gradients along `grad` (drawn if None)."""
    copies = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = f(*copies)
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out.detach(), *torch.autograd.grad(out, copies, grad.to(out.dtype))]


def assert_kernel_equals(
    kernel: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    tolerance: float = 1e-5,
) -> None:
    """Relative to the size of each result; the formula is computed in float64."""
    results = output_and_grads(kernel, inputs)
    expected = output_and_grads(formula, [x.double() for x in inputs])
    for i, (result, reference) in enumerate(zip(results, expected, strict=True)):
        error = relative_error(result, reference)
        assert error < tolerance, f"result {i}: relative error {error:.2e}"


def relative_error(result: Tensor, expected: Tensor) -> float:
    expected = expected.detach()
    return float((result.detach().double() - expected).norm() / expected.norm())
