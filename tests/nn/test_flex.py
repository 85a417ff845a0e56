"""FlexAttention: rules and biases as functions of indices are what dense computes.

The kernel itself is for a GPU (tests/test_gpu.py); here its uncompiled form, which has no backward.
"""

import pytest
import torch
from textbook import POSITIONS, RULES

from manyheads.nn.attention import attend
from manyheads.nn.block import Architecture, Stack
from manyheads.nn.exact_attention import AttentionSizes
from manyheads.nn.flex import Flex, flexible
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position, PositionSizes, bias_by_distance
from manyheads.nn.scores import Dot, ScaledDot

# FlexAttention traces the rules, which the hook that checks shapes does not let it.
pytestmark = pytest.mark.compile

SIZES = PositionSizes(dim=8, heads=2, head_dim=4, max_length=6, causal=False)


@pytest.mark.parametrize(
    ("name", "position"),
    [*((name, "none") for name in RULES), ("full", "t5"), ("causal", "alibi"), ("either", "t5")],
)
@torch.no_grad()
def test_equals_dense(name: str, position: str) -> None:
    torch.manual_seed(1)
    rule = RULES[name][0]
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    placed = POSITIONS[position][0].build(SIZES)
    real = torch.arange(6) < torch.tensor([[6], [4]])
    for shown in (None, real):
        index = torch.arange(6)[None]
        sight = AttentionMask(rule, index, index, shown, square=True)
        found = flexible(q, k, v, sight, ScaledDot().build(2, 4), placed)
        expected = attend(q, k, v, rule=rule, real=shown, position=placed)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@torch.no_grad()
def test_scale_and_shared_heads() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 6, 4), torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)
    index = torch.arange(6)[None]
    sight = AttentionMask(RULES["causal"][0], index, index, square=True)
    found = flexible(q, k, v, sight, Dot().build(4, 4), Position())
    expected = attend(q, k, v, rule="causal", score="dot")
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_what_a_bias_hangs_on() -> None:
    """A table of distances has the bias of every pair, where a position says so."""
    torch.manual_seed(1)
    q, places = torch.randn(1, 2, 6, 4), torch.arange(6)[None]
    for config, _ in POSITIONS.values():
        position = config.build(SIZES)
        bias = position.score(q, places, places)
        if bias is not None and position.is_relative_bias:
            table = bias_by_distance(position, q)
            assert table is not None
            expected = table[:, places.T.mul(-1) + places + 5]
            torch.testing.assert_close(bias[0], expected)
        else:
            assert bias is None or config.kind in ("shaw", "relative")  # by the query too


def test_dropped_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="attention_dropout=0"):
        Stack(Architecture(attention=Flex(), attention_dropout=0.1), causal=True)
    sizes = AttentionSizes(heads=1, kv_heads=1, head_dim=4, key_dim=4, max_length=8)
    assert Flex().build(sizes) == Flex()
