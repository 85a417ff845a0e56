"""How a query meets a key: the five score forms of the lectures.

Four of them are an inner product after each side has been projected; such a score gives its
`factors`, and any core can use it. The additive score is not, and needs a core that holds the
scores themselves.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import UserError, check_at_least

Query = Float[Tensor, "b h t c"]
Key = Float[Tensor, "b h s e"]
Scores = Float[Tensor, "b h t s"]
Factors = tuple[Float[Tensor, "b h t r"], Float[Tensor, "b h s r"]]


class Score(nn.Module):
    """score(q, k) for every pair of a query and a key."""

    def forward(self, q: Query, k: Key) -> Scores:
        raise NotImplementedError


class InnerScore(Score):
    """A score of the form scale · ⟨f(q), g(k)⟩. Subclasses give f and g."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def factors(self, q: Query, k: Key) -> Factors:
        return q, k

    def forward(self, q: Query, k: Key) -> Scores:
        f, g = self.factors(q, k)
        return einsum(f, g, "b h t r, b h s r -> b h t s") * self.scale


class BilinearScore(InnerScore):
    """q W kᵀ: W joins a query of one size to a key of another."""

    def __init__(self, heads: int, head_dim: int, key_dim: int) -> None:
        super().__init__(scale=1.0)
        self.weight = nn.Parameter(torch.empty(heads, head_dim, key_dim))
        nn.init.normal_(self.weight, std=(head_dim * key_dim) ** -0.5)

    def factors(self, q: Query, k: Key) -> Factors:
        return einsum(q, self.weight, "b h t c, h c e -> b h t e"), k


class ReducedRankScore(InnerScore):
    """(U q)ᵀ (V k): the bilinear form with W = UᵀV of a small rank."""

    def __init__(self, heads: int, head_dim: int, key_dim: int, rank: int) -> None:
        super().__init__(scale=1.0)
        self.query = nn.Parameter(torch.empty(heads, rank, head_dim))
        self.key = nn.Parameter(torch.empty(heads, rank, key_dim))
        nn.init.normal_(self.query, std=head_dim**-0.5)
        nn.init.normal_(self.key, std=(key_dim * rank) ** -0.5)

    def factors(self, q: Query, k: Key) -> Factors:
        return (
            einsum(q, self.query, "b h t c, h r c -> b h t r"),
            einsum(k, self.key, "b h s e, h r e -> b h s r"),
        )


class AdditiveScore(Score):
    """wᵀ tanh(A q + B k): a small network looks at the pair."""

    def __init__(self, heads: int, head_dim: int, key_dim: int, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(heads, width, head_dim))
        self.key = nn.Parameter(torch.empty(heads, width, key_dim))
        self.weight = nn.Parameter(torch.empty(heads, width))
        nn.init.normal_(self.query, std=head_dim**-0.5)
        nn.init.normal_(self.key, std=key_dim**-0.5)
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, q: Query, k: Key) -> Scores:
        f = einsum(q, self.query, "b h t c, h r c -> b h t r")
        g = einsum(k, self.key, "b h s e, h r e -> b h s r")
        pair = torch.tanh(f.unsqueeze(3) + g.unsqueeze(2))
        return einsum(pair, self.weight, "b h t s r, h r -> b h t s")


@dataclass(frozen=True, kw_only=True)
class Dot:
    """q · k, unscaled (also T5's)."""

    kind: ClassVar[str] = "dot"

    def key_dim(self, head_dim: int) -> int:
        return head_dim

    def build(self, heads: int, head_dim: int) -> Score:
        return InnerScore(scale=1.0)


@dataclass(frozen=True, kw_only=True)
class ScaledDot:
    """q · k / √c, the Transformer's own. `scale` replaces 1/√c."""

    scale: float | None = None
    kind: ClassVar[str] = "scaled-dot"

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise UserError(f"score.scale={self.scale} must be a finite number")

    def key_dim(self, head_dim: int) -> int:
        return head_dim

    def build(self, heads: int, head_dim: int) -> Score:
        return InnerScore(scale=1 / math.sqrt(head_dim) if self.scale is None else self.scale)


@dataclass(frozen=True, kw_only=True)
class Bilinear:
    """q W kᵀ; keys may have another size than queries."""

    key_size: int | None = None
    kind: ClassVar[str] = "bilinear"

    def __post_init__(self) -> None:
        check_at_least("score.key_size", self.key_size, 1)

    def key_dim(self, head_dim: int) -> int:
        return self.key_size or head_dim

    def build(self, heads: int, head_dim: int) -> Score:
        return BilinearScore(heads, head_dim, self.key_dim(head_dim))


@dataclass(frozen=True, kw_only=True)
class ReducedRank:
    """(U q)ᵀ (V k) through `rank` channels."""

    rank: int = 8
    key_size: int | None = None
    kind: ClassVar[str] = "reduced-rank"

    def __post_init__(self) -> None:
        check_at_least("score.rank", self.rank, 1)
        check_at_least("score.key_size", self.key_size, 1)

    def key_dim(self, head_dim: int) -> int:
        return self.key_size or head_dim

    def build(self, heads: int, head_dim: int) -> Score:
        if self.rank > head_dim:
            raise UserError(
                f"score.rank={self.rank} is no reduction: a head has {head_dim} channels, "
                "so choose a smaller rank"
            )
        return ReducedRankScore(heads, head_dim, self.key_dim(head_dim), self.rank)


@dataclass(frozen=True, kw_only=True)
class Additive:
    """wᵀ tanh(A q + B k) with a hidden `width` (the head size unless given)."""

    width: int | None = None
    key_size: int | None = None
    kind: ClassVar[str] = "additive"

    def __post_init__(self) -> None:
        check_at_least("score.width", self.width, 1)
        check_at_least("score.key_size", self.key_size, 1)

    def key_dim(self, head_dim: int) -> int:
        return self.key_size or head_dim

    def build(self, heads: int, head_dim: int) -> Score:
        return AdditiveScore(heads, head_dim, self.key_dim(head_dim), self.width or head_dim)


ScoreConfig = Dot | ScaledDot | Bilinear | ReducedRank | Additive
