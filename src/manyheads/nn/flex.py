"""FlexAttention: a mask rule and a bias compiled into one kernel that skips masked blocks.

PyTorch's kernel for a GPU takes a rule as a predicate over indices and a bias as a function of
them. Blocks of 128 × 128 pairs that the rule excludes are never computed, and no n × n tensor is
held. On other devices it has no backward pass, and `flex` is `fused`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from manyheads import ops
from manyheads.errors import UserError
from manyheads.nn.attention import AttentionInputs, AttentionSizes, ExactAttention, Fused
from manyheads.nn.masks import AttentionMask, Both, Either, Full, Rule, SameDocument
from manyheads.nn.positions import Position, bias_by_distance
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import HeadOutput

IndexRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query index, key index) → allowed?"""

NARROWEST = 16  # fewest channels of a head that the kernel supports
RECOMPILE_LIMIT = 64  # kernels: one for each rule, bias, precision and kind of pass


@dataclass(frozen=True)
class Flex(ExactAttention):
    """Any mask rule; biases that depend on the distance only (ALiBi, T5's buckets)."""

    kind: ClassVar[str] = "flex"

    def build(self, sizes: AttentionSizes) -> "Flex":
        if sizes.dropout:
            raise UserError(
                "model.attention=flex has no dropout of weights: set model.attention_dropout=0 "
                "or model.attention=fused"
            )
        return self

    def check(self, score: Score, position: Position) -> None:
        Fused().check(score, position)

    def __call__(self, inputs: AttentionInputs) -> HeadOutput:
        q, v, position = inputs.q, inputs.v, inputs.position
        supported = (
            ops.has_flex_attention(q)
            and inputs.mask.square
            and (position.is_relative_bias or not position.has_bias)
            and type(inputs.score) is InnerScore
            and min(q.shape[-1], v.shape[-1]) >= NARROWEST
        )
        return flex(inputs, *_compiled()) if supported else Fused()(inputs)


def flex(
    inputs: AttentionInputs,
    kernel: Callable[..., Any] = flex_attention,
    make_blocks: Callable[..., BlockMask] = create_block_mask,
) -> HeadOutput:
    """Attention of a square mask by FlexAttention."""
    q, score = inputs.q, inputs.score
    assert isinstance(score, InnerScore)
    batch, heads, length, _ = q.shape
    f, g = score.factors(q, ops.share_heads(inputs.k, heads))
    bias = bias_by_distance(inputs.position, q) if inputs.position.has_bias else None

    def add(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[head, key - query + length - 1]

    out: Tensor = kernel(
        f,
        g,
        ops.share_heads(inputs.v, heads),
        score_mod=None if bias is None else add,
        block_mask=_block_mask(inputs.mask, batch, make_blocks),
        scale=float(score.scale),
    )
    return out


_cached: WeakKeyDictionary[AttentionMask, BlockMask | None] = WeakKeyDictionary()


def _block_mask(
    mask: AttentionMask, rows: int, make_blocks: Callable[..., BlockMask]
) -> BlockMask | None:
    """Which blocks of pairs are allowed, partly allowed or excluded; None if all are allowed."""
    if mask in _cached:  # one mask serves all layers
        return _cached[mask]
    blocks = None
    if not isinstance(mask.rule, Full) or mask.padding_mask is not None:
        length, padding_mask = mask.key_positions.shape[1], mask.padding_mask
        by_rule = _over_indices(mask.rule, rows)
        if padding_mask is not None:
            padding_mask = padding_mask.expand(rows, -1)
        rows_alike = padding_mask is None and not _has_documents(mask.rule)

        def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            by_rule_only = by_rule(row, head, query, key)
            return by_rule_only if padding_mask is None else by_rule_only & padding_mask[row, key]

        device = str(mask.key_positions.device)
        blocks = make_blocks(
            allowed, None if rows_alike else rows, None, length, length, device=device
        )
    _cached[mask] = blocks
    return blocks


def _over_indices(rule: Rule, rows: int) -> IndexRule:
    """A rule over positions as a predicate over indices, which in a square mask are the same."""
    if isinstance(rule, SameDocument):
        documents = rule.documents.expand(rows, -1)
        return lambda row, head, query, key: documents[row, query] == documents[row, key]
    if isinstance(rule, Both | Either):
        first, second = _over_indices(rule.first, rows), _over_indices(rule.second, rows)
        if isinstance(rule, Both):
            return lambda *pair: first(*pair) & second(*pair)
        return lambda *pair: first(*pair) | second(*pair)
    if isinstance(rule, Full):
        return lambda row, head, query, key: key >= 0
    # The other rules compare positions, so they also take single ones.
    return lambda row, head, query, key: rule(query, key)


def _has_documents(rule: Rule) -> bool:
    if isinstance(rule, Both | Either):
        return _has_documents(rule.first) or _has_documents(rule.second)
    return isinstance(rule, SameDocument)


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernel and the function that finds blocks, which uncompiled would hold n × n booleans."""
    ops.allow_recompilations(RECOMPILE_LIMIT)
    return torch.compile(flex_attention), torch.compile(create_block_mask)
