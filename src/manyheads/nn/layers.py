"""The layers around attention: embedding, norm and residual connection, feed-forward, LM head.

Embedding      E[token] · scale + position + segment
Residual       post: x ← Norm(x + f(x))        pre: x ← x + f(Norm(x))
FeedForward    act(x W₁ + b₁) W₂ + b₂
LMHead         h Eᵀ
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.config import Count, Positive, Probability
from manyheads.nn.positions import Position
from manyheads.nn.shapes import Hidden, Positions, Tokens

# ---------------------------------------------------------------------------------------------
# Norm and residual connection


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Which norm, and where.

    LayerNorm(x) = γ (x − μ) / √(σ² + ε) + β        RMSNorm(x) = γ x / √(mean(x²) + ε)
    """

    placement: Annotated[
        Literal["pre", "post", "none"],
        "Norm before each layer, or after each residual sum; none: no norms",
    ] = "pre"
    form: Annotated[Literal["layer", "rms"], "LayerNorm or RMSNorm"] = "layer"
    eps: Annotated[Positive, "Added to the variance (ε)"] = 1e-5
    affine: Annotated[bool, "Learn gain γ and bias β"] = True

    def build(self, dim: int) -> nn.Module:
        if self.placement == "none":
            return nn.Identity()
        build = nn.RMSNorm if self.form == "rms" else nn.LayerNorm
        return build(dim, eps=self.eps, elementwise_affine=self.affine)

    def build_last(self, dim: int) -> nn.Module:
        """The last norm of a stack: pre-norm leaves the residual stream without one."""
        return self.build(dim) if self.placement == "pre" else nn.Identity()


class DropPath(nn.Dropout):
    """Dropout, and stochastic depth (Huang et al. 2016): in training a row skips the branch with
    probability `rate`; the others are divided by 1 − rate."""

    def __init__(self, dropout: float, rate: float) -> None:
        super().__init__(dropout)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        rows = x.new_ones(len(x), *[1] * (x.ndim - 1))
        return super().forward(x) * F.dropout(rows, self.rate, self.training)


