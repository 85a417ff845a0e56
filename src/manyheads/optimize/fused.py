"""Fused modules: subclasses that compute the same with fewer kernels, on a GPU in half precision.

Each checks the call and falls back to `super().forward`. They have no state of their own, so that
`optimize` can swap the class of a module that exists.
"""

import torch
from torch import Tensor, nn

from manyheads.kernels.attention import fits_short, short_selftest, short_settings
from manyheads.kernels.dispatch import (
    ACTIVATION_KINDS,
    HALF_PRECISION,
    has_hooks,
    runs_triton,
    verified,
)
from manyheads.nn.attention import Cache, CrossAttention, Fused, SelfAttention
from manyheads.nn.layers import FeedForward
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore
from manyheads.nn.shapes import Hidden


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _attention_dropout(module: SelfAttention | CrossAttention) -> float:
    return module.config.dropout if module.training else 0.0


def _supports_short(
    module: SelfAttention | CrossAttention,
    x: Tensor,
    memory: Tensor,
    mask: AttentionMask,
    position: Position,
) -> bool:
    """True for softmax(q kᵀ · scale) v over short sequences, with nothing added or rotated."""
    config = module.config
    return (
        runs_triton(x)
        and compute_dtype(x) in HALF_PRECISION
        and type(module.core) is Fused
        and type(module.score) is InnerScore
        and position.is_absolute
        and config.sizes[0] == config.sizes[1] == config.sizes[2]
        and x.shape[0] == memory.shape[0] > 0
        and fits_short(x.shape[0], x.shape[1], memory.shape[1], config.head_dim, mask)
        and verified(short_selftest(_attention_dropout(module)), x.device.index)
    )


def _attend_projected(
    module: SelfAttention | CrossAttention, x: Tensor, memory: Tensor | None, mask: AttentionMask
) -> Tensor:
    """Attention on the projection [q k v], or on q and [k v], in its memory layout."""
    from manyheads.kernels.short_attention import short_projected

    assert isinstance(module.score, InnerScore)
    scale = float(module.score.scale)
    settings = short_settings(mask, scale, _attention_dropout(module), x.device)
    return module.output(short_projected(x, memory, module.config.heads, *settings))


class FusedSelfAttention(SelfAttention):
    """Self-attention on the projection [q k v] in its memory layout, if the sequence is short."""

    def forward(
        self, x: Hidden, mask: AttentionMask, position: Position, cache: Cache | None = None
    ) -> Hidden:
        if cache is None and _supports_short(self, x, x, mask, position):
            return _attend_projected(self, self.project(x), None, mask)
        return super().forward(x, mask, position, cache)


class FusedCrossAttention(CrossAttention):
    """Cross-attention on the projections q and [k v] in their memory layout, if they are short."""

    def forward(
        self, x: Tensor, memory: Tensor, mask: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        cross_mask = mask.for_cross_attention(x.shape[1])
        if cache is None and _supports_short(self, x, memory, cross_mask, self.position):
            return _attend_projected(self, self.query(x), self.project(memory), cross_mask)
        return super().forward(x, memory, mask, cache)


class FusedFeedForward(FeedForward):
    """A feed-forward whose backward pass recomputes the activation in one kernel."""

    def forward(self, x: Hidden) -> Hidden:
        if not self._supports_kernel(x):
            return super().forward(x)
        from manyheads.kernels.mlp import fused_mlp

        dtype = compute_dtype(x)
        weights = (self.inner.weight, self.inner.bias, self.outer.weight, self.outer.bias)
        y: Tensor = fused_mlp(
            x.to(dtype), *(weight.to(dtype) for weight in weights), self.activation_name
        )[0]
        return y

    def _supports_kernel(self, x: Hidden) -> bool:
        linears = (self.inner, self.outer)
        return (
            runs_triton(x)
            and self.training
            and torch.is_autocast_enabled(x.device.type)
            and compute_dtype(x) in HALF_PRECISION
            and not (self.dropout.p and self.dropout.training)
            and self.activation_name in ACTIVATION_KINDS
            and all(type(linear) is nn.Linear and linear.bias is not None for linear in linears)
            and not has_hooks(*linears, self.dropout)
            and verified("mlp", x.device.index)
        )


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: FusedSelfAttention,
    CrossAttention: FusedCrossAttention,
    FeedForward: FusedFeedForward,
}
