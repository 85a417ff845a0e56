"""Tokens become vectors, and vectors become scores over tokens again."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.errors import check_at_least
from manyheads.nn.positions import Position
from manyheads.nn.residual import Norm
from manyheads.nn.shapes import Hidden, Positions, Tokens


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """How a token's vector enters the stack: its scale, a norm after the sum, segments.

    `dim` is the width of the tables where it is not the model's: what comes out of them is
    projected (ELECTRA).
    """

    scale: Literal["sqrt-dim", "one"] = "one"
    norm: Norm | None = None
    segments: int | None = None
    dim: int | None = None

    def __post_init__(self) -> None:
        check_at_least("embed.segments", self.segments, 1)
        check_at_least("embed.dim", self.dim, 1)

    def width(self, dim: int) -> int:
        """The width of the tables in a model of width `dim`."""
        return self.dim or dim

    def build(self, dim: int, dropout: float) -> "Embedding":
        return Embedding(self, dim, dropout)


class Embedding(nn.Module):
    """token · scale + position + segment, then the norm, the dropout and where the tables are
    narrower than the model the projection of the papers.

    The table of token vectors is given at the call: several embeddings and the output head may
    share one.
    """

    def __init__(self, config: EmbeddingConfig, dim: int, dropout: float) -> None:
        super().__init__()
        width = config.width(dim)
        self.scale = math.sqrt(dim) if config.scale == "sqrt-dim" else 1.0
        self.segment = nn.Embedding(config.segments, width) if config.segments else None
        self.norm = config.norm.build(width) if config.norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
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
        x = position.embed(x, positions)
        if self.segment is not None:
            x = x + self.segment(torch.zeros_like(tokens) if segments is None else segments)
        return self.project(self.dropout(self.norm(x)))


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What the last matrix has beside itself: a number a token, a scale (T5: d^−½).

    A `fixed` bias is loaded and never trained (BART, Marian).
    """

    scale: Literal["inverse-sqrt-dim", "one"] = "one"
    bias: Literal["none", "fixed", "trained"] = "none"

    def build(self, vocab_size: int, dim: int, *, tied: bool) -> "LMHead":
        scale = dim**-0.5 if self.scale == "inverse-sqrt-dim" else 1.0
        return LMHead(vocab_size, dim, tied=tied, bias=self.bias, scale=scale)


class LMHead(nn.Module):
    """Hidden states → a score for each token: h Eᵀ (tied to the embedding) or h Wᵀ (+ b)."""

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
        """The output matrix: the embedding's own tensor where the two are tied."""
        return table.weight if self.weight is None else self.weight

    def forward(self, hidden: Float[Tensor, "*n d"], table: nn.Embedding) -> Float[Tensor, "*n v"]:
        return F.linear(self.enter(hidden), self.matrix(table), self.bias)

    def enter(self, hidden: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the matrix is multiplied with."""
        return hidden if self.scale == 1.0 else hidden * self.scale
