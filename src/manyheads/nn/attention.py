"""Attention, exact and with several heads.

    Attention(Q, K, V) = softmax(score(Q, K)) V
    MultiHead(X) = Concat(head_1, …, head_h) W^O,  head_i = Attention(X W_i^Q, X W_i^K, X W_i^V)

An attention implementation (`AttentionFunction`) computes the first line from `AttentionInputs`.
`Dense` writes it out and `Fused` calls a fused kernel. The others are in nn/tiled.py (exact), and
in nn/local.py, nn/linformer.py, nn/performer.py and nn/compressed.py (approximations).
`SelfAttention` and `CrossAttention` project to heads and back.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads import ops
from manyheads.errors import UserError
from manyheads.nn.masks import AttentionMask, Rule, make_mask
from manyheads.nn.positions import Position, RotaryPosition, bias_by_distance
from manyheads.nn.scores import InnerScore, Score, ScoreConfig
from manyheads.nn.shapes import (
    HeadOutput,
    Hidden,
    Keys,
    PaddingMask,
    Queries,
    Values,
    Weights,
)

KeysAndValues = tuple[Tensor, Tensor]
E = TypeVar("E", bound="ExactAttention")

# ---------------------------------------------------------------------------------------------
# Attention implementations


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The arguments of an attention implementation; heads may share keys and values."""

    q: Queries
    k: Keys
    v: Values
    mask: AttentionMask
    score: Score
    position: Position
    dropout: float = 0.0  # probability of dropping a weight


