"""Blocks, stacks of blocks, models and their initial weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from manyheads.config import Count, Probability
from manyheads.errors import UserError
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import (
    AttentionConfig,
    Cache,
    CrossAttention,
    Fused,
    SelfAttention,
    check_combination,
)
from manyheads.nn.experts import FeedForwardConfig, Projections
from manyheads.nn.layers import Embedding, EmbeddingConfig, NoResidual, Norm, Plain, Residual
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position, PositionConfig, PositionSizes, Sinusoidal
from manyheads.nn.scores import ScaledDot, ScoreConfig
from manyheads.nn.shapes import Hidden


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes and parts that every model of blocks shares."""

    vocab_size: Annotated[Count | None, "Tokens; a run takes it from its tokenizer"] = None
    dim: Annotated[Count, "Width of the residual stream (d_model)"] = 256
    layers: Annotated[Count, "Blocks in a stack"] = 4
    heads: Annotated[Count, "Attention heads"] = 4
    head_dim: Annotated[Count | None, "Channels of a head; none: dim / heads"] = None
    kv_heads: Annotated[Count | None, "Key/value heads (grouped queries); none: heads"] = None
    ffn_dim: Annotated[Count | None, "Width of the feed-forward part; none: 4 · dim"] = None
    max_length: Annotated[Count, "Longest sequence, in tokens"] = 512
    position: Annotated[PositionConfig, "Position scheme"] = field(default_factory=Sinusoidal)
    norm: Annotated[Norm, "Which norm, and where"] = field(default_factory=Norm)
    residual: Annotated[
        Literal["add", "none"], "Residual connections; none: f(x) in place of x + f(x)"
    ] = "add"
    score: Annotated[ScoreConfig, "Score of a query and a key"] = field(default_factory=ScaledDot)
    attention: Annotated[AttentionFunctionConfig, "Attention implementation"] = field(
        default_factory=Fused
    )
    feedforward: Annotated[FeedForwardConfig, "Feed-forward part"] = field(default_factory=Plain)
    embed: Annotated[EmbeddingConfig, "Token embedding"] = field(default_factory=EmbeddingConfig)
    dropout: Annotated[Probability, "Dropout of embeddings and residual branches"] = 0.1
    drop_path: Annotated[
        Probability, "Stochastic depth: probability that a row skips a branch of the last block"
    ] = 0.0
    attention_dropout: Annotated[Probability, "Dropout of attention weights"] = 0.0
    bias: Annotated[bool, "Biases of all projections"] = True
    attention_bias: Annotated[bool | None, "Biases of attention; none: as bias"] = None
    qkv_bias: Annotated[bool | None, "Biases of q, k, v; none: as attention_bias"] = None
    qk_norm: Annotated[bool, "RMSNorm of each head's queries and keys (QK-norm)"] = False
    init: Annotated[
        Literal["xavier", "normal", "normal-scaled", "xavier-zero", "normal-zero"],
        "Initial weights: Transformer's, BERT's or GPT-2's scheme; -zero: outputs of branches zero",
    ] = "xavier"

    RENAMED: ClassVar[dict[str, str]] = {
        "hidden": "ffn_dim",
        "core": "attention",
        "initial": "init",
    }

    def __post_init__(self) -> None:
        if self.head_dim is None and self.dim % self.heads:
            raise UserError(
                f"model.dim={self.dim} does not divide into {self.heads} heads: "
                "change one of them, or set model.head_dim"
            )
        if self.embed.position != "add" and self.position.kind not in (
            *("sinusoidal", "sinusoidal-2d", "learned"),
        ):
            raise UserError(
                f"model.embed.position={self.embed.position} needs positions that are added to "
                f"embeddings (not {self.position.kind}): set model.position=sinusoidal or learned"
            )
        if self.embed.position == "every-layer" and self.embed.width(self.dim) != self.dim:
            raise UserError("model.embed.position=every-layer needs model.embed.dim=none")

    def refuse_narrow_table(self) -> None:
        """For models whose LM head may be the token table, which must be as wide as the model."""
        if self.embed.width(self.dim) != self.dim:
            raise UserError(f"model.embed.dim={self.embed.dim} works only with model.kind=bert")

    @property
    def vocabulary(self) -> int:
        if self.vocab_size is None:
            raise UserError("model.vocab_size is needed: a run takes it from its tokenizer")
        return self.vocab_size

    def attention_config(self) -> AttentionConfig:
        bias = self.bias if self.attention_bias is None else self.attention_bias
        head_dim = self.head_dim or self.dim // self.heads
        return AttentionConfig(
            dim=self.dim,
            heads=self.heads,
            head_dim=head_dim,
            key_dim=self.score.key_dim(head_dim),
            kv_heads=self.kv_heads or self.heads,
            bias=bias,
            qkv_bias=bias if self.qkv_bias is None else self.qkv_bias,
            qk_norm=self.qk_norm,
            norm_eps=self.norm.eps,
            dropout=self.attention_dropout,
            max_length=self.max_length,
            score=self.score,
            core=self.attention,
        )


