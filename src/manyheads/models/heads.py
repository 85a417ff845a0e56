"""What stands on top of an encoder: each kind of answer is one head.

A head that is `pooled` reads one vector a text or image, the others each position.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import UserError, check_at_least, check_share
from manyheads.models.base import Model
from manyheads.nn.block import Architecture
from manyheads.nn.layers import ACTIVATIONS, Activation, HeadConfig, Norm
from manyheads.nn.shapes import Hidden, PaddingMask

Vectors = Float[Tensor, "*n d"]
Answer = Float[Tensor, "b *n"]


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """What a head may need to know of the encoder under it."""

    dim: int
    pooled_dim: int
    embedded_dim: int
    vocab_size: int | None
    norm: Norm
    dropout: float


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """One vector for the whole: act(W h + b), h the first position's state or the mean of all."""

    over: Literal["first", "mean"] = "first"
    activation: Activation = "tanh"
    dim: int | None = None

    def __post_init__(self) -> None:
        check_at_least("pooler.dim", self.dim, 1)

    def width(self, dim: int) -> int:
        return self.dim or dim

    def build(self, dim: int) -> nn.Module:
        return PoolerLayer(self, dim)


class PoolerLayer(nn.Module):
    def __init__(self, config: Pooler, dim: int) -> None:
        super().__init__()
        self.mean = config.over == "mean"
        self.project = nn.Linear(dim, config.width(dim))
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, hidden: Hidden, real: PaddingMask | None = None) -> Float[Tensor, "b p"]:
        whole = mean_of(hidden, real) if self.mean else hidden[:, 0]
        return self.activation(self.project(whole))


def mean_of(hidden: Hidden, real: PaddingMask | None) -> Float[Tensor, "b d"]:
    """The mean of the states of real positions."""
    if real is None:
        return hidden.mean(1)
    share = real / real.sum(1, keepdim=True)
    return torch.einsum("btd,bt->bd", hidden, share.to(hidden.dtype))


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Predicts the masked tokens: a projection, an activation, a norm, the token matrix + b."""

    activation: Activation = "gelu"
    tie: Literal["all", "none"] = "all"
    kind: ClassVar[str] = "masked"

    def build(self, sizes: HeadSizes) -> "MaskedHead":
        return MaskedHead(self, sizes)


class MaskedHead(nn.Module):
    pooled = False

    def __init__(self, config: Masked, sizes: HeadSizes) -> None:
        super().__init__()
        if sizes.vocab_size is None:
            raise UserError("model.head=masked predicts tokens, and this model has none")
        width = sizes.embedded_dim
        self.project = nn.Linear(sizes.dim, width)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = sizes.norm.build(width)
        output = HeadConfig(bias="trained")
        self.output = output.build(sizes.vocab_size, width, tied=config.tie == "all")

    def enter(self, hidden: Vectors) -> Float[Tensor, "*n e"]:
        """What meets the token matrix."""
        return self.norm(self.activation(self.project(hidden)))

    def forward(self, hidden: Vectors, table: nn.Embedding) -> Float[Tensor, "*n v"]:
        return self.output(self.enter(hidden), table)


@dataclass(frozen=True, kw_only=True)
class _Labelled:
    """A choice among labels; a single label is a number to predict (regression)."""

    labels: tuple[str, ...] = ("0", "1")
    dropout: float | None = None

    def __post_init__(self) -> None:
        if not self.labels:
            raise UserError("model.head.labels is empty: name them, a,b,c")
        check_share("head.dropout", self.dropout)


@dataclass(frozen=True, kw_only=True)
class Classify(_Labelled):
    """Scores for the labels of a whole text or image."""

    kind: ClassVar[str] = "classify"

    def build(self, sizes: HeadSizes) -> "LabelHead":
        return LabelHead(self, sizes.pooled_dim, sizes.dropout, pooled=True)


@dataclass(frozen=True, kw_only=True)
class Tag(_Labelled):
    """Scores for the labels of each token."""

    kind: ClassVar[str] = "tag"

    def build(self, sizes: HeadSizes) -> "LabelHead":
        return LabelHead(self, sizes.dim, sizes.dropout, pooled=False)


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
    """Says of each token whether it was replaced (ELECTRA): above 0 means yes."""

    activation: Activation = "gelu"
    kind: ClassVar[str] = "detect"

    def build(self, sizes: HeadSizes) -> "DetectHead":
        return DetectHead(self, sizes.dim)


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
    """An encoder with a pooler, where it has one, and a head, where it has one."""

    head: nn.Module

    def crown(
        self,
        config: Architecture,
        head: EncoderHead | None,
        pooler: Pooler | None,
        vocab_size: int | None = None,
    ) -> int:
        """Build what stands on top; gives the width of the pooled vector."""
        pooled_dim = pooler.width(config.dim) if pooler else config.dim
        self.pooler = pooler.build(config.dim) if pooler else None
        if head is not None:
            sizes = HeadSizes(
                dim=config.dim,
                pooled_dim=pooled_dim,
                embedded_dim=config.embed.width(config.dim),
                vocab_size=vocab_size,
                norm=config.norm,
                dropout=config.dropout,
            )
            self.head = head.build(sizes)
        return pooled_dim

    def pool(self, hidden: Hidden, real: PaddingMask | None = None) -> Float[Tensor, "b p"]:
        """One vector for the whole: the pooler's, or where there is none the first position's."""
        return hidden[:, 0] if self.pooler is None else self.pooler(hidden, real)
