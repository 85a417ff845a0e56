"""Residual connections and where the norm stands: the only room that knows.

post: x ← Norm(x + f(x))        pre: x ← x + f(Norm(x)), one more Norm at the end
LayerNorm(x) = γ (x − μ) / √(σ² + ε) + β        RMSNorm(x) = γ x / √(mean(x²) + ε)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.errors import check_above_zero
from manyheads.kernels.dispatch import HALF, TRITON, trusted, unheard
from manyheads.nn.shapes import Hidden

WIDEST = 4096  # row that one program of our kernel holds


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Which norm, and whether it stands before each part or after each sum."""

    placement: Literal["pre", "post"] = "pre"
    form: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_above_zero("norm.eps", self.eps)

    def build(self, dim: int) -> nn.Module:
        if self.form == "rms":
            return nn.RMSNorm(dim, eps=self.eps)
        return nn.LayerNorm(dim, eps=self.eps)

    def build_last(self, dim: int) -> nn.Module:
        """What ends a stack: pre-norm leaves the residual stream unnormed, post-norm does not."""
        return self.build(dim) if self.placement == "pre" else nn.Identity()


def narrowed(x: Hidden) -> Hidden:
    """In the type that products are computed in: half as much to move, and to keep."""
    return x.to(_product_type(x))


def normed(norm: nn.Module, x: Hidden) -> Hidden:
    """norm(x), with our kernel for its gradients where that serves."""
    dtype = torch.float32 if _autocast(x.device.type) else x.dtype
    return _forked(norm, x, dtype)[0]


def _forked(norm: nn.Module, x: Hidden, dtype: torch.dtype) -> tuple[Hidden, Hidden]:
    """(norm(x), x): what goes into a part, in that type if by our kernel, and what goes on."""
    if not (torch.is_grad_enabled() and _serves(norm, x, _product_type(x))):
        return norm(x), x
    from manyheads.kernels.layer_norm import fork

    assert isinstance(norm, nn.LayerNorm)
    return fork(x, norm.weight, norm.bias, norm.eps, dtype)


def _product_type(x: Hidden) -> torch.dtype:
    """The type that products are computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if _autocast(kind) else x.dtype


def _serves(norm: nn.Module, x: Hidden, dtype: torch.dtype) -> bool:
    """Whether this is a training or writing on a GPU, in the type that our kernels are for.

    Where a step of writing is compiled, PyTorch joins more than sum and norm.
    """
    writes = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return (
        (norm.training or writes)
        and x.device.type == "cuda"
        and dtype in HALF
        and (torch.is_autocast_enabled("cuda") or x.dtype == dtype)
        and x.numel() > 0
        and x.shape[-1] % 16 == 0
        and x.shape[-1] <= WIDEST
        and type(norm) is nn.LayerNorm
        and norm.bias is not None
        and unheard(norm)
        and TRITON
        and trusted("layer_norm", x.device.index)
    )


class Residual(nn.Module):
    """x + dropout(f(x)), with the norm before f or after the sum.

    Where it is compiled, sum and norm are one kernel that computes in float32 and writes the type
    of the products. As it stands, PyTorch would have to convert back and forth between the two.
    On a GPU that of the norm after the sum is ours, and in training so is the backward pass of the
    norm before a part, with the sum of what comes back (kernels/layer_norm.py).
    """

    def __init__(self, dim: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.norm = norm.build(dim)
        self.placement = norm.placement
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Hidden, part: Callable[[Tensor], Tensor]) -> Hidden:
        if self.placement == "pre":
            given, x = _forked(self.norm, x, _product_type(x))
            x = x + self.dropout(part(given))
        else:
            added = part(x)
            if self._has_kernel(x, added):
                return self._by_kernel(narrowed(x), added)
            x = self.norm(x + self.dropout(added))
        return narrowed(x) if torch.compiler.is_compiling() else x

    def _has_kernel(self, x: Hidden, added: Hidden) -> bool:
        return (
            x.shape == added.shape and unheard(self.dropout) and _serves(self.norm, x, added.dtype)
        )

    def _by_kernel(self, x: Hidden, added: Hidden) -> Hidden:
        from manyheads.kernels.layer_norm import add_norm

        p = self.dropout.p if self.dropout.training else 0.0
        seed = torch.randint(2**62, (1,), device=x.device) if p else None
        weight, bias, eps = self.norm.weight, self.norm.bias, self.norm.eps
        found: Hidden = add_norm(x, added, weight, bias, seed, p, eps)[0]
        return found


def _autocast(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)