class Block(nn.Module):
    """Self-attention, cross-attention if the block attends to a memory, feed-forward."""

    def __init__(
        self, config: Architecture, memory_dim: int | None, *, causal: bool, layer: int
    ) -> None:
        super().__init__()
        attention, dim = config.attention_config(), config.dim
        drop_path = config.drop_path * (layer + 1) / config.layers  # rises with the depth
        self.attention = SelfAttention(attention, causal=causal, layer=layer)
        build_residual = Residual if config.residual == "add" else NoResidual
        self.attention_residual = build_residual(dim, config.norm, config.dropout, drop_path)
        if memory_dim is not None:
            self.cross = CrossAttention(attention, memory_dim)
            self.cross_residual = build_residual(dim, config.norm, config.dropout, drop_path)
        self.feedforward = config.feedforward.build(dim, config.ffn_dim or 4 * dim, config.bias)
        self.feedforward_residual = build_residual(dim, config.norm, config.dropout, drop_path)

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
        return self.feedforward_residual(x, self.feedforward)


class Stack(nn.Module):
    """N blocks, their positions (one for all, or one per layer), and the last norm of pre-norm."""

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
        count = config.layers if config.position.per_layer else 1
        self.positions = nn.ModuleList(config.position.build(sizes) for _ in range(count))
        self.blocks = nn.ModuleList(
            Block(config, memory_dim, causal=causal, layer=layer) for layer in range(config.layers)
        )
        self.last_norm = config.norm.build_last(config.dim)
        self.embeds_again = config.embed.position == "every-layer"
        for block in self.blocks:
            check_combination(block.attention.core, block.attention.score, self.position)  # type: ignore[arg-type, union-attr]

    @property
    def position(self) -> Position:
        """The position whose `embed` is used; schemes with a table per layer embed nothing."""
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
        for layer, (block, position) in enumerate(
            zip(self.blocks, cycle(self.positions), strict=False)
        ):
            if layer and self.embeds_again:
                x = self.position.embed(x, mask.query_positions)
            x = block(x, mask, position, memory, memory_mask, cache)
        return self.last_norm(x)


class Model(nn.Module):
    """Base class of models; those without Transformer blocks have no stacks.

    Viewers and exporters ask it for its stacks and embeddings.
    """

    def stacks(self) -> dict[str, Stack]:
        """Stacks of Transformer blocks by name (encoder, decoder), in the order of computation."""
        return {name: part for name, part in self.named_children() if isinstance(part, Stack)}

    def embeddings(self) -> dict[str, Embedding]:
        """The embedding layer of each stack that takes tokens: its own, or the model's only one."""
        embeddings = {}
        for name in self.stacks():
            layer = getattr(self, f"{name}_embedding", getattr(self, "embedding", None))
            if isinstance(layer, Embedding):
                embeddings[name] = layer
        return embeddings


RANDOM_INITS = {
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),
    *(Tensor.normal_, Tensor.uniform_),
}


class SkipInit(TorchFunctionMode):
    """Models built in this context have arbitrary weights: they are loaded afterwards.

    Sampling the weights of 1.3B parameters takes 10 seconds. For meta tensors, PyTorch would even
    import its compiler.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM_INITS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Models built in this context have sizes and no storage."""
    with torch.device("meta"), SkipInit():
        yield


def initialise(model: nn.Module, scheme: str, layers: int) -> None:
    """Initial weights by the papers' schemes; biases zero, norms one.

    xavier: each projection uniform by its own fans, embeddings N(0, 1/d) (Transformer);
    normal: N(0, 0.02²) (BERT); normal-scaled: also 1/√(2·layers) on projections into the
    residual stream (GPT-2); -zero: these are zero. Vectors, modules with
    `initialises_itself` and other modules of PyTorch keep the values of their
    constructor; any other matrix is an error.
    """
    if next(model.parameters()).is_meta and not is_in_torch_dispatch_mode():
        return  # no storage, and no mode that stores shards (train/parallel.py)

    def draw(weight: Tensor) -> None:
        if scheme.startswith("xavier"):
            nn.init.xavier_uniform_(weight)
        else:
            nn.init.normal_(weight, std=0.02)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Projections):
            for weight in module.weight:
                draw(weight)
        elif isinstance(module, nn.Embedding):
            std = module.embedding_dim**-0.5 if scheme.startswith("xavier") else 0.02
            nn.init.normal_(module.weight, std=std)
        elif not (hasattr(module, "reset_parameters") or hasattr(module, "initialises_itself")):
            for parameter, matrix in module.named_parameters(recurse=False):
                if matrix.ndim > 1:
                    raise TypeError(
                        f"no rule initialises {name}.{parameter} of {type(module).__name__}: set "
                        "it in the constructor and declare `initialises_itself = True`"
                    )
    for module in model.modules():
        if isinstance(module, (SelfAttention, CrossAttention)) and scheme.startswith("xavier"):
            # Queries, keys and values share a matrix for speed; each has its own fans.
            sizes = module.config.sizes
            parts = sizes if isinstance(module, SelfAttention) else sizes[1:]
            for weight in module.project.weight.split(parts):
                nn.init.xavier_uniform_(weight)
        for name, part in module.named_modules() if isinstance(module, Block) else ():
            if name.endswith(("output", "outer")) and scheme == "normal-scaled":
                nn.init.normal_(part.weight, std=0.02 * (2 * layers) ** -0.5)
            elif name.endswith(("output", "outer")) and scheme.endswith("-zero"):
                nn.init.zeros_(part.weight)
