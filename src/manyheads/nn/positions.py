"""Position schemes: how a model knows the order of its tokens.

A `Position` has four hooks, all of which are always called; a scheme overrides those it needs:

    embed   adds to the embeddings             sinusoidal, learned
    rotate  rotates queries and keys           rotary
    score   adds a bias to attention scores    Shaw, T5 buckets, ALiBi, Music Transformer
    value   adds to the attention output       Shaw

`bias` and `value_bias` are `score` and `value` for an `AttentionMask`. Schemes with a vector for
each distance override them too, to avoid an index for each pair (`skew`).
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.config import Count, Natural, Positive
from manyheads.errors import UserError
from manyheads.nn.masks import AttentionMask
from manyheads.nn.shapes import (
    HeadOutput,
    Hidden,
    KeyPositions,
    Positions,
    Queries,
    ScoreBias,
    Weights,
)

Rotated = Float[Tensor, "b h t c"]  # queries or keys
Distances = Int[Tensor, "#b 1 t s"]
ByDistance = Float[Tensor, "b h t r"]  # a column for each distance
Resized = Float[Tensor, "b h t columns"]
Square = Float[Tensor, "b h t t"]


class Position(nn.Module):
    """No position information; schemes override hooks."""

    initialises_itself = True
    max_length: int | None = None
    is_relative_bias: ClassVar[bool] = False  # True if the bias depends on the distance only
    # Class attributes, which compiled code treats as constants.
    has_bias: ClassVar[bool] = False  # True if the scheme adds to the attention scores
    is_absolute: ClassVar[bool] = True  # True if the scheme changes embeddings only

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()

        def overrides(*hooks: str) -> bool:
            return any(getattr(cls, hook) is not getattr(Position, hook) for hook in hooks)

        cls.has_bias = overrides("score", "bias")
        cls.is_absolute = not overrides("rotate", "score", "bias", "value", "value_bias")

    def embed(self, x: Hidden, positions: Positions) -> Hidden:
        return x

    def rotate(self, x: Rotated, positions: Positions) -> Rotated:
        return x

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> ScoreBias | None:
        return None

    def bias(self, q: Queries, mask: AttentionMask) -> ScoreBias | None:
        """`score` for the pairs of a mask; any value is allowed where the mask is False."""
        return self.score(q, mask.query_positions, mask.key_positions)

    def value(self, weights: Weights, queries: Positions, keys: KeyPositions) -> HeadOutput | None:
        return None

    def value_bias(self, weights: Weights, mask: AttentionMask) -> HeadOutput | None:
        """`value` for the pairs of a mask; weights are 0 where the mask is False."""
        return self.value(weights, mask.query_positions, mask.key_positions)

    def check_length(self, length: int) -> None:
        """Refuse positions past the end of a learned table."""
        if self.max_length is not None and length > self.max_length:
            raise UserError(
                f"{length} positions, but the learned ones end at {self.max_length}: shorten the "
                "text, or train with a larger model.max_length or another model.position"
            )


@dataclass(frozen=True, kw_only=True)
class PositionSizes:
    """Sizes of the stack that a scheme is built for.

    `dim` is the width at which positions are added: that of the token table.
    """

    dim: int
    heads: int
    head_dim: int
    max_length: int
    causal: bool


class _Scheme:
    """Base of the settings of a scheme."""

    per_layer: ClassVar[bool] = False  # True if each layer has weights of its own


@dataclass(frozen=True, kw_only=True)
class NoPosition(_Scheme):
    """None: the model sees a bag of tokens (a causal mask still gives some order)."""

    kind: ClassVar[str] = "none"

    def build(self, sizes: PositionSizes) -> Position:
        return Position()


def bias_by_distance(position: Position, q: Queries) -> Float[Tensor, "h far"]:
    """The bias of each head at the distances −(n−1) … n−1, in float32 at least.

    Full precision, because each entry is added to many scores. For positions whose bias depends on
    the distance only.
    """
    length = q.shape[2]
    center = torch.full((1, 1), length - 1, device=q.device)
    keys = torch.arange(2 * length - 1, device=q.device)[None]
    query = q[:1, :, :1].to(torch.promote_types(q.dtype, torch.float32))
    bias = position.score(query, center, keys)
    assert bias is not None
    return bias[0, :, 0]


def _distances(queries: Positions, keys: KeyPositions) -> Distances:
    """j − i of every pair."""
    return rearrange(keys, "b s -> b 1 1 s") - rearrange(queries, "b t -> b 1 t 1")


# ---------------------------------------------------------------------------------------------
# Absolute positions, and rotary


def _angles(
    positions: Positions, channels: int, base: float, dtype: torch.dtype
) -> Float[Tensor, "#b t half"]:
    """pos / base^(2i/channels) for each pair i of channels, in float32 at least."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, channels, 2, device=positions.device, dtype=dtype)
    return positions[..., None].to(dtype) * base ** (-pairs / channels)


