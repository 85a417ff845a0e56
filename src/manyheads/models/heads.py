"""Heads of encoders: masked tokens, classes, tags, replaced tokens.

A `pooled` head takes one vector per text or image, the others the vector of each position.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.config import Count, Probability
from manyheads.errors import UserError
from manyheads.nn.block import Architecture, Model
from manyheads.nn.layers import ACTIVATIONS, Activation, LMHead
from manyheads.nn.shapes import Hidden, PaddingMask

Vectors = Float[Tensor, "*n d"]
HeadOutput = Float[Tensor, "b *n"]


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """act(W h + b), with h the state of the first position or the mean of all."""

    over: Annotated[Literal["first", "mean"], "First position, or mean of all"] = "first"
    activation: Annotated[Activation, "Activation of the projection"] = "tanh"
    dim: Annotated[Count | None, "Width of the result; none: the model's"] = None

    def width(self, dim: int) -> int:
        return self.dim or dim


class PoolerLayer(nn.Module):
    def __init__(self, config: Pooler, dim: int) -> None:
        super().__init__()
        self.mean = config.over == "mean"
        self.project = nn.Linear(dim, config.width(dim))
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, hidden: Hidden, real: PaddingMask | None = None) -> Float[Tensor, "b p"]:
        pooled = mean_of(hidden, real) if self.mean else hidden[:, 0]
        return self.activation(self.project(pooled))


def mean_of(hidden: Hidden, real: PaddingMask | None) -> Float[Tensor, "b d"]:
    """The mean over positions that are not padding."""
    if real is None:
        return hidden.mean(1)
    weights = real / real.sum(1, keepdim=True)
    return torch.einsum("btd,bt->bd", hidden, weights.to(hidden.dtype))


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Predicts masked tokens: projection, activation, norm, output matrix + b."""

    activation: Annotated[Activation, "Activation of the projection"] = "gelu"
    tie: Annotated[Literal["all", "none"], "Output matrix: the token embedding, or its own"] = "all"
    kind: ClassVar[str] = "masked"

    def build(self, config: Architecture, pooled_dim: int) -> "MaskedHead":
        return MaskedHead(self, config)


class MaskedHead(nn.Module):
    pooled = False

    def __init__(self, settings: Masked, config: Architecture) -> None:
        super().__init__()
        width = config.embed.width(config.dim)
        self.project = nn.Linear(config.dim, width)
        self.activation = ACTIVATIONS[settings.activation]
        self.norm = config.norm.build(width)
        tied = settings.tie == "all"
        self.output = LMHead(config.vocabulary, width, tied=tied, bias="trained")

    def enter(self, hidden: Vectors) -> Float[Tensor, "*n e"]:
        """The input of the output matrix."""
        return self.norm(self.activation(self.project(hidden)))

    def forward(self, hidden: Vectors, table: nn.Embedding) -> Float[Tensor, "*n v"]:
        return self.output(self.enter(hidden), table)


@dataclass(frozen=True, kw_only=True)
class _Labelled:
    """Classification; a single label means regression."""

    labels: Annotated[tuple[str, ...], "Names of the labels"] = ("0", "1")
    dropout: Annotated[Probability | None, "Dropout before the head; none: the model's"] = None

    def __post_init__(self) -> None:
        if not self.labels:
            raise UserError("model.head.labels is empty: set model.head.labels=a,b,c")


@dataclass(frozen=True, kw_only=True)
class Classify(_Labelled):
    """Logits of the labels of a text or image."""

    kind: ClassVar[str] = "classify"

    def build(self, config: Architecture, pooled_dim: int) -> "LabelHead":
        return LabelHead(self, pooled_dim, config.dropout, pooled=True)


@dataclass(frozen=True, kw_only=True)
class Tag(_Labelled):
    """Logits of the labels of each token."""

    kind: ClassVar[str] = "tag"

    def build(self, config: Architecture, pooled_dim: int) -> "LabelHead":
        return LabelHead(self, config.dim, config.dropout, pooled=False)


class LabelHead(nn.Module):
    def __init__(self, config: _Labelled, dim: int, dropout: float, *, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.dropout = nn.Dropout(dropout if config.dropout is None else config.dropout)
        self.output = nn.Linear(dim, len(config.labels))

    def forward(
        self, hidden: Vectors, table: nn.Embedding | None = None
    ) -> Float[Tensor, "*n labels"]:
        return self.output(self.dropout(hidden))


@dataclass(frozen=True, kw_only=True)
class Detect:
    """Logit that a token was replaced (ELECTRA)."""

    activation: Annotated[Activation, "Activation of the projection"] = "gelu"
    kind: ClassVar[str] = "detect"

    def build(self, config: Architecture, pooled_dim: int) -> "DetectHead":
        return DetectHead(self, config.dim)


class DetectHead(nn.Module):
    pooled = False

    def __init__(self, config: Detect, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)
        self.activation = ACTIVATIONS[config.activation]
        self.output = nn.Linear(dim, 1)

    def forward(self, hidden: Vectors, table: nn.Embedding | None = None) -> Float[Tensor, "*n"]:
        return self.output(self.activation(self.project(hidden))).squeeze(-1)


EncoderHead = Masked | Classify | Tag | Detect


class EncoderWithHead(Model):
    """An encoder with an optional pooler and an optional head."""

    head: nn.Module

    def build_head(
        self, config: Architecture, head: EncoderHead | None, pooler: Pooler | None
    ) -> int:
        """Build pooler and head; returns the width of the pooled vector."""
        pooled_dim = pooler.width(config.dim) if pooler else config.dim
        self.pooler = PoolerLayer(pooler, config.dim) if pooler else None
        if head is not None:
            self.head = head.build(config, pooled_dim)
        return pooled_dim

    def pool(self, hidden: Hidden, real: PaddingMask | None = None) -> Float[Tensor, "b p"]:
        """One vector per text: the pooler's, or the first position's without a pooler."""
        return hidden[:, 0] if self.pooler is None else self.pooler(hidden, real)
