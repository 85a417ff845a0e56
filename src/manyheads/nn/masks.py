"""Attention masks: rules over positions, and `AttentionMask`, a rule applied to positions.

A rule is a predicate: True where the query at position i may attend to the key at position j.
It is defined on positions, not on matrix indices, so that one rule serves a full pass, a chunk
and a cached step.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.nn.shapes import KeyPositions, PaddingMask, Positions

QueryAxis = Int[Tensor, "#b t 1"]
KeyAxis = Int[Tensor, "#b 1 s"]
Allowed = Bool[Tensor, "#b #t #s"]
ALIGNMENT = 8  # elements: GPU kernels read rows of a mask that start at a multiple of it


class Rule:
    """A predicate over (query position i, key position j). Subclasses are frozen dataclasses."""

    @property
    def is_causal(self) -> bool:
        """True if no query ever attends to a later key."""
        return False

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        raise NotImplementedError


@dataclass(frozen=True)
class Full(Rule):
    """Every query attends to every key."""

    kind: ClassVar[str] = "full"

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=keys.device)


@dataclass(frozen=True)
class Causal(Rule):
    """j ≤ i: a position attends to itself and to earlier ones."""

    kind: ClassVar[str] = "causal"

    @property
    def is_causal(self) -> bool:
        return True

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        return keys <= queries


@dataclass(frozen=True)
class Window(Rule):
    """|i − j| ≤ size."""

    size: int

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        return (queries - keys).abs() <= self.size


@dataclass(frozen=True)
class Globals(Rule):
    """i < count or j < count: pairs with a global token (Longformer)."""

    count: int

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        return (queries < self.count) | (keys < self.count)


@dataclass(frozen=True)
class SameBlock(Rule):
    """⌊i / size⌋ = ⌊j / size⌋."""

    size: int

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        return queries // self.size == keys // self.size


@dataclass(frozen=True, eq=False)
class SameDocument(Rule):
    """In a packed row, a position attends to its own document; `documents` numbers them."""

    documents: Int[Tensor, "b n"]

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        of_queries, of_keys = self._at(queries[..., 0]), self._at(keys[:, 0])
        return rearrange(of_queries, "b t -> b t 1") == rearrange(of_keys, "b s -> b 1 s")

    def _at(self, positions: Positions) -> Positions:
        """The documents at these positions."""
        return self.documents.gather(1, positions.expand(len(self.documents), -1))

    def positions(self) -> Int[Tensor, "b n"]:
        """The position of each token in its own document, counted from 0."""
        index = torch.arange(self.documents.shape[1], device=self.documents.device)
        starts = torch.ones_like(self.documents, dtype=torch.bool)
        starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return index - torch.where(starts, index, 0).cummax(1).values


@dataclass(frozen=True)
class _Pair(Rule):
    first: Rule
    second: Rule


class Both(_Pair):
    """True where both rules are True."""

    @property
    def is_causal(self) -> bool:
        return self.first.is_causal or self.second.is_causal

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        return self.first(queries, keys) & self.second(queries, keys)


class Either(_Pair):
    """True where one of two rules is True."""

    @property
    def is_causal(self) -> bool:
        return self.first.is_causal and self.second.is_causal

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Allowed:
        return self.first(queries, keys) | self.second(queries, keys)


full = Full()
causal = Causal()


@dataclass(eq=False)
class AttentionMask:
    """A rule with the positions it applies to and the padding mask of the keys.

    `padding_mask` is True for real tokens. `square` states that queries and keys are the same
    positions 0 … n−1 in every row, so that a causal rule is the plain lower triangle, which kernels
    compute without a mask tensor. One mask serves all layers: its tensors are computed once and
    cached, so the padding mask must not change afterwards.
    """

    rule: Rule
    query_positions: Positions
    key_positions: KeyPositions
    padding_mask: PaddingMask | None = None
    square: bool = False
    _cached: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def pattern(self) -> Literal["full", "causal", "other"]:
        """The rule as kernels know it, before padding."""
        if isinstance(self.rule, Full):
            return "full"
        return "causal" if isinstance(self.rule, Causal) and self.square else "other"

    def is_causal(self) -> bool:
        """True if this is the plain causal triangle, without padding."""
        return self.pattern == "causal" and self.padding_mask is None

    def as_bool(self) -> Bool[Tensor, "#b 1 #t #s"] | None:
        """True where a query attends to a key; None if every query attends to every key."""
        if isinstance(self.rule, Full) and self.padding_mask is None:
            return None
        if torch.bool not in self._cached:
            self._cached[torch.bool] = self._compute()
        return self._cached[torch.bool]

    def as_bias(self, dtype: torch.dtype) -> Float[Tensor, "#b 1 #t #s"] | None:
        """The mask to be added to scores: 0 where it is True, else −∞.

        Rows start at multiples of `ALIGNMENT`; otherwise kernels would copy it in every layer.
        """
        allowed = self.as_bool()
        if allowed is None:
            return None
        if dtype not in self._cached:
            padded = F.pad(allowed, (0, -allowed.shape[-1] % ALIGNMENT))
            bias = torch.zeros_like(padded, dtype=dtype).masked_fill_(~padded, -torch.inf)
            self._cached[dtype] = bias[..., : allowed.shape[-1]]
        return self._cached[dtype]

    def _compute(self) -> Bool[Tensor, "#b 1 #t #s"]:
        if isinstance(self.rule, Full) and self.padding_mask is not None:
            return rearrange(self.padding_mask, "b s -> b 1 1 s")
        allowed = self.rule(
            rearrange(self.query_positions, "b t -> b t 1"),
            rearrange(self.key_positions, "b s -> b 1 s"),
        )
        if self.padding_mask is not None:
            allowed = allowed & rearrange(self.padding_mask, "b s -> b 1 s")
        return rearrange(allowed, "b t s -> b 1 t s")

    def for_cross_attention(self, queries: int) -> "AttentionMask":
        """The same keys for `queries` queries of another sequence, all at the first position."""
        positions = self.key_positions[:1, :1].expand(1, queries)
        mask = AttentionMask(self.rule, positions, self.key_positions, self.padding_mask)
        if isinstance(self.rule, Full):  # query positions change nothing: share the tensors
            mask._cached = self._cached
        return mask

    def block(self, rows: slice, columns: slice) -> "AttentionMask":
        """The mask of some of the queries and some of the keys."""
        padding_mask = None if self.padding_mask is None else self.padding_mask[:, columns]
        return AttentionMask(
            self.rule, self.query_positions[:, rows], self.key_positions[:, columns], padding_mask
        )


def make_mask(
    rule: Rule,
    length: int,
    *,
    start: int = 0,
    padding_mask: PaddingMask | None = None,
    device: torch.device | str | None = None,
) -> AttentionMask:
    """The mask of `length` positions after `start` cached ones over all positions so far."""
    if length == 1 and isinstance(rule, Causal):
        rule = full  # the newest position attends to everything: no mask to compute
    positions = torch.arange(start + length, device=device)[None]
    return AttentionMask(rule, positions[:, start:], positions, padding_mask, square=start == 0)
