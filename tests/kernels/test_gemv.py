"""Matrix–vector products with norm, activation and residual sum, and models that decode by them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyheads.kernels import gemv as kernels
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.layers import ACTIVATIONS, Gated, Norm, Plain, Residual
from manyheads.optimize import FusedResidualAdd, GemvLinear, with_gemv

CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK_ELEMENTS", 128)  # several rows of small matrices
    monkeypatch.setattr(kernels, "MAX_COLUMNS", 64)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (13, 40), (5, 150)])
@torch.no_grad()
def test_linear(outputs: int, inputs: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if biased else None
    linear = GemvLinear(weight, bias)
    for shape in ((inputs,), (1, 1, inputs), (3, inputs)):
        x = torch.randn(shape)
        torch.testing.assert_close(linear(x), F.linear(x, weight, bias), **CLOSE)
    x, residual = torch.randn(1, 1, inputs) + 0.5, torch.randn(1, 1, outputs)
    norms = nn.LayerNorm(inputs), nn.RMSNorm(inputs, eps=0.1)
    for norm, kind in zip((*norms, norms[0]), kernels.ACTIVATION_KINDS, strict=True):
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        linear.norm, linear.activation = norm, kind
        expected = ACTIVATIONS[kind](F.linear(norm(x), weight, bias))
        for fused_elements in (0, 2**22):  # the norm in a kernel of its own, or in the product
            monkeypatch.setattr(kernels, "MAX_FUSED_NORM_ELEMENTS", fused_elements)
            torch.testing.assert_close(linear(x), expected, **CLOSE)
            total = FusedResidualAdd(linear, None)(residual, lambda _: linear(x))
            torch.testing.assert_close(total, expected + residual, **CLOSE)
            assert linear.residual is None


@torch.no_grad()
def test_a_mean_far_from_zero_does_not_cancel_the_deviation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, norm, weight = 1000.0 + torch.randn(40), nn.LayerNorm(40), torch.randn(9, 40)
    expected = norm.double()(x.double()) @ weight.double().mT
    linear = GemvLinear(weight, None)
    linear.norm = norm.float()
    for fused_elements in (0, 2**22):
        monkeypatch.setattr(kernels, "MAX_FUSED_NORM_ELEMENTS", fused_elements)
        torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=1e-4)


def test_float64_is_left_to_pytorch() -> None:
    weight, x = torch.randn(9, 60).double(), torch.randn(60).double()
    torch.testing.assert_close(GemvLinear(weight, None)(x), weight @ x, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("config", "norm", "feedforward"),
    [
        (GptConfig, Norm(), Plain(activation="gelu")),
        (GptConfig, Norm(), Gated()),
        (GptConfig, Norm(form="rms", eps=0.01), Plain(activation="tanh")),
        (GptConfig, Norm(placement="post"), Plain()),
        (Seq2SeqConfig, Norm(), Plain()),
        (Seq2SeqConfig, Norm(form="rms", eps=0.01), Gated()),
    ],
)
@torch.no_grad()
def test_a_model_for_one_row_is_the_model(
    config: Any, norm: Norm, feedforward: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if norm.form == "rms":
        monkeypatch.setattr(kernels, "MAX_FUSED_NORM_ELEMENTS", 0)
    sizes = {"vocab_size": 30, "dim": 24, "heads": 2, "layers": 1, "ffn_dim": 40, "max_length": 16}
    model = config(**sizes, norm=norm, feedforward=feedforward).build().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    copy = with_gemv(model)
    token = torch.randint(3, 30, (1, 1))
    inputs = (token,) if config is GptConfig else (torch.randint(3, 30, (1, 5)), token)
    expected = model(*inputs)
    assert not calls
    torch.testing.assert_close(copy(*inputs), expected, **CLOSE)
    pre = norm.placement == "pre"
    assert calls.count("gemv") >= 4
    gated, fuses = isinstance(feedforward, Gated), norm.form == "layer"
    assert ("norm_row" in calls) == (pre and (gated or not fuses))
    residuals = {type(block.attention_residual) for block in copy.decoder.blocks}
    assert residuals == {FusedResidualAdd if pre else Residual}
    assert all(type(block.attention_residual) is Residual for block in model.decoder.blocks)
