"""Attention over short sequences in the memory layout of the projections, on a GPU.

The subclasses check the call and fall back to `super().forward`. They have no state of their own,
so that `optimize` can swap the class of a module that exists.
"""

import torch
from torch import Tensor, nn

from manyheads.kernels.dispatch import HALF_PRECISION, runs_triton, verified
from manyheads.nn.attention import Cache, CrossAttention, Fused, SelfAttention
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore
from manyheads.nn.shapes import Hidden

# Positions that one program of the kernel holds, by head size: more would not fit into shared
# memory.
SHORT_LENGTHS = {16: 128, 32: 128, 64: 128, 128: 64}


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _supports(module: SelfAttention | CrossAttention, x: Tensor, memory: Tensor) -> bool:
    """True for softmax(q kᵀ · scale) v over short sequences."""
    config = module.config
    return (
        runs_triton(x)
        and compute_dtype(x) in HALF_PRECISION
        and type(module.core) is Fused
        and type(module.score) is InnerScore
        and config.sizes[0] == config.sizes[1] == config.sizes[2]
        and x.shape[0] == memory.shape[0] > 0
        and max(x.shape[1], memory.shape[1]) <= SHORT_LENGTHS.get(config.head_dim, 0)
        and verified("short_attention", x.device.index)
    )


def _attend(
    module: SelfAttention | CrossAttention, x: Tensor, memory: Tensor | None, mask: AttentionMask
) -> Tensor:
    """Attention on the projection [q k v], or on q and [k v]."""
    from manyheads.kernels.short_attention import short_attention

    assert isinstance(module.score, InnerScore)
    scale, causal = float(module.score.scale), mask.pattern == "causal"
    dropout = module.config.dropout if module.training else 0.0
    seed = torch.randint(2**62, (1,), device=x.device) if dropout else None
    out = short_attention(
        x, memory, module.config.heads, mask.padding_mask, causal, scale, seed, dropout
    )
    return module.output(out)


class FusedSelfAttention(SelfAttention):
    """Self-attention on the projection [q k v] if the sequence is short."""

    def forward(
        self, x: Hidden, mask: AttentionMask, position: Position, cache: Cache | None = None
    ) -> Hidden:
        plain = cache is None and position.is_absolute and mask.pattern != "other"
        if plain and _supports(self, x, x):
            return _attend(self, self.project(x), None, mask)
        return super().forward(x, mask, position, cache)


class FusedCrossAttention(CrossAttention):
    """Cross-attention on the projections q and [k v] if both sequences are short."""

    def forward(
        self, x: Tensor, memory: Tensor, mask: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        plain = cache is None and mask.pattern == "full"
        if plain and _supports(self, x, memory):
            return _attend(self, self.query(x), self.project(memory), mask)
        return super().forward(x, memory, mask, cache)


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: FusedSelfAttention,
    CrossAttention: FusedCrossAttention,
}
