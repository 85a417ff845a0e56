"""Local attention: windows and blocks, at a cost that is linear in the length.

Both implementations are exact attention under a pattern in addition to the mask rule, and hold no
scores or masks of distant pairs. A row is split into blocks of queries; each block becomes a row,
with the keys that the pattern allows for its queries, and exact attention runs on these rows.
Rules, scores and positions get the positions of the original row.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.config import Count, Natural
from manyheads.nn.attention import AttentionInputs, ExactAttention, check_rule, exact_attention
from manyheads.nn.masks import (
    AttentionMask,
    Both,
    Causal,
    Either,
    Full,
    Globals,
    Rule,
    SameBlock,
    Window,
)
from manyheads.nn.shapes import HeadOutput, Weights

MIN_BLOCK = 32  # blocks as small as a small window would be too many to be fast


@dataclass(frozen=True)
class Blocking:
    """How a row is split: blocks of `block` positions, each with `before` positions to its left,
    `after` to its right, and the `first` positions of the row in front (global tokens)."""

    block: int
    before: int = 0
    after: int = 0
    first: int = 0

    def blocks(self, length: int) -> int:
        return -(-length // self.block)

    def split(self, x: Float[Tensor, "b g s e"]) -> Float[Tensor, "blocks g w e"]:
        """Every block of every row as a row; zeros beyond the ends of the original row."""
        length = x.shape[2]
        blocks = self.blocks(length)
        padded = F.pad(x, (0, 0, self.before, blocks * self.block - length + self.after))
        bands = padded.unfold(2, self.before + self.block + self.after, self.block)
        split = rearrange(bands, "b g m e w -> (b m) g w e")
        if not self.first:
            return split
        first = repeat(x[:, :, : self.first], "b g s e -> (b m) g s e", m=blocks)
        return torch.cat([first, split], dim=2)

    def positions(
        self, length: int, device: torch.device
    ) -> tuple[Int[Tensor, "m w"], Bool[Tensor, "m w"]]:
        """The original position of each key of each block, and whether it counts.

        Keys beyond the ends do not count, nor the `first` keys in their own block: they are
        already in front.
        """
        starts = torch.arange(self.blocks(length), device=device) * self.block - self.before
        width = torch.arange(self.before + self.block + self.after, device=device)
        positions = rearrange(starts, "m -> m 1") + width
        counts = (positions >= self.first) & (positions < length)
        first = torch.arange(min(self.first, length), device=device)
        first = repeat(first, "s -> m s", m=len(positions))
        return (
            torch.cat([first, positions.clamp(0, length - 1)], dim=1),
            torch.cat([torch.ones_like(first, dtype=torch.bool), counts], dim=1),
        )


class LocalAttention(ExactAttention):
    """Softmax attention over the keys that both the mask rule and a pattern allow."""

    exact: ClassVar[bool] = False
    kind: ClassVar[str]

    @property
    def pattern(self) -> Rule:
        raise NotImplementedError

    @property
    def reach(self) -> int:
        """Up to this length the pattern allows every pair."""
        raise NotImplementedError

    def blocking(self, rule: Rule) -> Blocking:
        """Blocks of queries with all keys that the pattern allows for them."""
        raise NotImplementedError

    def _under_pattern(self, inputs: AttentionInputs) -> AttentionInputs:
        """The same attention with the pattern as a part of the mask rule."""
        mask = inputs.mask
        rule = Both(mask.rule, self.pattern)
        mask = AttentionMask(rule, mask.query_positions, mask.key_positions, mask.padding_mask)
        return replace(inputs, mask=mask)

    def weights(self, inputs: AttentionInputs) -> Weights:
        return super().weights(self._under_pattern(inputs))

    def __call__(self, inputs: AttentionInputs) -> HeadOutput:
        attend = exact_attention(inputs.score, inputs.position)
        (batch, _, length, _), mask = inputs.q.shape, inputs.mask
        check_rule(self.kind, mask.rule, Full, Causal)
        if not mask.square:  # a cached step or chunk
            return attend(self._under_pattern(inputs))
        if length <= self.reach:
            return attend(inputs)
        blocking = self.blocking(mask.rule)
        out = attend(self._split(inputs, blocking))
        out = rearrange(out, "(b m) h t c -> b h (m t) c", b=batch)[:, :, :length]
        if not blocking.first:
            return out
        # Global tokens attend beyond their block, to all keys that the rule allows.
        rows = slice(blocking.first)
        mask = mask.block(rows, slice(None))
        first = attend(replace(inputs, q=inputs.q[:, :, rows], mask=mask))
        return torch.cat([first, out[:, :, blocking.first :]], dim=2)

    def _split(self, inputs: AttentionInputs, blocking: Blocking) -> AttentionInputs:
        """Every block of every row as a row."""
        (batch, _, length, _), mask, device = inputs.q.shape, inputs.mask, inputs.q.device
        of_queries = Blocking(blocking.block)
        query_positions, _ = of_queries.positions(length, device)
        key_positions, counts = blocking.positions(length, device)
        counts = counts.expand(batch, -1, -1)
        if mask.padding_mask is not None:
            counts = counts & mask.padding_mask[:, key_positions]
        padding_mask: Tensor | None = rearrange(counts, "b m w -> (b m) w")
        rule = mask.rule
        if blocking != of_queries:
            rule = Both(rule, self.pattern)
        elif mask.padding_mask is None and length % blocking.block == 0:
            padding_mask = None  # every key of every block counts
        split_mask = AttentionMask(
            rule,
            repeat(query_positions, "m t -> (b m) t", b=batch),
            repeat(key_positions, "m w -> (b m) w", b=batch),
            padding_mask,
        )
        q, k, v = of_queries.split(inputs.q), blocking.split(inputs.k), blocking.split(inputs.v)
        return replace(inputs, q=q, k=k, v=v, mask=split_mask)


@dataclass(frozen=True)
class Local(LocalAttention):
    """Blocks of positions, each of which attends within itself (Liu et al. 2018)."""

    size: Annotated[Count, "Positions of a block"] = 256
    kind: ClassVar[str] = "local"

    @property
    def pattern(self) -> Rule:
        return SameBlock(self.size)

    @property
    def reach(self) -> int:
        return self.size

    def blocking(self, rule: Rule) -> Blocking:
        return Blocking(self.size)


@dataclass(frozen=True)
class Longformer(LocalAttention):
    """A sliding window and global tokens (Beltagy et al. 2020)."""

    window: Annotated[Count, "Positions to either side that a query attends to"] = 256
    globals: Annotated[Natural, "First positions that attend to all and all attend to"] = 0
    kind: ClassVar[str] = "longformer"

    @property
    def pattern(self) -> Rule:
        near = Window(self.window)
        return Either(near, Globals(self.globals)) if self.globals else near

    @property
    def reach(self) -> int:
        return self.window + 1

    def blocking(self, rule: Rule) -> Blocking:
        after = 0 if rule.is_causal else self.window
        return Blocking(max(self.window, MIN_BLOCK), self.window, after, self.globals)
