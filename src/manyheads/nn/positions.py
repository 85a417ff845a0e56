"""Where a token stands: position schemes as hooks on a model that is otherwise unordered.

A `Position` has four hooks, and a scheme overrides exactly those that it needs:
`embed` adds to the embeddings (sinusoidal, learned), `rotate` turns queries and keys (rotary),
`score` adds to the attention scores (Shaw, T5 buckets, ALiBi), `value` adds to the mixed
values (Shaw). All of them are always called.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.errors import UserError, check_above_zero, check_at_least
from manyheads.nn.masks import AttentionMask
from manyheads.nn.shapes import Hidden, KeyPositions, Positions, Queries, Weights
from manyheads.nn.skew import shrink, skew, stretch, unskew

Bias = Float[Tensor, "#b h t s"]
Spread = Float[Tensor, "b h t c"]
Turned = Float[Tensor, "b h t c"]


class Position(nn.Module):
    """No position at all: attention over an unordered set. The schemes override hooks."""

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
        cls.is_absolute = not overrides("rotate", "score", "bias", "value", "spread")

    def embed(self, x: Hidden, positions: Positions) -> Hidden:
        return x

    def rotate(self, x: Turned, positions: Positions) -> Turned:
        return x

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> Bias | None:
        return None

    def bias(self, q: Queries, mask: AttentionMask) -> Bias | None:
        """What `score` adds for the pairs of a mask; a key that is not seen may get any number."""
        return self.score(q, mask.query_positions, mask.key_positions)

    def value(self, weights: Weights, queries: Positions, keys: KeyPositions) -> Spread | None:
        return None

    def spread(self, weights: Weights, mask: AttentionMask) -> Spread | None:
        """What `value` adds for the pairs of a mask, of which the unseen have no weight."""
        return self.value(weights, mask.query_positions, mask.key_positions)

    def refuse_past(self, length: int) -> None:
        """A learned table has an end; going past it is an error, not a wrap-around."""
        if self.max_length is not None and length > self.max_length:
            raise UserError(
                f"{length} positions, but the learned ones end at {self.max_length}: shorten the "
                "text, or train with a larger model.max_length or another model.position"
            )


def bias_by_distance(position: Position, q: Queries) -> Float[Tensor, "h far"]:
    """The bias of each head at the distances −(n−1) … n−1, in float32 at least.

    Full precision, because each entry is added to many scores. For positions whose bias depends on
    the distance only.
    """
    length = q.shape[2]
    center = torch.full((1, 1), length - 1, device=q.device)
    distances = torch.arange(2 * length - 1, device=q.device)[None]
    precise = q[:1, :, :1].to(torch.promote_types(q.dtype, torch.float32))
    bias = position.score(precise, center, distances)
    assert bias is not None
    return bias[0, :, 0]


def _angles(
    positions: Positions, channels: int, base: float, dtype: torch.dtype
) -> Float[Tensor, "#b t half"]:
    """pos / base^(2i/channels) for each pair i of channels, never in less than float32."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, channels, 2, device=positions.device, dtype=precise)
    return positions[..., None].to(precise) * base ** (-pairs / channels)


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


class LearnedPosition(Position):
    """One trained vector a position, up to a last one; the first `offset` rows are no position."""

    def __init__(self, max_length: int, dim: int, offset: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.offset = offset
        self.table = nn.Embedding(max_length + offset, dim)

    def embed(self, x: Hidden, positions: Positions) -> Hidden:
        return x + self.table(positions + self.offset)


class RotaryPosition(Position):
    """Turns each pair of channels by pos · θᵢ, so that q · k depends on the distance alone."""

    def __init__(self, base: float, layout: str) -> None:
        super().__init__()
        self.base = base
        self.layout = layout

    def rotate(self, x: Turned, positions: Positions) -> Turned:
        angles = rearrange(_angles(positions, x.shape[-1], self.base, x.dtype), "b t r -> b 1 t r")
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.layout == "interleaved":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


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

    def _rows(self, queries: Positions, keys: KeyPositions) -> Int[Tensor, "#b 1 t s"]:
        distance = rearrange(keys, "b s -> b 1 1 s") - rearrange(queries, "b t -> b 1 t 1")
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> Bias | None:
        every = (q @ self.keys.T) / math.sqrt(q.shape[-1])
        rows = self._rows(queries, keys)
        return every.gather(-1, rows.expand(*every.shape[:2], *rows.shape[2:]))

    def value(self, weights: Weights, queries: Positions, keys: KeyPositions) -> Spread | None:
        rows = self._rows(queries, keys).expand_as(weights)
        by_distance = weights.new_zeros(*weights.shape[:3], len(self.values))
        return by_distance.scatter_add(-1, rows, weights) @ self.values

    def bias(self, q: Queries, mask: AttentionMask) -> Bias | None:
        """Of a full pass nothing is gathered: all is skewed."""
        if not mask.square:
            return self.score(q, mask.query_positions, mask.key_positions)
        every, far = (q @ self.keys.T) / math.sqrt(q.shape[-1]), q.shape[2] - 1
        ahead = 0 if mask.rule.is_causal else far
        return skew(stretch(every, -self.max_distance, -far, ahead))

    def spread(self, weights: Weights, mask: AttentionMask) -> Spread | None:
        if not mask.square:
            return self.value(weights, mask.query_positions, mask.key_positions)
        far, most = weights.shape[2] - 1, self.max_distance
        return shrink(unskew(weights), -far, -most, most) @ self.values


class BucketPosition(Position):
    """T5's relative bias: one number a head for each bucket of distances, wider further off."""

    is_relative_bias = True

    def __init__(self, buckets: int, max_distance: int, heads: int, both_ways: bool) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.both_ways = both_ways
        self.table = nn.Embedding(buckets, heads)

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> Bias | None:
        distance = rearrange(keys, "b s -> b 1 s") - rearrange(queries, "b t -> b t 1")
        bias = self.table(self.bucket(distance)).to(q.dtype)
        return rearrange(bias, "b t s h -> b h t s")

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
        steps = torch.log(distance.clamp(min=1).float() / exact)
        far = exact + (steps / math.log(self.max_distance / exact) * (buckets - exact)).long()
        return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class AlibiPosition(Position):
    """−slope_h · |i − j| on the scores: each head is short-sighted in its own measure."""

    exponents: Tensor
    is_relative_bias = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        # The exponents are exact in any precision, the slopes are not.
        exponents = [math.log2(slope) for slope in alibi_slopes(heads)]
        self.register_buffer("exponents", torch.tensor(exponents), persistent=False)

    def score(self, q: Queries, queries: Positions, keys: KeyPositions) -> Bias | None:
        distance = rearrange(queries, "b t -> b 1 t 1") - rearrange(keys, "b s -> b 1 1 s")
        slopes = repeat(self.exponents.to(q.dtype).exp2(), "h -> 1 h 1 1")
        return -slopes * distance.abs()


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8i/n) for a power of two; else those, and every other one of the next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


