"""Linear layers for decoding: copies that leave a model unchanged; int8 within its error bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyheads.decode import linears
from manyheads.decode.linears import (
    ONEDNN_ACTIVATIONS,
    Int8Linear,
    PrepackedLinear,
    UnfusedLinear,
    for_inference,
    quantize_int8,
    replace_linears,
    to_int8,
)
from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.layers import ACTIVATIONS, HeadConfig, Plain

SIZES: Any = {"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, "dropout": 0.0}
GPT = GptConfig(**SIZES)
MODELS = {
    "gpt": GPT,
    "untied with bias": replace(GPT, tie="none", output=HeadConfig(bias="trained")),
    "seq2seq": Seq2SeqConfig(**SIZES),
    "seq2seq, two tables": Seq2SeqConfig(**SIZES, tie="target"),
}
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-5}
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN"
)


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    inputs = (tokens, tokens) if hasattr(model, "encoder") else (tokens,)
    out: Tensor = model(*inputs)
    return out


def test_quantization_error_is_half_a_step() -> None:
    x = torch.randn(7, 33) * torch.logspace(-3, 3, 7)[:, None]
    integers, scale = quantize_int8(x)
    assert integers.abs().amax(-1).tolist() == [127] * 7
    assert ((integers * scale - x).abs() <= scale * 0.5001).all()
    assert not quantize_int8(torch.zeros(2, 3))[0].any()


def test_int8_is_exact_for_integers_and_row_by_row() -> None:
    weight = torch.randint(-127, 128, (9, 16)).double()
    x = torch.randint(-127, 128, (2, 5, 16)).double()
    weight[:, 0], x[..., 0] = 127, -127  # the scale of each row is 1
    for bias in (None, torch.randn(9).double()):
        expected = nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(Int8Linear(weight, bias)(x), expected, rtol=1e-12, atol=1e-9)
    linear, x = Int8Linear(torch.randn(40, 32), torch.randn(40)), torch.randn(6, 32)
    x[3] *= 1000
    assert torch.equal(linear(x), torch.cat([linear(row[None]) for row in x]))


@pytest.mark.parametrize("name", MODELS)
def test_int8_models_are_close_copies(name: str) -> None:
    model, tokens = MODELS[name].build().eval(), torch.randint(50, (3, 9))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    quantized = to_int8(model)
    assert not any(isinstance(part, nn.Linear) for part in quantized.modules())
    exact = logits(model, tokens)
    assert 0 < float((exact - logits(quantized, tokens)).norm() / exact.norm()) < 0.05
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("build", "fix"),
    [
        (lambda: BertConfig(**SIZES).build(), "remove --int8"),
        (lambda: GPT.build().to("meta"), "--device cpu"),
    ],
)
def test_int8_refuses_other_models_and_devices(build: Any, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        to_int8(build())


@needs_onednn
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 7), (130,), (1030,)])
def test_prepacked_linear(
    shape: tuple[int, ...], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "LARGE_WEIGHT", 0)
    linear = nn.Linear(40, 70, bias=biased)
    x = torch.randn(*shape, 40)
    y = PrepackedLinear(linear.weight, linear.bias)(x)
    torch.testing.assert_close(y, linear(x), **CLOSE)


@needs_onednn
def test_few_numbers_of_rows_reach_onednn() -> None:
    """PyTorch keeps a program for each."""
    padded = {rows: linears._padded_rows(rows) for rows in range(1, linears.MAX_PREPACKED_ROWS + 1)}
    assert len({*padded.values()}) < 37
    assert all(filled >= rows for rows, filled in padded.items())


@needs_onednn
@pytest.mark.parametrize("name", MODELS)
def test_prepacked_models_are_the_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "LARGE_WEIGHT", 0)
    model, tokens = MODELS[name].build().eval(), torch.randint(50, (3, 9))
    copy = for_inference(model, rows=9)
    assert not any(isinstance(part, nn.Linear) for part in copy.modules())
    for key, value in copy.state_dict().items():  # tensors that are not prepacked are shared
        assert value.data_ptr() == model.state_dict()[key].data_ptr()
    torch.testing.assert_close(logits(copy, tokens), logits(model, tokens), **CLOSE)


@needs_onednn
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu-tanh", "silu"])
@torch.no_grad()
def test_activations_in_a_product_and_after_it(
    activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "LARGE_WEIGHT", 0)
    model: Any = replace(GPT, feedforward=Plain(activation=activation)).build().eval()
    copy: Any = for_inference(model, rows=1)
    plain, fused = (x.decoder.blocks[0].feedforward for x in (model, copy))
    for rows in (3, 1030):  # the second is left to PyTorch
        x = torch.randn(1, rows, 32)
        torch.testing.assert_close(fused(x), plain(x), **CLOSE)
    assert fused.inner.activation == (activation if activation in ONEDNN_ACTIVATIONS else None)
    assert plain.activation is ACTIVATIONS[activation]


@needs_onednn
def test_the_copy_follows_the_weights() -> None:
    model = GPT.build().eval()
    first = for_inference(model, rows=1)
    assert for_inference(model, rows=8) is first is not model
    with torch.autocast("cpu", torch.bfloat16):
        assert for_inference(model, rows=1) is model
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    second, tokens = for_inference(model, rows=1), torch.randint(50, (2, 4))
    assert second is not first
    torch.testing.assert_close(logits(second, tokens), logits(model, tokens), **CLOSE)


def test_some_models_are_not_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "MAX_PREPACKED_BYTES", 1000)
    for model in (GPT.build().double(), GPT.build()):
        assert for_inference(model, rows=1) is model


def test_compiled_steps_separate_products_and_biases() -> None:
    model, tokens = GPT.build().eval(), torch.randint(50, (1, 1))
    copy = replace_linears(model, UnfusedLinear)
    torch.testing.assert_close(logits(copy, tokens), logits(model, tokens))
