"""Residual connections and norm placement: the only module that knows about either.

post: x ← Norm(x + f(x))        pre: x ← x + f(Norm(x)), one more Norm at the end
LayerNorm(x) = γ (x − μ) / √(σ² + ε) + β        RMSNorm(x) = γ x / √(mean(x²) + ε)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from manyheads.errors import check_above_zero
from manyheads.nn.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Which norm, and whether it is applied before each part or after each sum."""

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
        """The end of a stack: pre-norm leaves the residual stream unnormalised, post-norm not."""
        return self.build(dim) if self.placement == "pre" else nn.Identity()


class Residual(nn.Module):
    """x + dropout(f(x)), with the norm before f or after the sum."""

    def __init__(self, dim: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.norm = norm.build(dim)
        self.placement = norm.placement
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Hidden, f: Callable[[Tensor], Tensor]) -> Hidden:
        if self.placement == "pre":
            return x + self.dropout(f(self.norm(x)))
        return self.norm(x + self.dropout(f(x)))