class Residual(nn.Module):
    """x + dropout(f(x)), with the norm before f or after the sum."""

    def __init__(self, dim: int, norm: Norm, dropout: float, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = norm.build(dim)
        self.placement = norm.placement
        self.dropout = DropPath(dropout, drop_path) if drop_path else nn.Dropout(dropout)

    def forward(self, x: Hidden, f: Callable[[Tensor], Tensor]) -> Hidden:
        if self.placement == "pre":
            return x + self.dropout(f(self.norm(x)))
        return self.norm(x + self.dropout(f(x)))


class NoResidual(Residual):
    """dropout(f(x)) without the sum, to see what residual connections are good for."""

    def forward(self, x: Hidden, f: Callable[[Tensor], Tensor]) -> Hidden:
        if self.placement == "pre":
            return self.dropout(f(self.norm(x)))
        return self.norm(self.dropout(f(x)))


# ---------------------------------------------------------------------------------------------
# Feed-forward

Activation = Literal["relu", "relu-squared", "gelu", "gelu-tanh", "silu", "tanh"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu-squared": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


class FeedForward(nn.Module):
    """act(x W₁ + b₁) W₂ + b₂ at every position."""

    def __init__(self, dim: int, ffn_dim: int, activation: str, bias: bool, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, ffn_dim, bias=bias)
        self.outer = nn.Linear(ffn_dim, dim, bias=bias)
        self.activation_name, self.activation = activation, ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Hidden) -> Hidden:
        return self.outer(self.dropout(self.activation(self.inner(x))))


class GatedFeedForward(nn.Module):
    """(act(x W) ∘ x V) W₂ (GLU variants)."""

    def __init__(self, dim: int, ffn_dim: int, activation: str, bias: bool, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=bias)
        self.inner = nn.Linear(dim, ffn_dim, bias=bias)
        self.outer = nn.Linear(ffn_dim, dim, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Hidden) -> Hidden:
        return self.outer(self.dropout(self.activation(self.gate(x)) * self.inner(x)))


InnerDropout = Annotated[Probability, "Dropout of the inner activations"]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Two projections with an activation in between."""

    activation: Annotated[Activation, "Activation function"] = "relu"
    dropout: InnerDropout = 0.0
    kind: ClassVar[str] = "plain"

    def build(self, dim: int, ffn_dim: int, bias: bool) -> nn.Module:
        return FeedForward(dim, ffn_dim, self.activation, bias, self.dropout)


@dataclass(frozen=True, kw_only=True)
class Gated:
    """Three projections: SwiGLU with silu, GEGLU with gelu."""

    activation: Annotated[Activation, "Activation function of the gate"] = "silu"
    dropout: InnerDropout = 0.0
    kind: ClassVar[str] = "gated"

    def build(self, dim: int, ffn_dim: int, bias: bool) -> nn.Module:
        return GatedFeedForward(dim, ffn_dim, self.activation, bias, self.dropout)


# ---------------------------------------------------------------------------------------------
# Embedding and LM head


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Token embedding: scale, norm, segments and width."""

    scale: Annotated[Literal["sqrt-dim", "one"], "Factor of token vectors: √d or 1"] = "one"
    norm: Annotated[Norm | None, "Norm after the sum (BERT)"] = None
    segments: Annotated[Count | None, "Segment types, each with a vector (BERT: 2)"] = None
    dim: Annotated[Count | None, "Width of the table, projected to model.dim (ELECTRA)"] = None
    dropout: Annotated[Probability | None, "Dropout of embeddings; none: model.dropout"] = None
    word_dropout: Annotated[Probability, "Probability that a whole token vector is zero"] = 0.0
    position: Annotated[
        Literal["add", "concatenate", "every-layer"],
        "Positions: x + p, [x; p] projected to model.dim, or x + p before every block",
    ] = "add"

    def width(self, dim: int) -> int:
        """The width of the tables in a model of width `dim`."""
        return self.dim or dim

    def build(self, dim: int, dropout: float) -> "Embedding":
        return Embedding(self, dim, dropout if self.dropout is None else self.dropout)


class Embedding(nn.Module):
    """project(dropout(norm(E[token] · scale + position + segment))).

    The table E is an argument of the call, because embeddings and the LM head may share it.
    """

    def __init__(self, config: EmbeddingConfig, dim: int, dropout: float) -> None:
        super().__init__()
        width = config.width(dim)
        self.scale = math.sqrt(dim) if config.scale == "sqrt-dim" else 1.0
        self.concatenates = config.position == "concatenate"
        width *= 1 + self.concatenates
        self.segment = nn.Embedding(config.segments, width) if config.segments else None
        self.norm = config.norm.build(width) if config.norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.word_dropout = config.word_dropout
        self.project = nn.Linear(width, dim) if width != dim else nn.Identity()

    def forward(
        self,
        table: nn.Embedding,
        tokens: Tokens,
        position: Position,
        positions: Positions,
        segments: Tokens | None = None,
    ) -> Hidden:
        x = table(tokens) if self.scale == 1.0 else table(tokens) * self.scale
        if self.word_dropout:
            x = x * F.dropout(x.new_ones(*tokens.shape, 1), self.word_dropout, self.training)
        if self.concatenates:
            x = torch.cat([x, position.embed(torch.zeros_like(x), positions)], dim=-1)
        else:
            x = position.embed(x, positions)
        if self.segment is not None:
            x = x + self.segment(torch.zeros_like(tokens) if segments is None else segments)
        return self.project(self.dropout(self.norm(x)))


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """LM head: scale and bias."""

    scale: Annotated[
        Literal["inverse-sqrt-dim", "one"], "Factor of hidden states: 1/√d (T5) or 1"
    ] = "one"
    bias: Annotated[
        Literal["none", "fixed", "trained"], "Bias of each token; fixed: loaded (BART, Marian)"
    ] = "none"

    def build(self, vocab_size: int, dim: int, *, tied: bool) -> "LMHead":
        scale = dim**-0.5 if self.scale == "inverse-sqrt-dim" else 1.0
        return LMHead(vocab_size, dim, tied=tied, bias=self.bias, scale=scale)


class LMHead(nn.Module):
    """Hidden states → logits: h Eᵀ (tied to the embedding) or h Wᵀ (+ b)."""

    initialises_itself = True
    bias: Tensor | None

    def __init__(
        self, vocab_size: int, dim: int, *, tied: bool, bias: str, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))
        zeros = torch.zeros(vocab_size)
        if bias == "fixed":
            self.register_buffer("bias", zeros)
        else:
            self.bias = nn.Parameter(zeros) if bias == "trained" else None
        self.scale = scale
        if self.weight is not None:
            nn.init.normal_(self.weight, std=dim**-0.5)

    def matrix(self, table: nn.Embedding) -> Float[Tensor, "v d"]:
        """The output matrix: the embedding's table if they are tied."""
        return table.weight if self.weight is None else self.weight

    def forward(self, hidden: Float[Tensor, "*n d"], table: nn.Embedding) -> Float[Tensor, "*n v"]:
        return F.linear(self.enter(hidden), self.matrix(table), self.bias)

    def enter(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """The scaled hidden states, the input of the output matrix."""
        return hidden if self.scale == 1.0 else hidden * self.scale
