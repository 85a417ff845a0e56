"""Attention without padding: the real tokens of all rows as one row, each text separate.

A batch of texts of different length is computed as if each were a batch of one, and so are the
documents that share a row: no work for padding or for pairs of tokens of different texts.
"""

from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor

from manyheads import ops
from manyheads.nn.attention import AttentionInputs, ExactAttention, Fused
from manyheads.nn.masks import AttentionMask, Both, Causal, Full, Rule, SameDocument
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import HeadOutput


@dataclass(frozen=True)
class Packed(ExactAttention):
    """Packs batches with padding or several documents in a row; otherwise as `fused`."""

    kind: ClassVar[str] = "packed"
    has_host_sync: ClassVar[bool] = True  # for the lengths of the texts

    def check(self, score: Score, position: Position) -> None:
        Fused().check(score, position)

    def __call__(self, inputs: AttentionInputs) -> HeadOutput:
        batch, heads, length, _ = inputs.q.shape
        texts = None if inputs.position.has_bias else find_texts(inputs.mask, batch)
        if texts is None:
            return Fused()(inputs)
        assert isinstance(inputs.score, InnerScore)
        k, v = (ops.share_heads(x, heads) for x in (inputs.k, inputs.v))
        f, g = inputs.score.factors(inputs.q, k)
        q, k, v = (
            rearrange(x, "b h n c -> 1 h (b n) c").index_select(2, texts.tokens) for x in (f, g, v)
        )
        causal, scale = inputs.mask.rule.is_causal, float(inputs.score.scale)
        packed = ops.packed_attention(
            q, k, v, texts.lengths, texts.sizes, causal, inputs.dropout, scale
        )
        out = packed.new_zeros(1, heads, batch * length, packed.shape[-1])
        out = out.index_copy(2, texts.tokens, packed)
        return rearrange(out, "1 h (b n) c -> b h n c", n=length)


@dataclass(frozen=True, eq=False)
class Texts:
    """The indices of real tokens among all tokens of a batch, and the length of each text."""

    tokens: Int[Tensor, " n"]
    lengths: Int[Tensor, " texts"]
    sizes: list[int]


_cached: WeakKeyDictionary[AttentionMask, Texts | None] = WeakKeyDictionary()


def find_texts(mask: AttentionMask, rows: int) -> Texts | None:
    """The texts of a batch; None if packing gains nothing or cannot express the rule."""
    if mask not in _cached:  # one mask serves all layers
        _cached[mask] = _find_texts(mask, rows)
    return _cached[mask]


def _find_texts(mask: AttentionMask, rows: int) -> Texts | None:
    rule, documents = _split_rule(mask.rule)
    nothing_to_pack = not rows or (documents is None and mask.padding_mask is None)
    if nothing_to_pack or not mask.square or not isinstance(rule, Full | Causal):
        return None
    length = mask.key_positions.shape[1]
    zeros = torch.zeros(rows, length, dtype=torch.long, device=mask.key_positions.device)
    numbers = zeros if documents is None else documents[:, :length].expand(rows, -1)
    real = zeros == 0 if mask.padding_mask is None else mask.padding_mask.expand(rows, -1)
    row = torch.arange(rows, device=numbers.device)[:, None]
    text = (row * (numbers.amax() - numbers.amin() + 1) + numbers).flatten()
    tokens = real.flatten().nonzero()[:, 0]
    names, lengths = torch.unique_consecutive(text[tokens], return_counts=True)
    if len(names) == 0 or len(names) != len(names.unique()):
        return None  # a document that continues after another one
    return Texts(tokens, lengths, lengths.tolist())


def _split_rule(rule: Rule) -> tuple[Rule, Tensor | None]:
    """The rule within a document, and the documents."""
    if isinstance(rule, SameDocument):
        return Full(), rule.documents
    if isinstance(rule, Both) and isinstance(rule.second, SameDocument):
        return rule.first, rule.second.documents
    return rule, None