@runtime_checkable
class AttentionFunction(Protocol):
    """An attention implementation, built for one layer: softmax(scores) V or an approximation."""

    def check(self, score: Score, position: Position) -> None:
        """Refuse, when a model is built, a combination that cannot be computed."""
        ...

    def weights(self, inputs: AttentionInputs) -> Weights:
        """The weights of the values, or of what the implementation makes of them."""
        ...

    def __call__(self, inputs: AttentionInputs) -> HeadOutput: ...


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes that an attention implementation is built for; `layer` is its depth in the stack."""

    heads: int
    kv_heads: int
    head_dim: int
    key_dim: int
    max_length: int
    causal: bool = False
    dropout: float = 0.0
    layer: int = 0


@runtime_checkable
class AttentionSettings(Protocol):
    """Settings of an attention implementation; `exact` if it is softmax attention to all keys."""

    kind: ClassVar[str]
    exact: ClassVar[bool]

    def build(self, sizes: AttentionSizes) -> AttentionFunction: ...


def dense_weights(
    q: Queries, k: Keys, mask: AttentionMask, score: Score, position: Position
) -> Weights:
    """softmax over the keys of score(q, k) + bias, with −∞ where the mask is False.

    A query that may attend to no key has only zero weights.
    """
    scores = score(q, ops.share_heads(k, q.shape[1]))
    bias = position.bias(q, mask)
    if bias is not None:
        scores = scores + bias
    allowed = mask.as_bool()
    if allowed is None:
        return scores.softmax(-1)
    blind = ~allowed.any(-1, keepdim=True)
    return scores.masked_fill(~allowed & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)


class ExactAttention:
    """Base of softmax attention without weights of its own; it is its own settings."""

    exact: ClassVar[bool] = True

    def build(self: E, sizes: AttentionSizes) -> E:
        return self

    def check(self, score: Score, position: Position) -> None:
        """Every score and position, unless overridden."""

    def weights(self, inputs: AttentionInputs) -> Weights:
        return dense_weights(inputs.q, inputs.k, inputs.mask, inputs.score, inputs.position)


@dataclass(frozen=True)
class Dense(ExactAttention):
    """The formula written out: holds every score and every weight."""

    kind: ClassVar[str] = "dense"

    def __call__(self, inputs: AttentionInputs) -> HeadOutput:
        weights = F.dropout(self.weights(inputs), inputs.dropout)
        v = ops.share_heads(inputs.v, inputs.q.shape[1])
        out = einsum(weights, v, "b h t s, b h s c -> b h t c")
        value_bias = inputs.position.value_bias(weights, inputs.mask)
        return out if value_bias is None else out + value_bias


@dataclass(frozen=True)
class Fused(ExactAttention):
    """Fused kernels that never hold the weights; `ops.attention` selects the fastest."""

    kind: ClassVar[str] = "fused"
    OLD_KINDS: ClassVar[tuple[str, ...]] = ("flex", "packed")

    def check(self, score: Score, position: Position) -> None:
        if not isinstance(score, InnerScore):
            raise UserError(
                "fused attention computes inner products, and the additive score is not one: "
                "choose the dense or tiled implementation (model.attention=dense)"
            )
        if type(position).value is not Position.value:
            raise UserError(
                "fused attention does not hold the weights that positions on values (shaw) need: "
                "choose the dense or tiled implementation (model.attention=dense)"
            )

    def __call__(self, inputs: AttentionInputs) -> HeadOutput:
        q, k, mask, position = inputs.q, inputs.k, inputs.mask, inputs.position
        score = inputs.score
        assert isinstance(score, InnerScore)
        by_distance = position.is_relative_bias and type(score) is InnerScore
        f, g = q, k  # a plain dot product needs no repeated key/value heads
        if type(score) is not InnerScore:
            f, g = score.factors(q, ops.share_heads(k, q.shape[1]))
        return ops.attention(
            f,
            g,
            inputs.v,
            mask,
            bias=(lambda: position.bias(q, mask)) if position.has_bias else None,
            bias_table=(lambda: bias_by_distance(position, q)) if by_distance else None,
            scale=float(score.scale),
            dropout=inputs.dropout,
        )


def exact_attention(score: Score, position: Position) -> Dense | Fused:
    """The fastest exact implementation for this score and position."""
    try:
        Fused().check(score, position)
    except UserError:
        return Dense()
    return Fused()


def check_rule(kind: str, rule: Rule, *known: type[Rule]) -> None:
    """Refuse a mask rule that an approximation does not have."""
    if not isinstance(rule, known):
        raise UserError(
            f"model.attention={kind} has no mask rule {type(rule).__name__}: set "
            "model.attention=fused"
        )


def check_combination(function: AttentionFunction, score: Score, position: Position) -> None:
    """Refuse, when a model is built, a combination that would be wrong or cannot be computed."""
    if isinstance(position, RotaryPosition) and type(score) is not InnerScore:
        raise UserError(
            "rotary positions work only with a dot product: "
            "set model.score=scaled-dot or dot, or another model.position"
        )
    function.check(score, position)


# ---------------------------------------------------------------------------------------------
# Multi-head attention


States = tuple[Tensor, ...]  # each [layers or positions, rows, width]


class Cache:
    """What earlier positions left, by module: keys and values of attention, states of others.

    `decode/` has two caches. `KVCache` grows; the size of `StaticCache` is fixed.
    """

    length: Any  # positions so far; a static cache has it on the device

    def __init__(self) -> None:
        self._kv: dict[nn.Module, KeysAndValues] = {}
        self._cross: dict[nn.Module, KeysAndValues] = {}
        self._states: dict[nn.Module, States] = {}

    def end(self, length: int) -> int:
        """How many positions there are after `length` more tokens; 0 if the host does not know."""
        raise NotImplementedError

    def mask(
        self, rule: Rule, length: int, padding_mask: PaddingMask | None, device: torch.device
    ) -> AttentionMask:
        """The mask of the next `length` tokens over all positions so far."""
        raise NotImplementedError

    def advance(self, positions: int | None = None) -> None:
        """Called by a model once tokens have passed all its layers.

        The default is the number of positions of the last `mask`; a model without masks passes it.
        """
        raise NotImplementedError

    def attend(
        self,
        module: "SelfAttention",
        q: Queries,
        k: Keys,
        v: Values,
        mask: AttentionMask,
        position: Position,
    ) -> HeadOutput:
        """Append k and v of a module, then attend to all its positions so far."""
        raise NotImplementedError

    def cross_kv(self, module: nn.Module, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Keys and values of the encoder output, computed once."""
        if module not in self._cross:
            keys, values = project()
            self._cross[module] = keys.contiguous(), values.contiguous()
        return self._cross[module]

    def state(self, module: nn.Module) -> States | None:
        """The newest states of a recurrent or convolutional module; None before the first.

        Rows are hypotheses.
        """
        return self._states.get(module)

    def set_state(self, module: nn.Module, states: States) -> None:
        self._states[module] = states


