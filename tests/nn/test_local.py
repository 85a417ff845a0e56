"""Local attention: dense attention under a pattern, at a cost linear in the length.

tests/nn/test_attention.py compares it with `Dense` for every score, position and mask rule.
"""

from itertools import product
from typing import Any

import pytest
import torch
from textbook import POSITIONS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.nn.attention import AttentionInputs, Dense
from manyheads.nn.local import MIN_BLOCK, Local, LocalAttention, Longformer
from manyheads.nn.masks import (
    AttentionMask,
    Both,
    causal,
    full,
    make_mask,
)
from manyheads.nn.positions import Position, PositionSizes
from manyheads.nn.scores import InnerScore

SCORE = InnerScore(0.5)
CASES = [
    Local(size=8),
    Longformer(window=5),
    Longformer(window=40),
    Longformer(window=3, globals=4),
    Longformer(window=3, globals=60),
]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def gradients(function: Any, tensors: list[Tensor], mask: AttentionMask, position: Position) -> Any:
    """The output and the gradients of q, k and v."""
    tensors = [x.clone().requires_grad_() for x in tensors]
    out = function(AttentionInputs(*tensors, mask, SCORE, position))
    return [
        out,
        *torch.autograd.grad(out, tensors, torch.linspace(-1, 2, out.numel()).view_as(out)),
    ]


@pytest.mark.parametrize("function", CASES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 33, 75, 96])
def test_blocks_may_end_anywhere(function: LocalAttention, length: int) -> None:
    """Blocks and windows of their real size, in rows of any length, padded anywhere."""
    tensors, index = [normal(3, 2, length, 4) for _ in range(3)], torch.arange(length)
    real = torch.stack([index < 35, index >= 38, (index <= 10) | (index >= 60)])
    for rule, padding_mask in product((full, causal), (None, real)):
        mask = make_mask(rule, length, padding_mask=padding_mask)
        near = AttentionMask(
            Both(rule, function.pattern), mask.query_positions, mask.key_positions, padding_mask
        )
        pairs = zip(
            gradients(function, tensors, mask, Position()),
            gradients(Dense(), tensors, near, Position()),
            strict=True,
        )
        for result, expected in pairs:
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def test_keys_that_are_all_too_far() -> None:
    """A step whose neighbours are not among the keys gives zeros."""
    q, k, v = normal(1, 2, 1, 4), normal(1, 2, 9, 4), normal(1, 2, 9, 4)
    mask = AttentionMask(full, torch.tensor([[50]]), torch.arange(9)[None])
    for function in (Local(size=8), Longformer(window=5)):
        assert not function(AttentionInputs(q, k, v, mask, SCORE, Position())).any()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


BOTH = pytest.mark.parametrize("function", [Local(size=32), Longformer(window=16, globals=4)])


@BOTH
@pytest.mark.parametrize("position", ["none", "shaw", "t5", "alibi"])
def test_nothing_is_as_large_as_the_square(function: LocalAttention, position: str) -> None:
    """Forward and backward, masks and biases included: n × (keys of a block) for each head."""
    length, heads = 2048, 2
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=length, causal=False)
    module = POSITIONS[position][0].build(sizes)
    tensors = [torch.randn(1, heads, length, 4) for _ in range(3)]
    for rule in (full, causal):
        mask = make_mask(rule, length, padding_mask=torch.arange(length)[None] < length - 5)
        with Largest() as largest:
            gradients(function, tensors, mask, module)
        assert 0 < largest.elements <= heads * length * (MIN_BLOCK + 2 * 16 + 4)
