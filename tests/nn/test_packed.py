"""Packed attention: every text as if it were alone, and nothing computed for padding."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.data.batching import Ragged
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.nn.attention import attend
from manyheads.nn.exact_attention import Dense
from manyheads.nn.masks import AttentionMask, Rule, SameDocument, both, causal, full
from manyheads.nn.packed import Packed, texts_of
from manyheads.nn.positions import Position
from manyheads.nn.scores import ScaledDot

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [4, 4, 4, 4, 4, 4, 4], [1, 2, 2, 3, 3, 3, 3]])
REAL = torch.arange(7) < torch.tensor([[7], [5], [2]])
CASES = {
    "full": (full, REAL),
    "causal": (causal, REAL),
    "documents": (SameDocument(DOCUMENTS), None),
    "causal documents": (both(causal, SameDocument(DOCUMENTS)), None),
    "padded documents": (both(causal, SameDocument(DOCUMENTS)), REAL),
}


def heads(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4, 7, 4), (3, 2, 7, 4), (3, 2, 7, 4)]  # two queries share a key
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_at_real_tokens(name: str) -> None:
    rule, real = CASES[name]
    shown = torch.ones(3, 1, 7, 1, dtype=torch.bool) if real is None else real[:, None, :, None]
    results = []
    for core in ("packed", "dense"):
        q, k, v = heads()
        out = attend(q, k, v, rule=rule, real=real, core=core) * shown
        (out * torch.linspace(-1, 2, 4, dtype=out.dtype)).sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Scored(TorchDispatchMode):
    """Counts the pairs of tokens that attention kernels are asked for."""

    pairs = 0

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):  # type: ignore
        if "scaled_dot_product" in str(function):
            q, k = arguments[0], arguments[1]
            self.pairs += q.shape[0] * q.shape[-2] * k.shape[-2]
        return function(*arguments, **(settings or {}))


def test_nothing_is_computed_for_padding() -> None:
    """Σ length² pairs, not rows × longest²."""
    q, k, v = (x.detach().float() for x in heads())
    with Scored() as packed:
        attend(q, k, v, real=REAL, core="packed")
    assert packed.pairs == 7**2 + 5**2 + 2**2


def test_an_encoder_reads_a_padded_batch_as_single_texts() -> None:
    torch.manual_seed(2)
    sizes = {"vocab_size": 9, "dim": 8, "heads": 2, "layers": 2, "max_length": 8, "head": None}
    model = BertConfig(**sizes, attention=Packed()).build().double().eval()
    texts = [[1, 2, 3, 4, 5], [6, 7], [8, 1, 2, 3, 4, 5, 6, 7]]
    tokens, real = Ragged.of(texts).padded(np.arange(3), 0)
    together = model(tokens, real)
    for row, text in enumerate(texts):
        alone = model(torch.tensor([text]))
        torch.testing.assert_close(together[row, : len(text)], alone[0], rtol=0, atol=1e-12)


def test_packed_documents_of_a_language_model() -> None:
    torch.manual_seed(3)
    sizes = {"vocab_size": 9, "dim": 8, "heads": 2, "layers": 2, "max_length": 8}
    found, expected = (
        GptConfig(**sizes, attention=core).build().double().eval() for core in (Packed(), Dense())
    )
    found.load_state_dict(expected.state_dict())
    tokens = torch.randint(9, (3, 7))
    torch.testing.assert_close(
        found.hidden(tokens, documents=DOCUMENTS),
        expected.hidden(tokens, documents=DOCUMENTS),
        rtol=0,
        atol=1e-12,
    )


def test_a_batch_of_padding_alone_gives_zeros() -> None:
    q, k, v = heads()
    out = attend(q, k, v, real=torch.zeros(3, 7, dtype=torch.bool), core="packed")
    assert (out == 0).all()


def test_one_row_of_padding_serves_all() -> None:
    q, k, v = heads()
    found = Packed()(q, k, v, index(full, REAL[1:2]), ScaledDot().build(4, 4), Position())
    expected = attend(q, k, v, real=REAL[1:2].expand(3, -1))
    torch.testing.assert_close(found[:, :, :5], expected[:, :, :5], rtol=0, atol=1e-12)


def index(rule: Rule, real: Tensor | None, square: bool = True) -> AttentionMask:
    places = torch.arange(7)[None]
    return AttentionMask(rule, places, places, real, square=square)


def test_what_is_not_packed() -> None:
    """No padding, a cached step, and a document that goes on after another one."""
    assert texts_of(index(causal, None), 1) is None
    assert texts_of(index(full, REAL, square=False), 3) is None
    back = torch.tensor([[0, 0, 1, 1, 0, 0, 0]])
    assert texts_of(index(SameDocument(back), None), 1) is None
    found = texts_of(index(SameDocument(DOCUMENTS), REAL), 3)
    assert found is not None
    assert found.sizes == [2, 3, 2, 5, 1, 1]
