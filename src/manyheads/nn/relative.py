"""Relative attention as in the Music Transformer (Huang et al. 2018): a vector for each distance.

    S_rel[i, j] = q_i · e_{j−i},  softmax((Q Kᵀ + S_rel) / √c) V

Written down as it stands, that gathers a vector for each pair: n × n × c numbers. But every row
of Q Eᵀ, which has n × distances, holds what its query adds at each distance, and S_rel is those
rows, each moved one place further than the one above it: `skew`.

`PositionConfig`, the union of all positions, stands at the end.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.errors import check_at_least
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import (
    Alibi,
    Bias,
    Buckets,
    Learned,
    NoPosition,
    Position,
    PositionSizes,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.shapes import KeyPositions, Positions, Queries
from manyheads.nn.skew import Met, Square, skew, stretch

Differences = Int[Tensor, "#b 1 t s"]


class Vectors(nn.Module):
    """A learned vector for each whole number from `lowest` to `highest`, in each head or in all.

    A number beyond them has the vector of the last.
    """

    def __init__(self, heads: int, lowest: int, highest: int, head_dim: int) -> None:
        super().__init__()
        self.lowest = lowest
        self.highest = highest
        self.table = nn.Parameter(torch.empty(heads, highest - lowest + 1, head_dim))
        nn.init.normal_(self.table, std=head_dim**-0.5)

    def meet(self, q: Queries, lowest: int, highest: int) -> Met:
        """q · e / √c for every number of a range."""
        first, last = max(lowest, self.lowest), min(highest, self.highest)
        table = self.table[:, first - self.lowest : last - self.lowest + 1]
        table = table.expand(q.shape[1], -1, -1)
        met = einsum(q, table, "b h t c, h r c -> b h t r") / math.sqrt(q.shape[-1])
        return stretch(met, first, lowest, highest)

    def pick(self, q: Queries, numbers: Differences) -> Bias:
        """q · e / √c for one number of each pair; t × numbers, never t × s × c."""
        met = self.meet(q, self.lowest, self.highest)
        columns = numbers.clamp(self.lowest, self.highest) - self.lowest
        return met.gather(-1, columns.expand(*met.shape[:2], *columns.shape[2:]))


class RelativePosition(Position):
    """q_i · e_{j−i} / √c on the scores; nothing for what is to come in a stack that looks back.

    With a `period` p, each p positions from `first` on are a step of p voices, and the distances
    in steps and in voices have vectors too: q_i · (e_{j−i} + e'_{⌊j/p⌋−⌊i/p⌋} + e''_{j%p−i%p}).
    """

    def __init__(self, config: "Relative", sizes: PositionSizes) -> None:
        super().__init__()
        far = sizes.max_length - 1 if config.max_distance is None else config.max_distance
        heads = sizes.heads if config.share == "none" else 1
        self.both_ways = not sizes.causal
        self.period = config.period
        self.first = config.first
        self.distances = Vectors(heads, -far, far * self.both_ways, sizes.head_dim)
        if self.period is not None:
            steps, voices = math.ceil(far / self.period), self.period - 1
            self.steps = Vectors(heads, -steps, steps * self.both_ways, sizes.head_dim)
            self.voices = Vectors(heads, -voices, voices, sizes.head_dim)

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> Bias | None:
        bias = self.distances.pick(q, _differences(queries, keys))
        if self.period is not None:
            begun, reached = queries - self.first, keys - self.first
            steps = _differences(begun // self.period, reached // self.period)
            voices = _differences(begun % self.period, reached % self.period)
            bias = bias + self.steps.pick(q, steps) + self.voices.pick(q, voices)
        return bias if self.both_ways else _without_later(bias, queries, keys)

    def bias(self, q: Queries, mask: AttentionMask) -> Bias | None:
        """Of a full pass nothing is picked: all is skewed."""
        if not mask.square:
            return self.score(q, mask.query_positions, mask.key_positions)
        far = q.shape[2] - 1
        bias = skew(self.distances.meet(q, -far, far * self.both_ways))
        if self.period is not None:
            bias = bias + self._by_step_and_voice(q, self.period)
        if self.both_ways or mask.rule.is_causal:
            return bias
        return _without_later(bias, mask.query_positions, mask.key_positions)

    def _by_step_and_voice(self, q: Queries, period: int) -> Square:
        """Steps × voices: what each pair of steps adds, and in each step each pair of voices."""
        length, before = q.shape[2], -self.first % period
        q = F.pad(q, (0, 0, before, -(before + length) % period))  # whole steps
        far = q.shape[2] // period - 1
        met = self.steps.meet(q, -far, far * self.both_ways)
        met = skew(rearrange(met, "b h (s p) r -> b (h p) s r", p=period))
        steps = rearrange(met, "b (h p) s u -> b h (s p) u 1", p=period)
        met = self.voices.meet(q, 1 - period, period - 1)
        met = skew(rearrange(met, "b h (s p) r -> b (h s) p r", p=period))
        voices = rearrange(met, "b (h s) p v -> b h (s p) 1 v", s=far + 1)
        whole, here = (steps + voices).flatten(-2), slice(before, before + length)
        return whole[:, :, here, here]


def _differences(queries: Positions, keys: KeyPositions) -> Differences:
    return rearrange(keys, "b s -> b 1 1 s") - rearrange(queries, "b t -> b 1 t 1")


def _without_later(bias: Bias, queries: Positions, keys: KeyPositions) -> Bias:
    later = rearrange(keys, "b s -> b 1 1 s") > rearrange(queries, "b t -> b 1 t 1")
    return bias.masked_fill(later, 0.0)


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A learned vector for each distance, in each layer and head anew, as the Music Transformer's.

    `max_distance` is the last that is told apart: model.max_length − 1, all of them, unless given.
    `share=heads` gives the heads of a layer one table. For what is several voices written in
    turn, `period` is their number (four in a chorale), and `first` where the first step begins.
    """

    max_distance: int | None = None
    share: Literal["none", "heads"] = "none"
    period: int | None = None
    first: int = 0
    kind: ClassVar[str] = "relative"
    per_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least("position.max_distance", self.max_distance, 1)
        check_at_least("position.period", self.period, 2)
        check_at_least("position.first", self.first, 0)

    def build(self, sizes: PositionSizes) -> Position:
        return RelativePosition(self, sizes)


PositionConfig = NoPosition | Sinusoidal | Learned | Rotary | Shaw | Buckets | Alibi | Relative
