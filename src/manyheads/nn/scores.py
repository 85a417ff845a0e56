"""Score functions: how well a query matches a key.

    dot            qᵀk                 scaled dot     qᵀk / √c
    bilinear       qᵀ W k              reduced rank   (U q)ᵀ (V k)
    additive       wᵀ tanh(A q + B k)

All but the additive score are inner products after a projection of each side (`InnerScore`), which
every attention implementation can compute. The additive score needs one that holds the scores.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.config import Count
from manyheads.errors import UserError
from manyheads.nn.shapes import Queries, SharedKeys, Weights

Factors = tuple[Float[Tensor, "b h t r"], Float[Tensor, "b h s r"]]


def _parameter(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(tensor=torch.empty(shape), std=std))


class Score(nn.Module):
    """score(q, k) of every pair of a query and a key."""

    initialises_itself = True

    def forward(self, q: Queries, k: SharedKeys) -> Weights:
        raise NotImplementedError


class InnerScore(Score):
    """scale · ⟨f(q), g(k)⟩; subclasses define f and g."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def factors(self, q: Queries, k: SharedKeys) -> Factors:
        return q, k

    def forward(self, q: Queries, k: SharedKeys) -> Weights:
        f, g = self.factors(q, k)
        return einsum(f, g, "b h t r, b h s r -> b h t s") * self.scale


class BilinearScore(InnerScore):
    """qᵀ W k with a matrix W for each head."""

    def __init__(self, heads: int, head_dim: int, key_dim: int) -> None:
        super().__init__()
        self.weight = _parameter(heads, head_dim, key_dim, std=(head_dim * key_dim) ** -0.5)

    def factors(self, q: Queries, k: SharedKeys) -> Factors:
        return einsum(q, self.weight, "b h t c, h c e -> b h t e"), k


class ReducedRankScore(InnerScore):
    """(U q)ᵀ (V k): the bilinear score with W = UᵀV of a small rank."""

    def __init__(self, heads: int, head_dim: int, key_dim: int, rank: int) -> None:
        super().__init__()
        self.query = _parameter(heads, rank, head_dim, std=head_dim**-0.5)
        self.key = _parameter(heads, rank, key_dim, std=(key_dim * rank) ** -0.5)

    def factors(self, q: Queries, k: SharedKeys) -> Factors:
        return (
            einsum(q, self.query, "b h t c, h r c -> b h t r"),
            einsum(k, self.key, "b h s e, h r e -> b h s r"),
        )


class AdditiveScore(Score):
    """wᵀ tanh(A q + B k), a network with one hidden layer."""

    def __init__(self, heads: int, head_dim: int, key_dim: int, width: int) -> None:
        super().__init__()
        self.query = _parameter(heads, width, head_dim, std=head_dim**-0.5)
        self.key = _parameter(heads, width, key_dim, std=key_dim**-0.5)
        self.weight = _parameter(heads, width, std=width**-0.5)

    def forward(self, q: Queries, k: SharedKeys) -> Weights:
        f = einsum(q, self.query, "b h t c, h r c -> b h t r")
        g = einsum(k, self.key, "b h s e, h r e -> b h s r")
        hidden = torch.tanh(f.unsqueeze(3) + g.unsqueeze(2))
        return einsum(hidden, self.weight, "b h t s r, h r -> b h t s")


class _SameKeySize:
    def key_dim(self, head_dim: int) -> int:
        """Channels of a key."""
        return head_dim


@dataclass(frozen=True, kw_only=True)
class Dot(_SameKeySize):
    """qᵀk, unscaled (T5)."""

    kind: ClassVar[str] = "dot"

    def build(self, heads: int, head_dim: int) -> Score:
        return InnerScore()


@dataclass(frozen=True, kw_only=True)
class ScaledDot(_SameKeySize):
    """qᵀk / √c (Transformer)."""

    scale: Annotated[float | None, "Factor of the dot product; none: 1/√c"] = None
    kind: ClassVar[str] = "scaled-dot"

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise UserError(f"score.scale={self.scale} must be a finite number")

    def build(self, heads: int, head_dim: int) -> Score:
        return InnerScore(1 / math.sqrt(head_dim) if self.scale is None else self.scale)


@dataclass(frozen=True, kw_only=True)
class _OtherKeySize:
    """Settings of scores whose keys may have another size than queries."""

    key_size: Annotated[Count | None, "Channels of a key; none: those of a query"] = None

    def key_dim(self, head_dim: int) -> int:
        return self.key_size or head_dim


@dataclass(frozen=True, kw_only=True)
class Bilinear(_OtherKeySize):
    """qᵀ W k."""

    kind: ClassVar[str] = "bilinear"

    def build(self, heads: int, head_dim: int) -> Score:
        return BilinearScore(heads, head_dim, self.key_dim(head_dim))


@dataclass(frozen=True, kw_only=True)
class ReducedRank(_OtherKeySize):
    """(U q)ᵀ (V k)."""

    rank: Annotated[Count, "Rank of UᵀV"] = 8
    kind: ClassVar[str] = "reduced-rank"

    def build(self, heads: int, head_dim: int) -> Score:
        if self.rank > head_dim:
            raise UserError(
                f"score.rank={self.rank} exceeds the {head_dim} channels of a head: lower it"
            )
        return ReducedRankScore(heads, head_dim, self.key_dim(head_dim), self.rank)


@dataclass(frozen=True, kw_only=True)
class Additive(_OtherKeySize):
    """wᵀ tanh(A q + B k)."""

    width: Annotated[Count | None, "Hidden width; none: the channels of a head"] = None
    kind: ClassVar[str] = "additive"

    def build(self, heads: int, head_dim: int) -> Score:
        return AdditiveScore(heads, head_dim, self.key_dim(head_dim), self.width or head_dim)


ScoreConfig = Dot | ScaledDot | Bilinear | ReducedRank | Additive
