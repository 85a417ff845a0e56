"""Blocks and stacks of blocks: encoder, decoder and encoder–decoder are made of these alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyheads.errors import UserError
from manyheads.nn.attention import (
    AttentionConfig,
    Cache,
    CoreConfig,
    CrossAttention,
    SelfAttention,
    check_parts,
)
from manyheads.nn.embedding import Embed
from manyheads.nn.exact_attention import Fused
from manyheads.nn.experts import FeedForwardConfig, Projections
from manyheads.nn.feedforward import Plain
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position, PositionSizes, Sinusoidal
from manyheads.nn.relative import PositionConfig
from manyheads.nn.residual import Norm, Residual
from manyheads.nn.scores import ScaledDot, ScoreConfig
from manyheads.nn.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes and parts that every model of blocks shares.

    `bias` is that of all projections, `attention_bias` of those of attention where it differs,
    `qkv_bias` of those to queries, keys and values.
    """

    vocab_size: int | None = None
    dim: int = 256
    layers: int = 4
    heads: int = 4
    head_dim: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    max_length: int = 512
    position: PositionConfig = field(default_factory=Sinusoidal)
    norm: Norm = field(default_factory=Norm)
    score: ScoreConfig = field(default_factory=ScaledDot)
    core: CoreConfig = field(default_factory=Fused)
    feedforward: FeedForwardConfig = field(default_factory=Plain)
    embed: Embed = field(default_factory=Embed)
    dropout: float = 0.1
    attention_dropout: float = 0.0
    bias: bool = True
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    initial: Literal["xavier", "normal", "normal-scaled"] = "xavier"

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "max_length"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("head_dim", "kv_heads", "hidden", "vocab_size"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise UserError(f"model.{name}={given} must be at least 1")
        if self.head_dim is None and self.dim % self.heads:
            raise UserError(
                f"model.dim={self.dim} does not divide into {self.heads} heads: "
                "change one of them, or give model.head_dim"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} must be at least 0, below 1")

    def refuse_narrow_table(self) -> None:
        """For models whose head may be their table: it has to be as wide as they are."""
        if self.embed.width(self.dim) != self.dim:
            raise UserError(
                f"model.embed.dim={self.embed.dim} is for encoders (model.kind=bert): leave it out"
            )

    @property
    def vocabulary(self) -> int:
        if self.vocab_size is None:
            raise UserError("model.vocab_size is needed: a run takes it from its tokenizer")
        return self.vocab_size

    def attention_config(self) -> AttentionConfig:
        bias = self.bias if self.attention_bias is None else self.attention_bias
        return AttentionConfig(
            dim=self.dim,
            heads=self.heads,
            head_dim=self.head_dim or self.dim // self.heads,
            kv_heads=self.kv_heads or self.heads,
            bias=bias,
            qkv_bias=bias if self.qkv_bias is None else self.qkv_bias,
            dropout=self.attention_dropout,
            max_length=self.max_length,
            score=self.score,
            core=self.core,
        )


class Block(nn.Module):
    """Self-attention, cross-attention where there is a memory to look at, feed-forward."""

    def __init__(
        self, config: Architecture, memory_dim: int | None, *, causal: bool, layer: int
    ) -> None:
        super().__init__()
        attention, dim = config.attention_config(), config.dim
        self.attention = SelfAttention(attention, causal=causal, layer=layer)
        self.attention_residual = Residual(dim, config.norm, config.dropout)
        if memory_dim is not None:
            self.cross = CrossAttention(attention, memory_dim)
            self.cross_residual = Residual(dim, config.norm, config.dropout)
        self.feedforward = config.feedforward.build(dim, config.hidden or 4 * dim, config.bias)
        self.feedforward_residual = Residual(dim, config.norm, config.dropout)

    def forward(
        self,
        x: Hidden,
        mask: AttentionMask,
        position: Position,
        memory: Tensor | None = None,
        memory_mask: AttentionMask | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        x = self.attention_residual(x, lambda y: self.attention(y, mask, position, cache))
        if memory is not None:
            x = self.cross_residual(x, lambda y: self.cross(y, memory, memory_mask, cache))
        x = self.feedforward_residual(x, self.feedforward)
        return x


class Stack(nn.Module):
    """N blocks, their positions (one for all, or one a layer), and the last norm of pre-norm."""

    def __init__(
        self, config: Architecture, *, causal: bool, memory_dim: int | None = None
    ) -> None:
        super().__init__()
        attention = config.attention_config()
        sizes = PositionSizes(
            dim=config.embed.width(config.dim),
            heads=attention.heads,
            head_dim=attention.head_dim,
            max_length=config.max_length,
            causal=causal,
        )
        kinds = config.layers if config.position.per_layer else 1
        self.positions = nn.ModuleList(config.position.build(sizes) for _ in range(kinds))
        self.blocks = nn.ModuleList(
            Block(config, memory_dim, causal=causal, layer=layer) for layer in range(config.layers)
        )
        self.last_norm = config.norm.build_last(config.dim)
        for block in self.blocks:
            check_parts(block.attention.core, block.attention.score, self.position)  # type: ignore[arg-type, union-attr]

    @property
    def position(self) -> Position:
        """The position that embeds; those that have one table a layer embed nothing."""
        first = self.positions[0]
        assert isinstance(first, Position)
        return first

    def forward(
        self,
        x: Hidden,
        mask: AttentionMask,
        memory: Tensor | None = None,
        memory_mask: AttentionMask | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        for block, position in zip(self.blocks, cycle(self.positions), strict=False):
            x = block(x, mask, position, memory, memory_mask, cache)
        return self.last_norm(x)


class _SkipInit(TorchFunctionMode):
    """Meta tensors are not initialised: PyTorch would import its compiler for that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_ and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Models built in this context have sizes and no storage."""
    with torch.device("meta"), _SkipInit():
        yield


def initialise(model: nn.Module, scheme: str, layers: int) -> None:
    """Starting weights by the papers' schemes; biases zero, norms one.

    xavier: each projection uniform by its own fans, embeddings N(0, 1/d) (Transformer);
    normal: N(0, 0.02²) (BERT); normal-scaled: also 1/√(2·layers) on what writes to the
    residual stream (GPT-2).
    """
    if next(model.parameters()).is_meta:
        return  # no storage
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if scheme == "xavier":
                nn.init.xavier_uniform_(module.weight)
            else:
                nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Projections):
            for piece in module.weight:
                if scheme == "xavier":
                    nn.init.xavier_uniform_(piece)
                else:
                    nn.init.normal_(piece, std=0.02)
        elif isinstance(module, nn.Embedding):
            std = module.embedding_dim**-0.5 if scheme == "xavier" else 0.02
            nn.init.normal_(module.weight, std=std)
    for module in model.modules():
        if isinstance(module, (SelfAttention, CrossAttention)) and scheme == "xavier":
            # Queries, keys and values share a matrix for speed; each keeps its own fans.
            sizes = module.config.sizes
            pieces = sizes if isinstance(module, SelfAttention) else sizes[1:]
            for piece in module.project.weight.split(pieces):
                nn.init.xavier_uniform_(piece)
        if isinstance(module, Block) and scheme == "normal-scaled":
            writers = [
                part for name, part in module.named_modules() if name.endswith(("output", "outer"))
            ]
            for writer in writers:
                nn.init.normal_(writer.weight, std=0.02 * (2 * layers) ** -0.5)
