"""FlexAttention: a rule and a bias compiled into one kernel that skips what nobody sees.

PyTorch's kernel for a GPU takes a rule as a predicate over indices and a bias as a function of
them. Blocks of 128 × 128 pairs that a rule rules out whole are never computed, and nothing of
n × n is held. Elsewhere than on a GPU it has no backward pass, and this is the fused core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from manyheads import ops
from manyheads.errors import UserError
from manyheads.nn.exact_attention import AttentionSizes, ExactAttention, Fused
from manyheads.nn.masks import AttentionMask, Both, Either, Full, Rule, SameDocument
from manyheads.nn.positions import Position, bias_by_distance
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import Keys, Queries, Values
from manyheads.ops import share_heads

AttentionOutput = Float[Tensor, "b h t c"]
Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) → may it look?"""


NARROWEST = 16  # channels of a head that the kernel can take
KERNELS = 64  # as many may be compiled: one for each rule, bias, precision and kind of pass


@dataclass(frozen=True)
class Flex(ExactAttention):
    """Any rule; biases that hang on the distance alone (ALiBi, T5's buckets)."""

    kind: ClassVar[str] = "flex"

    def build(self, sizes: AttentionSizes) -> "Flex":
        if sizes.dropout:
            raise UserError(
                "the flex core drops no weights: set model.attention_dropout=0, or choose another "
                "core (model.attention=fused)"
            )
        return self

    def check(self, score: Score, position: Position) -> None:
        Fused().check(score, position)

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        mask: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> AttentionOutput:
        table = position.is_relative_bias or not position.has_bias
        wide = min(q.shape[-1], v.shape[-1]) >= NARROWEST and type(score) is InnerScore
        if not ops.has_flex_attention(q) or not mask.square or not table or not wide:
            return Fused()(q, k, v, mask, score, position, dropout)
        return flexible(q, k, v, mask, score, position, *_compiled())


def flexible(
    q: Queries,
    k: Keys,
    v: Values,
    mask: AttentionMask,
    score: Score,
    position: Position,
    kernel: Callable[..., Any] = flex_attention,
    make: Callable[..., BlockMask] = create_block_mask,
) -> AttentionOutput:
    """Attention of a square mask by FlexAttention."""
    assert isinstance(score, InnerScore)
    heads, length = q.shape[1], q.shape[2]
    f, g = score.factors(q, share_heads(k, heads))
    bias = bias_by_distance(position, q) if position.has_bias else None

    def add(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[head, key - query + length - 1]

    mixed: Tensor = kernel(
        f,
        g,
        share_heads(v, heads),
        score_mod=None if bias is None else add,
        block_mask=blocks_of(mask, q.shape[0], make),
        scale=float(score.scale),
    )
    return mixed


_known: WeakKeyDictionary[AttentionMask, BlockMask | None] = WeakKeyDictionary()


def blocks_of(mask: AttentionMask, rows: int, make: Callable[..., BlockMask]) -> BlockMask | None:
    """Which blocks of pairs are seen whole, in part or not at all; None where all are whole."""
    if mask not in _known:  # one mask serves all layers
        _known[mask] = _blocks(mask, rows, make)
    return _known[mask]


def _blocks(mask: AttentionMask, rows: int, make: Callable[..., BlockMask]) -> BlockMask | None:
    if isinstance(mask.rule, Full) and mask.padding_mask is None:
        return None
    length, real = mask.key_positions.shape[1], mask.padding_mask
    by_rule = over_indices(mask.rule, rows)
    if real is not None:
        real = real.expand(rows, -1)
    alike = real is None and not _knows_rows(mask.rule)

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = by_rule(row, head, query, key)
        return own if real is None else own & real[row, key]

    return make(
        seen, None if alike else rows, None, length, length, device=str(mask.key_positions.device)
    )


def over_indices(rule: Rule, rows: int) -> Seen:
    """A rule over positions as a predicate over indices, which in a square mask are the same."""
    if isinstance(rule, SameDocument):
        documents = rule.documents.expand(rows, -1)
        return lambda row, head, query, key: documents[row, query] == documents[row, key]
    if isinstance(rule, Both | Either):
        first, second = over_indices(rule.first, rows), over_indices(rule.second, rows)
        if isinstance(rule, Both):
            return lambda *pair: first(*pair) & second(*pair)
        return lambda *pair: first(*pair) | second(*pair)
    if isinstance(rule, Full):
        return lambda row, head, query, key: key >= 0
    # The other rules compare positions, of single ones as well as of whole axes.
    return lambda row, head, query, key: rule(query, key)


def _knows_rows(rule: Rule) -> bool:
    if isinstance(rule, Both | Either):
        return _knows_rows(rule.first) or _knows_rows(rule.second)
    return isinstance(rule, SameDocument)


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernel, and the list of its blocks, which uncompiled would hold n × n truths."""
    ops.allow_recompilations(KERNELS)
    return torch.compile(flex_attention), torch.compile(create_block_mask)
