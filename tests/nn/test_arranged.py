"""Weights in another order are the same weights: what is computed with them is the same."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn import arranged as module
from manyheads.nn.arranged import (
    ON_THE_WAY,
    Arranged,
    Arrangement,
    arranged,
    can_be_arranged,
)
from manyheads.nn.embedding import Output
from manyheads.nn.feedforward import ACTIVATIONS, Plain

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN"
)
GPT = GptConfig(vocab_size=50, dim=32, layers=2, heads=4, dropout=0.0)
SEQ2SEQ = Seq2SeqConfig(vocab_size=50, dim=32, layers=2, heads=4, dropout=0.0)


@pytest.fixture(autouse=True)
def also_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 0)


OTHERS = [replace(GPT, tie="none"), replace(GPT, output=Output(bias="trained")), GPT]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 1), (2, 7), (130,), (3, 99)])
def test_a_product_is_the_same(shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(40, 70, bias=biased)
    x = torch.randn(*shape, 40)
    found = Arranged(layer.weight, layer.bias)(x)
    torch.testing.assert_close(found, layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", OTHERS)
@torch.no_grad()
def test_a_language_model_is_the_same(config: GptConfig) -> None:
    torch.manual_seed(1)
    model = config.build().eval()
    other, tokens = arranged(model, model.tokens), torch.randint(50, (3, 9))
    assert not any(isinstance(part, nn.Linear) for part in other.modules())
    assert other.tokens.weight is model.tokens.weight  # what is not arranged is shared
    torch.testing.assert_close(other(tokens), model(tokens), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_translator_is_the_same() -> None:
    torch.manual_seed(1)
    model = SEQ2SEQ.build().eval()
    other = arranged(model, model.target_table)
    source, target = torch.randint(50, (3, 9)), torch.randint(50, (3, 5))
    torch.testing.assert_close(other(source, target), model(source, target), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_under_autocast_the_model_writes_itself() -> None:
    model, arrangement = GPT.build().eval(), Arrangement()
    assert arrangement.of(model, model.tokens) is not model
    with torch.autocast("cpu", torch.bfloat16):
        assert arrangement.of(model, model.tokens) is model


def test_products_are_computed_with_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set()
    multiply = torch.ops.mkldnn._linear_pointwise

    class Counted:
        def _linear_pointwise(self, x: torch.Tensor, *more: object) -> torch.Tensor:
            met.add(x.shape[0])
            return multiply(x, *more)  # type: ignore[no-any-return]

        _reorder_linear_weight = torch.ops.mkldnn._reorder_linear_weight

    product = Arranged(torch.randn(8, 4), None)
    monkeypatch.setattr(torch.ops, "mkldnn", Counted())
    for rows in range(1, 1400):
        assert product(torch.randn(rows, 4)).shape == (rows, 8)
    assert len(met) < 37  # PyTorch keeps a program for each of them


def test_a_few_rows_of_a_small_matrix_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes less time than oneDNN takes to begin."""
    monkeypatch.setattr(module, "LARGE", 8 * 4 + 1)
    product, asked = Arranged(torch.randn(8, 4), None), []
    plain = product.plain
    monkeypatch.setattr(product, "plain", lambda x: (asked.append(len(x)), plain(x))[1])
    for rows in (module.LEAST_ROWS - 1, module.LEAST_ROWS, module.MOST_ROWS, module.MOST_ROWS + 1):
        product(torch.randn(rows, 4))
    assert asked == [module.LEAST_ROWS - 1, module.MOST_ROWS + 1]


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu-tanh", "silu"])
@torch.no_grad()
def test_activations_are_the_same_within_a_product_and_after_it(activation: str, rows: int) -> None:
    torch.manual_seed(1)
    config = replace(GPT, feedforward=Plain(activation=activation))  # type: ignore[arg-type]
    model = config.build().eval()
    other, x = arranged(model, model.tokens), torch.randn(1, rows, 32)
    one, same = model.decoder.blocks[0].feedforward, other.decoder.blocks[0].feedforward
    torch.testing.assert_close(same(x), one(x), rtol=1e-4, atol=1e-5)
    assert same.inner.activation == (activation if activation in ON_THE_WAY else None)
    assert one.activation is ACTIVATIONS[activation]  # the model itself is as it was


def test_new_weights_are_arranged_anew() -> None:
    model, kept = GPT.build().eval(), Arrangement()
    first = kept.of(model, model.tokens)
    assert kept.of(model, model.tokens) is first
    with torch.no_grad():
        model.decoder.blocks[0].feedforward.inner.weight.mul_(2)  # type: ignore[union-attr]
        second = kept.of(model, model.tokens)
        assert second is not first
        tokens = torch.randint(50, (2, 4))
        torch.testing.assert_close(second(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_arranged_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_be_arranged(GPT.build())
    assert not can_be_arranged(GPT.build().double())
    assert not can_be_arranged(BertConfig(vocab_size=50, dim=32, layers=1, heads=4).build())
    monkeypatch.setattr("manyheads.nn.arranged.MOST_BYTES", 1000)
    model = GPT.build()
    assert Arrangement().of(model, model.tokens) is model