Base = Annotated[Positive, "Base of the wavelengths"]


class SinusoidalPosition(Position):
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(pos / base^(2i/d))."""

    def __init__(self, base: float, layout: str) -> None:
        super().__init__()
        self.base = base
        self.layout = layout

    def embed(self, x: Hidden, positions: Positions) -> Hidden:
        angles = _angles(positions, x.shape[-1], self.base, x.dtype)
        if self.layout == "interleaved":
            waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        else:
            waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return x + waves[..., : x.shape[-1]].to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(_Scheme):
    """Fixed waves added to the embeddings."""

    base: Base = 10_000.0
    layout: Annotated[
        Literal["interleaved", "halves"], "Sines and cosines in turn, or all sines first"
    ] = "interleaved"
    kind: ClassVar[str] = "sinusoidal"

    def build(self, sizes: PositionSizes) -> Position:
        return SinusoidalPosition(self.base, self.layout)


class GridPosition(Position):
    """PE(row, column) = [PE(row), PE(column)], each sinusoidal in half of the channels.

    Positions are the patches of a square image row by row, after `before` others (the class
    token), which get nothing.
    """

    def __init__(self, columns: int, before: int, base: float) -> None:
        super().__init__()
        self.columns, self.before = columns, before
        self.line = SinusoidalPosition(base, "interleaved")

    def embed(self, x: Hidden, positions: Positions) -> Hidden:
        patch = (positions - self.before).clamp(min=0)
        of_row, of_column = x.chunk(2, dim=-1)
        rows = self.line.embed(of_row, patch // self.columns)
        columns = self.line.embed(of_column, patch % self.columns)
        embedded = torch.cat([rows, columns], dim=-1)
        return torch.where((positions < self.before)[..., None], x, embedded)


@dataclass(frozen=True, kw_only=True)
class Sinusoidal2d(_Scheme):
    """Fixed waves of row and column, added to the patches of a square image."""

    base: Base = 10_000.0
    kind: ClassVar[str] = "sinusoidal-2d"

    def build(self, sizes: PositionSizes) -> Position:
        if sizes.dim % 2:
            raise UserError(
                f"sinusoidal-2d positions need two halves, and model.dim={sizes.dim} is odd: "
                "choose an even one"
            )
        columns = math.isqrt(sizes.max_length)
        return GridPosition(columns, sizes.max_length - columns**2, self.base)


class LearnedPosition(Position):
    """A trained vector for each position; the first `offset` rows of the table are unused."""

    def __init__(self, max_length: int, dim: int, offset: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.offset = offset
        self.table = nn.Embedding(max_length + offset, dim)

    def embed(self, x: Hidden, positions: Positions) -> Hidden:
        return x + self.table(positions + self.offset)


@dataclass(frozen=True, kw_only=True)
class Learned(_Scheme):
    """A trained vector for each position up to model.max_length."""

    offset: Annotated[Natural, "Unused rows before the first position (RoBERTa, BART: 2)"] = 0
    kind: ClassVar[str] = "learned"

    def build(self, sizes: PositionSizes) -> Position:
        return LearnedPosition(sizes.max_length, sizes.dim, self.offset)


class RotaryPosition(Position):
    """Rotates each pair i of channels by pos · θᵢ, so that q · k depends on the distance only."""

    def __init__(self, base: float, layout: str) -> None:
        super().__init__()
        self.base = base
        self.layout = layout

    def rotate(self, x: Rotated, positions: Positions) -> Rotated:
        angles = rearrange(_angles(positions, x.shape[-1], self.base, x.dtype), "b t r -> b 1 t r")
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.layout == "interleaved":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Rotary(_Scheme):
    """Queries and keys rotated by their position (RoPE)."""

    base: Base = 10_000.0
    layout: Annotated[
        Literal["interleaved", "halves"], "Pairs of neighbouring channels, or of i and i + c/2"
    ] = "halves"
    kind: ClassVar[str] = "rotary"

    def build(self, sizes: PositionSizes) -> Position:
        if sizes.head_dim % 2:
            raise UserError(
                f"rotary positions need pairs of channels, and model.head_dim={sizes.head_dim} is "
                "odd: choose an even one"
            )
        return RotaryPosition(self.base, self.layout)


# ---------------------------------------------------------------------------------------------
# Biases that depend on the distance only


class BucketPosition(Position):
    """T5's relative bias: a number for each head and bucket of distances, wider further away."""

    is_relative_bias = True

    def __init__(self, buckets: int, max_distance: int, heads: int, both_ways: bool) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.both_ways = both_ways
        self.table = nn.Embedding(buckets, heads)

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> ScoreBias | None:
        bias = self.table(self.bucket(_distances(queries, keys))).to(q.dtype)
        return rearrange(bias, "b 1 t s h -> b h t s")

    def bucket(self, distance: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Half of the buckets for exact small distances, the rest in logarithmic steps."""
        buckets, offset = self.table.num_embeddings, torch.zeros_like(distance)
        if self.both_ways:
            buckets //= 2
            offset = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        steps = torch.log(distance.clamp(min=exact).float() / exact)
        far = exact + (steps / math.log(self.max_distance / exact) * (buckets - exact)).long()
        return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


@dataclass(frozen=True, kw_only=True)
class Buckets(_Scheme):
    """T5's bucketed relative bias, one table for all layers of a stack."""

    buckets: Annotated[int, "Buckets of distances"] = 32
    max_distance: Annotated[int, "Distances from here on share the last bucket"] = 128
    kind: ClassVar[str] = "t5"

    def build(self, sizes: PositionSizes) -> Position:
        least = 2 if sizes.causal else 4
        if self.buckets < least or self.max_distance <= self.buckets // least:
            raise UserError(
                f"position.buckets={self.buckets} must be at least {least}, and "
                f"position.max_distance={self.max_distance} beyond the exact buckets"
            )
        return BucketPosition(self.buckets, self.max_distance, sizes.heads, not sizes.causal)


class AlibiPosition(Position):
    """−slope_h · |i − j| on the scores (ALiBi)."""

    exponents: Tensor
    is_relative_bias = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        # The exponents are exact in any precision, the slopes are not.
        exponents = [math.log2(slope) for slope in alibi_slopes(heads)]
        self.register_buffer("exponents", torch.tensor(exponents), persistent=False)

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> ScoreBias | None:
        slopes = repeat(self.exponents.to(q.dtype).exp2(), "h -> 1 h 1 1")
        return -slopes * _distances(queries, keys).abs()


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8i/n) for a power of two; else those, and every other one of the next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
    return slopes + between[: heads - power]


