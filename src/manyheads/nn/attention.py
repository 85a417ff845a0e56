"""Attention: a query meets keys, the scores become weights, the weights mix values.

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
from manyheads.kernels.dispatch import HALF, SHORT, TRITON, trusted, unheard
from manyheads.nn.compressed import MemoryCompressed
from manyheads.nn.exact_attention import (
    Core,
    CoreSizes,
    Dense,
    Fused,
    dense_weights,
    exact_core,
    mix_projected,
)
from manyheads.nn.flex import Flex
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import Local, Longformer
from manyheads.nn.masks import AttentionMask, Causal, Full, Rule, full
from manyheads.nn.packed import Packed
from manyheads.nn.performer import Performer
from manyheads.nn.positions import Position, PositionSizes, RotaryPosition
from manyheads.nn.relative import PositionConfig
from manyheads.nn.scores import InnerScore, ScaledDot, Score, ScoreConfig
from manyheads.nn.shapes import Hidden, Keys, Queries, Real, Values, Weights
from manyheads.nn.tiled import Tiled

CoreConfig = (
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


def check_parts(core: Core, score: Score, position: Position) -> None:
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
    core: Core | CoreConfig | str = "dense",
    scale: float | None = None,
) -> Queries:
    """softmax(score(q, k)) · v on head tensors, with any score, rule, position and core.

    Queries stand at the last positions of the keys, so that a cached step is the same call.
    Positions that are added to embeddings (sinusoidal, learned) change nothing here: attention
    begins after them. A part that has weights is given as a built module, not by name.
    `scale` replaces the 1/√c of the scaled dot product.
    """
    heads, head_dim = q.shape[1], q.shape[3]
    q, k, sight, scored, placed = _prepare(q, k, score, rule, real, position, scale)
    settings: Any = parse(CoreConfig, core, "core") if isinstance(core, str) else core
    sizes = CoreSizes(
        heads=heads,
        kv_heads=k.shape[1],
        head_dim=head_dim,
        key_dim=k.shape[3],
        max_length=k.shape[2],
        causal=sight.rule.past_only,
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
    return chosen(q, k, v, sight, scored, placed)


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
    q, k, sight, scored, placed = _prepare(q, k, score, rule, real, position, scale)
    check_parts(Dense(), scored, placed)
    return dense_weights(q, k, sight, scored, placed)


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
        causal=chosen.past_only,
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
    sight = AttentionMask(chosen, queries, keys, real, square=q.shape[2] == length)
    return placed.rotate(q, queries), placed.rotate(k, keys), sight, scored, placed


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
    """Keys and values of earlier positions, one pair of tensors per attention module.

    In beam search the new tokens [sentences, hypotheses] stand at one position: the cache's mask
    gives each of them its own past.
    """

    def end(self, length: int) -> int:
        """Positions after `length` more tokens are read; 0 if only the device knows."""
        ...

    def mask(
        self, rule: Rule, length: int, padding: Real | None, device: torch.device
    ) -> AttentionMask:
        """The mask of the next tokens over everything cached."""
        ...

    def advance(self) -> None:
        """Called once a pass is through all layers; `mask` has seen how much was read."""
        ...

    def attend(
        self,
        module: "SelfAttention",
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        position: Position,
    ) -> Tensor:
        """Append the keys and values of a module, then attend to all of them."""
        ...

    def cross_kv(self, module: nn.Module, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Keys and values of the encoder's output, computed once."""
        ...


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The sizes and parts that self- and cross-attention share."""

    dim: int
    heads: int
    head_dim: int
    kv_heads: int
    bias: bool
    qkv_bias: bool
    dropout: float
    max_length: int
    score: ScoreConfig
    core: CoreConfig

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

    def core_sizes(self, *, causal: bool, layer: int) -> CoreSizes:
        return CoreSizes(
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
    """Queries, keys and values from the same sequence.

    `causal` says that it will be used with rules of the past alone, `layer` where it stands.
    """

    def __init__(self, heads: Heads, *, causal: bool = False, layer: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(heads.dim, sum(heads.sizes), bias=heads.qkv_bias)
        self.output = nn.Linear(heads.sizes[0], heads.dim, bias=heads.bias)
        self.score = heads.score.build(heads.heads, heads.head_dim)
        self.core: Core = heads.core.build(heads.core_sizes(causal=causal, layer=layer))

    def forward(
        self, x: Hidden, sight: AttentionMask, position: Position, cache: Cache | None = None
    ) -> Hidden:
        projected, (q, k, v) = self._projected(x, position)
        if cache is None and projected is not None:
            dropout = self.heads.dropout if self.training else 0.0
            given = (sight, self.score, position, dropout)
            whole = mix_projected(self.core, projected, None, (q, k, v), *given)
            if whole is not None:
                return self.output(whole)
        q, k = position.rotate(q, sight.queries), position.rotate(k, sight.queries)
        if cache is None:
            mixed = self.attend(q, k, v, sight, position)
        else:
            mixed = cache.attend(self, q, k, v, sight, position)
        return self.output(rearrange(mixed, "b h t c -> b t (h c)"))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, position: Position
    ) -> Tensor:
        """softmax(score(q, k)) v by the chosen core, with dropout in training."""
        dropout = self.heads.dropout if self.training else 0.0
        return self.core(q, k, v, sight, self.score, position, dropout)

    def _projected(
        self, x: Hidden, position: Position
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor, Tensor]]:
        """The projection, and q, k and v as views of it; the projection is None where our kernel
        has the gradients of the three, since it must not be used beside them.
        """
        if self._has_kernel(x, position):
            return None, self._by_kernel(x)
        projected = self.project(x)
        q, k, v = projected.split(self.heads.sizes, dim=-1)
        return projected, (
            rearrange(q, "b t (h c) -> b h t c", h=self.heads.heads),
            rearrange(k, "b s (g e) -> b g s e", g=self.heads.kv_heads),
            rearrange(v, "b s (g c) -> b g s c", g=self.heads.kv_heads),
        )

    def _has_kernel(self, x: Hidden, position: Position) -> bool:
        """Whether this is a training on a GPU over texts that are too long for kernels/short_attention."""
        head = self.heads.head_dim
        return (
            self.training
            and x.device.type == "cuda"
            and torch.is_grad_enabled()
            and torch.is_autocast_enabled("cuda")
            and torch.get_autocast_dtype("cuda") in HALF
            and x.shape[1] > SHORT.get(head, 0)
            and x.shape[0] > 0
            and position.embeds_alone
            and type(self.core) is Fused
            and all(size % 16 == 0 for size in (head, *self.heads.sizes))
            and self.heads.sizes[1] == self.heads.sizes[2]
            and type(self.project) is nn.Linear
            and self.project.bias is not None
            and unheard(self.project)
            and TRITON
            and trusted("qkv", x.device.index)
        )

    def _by_kernel(self, x: Hidden) -> tuple[Tensor, Tensor, Tensor]:
        from manyheads.kernels.qkv import part

        bias = self.project.bias
        projected = nn.functional.linear(x, self.project.weight, bias.detach())
        return part(projected, bias, self.heads.heads, self.heads.kv_heads)


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the top of the encoder."""

    def __init__(self, heads: Heads, memory_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(heads.dim, heads.sizes[0], bias=heads.qkv_bias)
        self.project = nn.Linear(memory_dim, sum(heads.sizes[1:]), bias=heads.qkv_bias)
        self.output = nn.Linear(heads.sizes[0], heads.dim, bias=heads.bias)
        self.score = heads.score.build(heads.heads, heads.head_dim)
        self.position = Position()  # source and target positions are not comparable
        # What sees less of a sequence than everything is for the sequence that a query stands in.
        self.core: Core = (
            heads.core.build(heads.core_sizes(causal=False, layer=0))
            if heads.core.exact
            else exact_core(self.score, self.position)
        )

    def project_kv(self, memory: Tensor) -> KeysAndValues:
        return self._heads_of(self.project(memory))

    def _heads_of(self, projected: Tensor) -> KeysAndValues:
        k, v = projected.split(self.heads.sizes[1:], dim=-1)
        return (
            rearrange(k, "b s (g e) -> b g s e", g=self.heads.kv_heads),
            rearrange(v, "b s (g c) -> b g s c", g=self.heads.kv_heads),
        )

    def forward(
        self, x: Tensor, memory: Tensor, sight: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        projected = None
        if cache is None:
            projected = self.project(memory)
            k, v = self._heads_of(projected)
        else:
            k, v = cache.cross_kv(self, lambda: self.project_kv(memory))
        asked = self.query(x)
        q = rearrange(asked, "b t (h c) -> b h t c", h=self.heads.heads)
        dropout = self.heads.dropout if self.training else 0.0
        given = (sight.across(q.shape[2]), self.score, self.position, dropout)
        if projected is not None:
            whole = mix_projected(self.core, asked, projected, (q, k, v), *given)
            if whole is not None:
                return self.output(whole)
        mixed = self.core(q, k, v, *given)
        return self.output(rearrange(mixed, "b h t c -> b t (h c)"))