def next_mask(
    cache: Cache | None,
    rule: Rule,
    length: int,
    padding_mask: PaddingMask | None,
    device: torch.device,
) -> AttentionMask:
    """The mask of `length` tokens, after the cached ones if there is a cache."""
    if cache is None:
        return make_mask(rule, length, padding_mask=padding_mask, device=device)
    return cache.mask(rule, length, padding_mask, device)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(AttentionSizes):
    """Sizes and parts of self- and cross-attention."""

    dim: int
    bias: bool
    qkv_bias: bool
    qk_norm: bool = False
    norm_eps: float = 1e-5
    score: ScoreConfig
    core: AttentionSettings

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads} evenly"
            )

    @property
    def sizes(self) -> list[int]:
        """Channels of all queries, all keys and all values."""
        return [
            self.heads * self.head_dim,
            self.kv_heads * self.key_dim,
            self.kv_heads * self.head_dim,
        ]

    def qk_norms(self) -> tuple[nn.Module, nn.Module]:
        """RMSNorm of the queries and keys of a head (Henry et al. 2020), or nothing."""
        if not self.qk_norm:
            return nn.Identity(), nn.Identity()
        eps = self.norm_eps
        return nn.RMSNorm(self.head_dim, eps=eps), nn.RMSNorm(self.key_dim, eps=eps)


class SelfAttention(nn.Module):
    """Queries, keys and values from the same sequence: softmax(score(Q, K)) V W^O.

    `causal` states that its masks never allow later keys; `layer` is its depth in the stack.
    """

    def __init__(self, config: AttentionConfig, *, causal: bool = False, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.project = nn.Linear(config.dim, sum(config.sizes), bias=config.qkv_bias)
        self.output = nn.Linear(config.sizes[0], config.dim, bias=config.bias)
        self.query_norm, self.key_norm = config.qk_norms()
        self.score = config.score.build(config.heads, config.head_dim)
        sizes = replace(config, causal=causal, layer=layer)
        self.core: AttentionFunction = config.core.build(sizes)

    def forward(
        self, x: Hidden, mask: AttentionMask, position: Position, cache: Cache | None = None
    ) -> Hidden:
        q, k, v = self.project(x).split(self.config.sizes, dim=-1)
        q = rearrange(q, "b t (h c) -> b h t c", h=self.config.heads)
        k = rearrange(k, "b s (g e) -> b g s e", g=self.config.kv_heads)
        v = rearrange(v, "b s (g c) -> b g s c", g=self.config.kv_heads)
        q = position.rotate(self.query_norm(q), mask.query_positions)
        k = position.rotate(self.key_norm(k), mask.query_positions)
        if cache is None:
            out = self.attend(q, k, v, mask, position)
        else:
            out = cache.attend(self, q, k, v, mask, position)
        return self.output(rearrange(out, "b h t c -> b t (h c)"))

    def attend(
        self, q: Queries, k: Keys, v: Values, mask: AttentionMask, position: Position
    ) -> HeadOutput:
        dropout = self.config.dropout if self.training else 0.0
        return self.core(AttentionInputs(q, k, v, mask, self.score, position, dropout))


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder output."""

    def __init__(self, config: AttentionConfig, memory_dim: int) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.dim, config.sizes[0], bias=config.qkv_bias)
        self.project = nn.Linear(memory_dim, sum(config.sizes[1:]), bias=config.qkv_bias)
        self.output = nn.Linear(config.sizes[0], config.dim, bias=config.bias)
        self.query_norm, self.key_norm = config.qk_norms()
        self.score = config.score.build(config.heads, config.head_dim)
        self.position = Position()  # source and target positions are not comparable
        # Approximations are of a sequence that attends to itself, not to another one.
        self.core: AttentionFunction = (
            config.core.build(config)
            if config.core.exact
            else exact_attention(self.score, self.position)
        )

    def project_kv(self, memory: Tensor) -> KeysAndValues:
        k, v = self.project(memory).split(self.config.sizes[1:], dim=-1)
        return (
            self.key_norm(rearrange(k, "b s (g e) -> b g s e", g=self.config.kv_heads)),
            rearrange(v, "b s (g c) -> b g s c", g=self.config.kv_heads),
        )

    def forward(
        self, x: Tensor, memory: Tensor, mask: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        q = self.query_norm(rearrange(self.query(x), "b t (h c) -> b h t c", h=self.config.heads))
        if cache is None:
            k, v = self.project_kv(memory)
        else:
            k, v = cache.cross_kv(self, lambda: self.project_kv(memory))
        out = self.attend(q, k, v, mask.for_cross_attention(q.shape[2]))
        return self.output(rearrange(out, "b h t c -> b t (h c)"))

    def attend(self, q: Queries, k: Keys, v: Values, mask: AttentionMask) -> HeadOutput:
        dropout = self.config.dropout if self.training else 0.0
        return self.core(AttentionInputs(q, k, v, mask, self.score, self.position, dropout))
