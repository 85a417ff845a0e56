"""Who may look at whom: rules over positions, and `AttentionMask`, a rule with its positions.

A rule is a predicate: True where the query at position i may see the key at position j.
Because it speaks of positions and not of matrix indices, the same rule serves a full pass,
a chunk and one cached step.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import check_at_least
from manyheads.nn.shapes import KeyPositions, Positions, Real

QueryAxis = Int[Tensor, "#b t 1"]
KeyAxis = Int[Tensor, "#b 1 s"]
Seen = Bool[Tensor, "#b #t #s"]
ALIGNED = 8  # numbers at which a GPU's kernels want a row of a mask to begin


class Rule:
    """A predicate over (query position, key position). Subclasses are final dataclasses."""

    kind: ClassVar[str]

    @property
    def past_only(self) -> bool:
        """Whether no query ever sees a later key."""
        return False

    def for_rows(self, repeats: int) -> "Rule":
        """The same rule where each row has been cut into `repeats` rows, one after another."""
        return self

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        raise NotImplementedError


@dataclass(frozen=True)
class Full(Rule):
    """Everyone sees everyone."""

    kind: ClassVar[str] = "full"

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=keys.device)


@dataclass(frozen=True)
class Causal(Rule):
    """A position sees itself and what came before: j ≤ i."""

    kind: ClassVar[str] = "causal"

    @property
    def past_only(self) -> bool:
        return True

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        return keys <= queries


@dataclass(frozen=True)
class Window(Rule):
    """A position sees those at most `size` away, on either side: |i − j| ≤ size."""

    size: int = 64
    kind: ClassVar[str] = "window"

    def __post_init__(self) -> None:
        check_at_least("window size", self.size, 0)

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        return (queries - keys).abs() <= self.size


@dataclass(frozen=True)
class Prefix(Rule):
    """The first `length` positions see each other; the rest see what came before."""

    length: int = 0
    kind: ClassVar[str] = "prefix"

    def __post_init__(self) -> None:
        check_at_least("prefix length", self.length, 0)

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        return (keys <= queries) | (keys < self.length)


@dataclass(frozen=True)
class Globals(Rule):
    """The first `count` positions see all and are seen by all (Longformer's global tokens)."""

    count: int = 1
    kind: ClassVar[str] = "globals"

    def __post_init__(self) -> None:
        check_at_least("globals count", self.count, 0)

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        return (queries < self.count) | (keys < self.count)


@dataclass(frozen=True)
class SameBlock(Rule):
    """A position sees its own block of `size` positions: ⌊i / size⌋ = ⌊j / size⌋."""

    size: int = 64
    kind: ClassVar[str] = "same-block"

    def __post_init__(self) -> None:
        check_at_least("same-block size", self.size, 1)

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        return queries // self.size == keys // self.size


@dataclass(frozen=True, eq=False)
class SameDocument(Rule):
    """In a packed row, a position sees only its own document; `documents` numbers them.

    Positions may come in `repeats` rows for each row of documents.
    """

    documents: Int[Tensor, "b n"]
    repeats: int = 1
    kind: ClassVar[str] = "same-document"

    def for_rows(self, repeats: int) -> Rule:
        return replace(self, repeats=self.repeats * repeats)

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        own, other = self._at(queries[..., 0]), self._at(keys[:, 0])
        return rearrange(own, "b t -> b t 1") == rearrange(other, "b s -> b 1 s")

    def _at(self, positions: Positions) -> Positions:
        """The documents at these positions; no row of documents is ever copied."""
        places = rearrange(positions, "(b r) t -> b (r t)", r=self.repeats)
        rows = max(places.shape[0], self.documents.shape[0])
        found = self.documents.expand(rows, -1).gather(1, places.expand(rows, -1))
        return rearrange(found, "b (r t) -> (b r) t", r=self.repeats)

    def places(self) -> Int[Tensor, "b n"]:
        """The position of each token in its own document, counted from 0."""
        index = torch.arange(self.documents.shape[1], device=self.documents.device)
        begins = torch.ones_like(self.documents, dtype=torch.bool)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return index - torch.where(begins, index, 0).cummax(1).values


@dataclass(frozen=True)
class Both(Rule):
    """Seen where both rules say so."""

    first: Rule
    second: Rule
    kind: ClassVar[str] = "both"

    @property
    def past_only(self) -> bool:
        return self.first.past_only or self.second.past_only

    def for_rows(self, repeats: int) -> Rule:
        return Both(self.first.for_rows(repeats), self.second.for_rows(repeats))

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        return self.first(queries, keys) & self.second(queries, keys)


@dataclass(frozen=True)
class Either(Rule):
    """Seen where one of two rules says so."""

    first: Rule
    second: Rule
    kind: ClassVar[str] = "either"

    @property
    def past_only(self) -> bool:
        return self.first.past_only and self.second.past_only

    def for_rows(self, repeats: int) -> Rule:
        return Either(self.first.for_rows(repeats), self.second.for_rows(repeats))

    def __call__(self, queries: QueryAxis, keys: KeyAxis) -> Seen:
        return self.first(queries, keys) | self.second(queries, keys)


full = Full()
causal = Causal()
window = Window
prefix = Prefix
both = Both
either = Either


@dataclass(eq=False)
class AttentionMask:
    """A rule, the positions it is asked about, and which keys are real (not padding).

    `square` says that queries and keys are the same positions 0 … n−1 in every row, so that a
    causal rule is the plain lower triangle and a kernel may use its own. One sight serves all
    layers: what it has computed once, it holds, so that what is real must not change afterwards.
    """

    rule: Rule
    queries: Positions
    keys: KeyPositions
    real: Real | None = None
    square: bool = False
    _held: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)

    def mask(self) -> Bool[Tensor, "#b 1 #t #s"] | None:
        """True where a query sees a key; None where every query sees every key."""
        if isinstance(self.rule, Full) and self.real is None:
            return None
        if torch.bool not in self._held:
            self._held[torch.bool] = self._compute()
        return self._held[torch.bool]

    def added(self, dtype: torch.dtype) -> Float[Tensor, "#b 1 #t #s"] | None:
        """The mask as kernels take it, to be added to the scores: 0 where it is True, else −∞.

        Rows begin at multiples of `ALIGNED`, or the kernels would copy it for every layer.
        """
        seen = self.mask()
        if seen is None:
            return None
        if dtype not in self._held:
            wide = F.pad(seen, (0, -seen.shape[-1] % ALIGNED))
            whole = torch.zeros_like(wide, dtype=dtype).masked_fill_(~wide, -torch.inf)
            self._held[dtype] = whole[..., : seen.shape[-1]]
        return self._held[dtype]

    def _compute(self) -> Bool[Tensor, "#b 1 #t #s"]:
        seen = self.rule(
            rearrange(self.queries, "b t -> b t 1"), rearrange(self.keys, "b s -> b 1 s")
        )
        if self.real is not None:
            seen = seen & rearrange(self.real, "b s -> b 1 s")
        return rearrange(seen, "b t s -> b 1 t s")

    def is_triangle(self) -> bool:
        """Whether this is the plain causal triangle, which kernels know without a mask."""
        return self.square and self.real is None and isinstance(self.rule, Causal)

    def across(self, queries: int) -> "AttentionMask":
        """Of the same keys, by so many queries that stand nowhere among them."""
        found = AttentionMask(self.rule, self.keys.new_zeros(1, queries), self.keys, self.real)
        if isinstance(self.rule, Full):  # where queries stand changes nothing
            found._held = self._held
        return found

    def block(self, rows: slice, columns: slice) -> "AttentionMask":
        """The same sight for some of the queries and some of the keys."""
        real = None if self.real is None else self.real[:, columns]
        return AttentionMask(self.rule, self.queries[:, rows], self.keys[:, columns], real)


def look(
    rule: Rule,
    length: int,
    *,
    start: int = 0,
    real: Real | None = None,
    device: torch.device | str | None = None,
) -> AttentionMask:
    """The sight of `length` positions after `start` cached ones on all positions so far."""
    if length == 1 and isinstance(rule, Causal):
        rule = full  # the newest position sees all there is: no mask to compute
    keys = torch.arange(start + length, device=device)[None]
    return AttentionMask(rule, keys[:, start:], keys, real, square=start == 0)
