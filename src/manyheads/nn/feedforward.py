"""The feed-forward part of a block, where most parameters and compute go."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.errors import check_share
from manyheads.nn.shapes import Hidden

Activation = Literal["relu", "gelu", "gelu-tanh", "silu", "tanh"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


class FeedForward(nn.Module):
    """act(x W₁ + b₁) W₂ + b₂, the same for every position."""

    def __init__(self, dim: int, hidden: int, activation: str, bias: bool, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, hidden, bias=bias)
        self.outer = nn.Linear(hidden, dim, bias=bias)
        self.activation_name, self.activation = activation, ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Hidden) -> Hidden:
        return self.outer(self.dropout(self.activation(self.inner(x))))


class GatedFeedForward(nn.Module):
    """(act(x W) ∘ x V) W₂: one projection opens or closes the other (GLU variants)."""

    def __init__(self, dim: int, hidden: int, activation: str, bias: bool, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.inner = nn.Linear(dim, hidden, bias=bias)
        self.outer = nn.Linear(hidden, dim, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Hidden) -> Hidden:
        return self.outer(self.dropout(self.activation(self.gate(x)) * self.inner(x)))


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Two projections with an activation between. `dropout` is on the inner activations."""

    activation: Activation = "relu"
    dropout: float = 0.0
    kind: ClassVar[str] = "plain"

    def __post_init__(self) -> None:
        check_share("feedforward.dropout", self.dropout)

    def build(self, dim: int, hidden: int, bias: bool) -> nn.Module:
        return FeedForward(dim, hidden, self.activation, bias, self.dropout)


@dataclass(frozen=True, kw_only=True)
class Gated:
    """Three projections: with silu SwiGLU, with gelu GEGLU."""

    activation: Activation = "silu"
    dropout: float = 0.0
    kind: ClassVar[str] = "gated"

    def __post_init__(self) -> None:
        check_share("feedforward.dropout", self.dropout)

    def build(self, dim: int, hidden: int, bias: bool) -> nn.Module:
        return GatedFeedForward(dim, hidden, self.activation, bias, self.dropout)