@dataclass(frozen=True, kw_only=True)
class Alibi(_Scheme):
    """A penalty on the scores that grows with the distance; nothing to train."""

    kind: ClassVar[str] = "alibi"

    def build(self, sizes: PositionSizes) -> Position:
        return AlibiPosition(sizes.heads)


# ---------------------------------------------------------------------------------------------
# A vector for each distance
#
# A gathered vector for each pair would take n × n × c numbers. Q Eᵀ, with a column for each
# distance, has n × distances, and the scores of all pairs are its rows, each shifted by one
# column more than the row above. `skew` and `unskew` convert between the two by padding and
# reading the same memory in rows of another length, without indices.


def skew(products: ByDistance) -> Square:
    """out[i, j] = products[i, j − i + n − 1]: the first column is the distance −(n−1).

    With a column of padding each row is one longer than the rows in which the memory is then
    read, so each begins one column further left. If the columns end at the distance 0, entries
    at j > i are meaningless.
    """
    length, columns = products.shape[2:]
    numbers = F.pad(products, (1, 0)).flatten(-2)[..., length:]
    return numbers.unflatten(-1, (length, columns))[..., :length]


def unskew(square: Square) -> ByDistance:
    """out[i, d] = square[i, i + d − (n − 1)] for 2n − 1 distances, 0 where there is no pair."""
    length = square.shape[2]
    numbers = F.pad(F.pad(square, (length - 1, 0)).flatten(-2), (0, length))
    return numbers.unflatten(-1, (length, 2 * length))[..., :-1]