@dataclass(frozen=True, kw_only=True)
class PositionSizes:
    """What a scheme may need to know of the stack that it is built for.

    `dim` is the width at which positions are added: that of the token table.
    """

    dim: int
    heads: int
    head_dim: int
    max_length: int
    causal: bool


@dataclass(frozen=True, kw_only=True)
class NoPosition:
    """None: the model sees a bag of tokens (a causal mask still tells a little)."""

    kind: ClassVar[str] = "none"
    per_layer: ClassVar[bool] = False

    def build(self, sizes: PositionSizes) -> Position:
        return Position()


@dataclass(frozen=True, kw_only=True)
class Sinusoidal:
    """Fixed waves added to the embeddings. `halves` puts all sines before all cosines."""

    base: float = 10_000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    kind: ClassVar[str] = "sinusoidal"
    per_layer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_above_zero("position.base", self.base)

    def build(self, sizes: PositionSizes) -> Position:
        return SinusoidalPosition(self.base, self.layout)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A trained vector for each position up to model.max_length.

    `offset` rows stand unused before the first (RoBERTa and BART counted from their padding on).
    """

    offset: int = 0
    kind: ClassVar[str] = "learned"
    per_layer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_at_least("position.offset", self.offset, 0)

    def build(self, sizes: PositionSizes) -> Position:
        return LearnedPosition(sizes.max_length, sizes.dim, self.offset)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Queries and keys turned by their position. `halves` pairs channel i with i + c/2."""

    base: float = 10_000.0
    layout: Literal["interleaved", "halves"] = "halves"
    kind: ClassVar[str] = "rotary"
    per_layer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_above_zero("position.base", self.base)

    def build(self, sizes: PositionSizes) -> Position:
        if sizes.head_dim % 2:
            raise UserError(
                f"rotary positions turn pairs of channels: head_dim={sizes.head_dim} "
                "is odd, so choose an even one"
            )
        return RotaryPosition(self.base, self.layout)


@dataclass(frozen=True, kw_only=True)
class Shaw:
    """Relative vectors on keys and values, clipped at `max_distance`, in each layer anew."""

    max_distance: int = 16
    kind: ClassVar[str] = "shaw"
    per_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_at_least("position.max_distance", self.max_distance, 1)

    def build(self, sizes: PositionSizes) -> Position:
        return ShawPosition(self.max_distance, sizes.head_dim)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """T5's bucketed relative bias, one table for all layers of a stack."""

    buckets: int = 32
    max_distance: int = 128
    kind: ClassVar[str] = "t5"
    per_layer: ClassVar[bool] = False

    def build(self, sizes: PositionSizes) -> Position:
        least = 2 if sizes.causal else 4
        if self.buckets < least or self.max_distance <= self.buckets // least:
            raise UserError(
                f"position.buckets={self.buckets} must be at least {least}, and "
                f"position.max_distance={self.max_distance} beyond the exact buckets"
            )
        return BucketPosition(self.buckets, self.max_distance, sizes.heads, not sizes.causal)


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """A penalty on the scores that grows with the distance; nothing to train."""

    kind: ClassVar[str] = "alibi"
    per_layer: ClassVar[bool] = False

    def build(self, sizes: PositionSizes) -> Position:
        return AlibiPosition(sizes.heads)
