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
from torch.nn import functional as F

from manyheads.nn.exact_attention import Exact, Fused, share_heads
from manyheads.nn.masks import AttentionMask, Both, Causal, Full, Rule, SameDocument
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import Keys, Queries, Values

Mixed = Float[Tensor, "b h t c"]
Row = Float[Tensor, "1 h n c"]
Meeting = Float[Tensor, "1 h n e"]


@dataclass(frozen=True)
class Packed(Exact):
    """What is padded or has several documents a row is packed; the rest is the fused core's."""

    kind: ClassVar[str] = "packed"
    asks_host: ClassVar[bool] = True  # for the lengths of the texts

    def check(self, score: Score, position: Position) -> None:
        Fused().check(score, position)

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        sight: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> Mixed:
        biased = type(position).score is not Position.score
        texts = None if biased else texts_of(sight, q.shape[0])
        if texts is None:
            return Fused()(q, k, v, sight, score, position, dropout)
        assert isinstance(score, InnerScore)
        heads, length = q.shape[1], q.shape[2]
        f, g = score.factors(q, share_heads(k, heads))
        f, g, w = (
            rearrange(x, "b h n c -> 1 h (b n) c").index_select(2, texts.places)
            for x in (f, g, share_heads(v, heads))
        )
        mixed = _attend(f, g, w, texts, sight.rule.past_only, dropout, float(score.scale))
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


def texts_of(sight: AttentionMask, rows: int) -> Texts | None:
    """The texts of a batch; None where packing gains nothing or the rule asks for more."""
    if sight not in _known:  # one sight serves all layers
        _known[sight] = _find(sight, rows)
    return _known[sight]


def _find(sight: AttentionMask, rows: int) -> Texts | None:
    plain, documents = _parts(sight.rule)
    if not rows or not plain or not sight.square or (documents is None and sight.real is None):
        return None
    length = sight.keys.shape[1]
    none = torch.zeros(rows, length, dtype=torch.long, device=sight.keys.device)
    numbers = none if documents is None else documents[:, :length].expand(rows, -1)
    real = none == 0 if sight.real is None else sight.real.expand(rows, -1)
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


def _attend(
    q: Meeting, k: Meeting, v: Row, texts: Texts, causal: bool, dropout: float, scale: float
) -> Row:
    """Each text on its own: by one kernel on a GPU, one after the other elsewhere."""
    if q.device.type != "cuda":
        sizes = texts.sizes
        pieces = (x.split(sizes, 2) for x in (q, k, v))
        parts = [
            F.scaled_dot_product_attention(
                f, g, w, dropout_p=dropout, is_causal=causal, scale=scale
            )
            for f, g, w in zip(*pieces, strict=True)
        ]
        return torch.cat(parts, dim=2)
    ends = F.pad(texts.lengths.cumsum(0), (1, 0))
    f, g, w = (
        torch.nested.nested_tensor_from_jagged(
            rearrange(x, "1 h n c -> n h c").contiguous(), ends, max_seqlen=max(texts.sizes)
        ).transpose(1, 2)
        for x in (q, k, v)
    )
    mixed = F.scaled_dot_product_attention(
        f, g, w, dropout_p=dropout, is_causal=causal, scale=scale
    )
    return rearrange(mixed.transpose(1, 2).values(), "n h c -> 1 h n c")
