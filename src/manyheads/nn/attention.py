"""Attention: scores of queries and keys become weights, the weights average the values.

    Attention(Q, K, V) = softmax(score(Q, K)) V
    MultiHead(X) = Concat(head_1, …, head_h) W^O,  head_i = Attention(X W_i^Q, X W_i^K, X W_i^V)

`attend` is the plain function; `SelfAttention` and `CrossAttention` project into heads first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from einops import rearrange
from torch import Tensor, nn

from manyheads.config import parse
from manyheads.errors import UserError
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.exact_attention import (
    AttentionFunction,
    AttentionSizes,
    Dense,
    Fused,
    dense_weights,
    exact_attention,
)
from manyheads.nn.flex import Flex
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import Local, Longformer
from manyheads.nn.masks import AttentionMask, Causal, Full, Rule, full, make_mask
from manyheads.nn.packed import Packed
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Position, PositionSizes, RotaryPosition
from manyheads.nn.relative import PositionConfig
from manyheads.nn.scores import InnerScore, ScaledDot, Score, ScoreConfig
from manyheads.nn.shapes import Hidden, Keys, Queries, Real, Values, Weights
from manyheads.nn.tiled import Tiled

AttentionFunctionConfig = (
    Dense
    | Fused
    | Tiled
    | Flex
    | Packed
    | Local
    | Longformer
    | MemoryCompressed
    | Linformer
    | Performer
)
KeysAndValues = tuple[Tensor, Tensor]
P = TypeVar("P", bound=nn.Module)


def check_parts(core: AttentionFunction, score: Score, position: Position) -> None:
    """Refuse, when a model is built, a combination that would be wrong or cannot be computed."""
    if isinstance(position, RotaryPosition) and type(score) is not InnerScore:
        raise UserError(
            "rotary positions make a dot product depend on distance; a matrix or a network "
            "between query and key undoes that: choose a dot score "
            "(model.score=scaled-dot) or another position"
        )
    core.check(score, position)


def attend(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    score: Score | ScoreConfig | str = "scaled-dot",
    rule: Rule | str = full,
    real: Real | None = None,
    position: Position | PositionConfig | str = "none",
    core: AttentionFunction | AttentionFunctionConfig | str = "dense",
    scale: float | None = None,
) -> Queries:
    """softmax(score(q, k)) · v on head tensors, with any score, rule, position and core.

    Queries stand at the last positions of the keys, so that a cached step is the same call.
    Positions that are added to embeddings (sinusoidal, learned) change nothing here: attention
    begins after them. A part that has weights is given as a built module, not by name.
    `scale` replaces the 1/√c of the scaled dot product.
    """
    heads, head_dim = q.shape[1], q.shape[3]
    q, k, mask, scored, placed = _prepare(q, k, score, rule, real, position, scale)
    settings: Any = parse(AttentionFunctionConfig, core, "core") if isinstance(core, str) else core
    sizes = AttentionSizes(
        heads=heads,
        kv_heads=k.shape[1],
        head_dim=head_dim,
        key_dim=k.shape[3],
        max_length=k.shape[2],
        causal=mask.rule.is_causal,
    )
    chosen = settings if isinstance(settings, nn.Module) else settings.build(sizes)
    if chosen is not settings and isinstance(chosen, nn.Module):
        raise UserError(
            f"core={settings.kind} has numbers of its own, and each call would draw others: build "
            f"it once and pass that, e.g. core={type(settings).__name__}().build(CoreSizes(...))"
        )
    if chosen is not settings and not isinstance(chosen, type(settings)):
        raise UserError(
            f"core={settings.kind} is another core in each layer: build the one that you mean, "
            f"e.g. core={type(settings).__name__}(layers='M').build(CoreSizes(...))"
        )
    check_parts(chosen, scored, placed)
    return chosen(q, k, v, mask, scored, placed)


def attention_weights(
    q: Queries,
    k: Keys,
    *,
    score: Score | ScoreConfig | str = "scaled-dot",
    rule: Rule | str = full,
    real: Real | None = None,
    position: Position | PositionConfig | str = "none",
    scale: float | None = None,
) -> Weights:
    """The weights with which `attend` mixes the values."""
    q, k, mask, scored, placed = _prepare(q, k, score, rule, real, position, scale)
    check_parts(Dense(), scored, placed)
    return dense_weights(q, k, mask, scored, placed)


def _prepare(
    q: Queries,
    k: Keys,
    score: Score | ScoreConfig | str,
    rule: Rule | str,
    real: Real | None,
    position: Position | PositionConfig | str,
    scale: float | None,
) -> tuple[Tensor, Tensor, AttentionMask, Score, Position]:
    heads, head_dim, length = q.shape[1], q.shape[3], k.shape[2]
    chosen: Rule = parse(Full | Causal, rule, "rule") if isinstance(rule, str) else rule
    sizes = PositionSizes(
        dim=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        max_length=length,
        causal=chosen.is_causal,
    )
    scored = _built(
        score, Score, ScoreConfig, "score", lambda config: config.build(heads, head_dim).to(q)
    )
    placed = _built(
        position, Position, PositionConfig, "position", lambda config: config.build(sizes).to(q)
    )
    if scale is not None:
        if type(scored) is not InnerScore:
            raise UserError("scale belongs to the dot product: leave it out with another score")
        scored = ScaledDot(scale=scale).build(heads, head_dim)
    keys = torch.arange(length, device=q.device)[None]
    queries = torch.arange(length - q.shape[2], length, device=q.device)[None]
    mask = AttentionMask(chosen, queries, keys, real, square=q.shape[2] == length)
    return placed.rotate(q, queries), placed.rotate(k, keys), mask, scored, placed


def _built(part: object, module: type[P], config: Any, where: str, build: Callable[..., P]) -> P:
    """A part given as a module, as its settings, or by name."""
    if isinstance(part, module):
        return part
    chosen: Any = parse(config, part, where) if isinstance(part, str) else part
    built = build(chosen)
    if any(True for _ in built.parameters()):
        sizes = "heads, head_dim" if module is Score else "PositionSizes(...)"
        raise UserError(
            f"{where}={chosen.kind} has weights, and each call would draw others: build it once "
            f"and pass that, e.g. {where}={type(chosen).__name__}().build({sizes})"
        )
    return built


@runtime_checkable
class Cache(Protocol):
    """Keys and values of earlier positions, stored by attention module (decode/)."""

    def end(self, length: int) -> int:
        """How many positions there are after `length` more tokens; 0 if the host does not know."""
        ...

    def mask(
        self, rule: Rule, length: int, padding_mask: Real | None, device: torch.device
    ) -> AttentionMask:
        """The mask of the next `length` tokens over all positions so far."""
        ...

    def advance(self, positions: int | None = None) -> None:
        """Called by a model once tokens have passed all its layers.

        Unless given, `positions` are those of the last `mask`.
        """
        ...

    def attend(
        self,
        module: "SelfAttention",
        q: Queries,
        k: Keys,
        v: Values,
        mask: AttentionMask,
        position: Position,
    ) -> Queries:
        """Append k and v of a module, then attend to all its positions so far."""
        ...

    def cross_kv(
        self, module: "CrossAttention", project: Callable[[], KeysAndValues]
    ) -> KeysAndValues:
        """Keys and values of the encoder output, computed once."""
        ...


def next_mask(
    cache: Cache | None,
    rule: Rule,
    length: int,
    padding_mask: Real | None,
    device: torch.device,
) -> AttentionMask:
    """The mask of `length` tokens, after the cached ones if there is a cache."""
    if cache is None:
        return make_mask(rule, length, padding_mask=padding_mask, device=device)
    return cache.mask(rule, length, padding_mask, device)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and parts that self- and cross-attention share."""

    dim: int
    heads: int
    head_dim: int
    kv_heads: int
    bias: bool
    qkv_bias: bool
    dropout: float
    max_length: int
    score: ScoreConfig
    core: AttentionFunctionConfig

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(
                f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly: "
                "choose a kv_heads that divides heads"
            )

    @property
    def sizes(self) -> list[int]:
        """Channels of all queries, all keys and all values."""
        key_dim = self.score.key_dim(self.head_dim)
        return [
            self.heads * self.head_dim,
            self.kv_heads * key_dim,
            self.kv_heads * self.head_dim,
        ]

    def core_sizes(self, *, causal: bool, layer: int) -> AttentionSizes:
        return AttentionSizes(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            key_dim=self.score.key_dim(self.head_dim),
            max_length=self.max_length,
            causal=causal,
            dropout=self.dropout,
            layer=layer,
        )


