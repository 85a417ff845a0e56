"""Performer: softmax attention estimated from random features, at a cost linear in the length.

    exp(qᵀk) = E_ω[φ(q)ᵀ φ(k)],  φ(x) = exp(ωᵀx − |x|²/2) / √m  over m features ω ~ N(0, I)

    Attention(Q, K, V) ≈ φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1)

No feature is negative, so no sum of weights is zero (FAVOR+; Choromanski et al. 2021, Rethinking
Attention with Performers). A scaled product is the product of queries and keys times √scale.

Features and sums are computed in at least float32, under autocast too, and rounded once. So that
no exponential overflows and none that counts is lost, with a_i and b_j the exponents of φ(q_i)
and φ(k_j),

    e^(−r_i) φ(q_i)ᵀ φ(k_j) = Σ e^(a_i + p − r_i) e^(b_j − p),  r_i = max(a_i + p)

for any p over the features: the quotient loses r_i again, and a pair p. Where p is as high as
what a query sees, but not beyond it, both factors are at most 1 and one pair's product is 1.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import ops
from manyheads.errors import UserError, check_at_least
from manyheads.nn.exact_attention import AttentionSizes
from manyheads.nn.masks import AttentionMask, Causal, Full
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import Keys, Queries, Values, Weights
from manyheads.ops import share_heads

Vectors = Float[Tensor, "*n c"]
Projection = Float[Tensor, "m c"]
Exponents = Float[Tensor, "*n m"]
OfQueries = Float[Tensor, "*n i m"]
OfKeys = Float[Tensor, "*n j m"]
OfValues = Float[Tensor, "*n j c"]
OfAll = Float[Tensor, "*n 1 m"]
State = Float[Tensor, "*n m c"]
Largest = Float[Tensor, "*n i 1"]
Sums = tuple[Float[Tensor, "*n i c"], Largest]
Chunks = Float[Tensor, "b h n l c"]
States = Float[Tensor, "b h n m c"]
Measures = Float[Tensor, "b h n m 1"]
QueryFeatures = Float[Tensor, "b h t m"]
KeyFeatures = Float[Tensor, "b h s m"]
KeyValues = Float[Tensor, "b h s c"]
AttentionOutput = Float[Tensor, "b h t c"]
Draw = Literal["orthogonal", "independent"]

# Of an exponential in float32: e^±60 leaves room for sums of many, and for what is e^−27 of it.
ROOM = 60.0
# The highest exponent where there is no key: below all others, and unlike −∞ it can be subtracted.
IGNORE_INDEX = -1e30


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

    def build(self, sizes: AttentionSizes) -> "PerformerCore":
        _refuse_dropout(sizes.dropout)
        return PerformerCore(self, sizes)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise UserError(
            "the performer core never holds the weights, so that none can be dropped: choose "
            "model.attention_dropout=0, or another core (model.attention=fused)"
        )


class PerformerCore(nn.Module):
    """φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1); its features are saved with the weights."""

    projection: Tensor
    calls: Tensor

    def __init__(self, settings: Performer, sizes: AttentionSizes) -> None:
        super().__init__()
        self.settings, self.sizes = settings, sizes
        self.has_host_sync = settings.redraw is not None  # whether it is time for it
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
            raise UserError(
                "the performer core estimates the exponential of a dot product: choose "
                "model.score=scaled-dot or dot, or another core (model.attention=fused)"
            )
        kind = type(position)
        if kind.score is not Position.score or kind.value is not Position.value:
            raise UserError(
                "the performer core never holds scores or weights, and this position adds to "
                "them: choose one that does not (model.position=rotary, sinusoidal or learned)"
            )

    def weights(
        self, q: Queries, k: Keys, mask: AttentionMask, score: Score, position: Position
    ) -> Weights:
        """The estimated weights, which a pass never holds unless queries are few."""
        with ops.full_precision(q):
            kernel = _seen(*self._exponents(q, k, mask, score), mask)
            return _divide(kernel, kernel.sum(-1, keepdim=True)).to(q.dtype)

    def forward(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        mask: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> AttentionOutput:
        _refuse_dropout(dropout)
        with ops.full_precision(q):
            queries, keys = self._exponents(q, k, mask, score)
            # A channel of ones beside the values sums the weights that they are mixed with.
            values = F.pad(share_heads(v, q.shape[1]).to(keys.dtype), (0, 1), value=1.0)
            if isinstance(mask.rule, Full):
                p = _highest(keys)
                state = einsum((keys - p).exp(), values, "b h s m, b h s c -> b h m c")
                sums, _ = _meet(queries, p, state)
            elif mask.square:
                sums = _causal(queries, keys, values, self.settings.chunk)
            else:
                kernel = _seen(queries, keys, mask)
                sums = einsum(kernel, values, "b h t s, b h s c -> b h t c")
            mixed = _divide(sums[..., :-1], sums[..., -1:]).to(q.dtype)
        self._count()
        return mixed

    def _exponents(
        self, q: Queries, k: Keys, mask: AttentionMask, score: Score
    ) -> tuple[QueryFeatures, KeyFeatures]:
        """The logarithms of √m φ(q) and √m φ(k), −∞ of what is padding."""
        if not isinstance(mask.rule, Full | Causal):
            raise UserError(
                "the performer core sums over all keys or over all earlier ones, and knows no "
                f"rule like {mask.rule.kind}: choose another core (model.attention=fused)"
            )
        assert isinstance(score, InnerScore)
        precise = torch.promote_types(q.dtype, torch.float32)
        root, projection = math.sqrt(abs(score.scale)), self.projection.to(precise)
        queries = exponents(q.to(precise) * math.copysign(root, score.scale), projection)
        keys = exponents(k.to(precise) * root, projection)
        if mask.padding_mask is not None:
            keys = keys.masked_fill(~rearrange(mask.padding_mask, "b s -> b 1 s 1"), -torch.inf)
        return queries, share_heads(keys, q.shape[1])

    def _count(self) -> None:
        """A training pass is over; after `redraw` of them the next has other features."""
        if self.training and self.settings.redraw is not None:
            self.calls += 1
            if int(self.calls) % self.settings.redraw == 0:
                self.draw()


def _highest(keys: OfKeys) -> OfAll:
    """The highest exponent of each feature. It cancels: no gradient need go through it."""
    return keys.detach().amax(-2, keepdim=True).clamp(min=IGNORE_INDEX)


def _reference(keys: OfKeys, before: OfAll) -> tuple[OfAll, bool]:
    """A p for queries that all see `before` and some of these keys, and whether it serves them all.

    It does if keys that only some of them see are not too far above what each of them sees.
    """
    keys = keys.detach()
    highest = torch.maximum(_highest(keys), before)
    least = torch.where(keys == -torch.inf, torch.inf, keys).amin(-2, keepdim=True)
    lowest = torch.minimum(torch.maximum(least, before), highest)
    return torch.maximum(lowest, highest - ROOM), bool((highest - lowest <= 2 * ROOM).all())


def _measured(queries: OfQueries, p: OfAll) -> tuple[OfQueries, Largest]:
    """e^(a_i + p − r_i), and r_i."""
    queries = queries + p
    r = queries.detach().amax(-1, keepdim=True)
    return (queries - r).exp(), r


def _meet(queries: OfQueries, p: OfAll, state: State) -> Sums:
    """What queries get of Σ_j e^(b_j − p) v_j, and r_i."""
    features, r = _measured(queries, p)
    return einsum(features, state, "... t m, ... m c -> ... t c"), r


def _seen(queries: QueryFeatures, keys: KeyFeatures, mask: AttentionMask) -> Weights:
    """φ(q)ᵀ φ(k) of every pair up to a factor for each query, zero where it must not see."""
    allowed = mask.as_bool()
    if allowed is None:
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=keys.device)
    by_all = rearrange(allowed.all(2), "b 1 s -> b 1 s 1")
    p, serves = _reference(keys, _highest(torch.where(by_all, keys, -torch.inf)))
    if serves:
        features, _ = _measured(queries, p)
        kernel = einsum(features, (keys - p).exp(), "b h t m, b h s m -> b h t s")
        return kernel.masked_fill(~allowed, 0.0)

    def pairs(feature: int) -> Weights:
        a, b = queries[..., feature], keys[..., feature]
        sums = rearrange(a, "b h t -> b h t 1") + rearrange(b, "b h s -> b h 1 s")
        return sums.masked_fill(~allowed, -torch.inf)

    # No p serves: feature by feature, each pair as it is.
    r = torch.full_like(queries[..., :1], IGNORE_INDEX)
    for feature in range(queries.shape[-1]):
        r = torch.maximum(r, pairs(feature).detach().amax(-1, keepdim=True))
    kernel = (pairs(0) - r).exp()
    for feature in range(1, queries.shape[-1]):
        kernel = kernel + (pairs(feature) - r).exp()
    return kernel


def _causal(
    queries: QueryFeatures, keys: KeyFeatures, values: KeyValues, chunk: int
) -> AttentionOutput:
    """Σ_{j≤i} φ(q_i)ᵀφ(k_j) v_j up to a factor for each query.

    Pair by pair inside a chunk, and all chunks before it at once. What is later changes no p by
    more than there is room for, so that nothing of a query's own past is lost to it.
    """
    length = queries.shape[2]
    chunk = min(chunk, length)
    rest = (0, 0, 0, -length % chunk)
    queries, values = (_chunks(F.pad(x, rest), chunk) for x in (queries, values))
    keys = _chunks(F.pad(keys, rest, value=-torch.inf), chunk)
    highest = _highest(keys).cummax(2).values
    before = F.pad(highest[:, :, :-1], (0, 0, 0, 0, 1, 0), value=IGNORE_INDEX)
    p, serves = _reference(keys, before)
    features = (keys - p).exp()
    states = einsum(features, values, "b h n l m, b h n l c -> b h n m c")
    past = _carried(states, *(rearrange(x, "b h n 1 m -> b h n m 1") for x in (p, before)))
    if serves:
        own, _ = _measured(queries, p)
        near = einsum(own, features, "b h n i m, b h n j m -> b h n i j").tril()
        sums = einsum(near, values, "b h n i j, b h n j c -> b h n i c")
        past = past * rearrange((before - p).exp(), "b h n 1 m -> b h n m 1")
        sums = sums + einsum(own, past, "b h n i m, b h n m c -> b h n i c")
    else:
        sums, _ = _join(_meet(queries, before, past), _triangle(queries, keys, values))
    return rearrange(sums, "b h n l c -> b h (n l) c")[:, :, :length]


def _chunks(x: KeyValues, chunk: int) -> Chunks:
    return rearrange(x, "b h (n l) c -> b h n l c", l=chunk)


def _carried(states: States, p: Measures, before: Measures) -> States:
    """Σ_{n'<n} e^(p_n' − before_n) S_n': of each chunk, what came before it.

    As no p is below an earlier one, sums over 1, 2, 4 … chunks add up without a factor above 1.
    """
    step = 1
    while step < states.shape[2]:
        shrink = (p[:, :, :-step] - p[:, :, step:]).exp()
        states = states + F.pad(states[:, :, :-step] * shrink, (0, 0, 0, 0, step, 0))
        step *= 2
    shrink = (p[:, :, :-1] - before[:, :, 1:]).exp()
    return F.pad(states[:, :, :-1] * shrink, (0, 0, 0, 0, 1, 0))


def _triangle(queries: OfQueries, keys: OfKeys, values: OfValues) -> Sums:
    """Σ_{j≤i} where a key may be far above all before it: both halves, and the late on the early.

    A late query sees all early keys, so that their highest is a p for it.
    """
    length = queries.shape[-2]
    if length == 1:
        return _pairs(queries, keys, values)
    if length % 2:
        sums, r = _triangle(
            F.pad(queries, (0, 0, 0, 1)),
            F.pad(keys, (0, 0, 0, 1), value=-torch.inf),
            F.pad(values, (0, 0, 0, 1)),
        )
        return sums[..., :-1, :], r[..., :-1, :]
    queries, keys, values = (
        rearrange(x, "... (o l) c -> ... o l c", o=2) for x in (queries, keys, values)
    )
    sums, r = _triangle(queries, keys, values)
    early = _pairs(queries[..., 1, :, :], keys[..., 0, :, :], values[..., 0, :, :])
    late = _join((sums[..., 1, :, :], r[..., 1, :, :]), early)
    return (
        torch.cat([sums[..., 0, :, :], late[0]], dim=-2),
        torch.cat([r[..., 0, :, :], late[1]], dim=-2),
    )


def _pairs(queries: OfQueries, keys: OfKeys, values: OfValues) -> Sums:
    """What queries get that see all of these keys."""
    p = _highest(keys)
    features, r = _measured(queries, p)
    kernel = einsum(features, (keys - p).exp(), "... i m, ... j m -> ... i j")
    return einsum(kernel, values, "... i j, ... j c -> ... i c"), r


def _join(one: Sums, other: Sums) -> Sums:
    """Sums with the factors e^(−r_i) of the larger r_i."""
    r = torch.maximum(one[1], other[1])
    return one[0] * (one[1] - r).exp() + other[0] * (other[1] - r).exp(), r


def _divide(sums: Tensor, total: Tensor) -> Tensor:
    """The mean from weighted sums; a query that sees no key gets zeros and gives no gradient."""
    blind = total == 0
    return (sums / total.masked_fill(blind, 1.0)).masked_fill(blind, 0.0)
