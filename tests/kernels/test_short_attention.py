"""Attention over short sequences, by heads and on projections."""

from typing import Any

import pytest
import torch
from tests.kernels.compare import assert_kernel_equals, output_and_grads
from torch import Tensor

from manyheads.kernels.short_attention import (
    dropout_mask,
    merge_heads,
    short_attention,
    short_projected,
)

SIZES = [(5, 5, 16), (16, 16, 32), (64, 64, 16), (7, 40, 16), (1, 33, 32)]


def formula(
    q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, causal: bool, mask: Any = 1.0
) -> Tensor:
    """softmax(q kᵀ · 0.3) v; zeros for a query without keys."""
    queries, keys = q.shape[2], k.shape[2]
    allowed = torch.ones(len(q), 1, queries, keys, dtype=torch.bool)
    if causal:
        allowed &= torch.arange(keys) <= torch.arange(queries)[:, None]
    if padding_mask is not None:
        allowed &= padding_mask[:, None, None]
    empty = ~allowed.any(-1, keepdim=True)
    scores = (q @ k.mT * 0.3).masked_fill(~allowed & ~empty, -torch.inf)
    return (scores.softmax(-1).masked_fill(empty, 0.0) * mask) @ v


def heads(length: int, width: int) -> Tensor:
    """[b h n c] with the strides of a projection."""
    return torch.randn(3, length, 2, width).transpose(1, 2)


@pytest.mark.parametrize("padding", [None, "rows", "shared"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), SIZES)
def test_heads_and_projections(
    queries: int, keys: int, width: int, causal: bool, padding: str | None
) -> None:
    if causal and queries != keys:
        pytest.skip("a causal mask is square")
    q, k, v = heads(queries, width), heads(keys, width), heads(keys, width)
    lengths = {"rows": [[keys], [max(1, keys - 4)], [0]], "shared": [[max(1, keys - 2)]]}
    padding_mask = torch.arange(keys) < torch.tensor(lengths[padding]) if padding else None
    settings = (padding_mask, causal, 0.3, None, 0.0)
    assert_kernel_equals(
        lambda *qkv: short_attention(*qkv, *settings),
        lambda *qkv: formula(*qkv, padding_mask, causal),
        (q, k, v),
    )
    grad = torch.randn(3, 2, queries, width)
    out, dq, dk, dv = output_and_grads(
        lambda *qkv: short_attention(*qkv, *settings), (q, k, v), grad
    )

    def merged(*parts: Tensor) -> Tensor:
        return torch.cat([merge_heads(x) for x in parts], -1)

    separate = output_and_grads(
        lambda x, memory: short_projected(x, memory, 2, *settings),
        (merged(q), merged(k, v)),
        merged(grad),
    )
    for result, expected in zip(separate, (merged(out), merged(dq), merged(dk, dv)), strict=True):
        assert torch.equal(result, expected)
    if queries == keys:
        joint = output_and_grads(
            lambda x: short_projected(x, None, 2, *settings), (merged(q, k, v),), merged(grad)
        )
        assert torch.equal(joint[0], merged(out))
        assert torch.equal(joint[1], merged(dq, dk, dv))


def test_dropout_is_the_same_in_both_passes_and_both_functions() -> None:
    q, k, v = torch.randn(3, 3, 2, 20, 32)
    seed = torch.tensor([1])
    mask, settings = dropout_mask(q, k, seed, 0.3), (None, True, 0.3, seed, 0.3)

    def projected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = torch.cat([merge_heads(x) for x in (q, k, v)], -1)
        out: Tensor = short_projected(qkv, None, 2, *settings)
        return out.unflatten(-1, (2, -1)).transpose(1, 2)

    for kernel in (lambda *qkv: short_attention(*qkv, *settings), projected):
        assert_kernel_equals(kernel, lambda *qkv: formula(*qkv, None, True, mask), (q, k, v))


def test_dropout_differs_by_seed_row_head_and_query() -> None:
    q, k = torch.randn(2, 3, 2, 20, 32)
    mask, other = (dropout_mask(q, k, torch.tensor([seed]), 0.3) for seed in (1, 2))
    assert set(mask.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(float((mask > 0).double().mean()) - 0.7) < 0.04
    for shifted in (other, mask.roll(1, 0), mask.roll(1, 1), mask.roll(1, 2)):
        agreement = (mask == shifted).double().mean()
        assert abs(float(agreement) - (0.7**2 + 0.3**2)) < 0.05


def test_operators_are_well_formed_for_any_strides() -> None:
    x = torch.randn(12, 96, 2).permute(2, 0, 1).requires_grad_()
    torch.library.opcheck(short_projected, (x, None, 2, None, True, 0.3, None, 0.0))
