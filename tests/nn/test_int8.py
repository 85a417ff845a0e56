"""Eight bits: exact where numbers are whole, near elsewhere, and every row by itself."""

import pytest
import torch
from torch import nn

from manyheads.decode.kv_cache import KVCache
from manyheads.errors import UserError
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.embedding import Output
from manyheads.nn.int8 import Product, in_int8, quantize

SIZES = {"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4}
MODELS = {
    "gpt": GptConfig(**SIZES, dropout=0.0),
    "gpt, untied, with a bias": GptConfig(
        **SIZES, tie="none", output=Output(bias="trained"), dropout=0.0
    ),
    "seq2seq": Seq2SeqConfig(**SIZES, dropout=0.0),
    "seq2seq, two tables": Seq2SeqConfig(**SIZES, tie="target", dropout=0.0),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


def test_numbers_keep_within_half_a_step() -> None:
    x = torch.randn(7, 33) * torch.logspace(-3, 3, 7)[:, None]
    whole, scale = quantize(x)
    assert whole.abs().amax(-1).tolist() == [127] * 7  # all of the eight bits are used
    assert ((whole * scale - x).abs() <= scale * 0.5001).all()
    nothing, _ = quantize(torch.zeros(2, 3))
    assert not nothing.any()


@pytest.mark.parametrize("biased", [True, False])
def test_products_of_whole_numbers_are_exact(biased: bool) -> None:
    weight = torch.randint(-127, 128, (9, 16)).double()
    x = torch.randint(-127, 128, (2, 5, 16)).double()
    weight[:, 0], x[..., 0] = 127, -127  # a step of each row is 1
    bias = torch.randn(9).double() if biased else None
    expected = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(Product(weight, bias)(x), expected, rtol=1e-12, atol=1e-9)


def test_what_a_row_gets_does_not_hang_on_the_others() -> None:
    product = Product(torch.randn(40, 32), torch.randn(40))
    x = torch.randn(6, 32)
    x[3] *= 1000  # would spoil a scale that all rows share
    assert torch.equal(product(x), torch.cat([product(row[None]) for row in x]))


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, tokens) if hasattr(model, "encoder") else model(tokens)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_nearly_the_same(name: str) -> None:
    model = MODELS[name].build().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    smaller, tokens = in_int8(model), torch.randint(50, (3, 9))
    assert not any(isinstance(part, nn.Linear) for part in smaller.modules())
    exact, near = logits_of(model, tokens), logits_of(smaller, tokens)
    assert 0 < float((exact - near).norm() / exact.norm()) < 0.05
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])  # it was a copy


def test_a_cached_step_is_the_full_pass() -> None:
    smaller, tokens = in_int8(MODELS["gpt"].build().eval()), torch.randint(50, (3, 9))
    cache = KVCache()
    with torch.no_grad():
        steps = [smaller(tokens[:, [place]], cache=cache) for place in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), logits_of(smaller, tokens), rtol=0, atol=2e-2)


def test_what_does_not_write_is_refused() -> None:
    with pytest.raises(UserError, match="models that write"):
        in_int8(BertConfig(**SIZES).build())
    with pytest.raises(UserError, match="for the CPU"):
        in_int8(MODELS["gpt"].build().to("meta"))
