"""Dropout, sum and norm in one kernel, and the norm before a sub-layer."""

from itertools import product

import pytest
import torch
from tests.kernels.compare import assert_kernel_equals
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels import layer_norm
from manyheads.kernels.layer_norm import add_norm, prenorm
from manyheads.kernels.reduce import sum_rows

SHAPES = [(3, 5, 64), (7, 48), (2, 1, 512), (9, 2048)]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_norm(shape: tuple[int, ...], p: float) -> None:
    width = shape[-1]
    inputs = [torch.randn(shape), torch.randn(shape), torch.randn(width), torch.randn(width)]
    seed = torch.tensor([2**40 + 7]) if p else None
    h = add_norm(*inputs, seed, p, 1e-5)[1]
    mask = ((h - inputs[0]).abs() > 1e-4 * inputs[1].abs()).double()
    assert width < 500 or abs(float(mask.mean()) - (1 - p)) < 0.06

    def formula(x: Tensor, f: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + mask / (1 - p) * f, (width,), weight, bias, 1e-5)

    assert_kernel_equals(lambda *x: add_norm(*x, seed, p, 1e-5)[0], formula, inputs)


def test_dropout_differs_by_seed_row_and_column() -> None:
    ones = torch.ones(64, 256)
    mask, other = (
        add_norm(0 * ones, ones, ones[0], ones[0], torch.tensor([seed]), 0.5, 1e-5)[1] > 0
        for seed in (1, 2)
    )
    for shifted in (other, mask.roll(1, 0), mask.roll(1, 1)):
        assert abs(float((mask == shifted).double().mean()) - 0.5) < 0.02


def test_programs_with_several_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_norm, "_processors", lambda x: 3)
    monkeypatch.setattr(layer_norm, "WARPS_PER_PROCESSOR", 1)
    assert_kernel_equals(
        lambda x, weight, bias: prenorm(x, weight, bias, 1e-5, torch.float32)[0],
        lambda x, weight, bias: F.layer_norm(x, (512,), weight, bias, 1e-5),
        [torch.randn(41, 512), torch.randn(512), torch.randn(512)],
    )


@pytest.mark.parametrize("uses", ["norm", "stream", "both"])
def test_prenorm_adds_the_gradients_of_norm_and_stream(uses: str) -> None:
    def used(normed: Tensor, stream: Tensor) -> Tensor:
        return {"norm": normed.sin(), "stream": stream.cos(), "both": normed.sin() + stream}[uses]

    inputs = [torch.randn(4, 32), *torch.randn(2, 32)]
    if uses == "stream":
        x = inputs[0].requires_grad_()
        [grad] = torch.autograd.grad(prenorm(*inputs, 1e-5, torch.float32)[1].cos().sum(), x)
        torch.testing.assert_close(grad, -x.sin())
        return
    assert_kernel_equals(
        lambda *x: used(*prenorm(*x, 1e-5, torch.float32)),
        lambda x, weight, bias: used(F.layer_norm(x, (32,), weight, bias, 1e-5), x),
        inputs,
    )


def test_operators_are_well_formed_for_any_strides() -> None:
    x, ones = torch.randn(16, 6).T, torch.ones(16)
    torch.library.opcheck(add_norm, (x, x, ones, ones, None, 0.0, 1e-5))


def test_sum_rows() -> None:
    for rows, width in product((1, 64, 65, 200), (1, 16, 50)):
        partial = torch.randn(rows, width)
        torch.testing.assert_close(sum_rows(partial), partial.sum(0), rtol=1e-5, atol=1e-5)
