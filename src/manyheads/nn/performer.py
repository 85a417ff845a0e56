"""Performer: softmax attention estimated from random features, at a cost linear in the length.

    exp(qᵀk) = E_ω[φ(q)ᵀ φ(k)],  φ(x) = exp(ωᵀx − |x|²/2) / √m  over m features ω ~ N(0, I)

    Attention(Q, K, V) ≈ φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1)

No feature is negative, so no sum of weights is zero (FAVOR+; Choromanski et al. 2021, Rethinking
Attention with Performers). A scaled product is the product of queries and keys times √scale.

Features and sums are computed in at least float32, under autocast too, and rounded once. To avoid
overflow and underflow, with a_i and b_j the exponents of φ(q_i) and φ(k_j),

    e^(−r_i) φ(q_i)ᵀ φ(k_j) = Σ e^(a_i + p − r_i) e^(b_j − p),  r_i = max(a_i + p)

for any shift p of each feature: r_i cancels in the quotient, and p in each pair. p is the highest
exponent of the keys that all queries attend to, or at most `MARGIN` below the highest of all.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import ops
from manyheads.config import Count
from manyheads.errors import UserError
from manyheads.nn.attention import AttentionInputs, AttentionSizes, check_rule
from manyheads.nn.masks import AttentionMask, Causal, Full
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import HeadOutput, Weights
from manyheads.ops import share_heads

Projection = Float[Tensor, "m c"]
Exponents = Float[Tensor, "*n j m"]
Shift = Float[Tensor, "*n 1 m"]  # p

CHUNK = 128  # positions of a causal chunk, inside which pairs are computed
# Exponents of float32: e^±60 leaves a margin for sums of many, and for terms e^−27 times smaller.
MARGIN = 60.0
# The highest exponent of no key: below all others, and unlike −∞ it can be subtracted.
LOWEST = -1e30
SMALLEST = 1e-30  # sums of weights below it have lost their precision, and would overflow gradients


def exponents(x: Float[Tensor, "*n c"], projection: Projection) -> Float[Tensor, "*n m"]:
    """ωᵀx − |x|²/2 for each feature: the logarithm of √m · φ(x)."""
    return x @ projection.T - x.square().sum(-1, keepdim=True) / 2


def draw_projection(features: int, channels: int) -> Projection:
    """The ω, each distributed as N(0, I), from the global generator of the CPU.

    They are orthogonal in blocks of as many as there are channels: the directions of a block are
    the rows of a uniformly random rotation, the lengths those of other Gaussians.
    """
    gaussian = torch.randn(features, channels, dtype=torch.float32, device="cpu")
    blocks = math.ceil(features / channels)
    square = torch.randn(blocks, channels, channels, dtype=torch.float32, device="cpu")
    rotation, upper = torch.linalg.qr(square)
    # QR fixes the signs in its own way. Only after undoing the signs of R's diagonal is every
    # rotation equally likely, and the estimate unbiased.
    signs = upper.diagonal(dim1=-2, dim2=-1).sign()
    directions = rearrange(rotation * signs.unsqueeze(-2), "n r c -> (n r) c")[:features]
    return directions * gaussian.norm(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Performer:
    """Softmax attention estimated from positive random features."""

    features: Annotated[Count, "Random features"] = 256
    kind: ClassVar[str] = "performer"
    exact: ClassVar[bool] = False
    REMOVED: ClassVar[dict[str, tuple[object, ...]]] = {
        "draw": ("orthogonal",),
        "chunk": (CHUNK,),
    }

    def build(self, sizes: AttentionSizes) -> "PerformerAttention":
        _refuse_dropout(sizes.dropout)
        return PerformerAttention(self.features, sizes)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise UserError(
            "model.attention=performer holds no weights that could be dropped: set "
            "model.attention_dropout=0, or model.attention=fused"
        )


class PerformerAttention(nn.Module):
    """φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1); the features are saved with the weights."""

    projection: Tensor

    def __init__(self, features: int, sizes: AttentionSizes) -> None:
        super().__init__()
        self.sizes = sizes
        projection = draw_projection(features, sizes.head_dim)
        self.register_buffer("projection", projection.to(torch.get_default_device()))

    def check(self, score: Score, position: Position) -> None:
        if type(score) is not InnerScore:
            raise UserError(
                "model.attention=performer estimates the exponential of a dot product: set "
                "model.score=scaled-dot or dot, or model.attention=fused"
            )
        if position.has_bias or type(position).value is not Position.value:
            raise UserError(
                "model.attention=performer holds no scores or weights to which this position "
                "could add: set model.position=rotary, sinusoidal or learned"
            )

    def weights(self, inputs: AttentionInputs) -> Weights:
        """The estimated weights, which a pass holds only for a chunk or a cached step."""
        with ops.full_precision(inputs.q):
            kernel = _masked_kernel(*self._exponents(inputs), inputs.mask)
            return _divide(kernel, kernel.sum(-1, keepdim=True)).to(inputs.q.dtype)

    def forward(self, inputs: AttentionInputs) -> HeadOutput:
        _refuse_dropout(inputs.dropout)
        q, mask = inputs.q, inputs.mask
        with ops.full_precision(q):
            queries, keys = self._exponents(inputs)
            # A channel of ones next to the values sums the weights.
            values = F.pad(share_heads(inputs.v, q.shape[1]).to(keys.dtype), (0, 1), value=1.0)
            if isinstance(mask.rule, Full):
                p = _highest(keys)
                state = einsum((keys - p).exp(), values, "b h s m, b h s c -> b h m c")
                sums = einsum(_query_features(queries, p), state, "b h t m, b h m c -> b h t c")
            elif mask.square:
                sums = _causal(queries, keys, values)
            else:
                kernel = _masked_kernel(queries, keys, mask)
                sums = einsum(kernel, values, "b h t s, b h s c -> b h t c")
            return _divide(sums[..., :-1], sums[..., -1:]).to(q.dtype)

    def _exponents(
        self, inputs: AttentionInputs
    ) -> tuple[Float[Tensor, "b h t m"], Float[Tensor, "b h s m"]]:
        """The logarithms of √m φ(q) and √m φ(k), −∞ for padding."""
        q, k, mask, score = inputs.q, inputs.k, inputs.mask, inputs.score
        check_rule("performer", mask.rule, Full, Causal)
        assert isinstance(score, InnerScore)
        dtype = torch.promote_types(q.dtype, torch.float32)
        root, projection = math.sqrt(abs(score.scale)), self.projection.to(dtype)
        queries = exponents(q.to(dtype) * math.copysign(root, score.scale), projection)
        keys = exponents(k.to(dtype) * root, projection)
        if mask.padding_mask is not None:
            keys = keys.masked_fill(~rearrange(mask.padding_mask, "b s -> b 1 s 1"), -torch.inf)
        return queries, share_heads(keys, q.shape[1])


def _highest(keys: Exponents) -> Shift:
    """The highest exponent of each feature. It cancels, so it needs no gradient."""
    return keys.detach().amax(-2, keepdim=True).clamp(min=LOWEST)


def _common_shift(keys: Exponents, before: Shift) -> Shift:
    """p for queries that all attend to keys with the maximum `before`, and some to these keys."""
    highest = torch.maximum(_highest(keys), before)
    keys = keys.detach()
    least = torch.where(keys == -torch.inf, torch.inf, keys).amin(-2, keepdim=True)
    lowest = torch.minimum(torch.maximum(least, before), highest)
    return torch.maximum(lowest, highest - MARGIN)


def _query_features(queries: Exponents, p: Shift) -> Exponents:
    """e^(a_i + p − r_i)."""
    queries = queries + p
    return (queries - queries.detach().amax(-1, keepdim=True)).exp()


def _masked_kernel(
    queries: Float[Tensor, "b h t m"], keys: Float[Tensor, "b h s m"], mask: AttentionMask
) -> Weights:
    """φ(q)ᵀ φ(k) of every pair up to a factor for each query, zero where the mask is False."""
    allowed = mask.as_bool()
    if allowed is None:
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=keys.device)
    by_all = rearrange(allowed.all(2), "b 1 s -> b 1 s 1")
    p = _common_shift(keys, _highest(torch.where(by_all, keys, -torch.inf)))
    features = _query_features(queries, p)
    kernel = einsum(features, (keys - p).exp(), "b h t m, b h s m -> b h t s")
    return kernel.masked_fill(~allowed, 0.0)


def _causal(
    queries: Float[Tensor, "b h t m"],
    keys: Float[Tensor, "b h s m"],
    values: Float[Tensor, "b h s c"],
) -> HeadOutput:
    """Σ_{j≤i} φ(q_i)ᵀφ(k_j) v_j up to a factor for each query.

    Pair by pair inside a chunk, and all chunks before it by their state Σ_j e^(b_j − p) v_j.
    """
    length = queries.shape[2]
    chunk = min(CHUNK, length)
    padding = (0, 0, 0, -length % chunk)
    queries, values = (_chunks(F.pad(x, padding), chunk) for x in (queries, values))
    keys = _chunks(F.pad(keys, padding, value=-torch.inf), chunk)
    highest = _highest(keys).cummax(2).values
    before = F.pad(highest[:, :, :-1], (0, 0, 0, 0, 1, 0), value=LOWEST)
    p = _common_shift(keys, before)
    features, of_queries = (keys - p).exp(), _query_features(queries, p)
    near = einsum(of_queries, features, "b h n i m, b h n j m -> b h n i j").tril()
    sums = einsum(near, values, "b h n i j, b h n j c -> b h n i c")
    states = einsum(features, values, "b h n l m, b h n l c -> b h n m c")
    past = _past_states(states, rearrange(p, "b h n 1 m -> b h n m 1"))
    sums = sums + einsum(of_queries, past, "b h n i m, b h n m c -> b h n i c")
    return rearrange(sums, "b h n l c -> b h (n l) c")[:, :, :length]


def _chunks(x: Float[Tensor, "b h s c"], chunk: int) -> Float[Tensor, "b h n l c"]:
    return rearrange(x, "b h (n l) c -> b h n l c", l=chunk)


def _past_states(
    states: Float[Tensor, "b h n m c"], p: Float[Tensor, "b h n m 1"]
) -> Float[Tensor, "b h n m c"]:
    """Σ_{n'<n} e^(p_n' − p_n) S_n': for each chunk, the state of all chunks before it.

    No p is below an earlier one, so sums over 1, 2, 4 … chunks add up without a factor above 1.
    """
    step = 1
    while step < states.shape[2]:
        shrink = (p[:, :, :-step] - p[:, :, step:]).exp()
        states = states + F.pad(states[:, :, :-step] * shrink, (0, 0, 0, 0, step, 0))
        step *= 2
    shrink = (p[:, :, :-1] - p[:, :, 1:]).exp()
    return F.pad(states[:, :, :-1] * shrink, (0, 0, 0, 0, 1, 0))


def _divide(sums: Tensor, total: Tensor) -> Tensor:
    """sums / total; zeros, without a gradient, for a query that attends to no key.

    So are those of a query whose own keys have exponents more than about 120 below those of its
    chunk (causal only), which happens for keys several times as long as trained models have.
    """
    blind = total < SMALLEST
    return (sums / total.masked_fill(blind, 1.0)).masked_fill(blind, 0.0)