def _repeat_ends(table: ByDistance, lowest: int, first: int, last: int) -> Resized:
    """Columns `first` … `last` of a table that starts at `lowest`; beyond it, its end columns."""
    highest = lowest + table.shape[-1] - 1
    inside = table[..., max(first, lowest) - lowest : min(last, highest) - lowest + 1]
    before, after = max(0, lowest - first), max(0, last - highest)
    if not before and not after:
        return inside
    left = inside[..., :1].expand(*inside.shape[:-1], before)
    right = inside[..., -1:].expand(*inside.shape[:-1], after)
    return torch.cat([left, inside, right], dim=-1)


def _sum_ends(table: ByDistance, lowest: int, first: int, last: int) -> Resized:
    """The transpose of `_repeat_ends`: the end columns have the sums of those beyond them."""
    highest = lowest + table.shape[-1] - 1
    table = F.pad(table, (max(0, lowest - first), max(0, last - highest)))
    lowest = min(lowest, first)
    left = table[..., : first - lowest + 1].sum(-1, keepdim=True)
    right = table[..., last - lowest :].sum(-1, keepdim=True)
    return torch.cat([left, table[..., first - lowest + 1 : last - lowest], right], dim=-1)


def _gather(products: ByDistance, columns: Distances) -> ScoreBias:
    """One column for each pair."""
    return products.gather(-1, columns.expand(*products.shape[:2], *columns.shape[2:]))


