"""Fused modules: subclasses that compute the same with fewer kernels, on a GPU in half precision.

Each checks the call and falls back to `super().forward`. They have no state of their own, so that
`optimize` can swap the class of a module that exists.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from manyheads.kernels.dispatch import HALF_PRECISION, runs_triton, verified
from manyheads.kernels.selftest import FUSED_ACTIVATIONS
from manyheads.nn.attention import Cache, CrossAttention, Fused, SelfAttention
from manyheads.nn.layers import FeedForward, Residual
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position
from manyheads.nn.scores import InnerScore
from manyheads.nn.shapes import Hidden

# Positions that one program of short attention holds, by head size: more would not fit into shared
# memory.
SHORT_LENGTHS = {16: 128, 32: 128, 64: 128, 128: 64}
MAX_NORM_WIDTH = 4096  # widest row that one program of the norm kernel holds


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _runs_in_half(x: Tensor, dtype: torch.dtype) -> bool:
    """True on a GPU if the kernel computes in bfloat16 or float16, for which all here are made."""
    return runs_triton(x) and dtype in HALF_PRECISION


def _has_hooks(*modules: nn.Module) -> bool:
    """True if any of these modules has hooks; a kernel that replaces several would skip them."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in modules for kind in kinds)


# ---------------------------------------------------------------------------------------------
# Attention


def _supports(module: SelfAttention | CrossAttention, x: Tensor, memory: Tensor) -> bool:
    """True for softmax(q kᵀ · scale) v over short sequences."""
    config = module.config
    return (
        _runs_in_half(x, compute_dtype(x))
        and type(module.core) is Fused
        and type(module.score) is InnerScore
        and not config.qk_norm
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


# ---------------------------------------------------------------------------------------------
# Feed-forward


class FusedFeedForward(FeedForward):
    """In training, a feed-forward whose backward pass recomputes the activation in one kernel."""

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
            _runs_in_half(x, compute_dtype(x))
            and self.training
            and torch.is_autocast_enabled(x.device.type)
            and not (self.dropout.p and self.dropout.training)
            and self.activation_name in FUSED_ACTIVATIONS
            and all(type(linear) is nn.Linear and linear.bias is not None for linear in linears)
            and not _has_hooks(*linears, self.dropout)
            and verified("mlp", x.device.index)
        )


# ---------------------------------------------------------------------------------------------
# Norm and residual connection


def _supports_norm(norm: nn.Module, x: Hidden, dtype: torch.dtype) -> bool:
    """True in training or eager inference on a GPU in half precision.

    A compiled inference step is left to PyTorch, which fuses more than the sum and the norm.
    """
    eager_inference = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return (
        _runs_in_half(x, dtype)
        and (norm.training or eager_inference)
        and (torch.is_autocast_enabled(x.device.type) or x.dtype == dtype)
        and x.numel() > 0
        and x.shape[-1] % 16 == 0
        and x.shape[-1] <= MAX_NORM_WIDTH
        and isinstance(norm, nn.LayerNorm)
        and norm.bias is not None
        and not _has_hooks(norm)
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

    In compiled blocks the sum is written in the dtype of the matrix products. Under autocast a norm
    returns float32, and so the stream would take twice the memory traffic.
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
            and type(self.dropout) is nn.Dropout  # not DropPath
            and not _has_hooks(self.dropout)
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
