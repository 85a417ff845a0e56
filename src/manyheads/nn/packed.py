"""Attention without padding: the real tokens of all rows in one long row, each text for itself.

A batch of texts of different length is computed as if each were alone; so are the documents that
share a row. Nothing is spent on padding, nor on pairs of tokens of different texts.
"""

from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from manyheads import ops
from manyheads.nn.exact_attention import ExactAttention, Fused
from manyheads.nn.masks import AttentionMask, Both, Causal, Full, Rule, SameDocument
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import Keys, Queries, Values
from manyheads.ops import share_heads

AttentionOutput = Float[Tensor, "b h t c"]
Row = Float[Tensor, "1 h n c"]
Meeting = Float[Tensor, "1 h n e"]


@dataclass(frozen=True)
class Packed(ExactAttention):
    """What is padded or has several documents a row is packed; the rest is the fused core's."""

    kind: ClassVar[str] = "packed"
    has_host_sync: ClassVar[bool] = True  # for the lengths of the texts

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
        texts = None if position.has_bias else texts_of(mask, q.shape[0])
        if texts is None:
            return Fused()(q, k, v, mask, score, position, dropout)
        assert isinstance(score, InnerScore)
        heads, length = q.shape[1], q.shape[2]
        f, g = score.factors(q, share_heads(k, heads))
        f, g, w = (
            rearrange(x, "b h n c -> 1 h (b n) c").index_select(2, texts.places)
            for x in (f, g, share_heads(v, heads))
        )
        causal, scale = mask.rule.is_causal, float(score.scale)
        mixed = ops.packed_attention(f, g, w, texts.lengths, texts.sizes, causal, dropout, scale)
        whole = mixed.new_zeros(1, heads, q.shape[0] * length, mixed.shape[-1])
        whole = whole.index_copy(2, texts.places, mixed)
        return rearrange(whole, "1 h (b n) c -> b h n c", n=length)


@dataclass(frozen=True, eq=False)
class Texts:
    """Where the real tokens stand among all of a batch, and how many each text has of them."""

    places: Int[Tensor, " n"]
    lengths: Int[Tensor, " texts"]
    sizes: list[int]


_known: WeakKeyDictionary[AttentionMask, Texts | None] = WeakKeyDictionary()


def texts_of(mask: AttentionMask, rows: int) -> Texts | None:
    """The texts of a batch; None where packing gains nothing or the rule asks for more."""
    if mask not in _known:  # one mask serves all layers
        _known[mask] = _find(mask, rows)
    return _known[mask]


def _find(mask: AttentionMask, rows: int) -> Texts | None:
    plain, documents = _parts(mask.rule)
    if (
        not rows
        or not plain
        or not mask.square
        or (documents is None and mask.padding_mask is None)
    ):
        return None
    length = mask.key_positions.shape[1]
    none = torch.zeros(rows, length, dtype=torch.long, device=mask.key_positions.device)
    numbers = none if documents is None else documents[:, :length].expand(rows, -1)
    real = none == 0 if mask.padding_mask is None else mask.padding_mask.expand(rows, -1)
    row = torch.arange(rows, device=numbers.device)[:, None]
    spread = numbers.amax() - numbers.amin() + 1
    text = (row * spread + numbers).flatten()
    places = real.flatten().nonzero()[:, 0]
    names, lengths = torch.unique_consecutive(text[places], return_counts=True)
    if len(names) == 0 or len(names) != len(names.unique()):
        return None  # a document that goes on after another one
    return Texts(places, lengths, lengths.tolist())


def _parts(rule: Rule) -> tuple[bool, Tensor | None]:
    """Whether a rule is causal or full within a document, and the documents."""
    if isinstance(rule, SameDocument):
        return True, rule.documents
    if isinstance(rule, Both) and isinstance(rule.second, SameDocument):
        return isinstance(rule.first, Full | Causal), rule.second.documents
    return isinstance(rule, Full | Causal), None
