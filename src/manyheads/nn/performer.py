"""Performer: softmax attention estimated from random features, at a cost linear in the length.

    exp(qᵀk) = E_ω[φ(q)ᵀ φ(k)],  φ(x) = exp(ωᵀx − |x|²/2) / √m  over m features ω ~ N(0, I)

    Attention(Q, K, V) ≈ φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1)

No feature is negative, so no sum of weights is zero (FAVOR+; Choromanski et al. 2021, Rethinking
Attention with Performers). A scaled product is the product of queries and keys times √scale.

Features and sums are computed in at least float32, under autocast too, and rounded once.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.errors import Mistake, check_at_least
from manyheads.nn.cores import CoreSizes, share_heads
from manyheads.nn.masks import Causal, Full, Sight
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import Keys, Queries, Values, Weights

Vectors = Float[Tensor, "*n c"]
Projection = Float[Tensor, "m c"]
Exponents = Float[Tensor, "*n m"]
QueryFeatures = Float[Tensor, "b h t m"]
KeyFeatures = Float[Tensor, "b h s m"]
KeyValues = Float[Tensor, "b h s c"]
Mixed = Float[Tensor, "b h t c"]
Draw = Literal["orthogonal", "independent"]

# Weights whose sum is below this are lost to rounding, and dividing by it would overflow.
LEAST = 1e-30


def exponents(x: Vectors, projection: Projection) -> Exponents:
    """ωᵀx − |x|²/2 for each feature: the logarithm of √m · φ(x)."""
    return x @ projection.T - x.square().sum(-1, keepdim=True) / 2


def draw_projection(features: int, channels: int, draw: Draw) -> Projection:
    """The ω, each as if from N(0, I), from the global generator of the CPU.

    Orthogonal ones are at right angles in blocks of as many as there are channels: the directions
    of a block are the rows of a uniformly random rotation, the lengths those of other Gaussians.
    """
    gaussian = torch.randn(features, channels, dtype=torch.float32, device="cpu")
    if draw == "independent":
        return gaussian
    blocks = math.ceil(features / channels)
    square = torch.randn(blocks, channels, channels, dtype=torch.float32, device="cpu")
    rotation, upper = torch.linalg.qr(square)
    # A factorisation fixes the signs by its own habit; only with those of R's diagonal undone
    # is every rotation equally likely, and the estimate unbiased.
    signs = upper.diagonal(dim1=-2, dim2=-1).sign()
    directions = rearrange(rotation * signs.unsqueeze(-2), "n r c -> (n r) c")[:features]
    return directions * gaussian.norm(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Performer:
    """Softmax estimated from positive random `features`; both ways, or looking back only.

    `redraw` draws new ones after so many training passes. `chunk` is how many positions a causal
    pass takes together: it changes the time and not the result.
    """

    features: int = 256
    redraw: int | None = None
    draw: Draw = "orthogonal"
    chunk: int = 128
    kind: ClassVar[str] = "performer"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_at_least("core.features", self.features, 1)
        check_at_least("core.redraw", self.redraw, 1)
        check_at_least("core.chunk", self.chunk, 1)

    def build(self, sizes: CoreSizes) -> "PerformerCore":
        _refuse_dropout(sizes.dropout)
        return PerformerCore(self, sizes)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise Mistake(
            "the performer core never holds the weights, so that none can be dropped: choose "
            "model.attention_dropout=0, or another core (model.core=fused)"
        )


class PerformerCore(nn.Module):
    """φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1); its features are saved with the weights."""

    projection: Tensor
    calls: Tensor

    def __init__(self, settings: Performer, sizes: CoreSizes) -> None:
        super().__init__()
        self.settings = settings
        room = torch.empty(settings.features, sizes.head_dim, dtype=torch.float32)
        self.register_buffer("projection", room)
        if settings.redraw is not None:
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.draw()

    def draw(self) -> None:
        """New features, in a new tensor: a backward pass may still need the old one."""
        features, channels = self.projection.shape
        drawn = draw_projection(features, channels, self.settings.draw)
        self.projection = drawn.to(self.projection)

    def check(self, score: Score, position: Position) -> None:
        if type(score) is not InnerScore:
            raise Mistake(
                "the performer core estimates the exponential of a dot product: choose "
                "model.score=scaled-dot or dot, or another core (model.core=fused)"
            )
        kind = type(position)
        if kind.score is not Position.score or kind.value is not Position.value:
            raise Mistake(
                "the performer core never holds scores or weights, and this position adds to "
                "them: choose one that does not (model.position=rotary, sinusoidal or learned)"
            )

    def meets(self, length: int) -> int:
        return self.settings.features

    def weights(
        self, q: Queries, k: Keys, sight: Sight, score: Score, position: Position
    ) -> Weights:
        """The estimated weights, which a pass never holds unless queries are few."""
        with torch.autocast(q.device.type, enabled=False):
            kernel = _seen(*self._features(q, k, sight, score), sight)
            return _divide(kernel, kernel.sum(-1, keepdim=True)).to(q.dtype)

    def forward(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        sight: Sight,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> Mixed:
        _refuse_dropout(dropout)
        with torch.autocast(q.device.type, enabled=False):
            queries, keys = self._features(q, k, sight, score)
            # A channel of ones beside the values sums the weights that they are mixed with.
            values = F.pad(share_heads(v, q.shape[1]).to(keys.dtype), (0, 1), value=1.0)
            if isinstance(sight.rule, Full):
                state = einsum(keys, values, "b h s m, b h s c -> b h m c")
                sums = einsum(queries, state, "b h t m, b h m c -> b h t c")
            elif sight.square:
                sums = _causal(queries, keys, values, self.settings.chunk)
            else:
                kernel = _seen(queries, keys, sight)
                sums = einsum(kernel, values, "b h t s, b h s c -> b h t c")
            mixed = _divide(sums[..., :-1], sums[..., -1:]).to(q.dtype)
        self._count()
        return mixed

    def _features(
        self, q: Queries, k: Keys, sight: Sight, score: Score
    ) -> tuple[QueryFeatures, KeyFeatures]:
        """φ(q) and φ(k), up to a factor for each query, which a quotient of sums loses again.

        Each feature of the keys is measured by its largest over the row, which is given back to
        the queries, and each query's by its own largest: nothing overflows, and where a query
        sees all keys its features sum to 1 at least. As these factors cancel, no gradient need go
        through them, and none leads from a query to later keys.
        """
        if not isinstance(sight.rule, Full | Causal):
            raise Mistake(
                "the performer core sums over all keys or over all earlier ones, and knows no "
                f"rule like {sight.rule.kind}: choose another core (model.core=fused)"
            )
        assert isinstance(score, InnerScore)
        precise = torch.promote_types(q.dtype, torch.float32)
        root, projection = math.sqrt(abs(score.scale)), self.projection.to(precise)
        queries = exponents(q.to(precise) * math.copysign(root, score.scale), projection)
        keys = exponents(k.to(precise) * root, projection)
        if sight.real is not None:
            keys = keys.masked_fill(~rearrange(sight.real, "b s -> b 1 s 1"), -torch.inf)
        highest = keys.detach().amax(2, keepdim=True)
        highest = highest.masked_fill(highest == -torch.inf, 0.0)
        queries = queries + share_heads(highest, q.shape[1])
        queries = queries - queries.detach().amax(-1, keepdim=True)
        return queries.exp(), share_heads((keys - highest).exp(), q.shape[1])

    def _count(self) -> None:
        """A training pass is over; after `redraw` of them the next has other features."""
        if self.training and self.settings.redraw is not None:
            self.calls += 1
            if int(self.calls) % self.settings.redraw == 0:
                self.draw()


def _seen(queries: QueryFeatures, keys: KeyFeatures, sight: Sight) -> Weights:
    """φ(q)ᵀ φ(k) of every pair, zero where a query must not see."""
    kernel = einsum(queries, keys, "b h t m, b h s m -> b h t s")
    mask = sight.mask()
    return kernel if mask is None else kernel.masked_fill(~mask, 0.0)


def _causal(queries: QueryFeatures, keys: KeyFeatures, values: KeyValues, chunk: int) -> Mixed:
    """Σ_{j≤i} φ(q_i)ᵀφ(k_j) v_j: pair by pair inside a chunk, and all chunks before it at once."""
    length = queries.shape[2]
    chunk = min(chunk, length)
    if length % chunk:
        rest = (0, 0, 0, -length % chunk)
        queries, keys, values = (F.pad(x, rest) for x in (queries, keys, values))
    queries, keys, values = (
        rearrange(x, "b h (n l) c -> b h n l c", l=chunk) for x in (queries, keys, values)
    )
    near = einsum(queries, keys, "b h n i m, b h n j m -> b h n i j").tril()
    states = einsum(keys, values, "b h n l m, b h n l c -> b h n m c").cumsum(2)
    before = F.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))
    sums = einsum(near, values, "b h n i j, b h n j c -> b h n i c")
    sums = sums + einsum(queries, before, "b h n i m, b h n m c -> b h n i c")
    return rearrange(sums, "b h n l c -> b h (n l) c")[:, :, :length]


def _divide(sums: Tensor, total: Tensor) -> Tensor:
    """The mean from weighted sums; a query that sees no key gets zeros and gives no gradient."""
    blind = total < LEAST
    return (sums / total.masked_fill(blind, 1.0)).masked_fill(blind, 0.0)
