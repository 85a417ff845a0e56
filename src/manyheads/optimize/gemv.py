"""Decoding one row: norms, activations and residual sums inside matrix–vector products."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.kernels.dispatch import ACTIVATION_KINDS, runs_triton, verified
from manyheads.nn.block import Block
from manyheads.nn.layers import ACTIVATIONS, FeedForward, GatedFeedForward

M = TypeVar("M", bound=nn.Module)


class GemvLinear(nn.Module):
    """act(norm(x) Wᵀ + b) + residual by our kernel if x is one row.

    `norm` moves here from the residual connection, `activation` from the feed-forward part;
    `FusedResidualAdd` sets `residual` for a call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach()
        self.activation: str | None = None
        self.norm: nn.Module | None = None
        self.residual: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not _is_one_row(x, self.weight):
            y = F.linear(x if self.norm is None else self.norm(x), self.weight, self.bias)
            y = y if self.activation is None else ACTIVATIONS[self.activation](y)
            return y if self.residual is None else self.residual + y
        from manyheads.kernels.gemv import gemv

        fused_norm = self._fused_norm()
        if self.norm is not None and not fused_norm:
            x = _norm_one_row(self.norm, x)
        kind = -1 if self.activation is None else ACTIVATION_KINDS.index(self.activation)
        y = gemv(x, self.weight, self.bias, kind, self.residual, *fused_norm)
        return y

    def _fused_norm(self) -> tuple[Any, ...]:
        """Weight, bias and ε of the norm if the matrix is small enough to compute it inside."""
        from manyheads.kernels.gemv import MAX_COLUMNS, MAX_FUSED_NORM_ELEMENTS

        norm: Any = self.norm
        small = self.weight.numel() <= MAX_FUSED_NORM_ELEMENTS
        narrow = self.weight.shape[1] <= MAX_COLUMNS
        if norm is None or not (small and narrow) or norm.weight.dtype != self.weight.dtype:
            return ()
        return norm.weight, _norm_bias(norm), norm.eps


class UntiedHead(nn.Module):
    """An output head with a linear layer of its own, whatever its weight was tied to."""

    def __init__(self, linear: GemvLinear, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale

    def forward(self, hidden: Tensor, table: nn.Embedding) -> Tensor:
        return self.linear(hidden if self.scale == 1.0 else hidden * self.scale)


class FusedResidualAdd(nn.Module):
    """A residual connection whose sum the last linear layer of its part computes.

    The first linear layer computes the norm, unless there are several first ones (gated).
    """

    def __init__(self, last: GemvLinear, norm: nn.Module | None) -> None:
        super().__init__()
        self.last, self.norm = last, norm

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        self.last.residual = x
        try:
            return f(x if self.norm is None else _norm_one_row(self.norm, x))
        finally:
            self.last.residual = None


def _is_one_row(x: Tensor, weight: Tensor) -> bool:
    return x.numel() == x.shape[-1] and x.dtype == weight.dtype != torch.float64


def _norm_one_row(norm: Any, x: Tensor) -> Tensor:
    if not _is_one_row(x, norm.weight):
        return norm(x)
    from manyheads.kernels.gemv import norm_row

    y: Tensor = norm_row(x, norm.weight, _norm_bias(norm), norm.eps)
    return y


def _norm_bias(norm: nn.Module) -> Tensor | None:
    return norm.bias if isinstance(norm, nn.LayerNorm) else None


def _has_norm_kernel(norm: Any) -> bool:
    from manyheads.kernels.gemv import MAX_ROW_NORM_WIDTH

    supported = isinstance(norm, nn.RMSNorm) or (
        isinstance(norm, nn.LayerNorm) and norm.bias is not None
    )
    return bool(
        supported
        and norm.weight is not None
        and norm.weight.numel() <= MAX_ROW_NORM_WIDTH
        and norm.eps is not None
    )


def has_gemv(model: nn.Module) -> bool:
    """True if the kernel for one row runs on the device of the model."""
    weight = next(model.parameters())
    return runs_triton(weight) and verified("gemv", weight.device.index)


def with_gemv(model: M) -> M:
    """A copy for one row, with norms, activations and sums inside the linear layers."""
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    fused: Any = copy.deepcopy(model, shared)
    for module in list(fused.modules()):
        for name, part in module.named_children():
            if isinstance(part, nn.Linear):
                setattr(module, name, GemvLinear(part.weight, part.bias))
    table = getattr(fused, "target_table", None) or fused.tokens
    matrix, stack = fused.head.matrix(table), fused.decoder
    fused.head = head = UntiedHead(GemvLinear(matrix, fused.head.bias), fused.head.scale)
    for module in fused.modules():
        if isinstance(module, FeedForward) and module.activation_name in ACTIVATION_KINDS:
            inner: Any = module.inner
            inner.activation, module.activation = module.activation_name, _identity
        if isinstance(module, Block):
            _fuse_residuals(module)
    if head.scale == 1.0 and _has_norm_kernel(stack.last_norm):
        head.linear.norm, stack.last_norm = stack.last_norm, nn.Identity()
    return fused


def _identity(x: Tensor) -> Tensor:
    return x


def _fuse_residuals(block: Any) -> None:
    """Move norms and sums of a pre-norm block into its first and last linear layers."""
    parts = {"attention": ("project", "output"), "cross": ("query", "output")}
    if isinstance(block.feedforward, FeedForward | GatedFeedForward):
        parts["feedforward"] = ("inner", "outer")
    for name, (first, last) in parts.items():
        if name not in block._modules:
            continue
        part, residual = getattr(block, name), getattr(block, f"{name}_residual")
        if residual.placement != "pre" or not _has_norm_kernel(residual.norm):
            continue
        gated = isinstance(part, GatedFeedForward)  # two first linear layers share the norm
        if not gated:
            getattr(part, first).norm = residual.norm
        fused = FusedResidualAdd(getattr(part, last), residual.norm if gated else None)
        setattr(block, f"{name}_residual", fused)
