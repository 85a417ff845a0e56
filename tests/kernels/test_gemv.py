"""Linear layers with norm, activation and residual sum for one row, and models that use them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyheads.kernels import gemv as kernels
from manyheads.kernels.selftest import FUSED_ACTIVATIONS
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.layers import ACTIVATIONS, Gated, Norm, Plain, Residual
from manyheads.optimize.gemv import GemvLinear, GemvResidual, with_gemv

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's sigmoid
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK_ELEMENTS", 128)  # several rows of small matrices
    monkeypatch.setattr(kernels, "MAX_COLUMNS", 64)


def gemv_linear(inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> Any:
    linear: Any = nn.Linear(inputs, outputs, dtype=dtype)
    linear.__class__ = GemvLinear
    linear.norm, linear.activation, linear.residual = None, "", None
    return linear


@pytest.mark.parametrize("fused_elements", [0, 2**22])  # the norm in its own kernel or the product
@pytest.mark.parametrize(("outputs", "inputs"), [(13, 40), (5, 150)])
@torch.no_grad()
def test_linear(
    outputs: int, inputs: int, fused_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_FUSED_NORM_ELEMENTS", fused_elements)
    linear = gemv_linear(inputs, outputs)
    norms = nn.LayerNorm(inputs), nn.RMSNorm(inputs, eps=0.1), None
    for norm, activation in zip(norms, FUSED_ACTIVATIONS, strict=True):
        linear.norm, linear.activation = norm, activation
        for shape in ((), (1, 1), (3,)):  # the last is left to PyTorch
            x, residual = torch.randn(*shape, inputs) + 0.5, torch.randn(*shape, outputs)
            product = F.linear(x if norm is None else norm(x), linear.weight, linear.bias)
            expected = ACTIVATIONS[activation](product)
            torch.testing.assert_close(linear(x), expected, **CLOSE)
            linear.residual = residual
            torch.testing.assert_close(linear(x), expected + residual, **CLOSE)
            linear.residual = None


def test_float64_is_left_to_pytorch() -> None:
    linear, x = gemv_linear(60, 9, torch.float64), torch.randn(60).double()
    expected = linear.weight @ x + linear.bias
    torch.testing.assert_close(linear(x), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("config", "norm", "feedforward"),
    [
        (GptConfig, Norm(), Gated()),
        (GptConfig, Norm(form="rms", eps=0.01), Plain(activation="tanh")),
        (GptConfig, Norm(placement="post"), Plain()),
        (Seq2SeqConfig, Norm(), Plain(activation="gelu")),
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
    pre, fuses_norm = norm.placement == "pre", norm.form == "layer"
    assert calls.count("gemv") >= 4
    assert ("norm_row" in calls) == (pre and (isinstance(feedforward, Gated) or not fuses_norm))
    residuals = {type(block.attention_residual) for block in copy.decoder.blocks}
    assert residuals == {GemvResidual if pre else Residual}
    assert all(type(block.attention_residual) is Residual for block in model.decoder.blocks)