class SelfAttention(nn.Module):
    """Queries, keys and values from the same sequence: softmax(score(Q, K)) V W^O.

    `causal` states that its masks never allow later keys; `layer` is its depth in the stack.
    """

    def __init__(self, config: AttentionConfig, *, causal: bool = False, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.project = nn.Linear(config.dim, sum(config.sizes), bias=config.qkv_bias)
        self.output = nn.Linear(config.sizes[0], config.dim, bias=config.bias)
        self.score = config.score.build(config.heads, config.head_dim)
        self.core: AttentionFunction = config.core.build(
            config.core_sizes(causal=causal, layer=layer)
        )

    def forward(
        self, x: Hidden, mask: AttentionMask, position: Position, cache: Cache | None = None
    ) -> Hidden:
        q, k, v = self.project(x).split(self.config.sizes, dim=-1)
        q = rearrange(q, "b t (h c) -> b h t c", h=self.config.heads)
        k = rearrange(k, "b s (g e) -> b g s e", g=self.config.kv_heads)
        v = rearrange(v, "b s (g c) -> b g s c", g=self.config.kv_heads)
        q = position.rotate(q, mask.query_positions)
        k = position.rotate(k, mask.query_positions)
        if cache is None:
            out = self.attend(q, k, v, mask, position)
        else:
            out = cache.attend(self, q, k, v, mask, position)
        return self.output(rearrange(out, "b h t c -> b t (h c)"))

    def attend(
        self, q: Queries, k: Keys, v: Values, mask: AttentionMask, position: Position
    ) -> Queries:
        """Attention of all heads by the chosen implementation, with dropout in training."""
        dropout = self.config.dropout if self.training else 0.0
        return self.core(q, k, v, mask, self.score, position, dropout)


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder output."""

    def __init__(self, config: AttentionConfig, memory_dim: int) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.dim, config.sizes[0], bias=config.qkv_bias)
        self.project = nn.Linear(memory_dim, sum(config.sizes[1:]), bias=config.qkv_bias)
        self.output = nn.Linear(config.sizes[0], config.dim, bias=config.bias)
        self.score = config.score.build(config.heads, config.head_dim)
        self.position = Position()  # source and target positions are not comparable
        # Inexact attention approximates a sequence attending to itself, not to another one.
        self.core: AttentionFunction = (
            config.core.build(config.core_sizes(causal=False, layer=0))
            if config.core.exact
            else exact_attention(self.score, self.position)
        )

    def project_kv(self, memory: Tensor) -> KeysAndValues:
        k, v = self.project(memory).split(self.config.sizes[1:], dim=-1)
        return (
            rearrange(k, "b s (g e) -> b g s e", g=self.config.kv_heads),
            rearrange(v, "b s (g c) -> b g s c", g=self.config.kv_heads),
        )

    def forward(
        self, x: Tensor, memory: Tensor, mask: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        q = rearrange(self.query(x), "b t (h c) -> b h t c", h=self.config.heads)
        if cache is None:
            k, v = self.project_kv(memory)
        else:
            k, v = cache.cross_kv(self, lambda: self.project_kv(memory))
        dropout = self.config.dropout if self.training else 0.0
        mask = mask.for_cross_attention(q.shape[2])
        out = self.core(q, k, v, mask, self.score, self.position, dropout)
        return self.output(rearrange(out, "b h t c -> b t (h c)"))
