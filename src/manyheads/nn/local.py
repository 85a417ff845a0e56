"""Windows and blocks: attention to what is near, at a cost that is linear in the length.

Both cores are exact attention under a pattern besides the rule, and hold no score and no mask of
what is far apart. A row is cut into blocks of queries; each block becomes a row of its own, with
the keys that its queries can see, and an exact core attends in these rows. Rules, scores and
positions are asked about the positions of the uncut row, so that they mean what they always do.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import check_at_least
from manyheads.nn.exact_attention import (
    AttentionOutput,
    AttentionSizes,
    dense_weights,
    exact_attention,
)
from manyheads.nn.masks import AttentionMask, Both, Either, Globals, Rule, SameBlock, Window
from manyheads.nn.positions import Position
from manyheads.nn.scores import Score
from manyheads.nn.shapes import Keys, Queries, Values, Weights

Row = Float[Tensor, "b g s e"]
Blocks = Float[Tensor, "blocks g w e"]
Places = Int[Tensor, "m w"]
Inside = Bool[Tensor, "m w"]
N = TypeVar("N", bound="LocalAttention")

LEAST_BLOCK = 32  # with a small window, blocks of its size are too many and too small to be fast


@dataclass(frozen=True)
class Cut:
    """How a row is cut into blocks, what around each goes with it, and the first as guests."""

    block: int
    before: int = 0
    after: int = 0
    first: int = 0

    def blocks(self, length: int) -> int:
        return -(-length // self.block)

    def fold(self, x: Row) -> Blocks:
        """Every block of every row as a row; zeros beyond the ends of the uncut one."""
        length = x.shape[2]
        missing = self.blocks(length) * self.block - length
        padded = F.pad(x, (0, 0, self.before, missing + self.after))
        bands = padded.unfold(2, self.before + self.block + self.after, self.block)
        folded = rearrange(bands, "b g m e w -> (b m) g w e")
        if not self.first:
            return folded
        guests = x[:, :, : self.first]
        guests = repeat(guests, "b g s e -> (b m) g s e", m=self.blocks(length))
        return torch.cat([guests, folded], dim=2)

    def places(self, length: int, device: torch.device) -> tuple[Places, Inside]:
        """The positions of what `fold` gives of each block, and which of them count.

        Not those beyond the ends, nor the first where they are at home: they came as guests.
        """
        starts = torch.arange(self.blocks(length), device=device) * self.block - self.before
        width = torch.arange(self.before + self.block + self.after, device=device)
        places = rearrange(starts, "m -> m 1") + width
        inside = (places >= self.first) & (places < length)
        first = torch.arange(min(self.first, length), device=device)
        guests = repeat(first, "s -> m s", m=len(places))
        return (
            torch.cat([guests, places.clamp(0, length - 1)], dim=1),
            torch.cat([torch.ones_like(guests, dtype=torch.bool), inside], dim=1),
        )


class LocalAttention:
    """A core that sees by a pattern of its own besides the rule, and is its own settings.

    softmax of score(q_i, k_j) over the j that the rule and the pattern let i see
    """

    exact: ClassVar[bool] = False
    kind: ClassVar[str]
    measure: ClassVar[str]  # the setting that its reach hangs on

    @property
    def pattern(self) -> Rule:
        """What is near enough."""
        raise NotImplementedError

    @property
    def reach(self) -> int:
        """Up to this length all is near."""
        raise NotImplementedError

    def cut(self, rule: Rule) -> Cut:
        """Blocks of queries with all the keys that are near to them."""
        raise NotImplementedError

    def build(self: N, sizes: AttentionSizes) -> N:
        return self

    def check(self, score: Score, position: Position) -> None:
        """Honours everything: what no kernel takes, the textbook's core computes in blocks."""

    def weights(
        self, q: Queries, k: Keys, mask: AttentionMask, score: Score, position: Position
    ) -> Weights:
        rule = Both(mask.rule, self.pattern)
        near = AttentionMask(rule, mask.query_positions, mask.key_positions, mask.padding_mask)
        return dense_weights(q, k, near, score, position)

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
        core, length = exact_attention(score, position), q.shape[2]
        if not mask.square:
            return core(q, *_reached(k, v, mask, self.pattern), score, position, dropout)
        if length <= self.reach:
            return core(q, k, v, mask, score, position, dropout)
        cut = self.cut(mask.rule)
        mixed = core(*self._folded(cut, q, k, v, mask), score, position, dropout)
        mixed = rearrange(mixed, "(b m) h t c -> b h (m t) c", b=q.shape[0])[:, :, :length]
        if not cut.first:
            return mixed
        rows = slice(cut.first)  # they see more than their block: all that the rule allows
        columns = rows if mask.rule.is_causal else slice(None)
        looking = (q[:, :, rows], k[:, :, columns], v[:, :, columns], mask.block(rows, columns))
        first = core(*looking, score, position, dropout)
        return torch.cat([first, mixed[:, :, cut.first :]], dim=2)

    def _folded(
        self, cut: Cut, q: Queries, k: Keys, v: Values, mask: AttentionMask
    ) -> tuple[Tensor, Tensor, Tensor, AttentionMask]:
        """Every block of every row as a row, its keys apart from its queries."""
        rows, _, length, _ = q.shape
        alone, blocks = Cut(cut.block), cut.blocks(length)
        queries, _ = alone.places(length, q.device)
        keys, inside = cut.places(length, q.device)
        counted = inside.expand(rows, -1, -1)
        if mask.padding_mask is not None:
            counted = counted & mask.padding_mask[:, keys]
        real: Tensor | None = rearrange(counted, "b m w -> (b m) w")
        rule = mask.rule.for_rows(blocks)
        if cut != alone:
            rule = Both(rule, self.pattern)
        elif mask.padding_mask is None and length % cut.block == 0:
            real = None  # a block alone is near and real as a whole: that needs no mask
        folded = AttentionMask(
            rule,
            repeat(queries, "m t -> (b m) t", b=rows),
            repeat(keys, "m w -> (b m) w", b=rows),
            real,
        )
        return alone.fold(q), cut.fold(k), cut.fold(v), folded