class ShawPosition(Position):
    """Relative positions of Shaw et al.: a vector for each clipped distance, on keys and values.

    e_ij = (q_i · k_j + q_i · a^K_{clip(j−i)}) / √c,  z_i = Σ_j α_ij (v_j + a^V_{clip(j−i)})
    """

    def __init__(self, max_distance: int, head_dim: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.keys = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        self.values = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        nn.init.normal_(self.keys, std=head_dim**-0.5)
        nn.init.normal_(self.values, std=head_dim**-0.5)

    def _rows(self, queries: Positions, keys: KeyPositions) -> Distances:
        clipped = _distances(queries, keys).clamp(-self.max_distance, self.max_distance)
        return clipped + self.max_distance

    def _products(self, q: Queries) -> ByDistance:
        return (q @ self.keys.T) / math.sqrt(q.shape[-1])

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> ScoreBias | None:
        return _gather(self._products(q), self._rows(queries, keys))

    def bias(self, q: Queries, mask: AttentionMask) -> ScoreBias | None:
        if not mask.square:
            return super().bias(q, mask)
        far = q.shape[2] - 1
        ahead = 0 if mask.rule.is_causal else far
        return skew(_repeat_ends(self._products(q), -self.max_distance, -far, ahead))

    def value(self, weights: Weights, queries: Positions, keys: KeyPositions) -> HeadOutput | None:
        rows = self._rows(queries, keys).expand_as(weights)
        by_distance = weights.new_zeros(*weights.shape[:3], len(self.values))
        return by_distance.scatter_add(-1, rows, weights) @ self.values

    def value_bias(self, weights: Weights, mask: AttentionMask) -> HeadOutput | None:
        if not mask.square:
            return super().value_bias(weights, mask)
        far, clip = weights.shape[2] - 1, self.max_distance
        return _sum_ends(unskew(weights), -far, -clip, clip) @ self.values


@dataclass(frozen=True, kw_only=True)
class Shaw(_Scheme):
    """Relative vectors on keys and values, in each layer (Shaw et al. 2018)."""

    max_distance: Annotated[Count, "Distance at which vectors are clipped"] = 16
    kind: ClassVar[str] = "shaw"
    per_layer: ClassVar[bool] = True

    def build(self, sizes: PositionSizes) -> Position:
        return ShawPosition(self.max_distance, sizes.head_dim)


class DistanceVectors(nn.Module):
    """A learned vector e_d in each head for each d from `lowest` to `highest`.

    A d beyond them has the vector of the nearer end.
    """

    initialises_itself = True

    def __init__(self, heads: int, lowest: int, highest: int, head_dim: int) -> None:
        super().__init__()
        self.lowest = lowest
        self.highest = highest
        self.table = nn.Parameter(torch.empty(heads, highest - lowest + 1, head_dim))
        nn.init.normal_(self.table, std=head_dim**-0.5)

    def scores(self, q: Queries, lowest: int, highest: int) -> ByDistance:
        """q · e_d / √c for every d of a range."""
        first, last = max(lowest, self.lowest), min(highest, self.highest)
        table = self.table[:, first - self.lowest : last - self.lowest + 1]
        products = einsum(q, table, "b h t c, h r c -> b h t r") / math.sqrt(q.shape[-1])
        return _repeat_ends(products, first, lowest, highest)


class RelativePosition(Position):
    """S_rel[i, j] = q_i · e_{j−i} / √c on the scores (Music Transformer)."""

    def __init__(self, max_distance: int, sizes: PositionSizes) -> None:
        super().__init__()
        self.both_ways = not sizes.causal
        highest = max_distance * self.both_ways
        self.distances = DistanceVectors(sizes.heads, -max_distance, highest, sizes.head_dim)

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> ScoreBias | None:
        lowest, highest = self.distances.lowest, self.distances.highest
        columns = _distances(queries, keys).clamp(lowest, highest) - lowest
        return _gather(self.distances.scores(q, lowest, highest), columns)

    def bias(self, q: Queries, mask: AttentionMask) -> ScoreBias | None:
        if not mask.square:
            return super().bias(q, mask)
        far = q.shape[2] - 1
        return skew(self.distances.scores(q, -far, far * self.both_ways))


@dataclass(frozen=True, kw_only=True)
class Relative(_Scheme):
    """A learned vector for each distance, in each layer (Music Transformer, Huang et al. 2018)."""

    max_distance: Annotated[
        Count | None, "Distance at which vectors are clipped; none: model.max_length − 1"
    ] = None
    kind: ClassVar[str] = "relative"
    per_layer: ClassVar[bool] = True
    REMOVED: ClassVar[dict[str, tuple[object, ...]]] = {"share": ("none",), "first": (0,)}

    def build(self, sizes: PositionSizes) -> Position:
        far = sizes.max_length - 1 if self.max_distance is None else self.max_distance
        return RelativePosition(far, sizes)


PositionConfig = NoPosition | Sinusoidal | Learned | Rotary | Shaw | Buckets | Alibi | Relative
