"""Attention implementations: softmax(scores) · V by the textbook (`Dense`) or a fused kernel.

An implementation (`Core`) takes queries [b h t c], keys and values of as many or fewer heads, an
`AttentionMask`, a score and a position. Its settings `build` it for a layer; one without weights
is its own settings. Combinations that it cannot compute it refuses in `check`, when the model is
built. The others are in nn/tiled.py, nn/packed.py and nn/flex.py (exact), and in nn/local.py,
nn/linformer.py, nn/performer.py and nn/compressed.py (approximations).
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from manyheads import ops
from manyheads.errors import UserError
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position, bias_by_distance
from manyheads.nn.scores import InnerScore, Score
from manyheads.nn.shapes import Keys, Queries, Values, Weights

AttentionOutput = Float[Tensor, "b h t c"]
E = TypeVar("E", bound="ExactAttention")


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """What a core may need to know of the attention that it is built for."""

    heads: int
    kv_heads: int
    head_dim: int
    key_dim: int
    max_length: int
    causal: bool = False
    dropout: float = 0.0
    layer: int = 0


@runtime_checkable
class AttentionFunction(Protocol):
    """softmax(scores) · V or something like it, and a check at build of what it can honour."""

    def check(self, score: Score, position: Position) -> None: ...

    def weights(
        self, q: Queries, k: Keys, mask: AttentionMask, score: Score, position: Position
    ) -> Weights:
        """What the values are mixed with: over the keys, or over what the core makes of them."""
        ...

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        mask: AttentionMask,
        score: Score,
        position: Position,
        dropout: float = 0.0,
    ) -> AttentionOutput: ...


def dense_weights(
    q: Queries, k: Keys, mask: AttentionMask, score: Score, position: Position
) -> Weights:
    """softmax over the keys of score(q, k) + bias, −∞ where a query must not see.

    A query that sees no key at all gives no weight to any.
    """
    scores = score(q, ops.share_heads(k, q.shape[1]))
    bias = position.bias(q, mask)
    if bias is not None:
        scores = scores + bias
    allowed = mask.as_bool()
    if allowed is None:
        return scores.softmax(-1)
    blind = ~allowed.any(-1, keepdim=True)
    return scores.masked_fill(~allowed & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)


class ExactAttention:
    """A core of softmax attention as it is defined: without weights, and its own settings."""

    exact: ClassVar[bool] = True

    def build(self: E, sizes: AttentionSizes) -> E:
        return self

    def weights(
        self, q: Queries, k: Keys, mask: AttentionMask, score: Score, position: Position
    ) -> Weights:
        return dense_weights(q, k, mask, score, position)


@dataclass(frozen=True)
class Dense(ExactAttention):
    """The textbook: holds every score and every weight."""

    kind: ClassVar[str] = "dense"

    def check(self, score: Score, position: Position) -> None:
        """Honours everything."""

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
        weights = F.dropout(dense_weights(q, k, mask, score, position), dropout)
        mixed = einsum(weights, ops.share_heads(v, q.shape[1]), "b h t s, b h s c -> b h t c")
        spread = position.spread(weights, mask)
        return mixed if spread is None else mixed + spread


@dataclass(frozen=True)
class Fused(ExactAttention):
    """Fused kernels that never hold the weights; the fastest one for the call (`ops.attention`)."""

    kind: ClassVar[str] = "fused"

    def check(self, score: Score, position: Position) -> None:
        if not isinstance(score, InnerScore):
            raise UserError(
                "the fused core computes inner products inside its kernel, and an additive score "
                "is none: choose the dense or the tiled core (model.attention=dense)"
            )
        if type(position).value is not Position.value:
            raise UserError(
                "the fused core never holds the weights, and relative vectors on the values "
                "(shaw) need them: choose the dense or the tiled core (model.attention=dense)"
            )

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
        assert isinstance(score, InnerScore)
        by_distance = position.is_relative_bias and type(score) is InnerScore
        f, g = q, k  # a plain score keeps shared key/value heads as they are
        if type(score) is not InnerScore:
            f, g = score.factors(q, ops.share_heads(k, q.shape[1]))
        return ops.attention(
            f,
            g,
            v,
            mask,
            bias=(lambda: position.bias(q, mask)) if position.has_bias else None,
            bias_table=(lambda: bias_by_distance(position, q)) if by_distance else None,
            scale=float(score.scale),
            dropout=dropout,
        )


def exact_attention(score: Score, position: Position) -> "Dense | Fused":
    """The fastest exact core that takes this score and this position."""
    try:
        Fused().check(score, position)
    except UserError:
        return Dense()
    return Fused()
