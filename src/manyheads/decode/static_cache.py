"""A cache of fixed room, so that every step is the same kernels over the same places.

Keys and values have a slot for every position that there will ever be, and where the next one
goes is a number on the device. A slot that is not written yet is never seen, because rules speak
of positions and its own is still to come.

Hypotheses never move. What beam j of a sentence computed at position p stays in slot p · k + j,
and a table says for each hypothesis by which beam its token at p was read, its ancestor there.
To go on from other hypotheses is to reorder that table, not the keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.decode.kv_cache import KeyValueCache
from manyheads.nn.attention import KeysAndValues
from manyheads.nn.masks import AttentionMask, Causal, Rule
from manyheads.nn.shapes import Real

PLACED = 32  # most hypotheses whose keys and values one program of our kernel holds
Table = Int[Tensor, "n k room"]
BeamPlaces = Int[Tensor, "1 k 1"]
Slots = Int[Tensor, "1 1 slots"]
OwnSlots = Bool[Tensor, "n k slots"]
NewQueries = Float[Tensor, "n h k c"]
NewKeys = Float[Tensor, "n g k e"]
NewValues = Float[Tensor, "n g k c"]
HeldKeys = Float[Tensor, "n g slots e"]
HeldValues = Float[Tensor, "n g slots c"]


@dataclass(frozen=True, eq=False)
class Ancestors(Rule):
    """Of the slots of a sentence, each hypothesis sees those that its own past was written to."""

    table: Table
    kind: ClassVar[str] = "ancestors"

    @property
    def is_causal(self) -> bool:
        return True

    def __call__(self, queries: BeamPlaces, keys: Slots) -> OwnSlots:
        beams = torch.arange(self.table.shape[1], device=keys.device)
        own = rearrange(self.table[..., None] == beams, "n k p j -> n k (p j)")
        return own & (keys <= queries)


class FixedCache:
    """Room for so many positions of so many sentences with k beams each, and for their sources.

    It is read to by `fill` (a prompt) and `put` (a source), and then one position at a time. How
    many there are is a number on the device alone, `place`: whoever takes so much room has seen
    to it that the model has positions for it.
    """

    length = 0

    def __init__(
        self, sentences: int, beams: int, room: int, device: torch.device, source_room: int = 0
    ) -> None:
        self.beams, self.room, self.source_room = beams, room, source_room
        self.sentences = sentences
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.ancestors = torch.zeros(sentences, beams, room, dtype=torch.long, device=device)
        self._own = torch.arange(beams, device=device)
        self._positions = torch.arange(room, device=device).repeat_interleave(beams)[None]
        self._slots = self._own
        self._come = torch.zeros(
            0, dtype=torch.int32, device=device
        )  # see kernels/append_attention.py
        self._grown: dict[nn.Module, KeysAndValues] = {}
        self._memory: dict[nn.Module, KeysAndValues] = {}

    def look(
        self, rule: Rule, length: int, real: Real | None, device: torch.device
    ) -> AttentionMask:
        """The sight of one position of each hypothesis on the whole room."""
        assert isinstance(rule, Causal)
        assert length == 1
        assert real is None
        queries = self.place.expand(1, self.beams)
        if self.beams == 1:
            self._slots = self.place
            return AttentionMask(rule, queries, self._positions)
        self._slots = self.place * self.beams + self._own  # for all layers alike
        own = repeat(self._own, "k -> n k 1", n=self.sentences)
        self.ancestors.index_copy_(2, self.place, own)
        return AttentionMask(Ancestors(self.ancestors), queries, self._positions)

    def extend(self, owner: nn.Module, keys: NewKeys, values: NewValues) -> KeysAndValues:
        """Write the newest position of every beam; gives the whole room."""
        pair = self._room_of(owner, keys, values)
        if _has_kernel(keys):
            from manyheads.kernels.kv_write import place

            place(*pair, self._slots, keys, values)
            return pair
        for held, new in zip(pair, (keys, values), strict=True):
            held.index_copy_(2, self._slots, new.to(held.dtype))
        return pair

    def newest(
        self, owner: nn.Module, q: NewQueries, k: NewKeys, v: NewValues, scale: float
    ) -> Float[Tensor, "n h 1 c"] | None:
        """Both at once by our kernel, where a text has one hypothesis and there are few of them."""
        if not self._has_both(q, k, v):
            return None
        from manyheads.kernels.append_attention import newest

        rows = q.shape[0] * q.shape[1]
        if len(self._come) < rows:
            self._come = torch.zeros(rows, dtype=torch.int32, device=q.device)
        found: Tensor = newest(q, k, v, *self._room_of(owner, k, v), self.place, self._come, scale)
        return found

    def _has_both(self, q: NewQueries, k: NewKeys, v: NewValues) -> bool:
        """Whether that kernel is for this: one position, which sees all before it, as in `look`."""
        alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape and q.shape[-1] == k.shape[-1]
        if (
            self.beams > 1
            or q.shape[2] != 1
            or q.device.type != "cuda"
            or q.dtype not in HALF
            or q.shape[-1] not in CHANNELS
            or not alike
            or torch.is_grad_enabled()
            or not TRITON
        ):
            return False
        from manyheads.kernels.append_attention import served

        fits = served(q.shape[0], q.shape[1], self.room)
        return fits and trusted("append_attention", q.device.index)

    def advance(self, positions: int) -> None:
        self.place += positions

    def once(self, owner: nn.Module, compute: Callable[[], KeysAndValues]) -> KeysAndValues:
        """What was put there for this module."""
        return self._memory[owner]

    def reorder(self, parents: Int[Tensor, "n k"]) -> None:
        """Go on from these hypotheses of each sentence; a parent may have several children."""
        places = repeat(parents, "n k -> n k room", room=self.room)
        self.ancestors.copy_(self.ancestors.gather(1, places))

    def clear(self) -> None:
        """Begin anew; what is still in the room is overwritten before it is seen."""
        self.place.zero_()
        self._come.zero_()
        self.ancestors.zero_()

    def fill(self, read: KeyValueCache) -> None:
        """Begin after what was read, the same for all beams of a sentence: it is beam 0's."""
        self.clear()
        for owner, keys, values in read.held():
            pair = self._room_of(owner, keys, values)
            for held, old in zip(pair, (keys, values), strict=True):
                held[: len(old), :, : read.length * self.beams : self.beams] = old
        self.place.fill_(read.length)

    def put(self, owner: nn.Module, keys: HeldKeys, values: HeldValues) -> None:
        """The keys and values of the sources, for a module that looks at them."""
        if owner not in self._memory:
            self._memory[owner] = self._zeros(keys, values, self.source_room)
        for held, new in zip(self._memory[owner], (keys, values), strict=True):
            held[: len(new), :, : new.shape[2]] = new

    def bytes(self) -> int:
        """What the room takes, filled or not."""
        pairs = (*self._grown.values(), *self._memory.values())
        held = [x for pair in pairs for x in pair]
        return sum(x.numel() * x.element_size() for x in (self.ancestors, *held))

    def _room_of(self, owner: nn.Module, keys: Tensor, values: Tensor) -> KeysAndValues:
        if owner not in self._grown:
            self._grown[owner] = self._zeros(keys, values, self.room * self.beams)
        return self._grown[owner]

    def _zeros(self, keys: Tensor, values: Tensor, slots: int) -> KeysAndValues:
        """Nothing yet: not even what multiplied by a weight of zero would spoil a sum."""
        one, other = (
            x.new_zeros(self.sentences, x.shape[1], slots, x.shape[3]) for x in (keys, values)
        )
        return one, other


def _has_kernel(keys: Tensor) -> bool:
    """Whether our kernel puts both at once."""
    return (
        keys.device.type == "cuda"
        and keys.shape[2] <= PLACED
        and not torch.is_grad_enabled()
        and TRITON
        and trusted("kv_write", keys.device.index)
    )
