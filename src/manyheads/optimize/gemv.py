"""Decoding one row: norms, activations and residual sums inside matrix–vector products."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from manyheads.kernels.dispatch import runs_triton, verified
from manyheads.kernels.selftest import FUSED_ACTIVATIONS
from manyheads.nn.block import Block
from manyheads.nn.layers import (
    ACTIVATIONS,
    FeedForward,
    GatedFeedForward,
    LMHead,
    NoResidual,
    Residual,
)

M = TypeVar("M", bound=nn.Module)


def _is_one_row(x: Tensor, weight: Tensor) -> bool:
    return x.numel() == x.shape[-1] and x.dtype == weight.dtype != torch.float64


def _norm_one_row(norm: Any, x: Tensor) -> Tensor:
    if not _is_one_row(x, norm.weight):
        return norm(x)
    from manyheads.kernels.gemv import norm_row

    y: Tensor = norm_row(x, norm.weight, getattr(norm, "bias", None), norm.eps)
    return y


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Any,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """act(norm(x) Wᵀ + b) + residual of one row, the norm in the product if the matrix is small."""
    from manyheads.kernels.gemv import MAX_COLUMNS, MAX_FUSED_NORM_ELEMENTS, gemv

    small = weight.numel() <= MAX_FUSED_NORM_ELEMENTS and weight.shape[1] <= MAX_COLUMNS
    fused_norm: tuple[Any, ...] = ()
    if norm is not None and small:
        fused_norm = norm.weight, getattr(norm, "bias", None), norm.eps
    elif norm is not None:
        x = _norm_one_row(norm, x)
    y: Tensor = gemv(x, weight, bias, activation, residual, *fused_norm)
    return y


class GemvLinear(nn.Linear):
    """act(norm(x) Wᵀ + b) + residual by our kernel if x is one row.

    `norm` moves here from the residual connection and `activation` from the feed-forward part;
    `GemvResidual` sets `residual` for a call.
    """

    norm: nn.Module | None
    activation: str
    residual: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if _is_one_row(x, self.weight):
            return _multiply(x, self.weight, self.bias, self.norm, self.activation, self.residual)
        y = super().forward(x if self.norm is None else self.norm(x))
        y = ACTIVATIONS[self.activation](y) if self.activation else y
        return y if self.residual is None else self.residual + y


class GemvHead(LMHead):
    """The LM head by our kernel if there is one row; `norm` is the last one of the stack."""

    norm: nn.Module | None

    def forward(self, hidden: Tensor, table: nn.Embedding) -> Tensor:
        matrix = self.matrix(table)
        if _is_one_row(hidden, matrix):
            return _multiply(self.enter(hidden), matrix, self.bias, self.norm)
        return super().forward(hidden if self.norm is None else self.norm(hidden), table)


class GemvResidual(Residual):
    """A residual connection whose sum the last linear layer of its part computes.

    The first linear layer computes the norm, unless there are several first ones (gated).
    """

    last: GemvLinear

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        self.last.residual = x
        y = f(x if self.norm is None else _norm_one_row(self.norm, x))
        self.last.residual = None
        return y


def _has_norm_kernel(norm: Any) -> bool:
    from manyheads.kernels.gemv import MAX_ROW_NORM_WIDTH

    is_norm = isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    return is_norm and norm.weight is not None and norm.weight.numel() <= MAX_ROW_NORM_WIDTH


def has_gemv(model: nn.Module) -> bool:
    """True if the kernel for one row runs on the device of the model."""
    weight = next(model.parameters())
    return runs_triton(weight) and verified("gemv", weight.device.index)


def with_gemv(model: M) -> M:
    """A copy for one row that shares all tensors.

    Norms, activations and sums move into the linear layers.
    """
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    fused: Any = copy.deepcopy(model, shared)
    linears: list[Any] = [part for part in fused.modules() if type(part) is nn.Linear]
    for linear in linears:
        linear.__class__ = GemvLinear
        linear.norm, linear.activation, linear.residual = None, "", None
    for block in list(fused.modules()):
        if isinstance(block, Block):
            _fuse_block(block)
    stack, head = fused.decoder, fused.head
    head.__class__, head.norm = GemvHead, None
    if head.scale == 1.0 and _has_norm_kernel(stack.last_norm):
        head.norm, stack.last_norm = stack.last_norm, nn.Identity()
    return fused


def _fuse_block(block: Any) -> None:
    """Move the activation, and norms and sums if they are pre-norm, into linear layers."""
    parts = {"attention": ("project", "output"), "cross": ("query", "output")}
    feedforward = block.feedforward
    if isinstance(feedforward, FeedForward | GatedFeedForward):
        parts["feedforward"] = ("inner", "outer")
    if getattr(feedforward, "activation_name", None) in FUSED_ACTIVATIONS:
        feedforward.inner.activation = feedforward.activation_name
        feedforward.activation = nn.Identity()
    for name, (first, last) in parts.items():
        if name not in block._modules:
            continue
        part, residual = getattr(block, name), getattr(block, f"{name}_residual")
        adds = residual.placement == "pre" and not isinstance(residual, NoResidual)
        if not adds or not _has_norm_kernel(residual.norm):
            continue
        residual.__class__, residual.last = GemvResidual, getattr(part, last)
        if not isinstance(part, GatedFeedForward):  # whose two first linear layers share the norm
            getattr(part, first).norm, residual.norm = residual.norm, None
