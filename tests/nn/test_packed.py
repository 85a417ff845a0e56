"""Packed attention: nothing is computed for padding. (tests/nn/test_attention.py: it is exact.)"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.models.gpt import GptConfig
from manyheads.nn.attend import attend
from manyheads.nn.attention import AttentionInputs, Dense
from manyheads.nn.masks import AttentionMask, SameDocument, causal, full, make_mask
from manyheads.nn.packed import Packed, find_texts
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [4, 4, 4, 4, 4, 4, 4], [1, 2, 2, 3, 3, 3, 3]])
REAL = torch.arange(7) < torch.tensor([[7], [5], [2]])


class ScoredPairs(TorchDispatchMode):
    """Counts the pairs of tokens that attention kernels compute."""

    pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            q, k = args[0], args[1]
            self.pairs += q.shape[0] * q.shape[-2] * k.shape[-2]
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_for_padding() -> None:
    """Σ length² pairs, not rows × longest²."""
    q, k, v = torch.randn(3, 4, 7, 4), torch.randn(3, 2, 7, 4), torch.randn(3, 2, 7, 4)
    with ScoredPairs() as packed:
        attend(q, k, v, real=REAL, implementation="packed")
    assert packed.pairs == 7**2 + 5**2 + 2**2
    nothing = attend(q, k, v, real=torch.zeros_like(REAL), implementation="packed")
    assert not nothing.any()


def test_packed_documents_of_a_language_model() -> None:
    sizes = {"vocab_size": 9, "dim": 8, "heads": 2, "layers": 2, "max_length": 8}
    packed, dense = (
        GptConfig(**sizes, attention=attention).build().double().eval()  # type: ignore[arg-type]
        for attention in (Packed(), Dense())
    )
    packed.load_state_dict(dense.state_dict())
    tokens = torch.randint(9, (3, 7))
    result, expected = (model.hidden(tokens, documents=DOCUMENTS) for model in (packed, dense))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_one_row_of_padding_serves_all() -> None:
    q, k, v = torch.randn(3, 3, 2, 7, 4, dtype=torch.float64)
    mask = make_mask(full, 7, padding_mask=REAL[1:2])
    result = Packed()(AttentionInputs(q, k, v, mask, InnerScore(0.5), Position()))
    expected = attend(q, k, v, real=REAL[1:2].expand(3, -1))
    torch.testing.assert_close(result[:, :, :5], expected[:, :, :5], rtol=0, atol=1e-12)


def test_what_is_not_packed() -> None:
    """No padding, a cached step, and a document that continues after another one."""
    assert find_texts(make_mask(causal, 7), 1) is None
    positions = torch.arange(7)[None]
    assert find_texts(AttentionMask(full, positions, positions, REAL), 3) is None
    split = SameDocument(torch.tensor([[0, 0, 1, 1, 0, 0, 0]]))
    assert find_texts(make_mask(split, 7), 1) is None
    texts = find_texts(make_mask(SameDocument(DOCUMENTS), 7, padding_mask=REAL), 3)
    assert texts is not None
    assert texts.sizes == [2, 3, 2, 5, 1, 1]
