"""Fused modules: subclasses that compute the same with fewer kernels, on a GPU in half precision.

Each checks the call and falls back to `super().forward`. They have no state of their own, so that
`optimize` can swap the class of a module that exists.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.kernels.attention import SHORT_LENGTHS, fits_short, short_selftest, short_settings
from manyheads.kernels.dispatch import (
    ACTIVATION_KINDS,
    HALF_PRECISION,
    has_hooks,
    runs_triton,
    verified,
)
from manyheads.nn.attention import Cache, CrossAttention, Fused, SelfAttention
from manyheads.nn.layers import FeedForward, Residual
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore
from manyheads.nn.shapes import Hidden

MAX_NORM_WIDTH = 4096  # widest row that one program of the norm kernel holds


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _trains_in_half_precision(module: nn.Module, x: Tensor) -> bool:
    """True in training under autocast on a GPU, for which the training kernels are made."""
    return (
        runs_triton(x)
        and module.training
        and torch.is_autocast_enabled(x.device.type)
        and compute_dtype(x) in HALF_PRECISION
    )


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
    """Self-attention on the projection [q k v] in its memory layout.

    Short sequences attend directly in that layout. For long ones a kernel packs the gradients of
    q, k and v into that layout and sums the gradient of the bias on the way.
    """

    def forward(
        self, x: Hidden, mask: AttentionMask, position: Position, cache: Cache | None = None
    ) -> Hidden:
        if cache is None and _supports_short(self, x, x, mask, position):
            return _attend_projected(self, self.project(x), None, mask)
        if cache is None and self._supports_packed_grad(x, position):
            from manyheads.kernels.qkv import split_qkv

            bias = self.project.bias
            qkv = F.linear(x, self.project.weight, bias.detach())
            q, k, v = split_qkv(qkv, bias, self.config.heads, self.config.kv_heads)
            out = self.attend(q, k, v, mask, position)
            return self.output(rearrange(out, "b h t c -> b t (h c)"))
        return super().forward(x, mask, position, cache)

    def _supports_packed_grad(self, x: Hidden, position: Position) -> bool:
        config = self.config
        return (
            _trains_in_half_precision(self, x)
            and torch.is_grad_enabled()
            and type(self.core) is Fused
            and position.is_absolute
            and x.shape[1] > SHORT_LENGTHS.get(config.head_dim, 0)
            and x.shape[0] > 0
            and all(size % 16 == 0 for size in (config.head_dim, *config.sizes))
            and config.sizes[1] == config.sizes[2]
            and type(self.project) is nn.Linear
            and self.project.bias is not None
            and not has_hooks(self.project)
            and verified("qkv", x.device.index)
        )


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
            _trains_in_half_precision(self, x)
            and not (self.dropout.p and self.dropout.training)
            and self.activation_name in ACTIVATION_KINDS
            and all(type(linear) is nn.Linear and linear.bias is not None for linear in linears)
            and not has_hooks(*linears, self.dropout)
            and verified("mlp", x.device.index)
        )


def _supports_norm(norm: nn.Module, x: Hidden, dtype: torch.dtype) -> bool:
    """True in training or eager inference on a GPU in half precision.

    A compiled inference step is left to PyTorch, which fuses more than the sum and the norm.
    """
    eager_inference = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return (
        runs_triton(x)
        and (norm.training or eager_inference)
        and dtype in HALF_PRECISION
        and (torch.is_autocast_enabled(x.device.type) or x.dtype == dtype)
        and x.numel() > 0
        and x.shape[-1] % 16 == 0
        and x.shape[-1] <= MAX_NORM_WIDTH
        and isinstance(norm, nn.LayerNorm)
        and norm.bias is not None
        and not has_hooks(norm)
        and verified("layer_norm", x.device.index)
    )


def _prenorm(norm: nn.Module, x: Hidden, dtype: torch.dtype) -> tuple[Hidden, Hidden] | None:
    """(norm(x) in that dtype, x), with one kernel for the gradients of both, if there is one."""
    if not (torch.is_grad_enabled() and _supports_norm(norm, x, compute_dtype(x))):
        return None
    from manyheads.kernels.layer_norm import prenorm

    assert isinstance(norm, nn.LayerNorm)
    return prenorm(x, norm.weight, norm.bias, norm.eps, dtype)


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm with our kernel for its gradients; the last one of a pre-norm stack."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
        fused = _prenorm(self, x, dtype)
        return super().forward(x) if fused is None else fused[0]


class FusedResidual(Residual):
    """Dropout, sum and norm in one kernel, forward and backward.

    In compiled blocks the sum is written in the dtype of the matrix products, so that PyTorch
    need not convert back and forth.
    """

    def forward(self, x: Hidden, f: Callable[[Tensor], Tensor]) -> Hidden:
        if self.placement == "pre":
            normed, x = _prenorm(self.norm, x, compute_dtype(x)) or (self.norm(x), x)
            x = x + self.dropout(f(normed))
        else:
            update = f(x)
            if self._supports_kernel(x, update):
                return self._add_norm(x.to(compute_dtype(x)), update)
            x = self.norm(x + self.dropout(update))
        return x.to(compute_dtype(x)) if torch.compiler.is_compiling() else x

    def _supports_kernel(self, x: Hidden, update: Hidden) -> bool:
        return (
            x.shape == update.shape
            and not has_hooks(self.dropout)
            and _supports_norm(self.norm, x, update.dtype)
        )

    def _add_norm(self, x: Hidden, update: Hidden) -> Hidden:
        from manyheads.kernels.layer_norm import add_norm

        p = self.dropout.p if self.dropout.training else 0.0
        seed = torch.randint(2**62, (1,), device=x.device) if p else None
        y: Hidden = add_norm(x, update, self.norm.weight, self.norm.bias, seed, p, self.norm.eps)[0]
        return y


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    SelfAttention: FusedSelfAttention,
    CrossAttention: FusedCrossAttention,
    FeedForward: FusedFeedForward,
    Residual: FusedResidual,
}
