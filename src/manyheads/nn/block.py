"""Blocks and stacks of blocks: encoder, decoder and encoder–decoder are made of these alone."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch
import torch._functorch.config as partition
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from manyheads.errors import UserError
from manyheads.kernels.dispatch import TRITON
from manyheads.nn.attention import (
    Cache,
    CoreConfig,
    CrossAttention,
    Heads,
    SelfAttention,
    check_parts,
)
from manyheads.nn.embedding import Embed
from manyheads.nn.exact_attention import Fused
from manyheads.nn.experts import FeedForwardConfig, Projections
from manyheads.nn.feedforward import BY_KERNEL, FeedForward, Plain
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import Position, PositionSizes, Sinusoidal
from manyheads.nn.relative import PositionConfig
from manyheads.nn.residual import Norm, Residual, narrowed, normed
from manyheads.nn.scores import ScaledDot, ScoreConfig
from manyheads.nn.shapes import Hidden

GRAPHS = 32  # of a block: with padding and without, short texts and long
KEPT = 0.9  # of the activations: a feed-forward's inner ones are made again by one kernel


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

    def attention_heads(self) -> Heads:
        bias = self.bias if self.attention_bias is None else self.attention_bias
        return Heads(
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
        heads, dim = config.attention_heads(), config.dim
        self.attention = SelfAttention(heads, causal=causal, layer=layer)
        self.attention_residual = Residual(dim, config.norm, config.dropout)
        if memory_dim is not None:
            self.cross = CrossAttention(heads, memory_dim)
            self.cross_residual = Residual(dim, config.norm, config.dropout)
        self.feedforward = config.feedforward.build(dim, config.hidden or 4 * dim, config.bias)
        self.feedforward_residual = Residual(dim, config.norm, config.dropout)

    def forward(
        self,
        x: Hidden,
        sight: AttentionMask,
        position: Position,
        memory: Tensor | None = None,
        memory_sight: AttentionMask | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        x = self.attention_residual(x, lambda y: self.attention(y, sight, position, cache))
        if memory is not None:
            x = self.cross_residual(x, lambda y: self.cross(y, memory, memory_sight, cache))
        x = self.feedforward_residual(x, self.feedforward)
        return x


class Stack(nn.Module):
    """N blocks, their positions (one for all, or one a layer), and the last norm of pre-norm."""

    def __init__(
        self, config: Architecture, *, causal: bool, memory_dim: int | None = None
    ) -> None:
        super().__init__()
        heads = config.attention_heads()
        sizes = PositionSizes(
            dim=config.embed.width(config.dim),
            heads=heads.heads,
            head_dim=heads.head_dim,
            max_length=config.max_length,
            causal=causal,
        )
        kinds = config.layers if config.position.per_layer else 1
        self.positions = nn.ModuleList(config.position.build(sizes) for _ in range(kinds))
        self.blocks = nn.ModuleList(
            Block(config, memory_dim, causal=causal, layer=layer) for layer in range(config.layers)
        )
        self.last_norm = config.norm.build_last(config.dim)
        self.attention_dropout = heads.dropout
        self.compiled = self.keeps_less = self.recomputes = False
        for block in self.blocks:
            check_parts(block.attention.core, block.attention.score, self.position)  # type: ignore[arg-type, union-attr]

    def compile_blocks(self) -> None:
        """Block by block: one is compiled in seconds, and serves for all that are like it.

        Activations that are cheap to compute again are not kept for the backward pass, unless
        some are drawn: PyTorch (2.13) would draw others when it computes them again. Nor where our
        kernels are used: they keep little, and PyTorch takes what they compute for cheap.
        """
        self.compiled = True
        self.keeps_less = not self._draws() and not self._by_kernels()
        for block in self.blocks:
            block.compile()

    @property
    def asks_host(self) -> bool:
        """To draw the same again when it computes again, where the generator stood is read."""
        return self.recomputes and self._draws()

    def _draws(self) -> bool:
        shares = [part.p for part in self.modules() if isinstance(part, nn.Dropout)]
        return any([*shares, self.attention_dropout])

    def _by_kernels(self) -> bool:
        parts = [part for part in self.modules() if isinstance(part, FeedForward)]
        on_gpu = next(self.parameters()).device.type == "cuda"
        return on_gpu and TRITON and any(part.named in BY_KERNEL for part in parts)

    @property
    def position(self) -> Position:
        """The position that embeds; those that have one table a layer embed nothing."""
        first = self.positions[0]
        assert isinstance(first, Position)
        return first

    def forward(
        self,
        x: Hidden,
        sight: AttentionMask,
        memory: Tensor | None = None,
        memory_sight: AttentionMask | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        if self.compiled:
            x = narrowed(x)  # as every block but the first gets it: one graph serves for all
        again = self.recomputes and torch.is_grad_enabled()
        with self._compiling() if self.compiled else nullcontext():
            for block, position in zip(self.blocks, cycle(self.positions), strict=False):
                through = partial(self._computed_again, block) if again else block
                x = through(x, sight, position, memory, memory_sight, cache)
        return normed(self.last_norm, x)

    def _computed_again(self, block: nn.Module, *given: Any) -> Hidden:
        """What a block makes of its input, which alone is kept for the backward pass."""
        return checkpoint(
            _anew, block, *given, use_reentrant=False, preserve_rng_state=self._draws()
        )

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """What PyTorch is told about our blocks, and about nobody else's."""
        import torch._dynamo.config as dynamo  # takes seconds

        budget = KEPT if self.keeps_less else partition.activation_memory_budget
        with (
            dynamo.patch(recompile_limit=GRAPHS),  # beyond it a block would not be compiled
            partition.patch(activation_memory_budget=budget),
        ):
            yield


def _anew(block: nn.Module, x: Hidden, sight: AttentionMask, *given: Any) -> Hidden:
    """With sights that hold nothing: the second time is to be as the first."""
    fresh = (replace(one) if isinstance(one, AttentionMask) else one for one in (sight, *given))
    return block(x, *fresh)


def recompute_blocks(model: nn.Module) -> None:
    """Of each block keep its input alone, and compute the rest again in the backward pass."""
    stacks = [part for part in model.modules() if isinstance(part, Stack)]
    if not stacks:
        raise UserError(
            "train.recompute is for models of blocks, and this one has none: leave it out"
        )
    for stack in stacks:
        stack.recomputes = True


class _Undrawn(TorchFunctionMode):
    """Tensors without numbers are not filled with any: PyTorch would import its compiler for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_ and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def sizes_alone() -> Iterator[None]:
    """What is built in here has sizes and no numbers."""
    with torch.device("meta"), _Undrawn():
        yield


def initialise(model: nn.Module, scheme: str, layers: int) -> None:
    """Starting weights by the papers' schemes; biases zero, norms one.

    xavier: each projection uniform by its own fans, embeddings N(0, 1/d) (Transformer);
    normal: N(0, 0.02²) (BERT); normal-scaled: also 1/√(2·layers) on what writes to the
    residual stream (GPT-2).
    """
    if next(model.parameters()).is_meta:
        return  # sizes alone, of which nothing can be drawn
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
            sizes = module.heads.sizes
            pieces = sizes if isinstance(module, SelfAttention) else sizes[1:]
            for piece in module.project.weight.split(pieces):
                nn.init.xavier_uniform_(piece)
        if isinstance(module, Block) and scheme == "normal-scaled":
            writers = [
                part for name, part in module.named_modules() if name.endswith(("output", "outer"))
            ]
            for writer in writers:
                nn.init.normal_(writer.weight, std=0.02 * (2 * layers) ** -0.5)