def _reached(
    k: Keys, v: Values, mask: AttentionMask, pattern: Rule
) -> tuple[Tensor, Tensor, AttentionMask]:
    """The keys that a step or a chunk can see: near to its first or last query, or between."""
    ends = torch.stack([mask.query_positions.min(), mask.query_positions.max()])
    near = pattern(
        rearrange(ends, "t -> 1 t 1"), rearrange(mask.key_positions, "b s -> b 1 s")
    ).any(1)
    between = (mask.key_positions >= ends[0]) & (mask.key_positions <= ends[1])
    index = (near | between).any(0).nonzero()[:, 0]
    real = None if mask.padding_mask is None else mask.padding_mask[:, index]
    reached = AttentionMask(
        Both(mask.rule, pattern), mask.query_positions, mask.key_positions[:, index], real
    )
    return k[:, :, index], v[:, :, index], reached


@dataclass(frozen=True)
class Local(LocalAttention):
    """Blocks of `size` positions, each of which attends within itself (Liu et al. 2018)."""

    size: int = 256
    kind: ClassVar[str] = "local"
    measure: ClassVar[str] = "size"

    def __post_init__(self) -> None:
        check_at_least("core.size", self.size, 1)

    @property
    def pattern(self) -> Rule:
        return SameBlock(self.size)

    @property
    def reach(self) -> int:
        return self.size

    def cut(self, rule: Rule) -> Cut:
        return Cut(self.size)


@dataclass(frozen=True)
class Longformer(LocalAttention):
    """A sliding window, `window` positions to either side, and the first `globals` positions,
    which see all and are seen by all (Beltagy et al. 2020)."""

    window: int = 256
    globals: int = 0
    kind: ClassVar[str] = "longformer"
    measure: ClassVar[str] = "window"

    def __post_init__(self) -> None:
        check_at_least("core.window", self.window, 1)
        check_at_least("core.globals", self.globals, 0)

    @property
    def pattern(self) -> Rule:
        near = Window(self.window)
        return Either(near, Globals(self.globals)) if self.globals else near

    @property
    def reach(self) -> int:
        return self.window + 1

    @property
    def keeps_apart(self) -> bool:
        """Whether packed documents are read as if each were alone: each has no first ones here."""
        return not self.globals

    def cut(self, rule: Rule) -> Cut:
        after = 0 if rule.is_causal else self.window
        return Cut(max(self.window, LEAST_BLOCK), self.window, after, self.globals)
