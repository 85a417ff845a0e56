"""A cache for hypotheses that are asked for in any order, one or a few of each sentence at a time.

A hypothesis that was asked for keeps the keys and values of its last token in a slot, as long as
its sentence is searched. What attention looks at lies elsewhere: in a row of its own, in which the
past of a hypothesis is laid out, position by position. The next one there has most often the same
past but for a few tokens or for none, and only these are brought from their slots.
"""

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.nn.attention import KeysAndValues
from manyheads.nn.masks import AttentionMask, Causal, Rule
from manyheads.nn.shapes import Real

ROOM = 32  # positions and slots to begin with
Path = Sequence[int]
Brought = Int[Tensor, " brought"]
Memory = Float[Tensor, "_ g _ c"]
NewKeys = Float[Tensor, "n g 1 e"]
NewValues = Float[Tensor, "n g 1 c"]


class TreeCache:
    """Keys and values of the hypotheses of n sentences, and of their sources.

    The hypotheses of a sentence are numbered from 0 in the order in which they are asked for. A
    path has the number of a hypothesis behind those of all that it continues, one a position.
    """

    beams = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.length = 0
        self._trees: list[list[int]] = []  # of each sentence the slots of its hypotheses
        self._paths: list[Path] = []  # what is laid out in which row
        self._at_once = 1  # rows of a sentence, one after another
        self._room, self._width = ROOM, 0  # for positions of hypotheses, and of sources
        self._laid: dict[nn.Module, KeysAndValues] = {}  # [rows, room, heads, channels]
        self._memory: dict[nn.Module, KeysAndValues] = {}  # [rows, heads, width, channels]
        self._slots = torch.empty(0, 1)  # [slots, channels of all modules]
        self._free: list[int] = []
        self._most = 0  # slots, free or not
        self._newest: list[Tensor] = []
        self._positions, self._places, self._into = torch.empty(3, 0, dtype=torch.long)

    def add(self, memories: Sequence[dict[nn.Module, KeysAndValues]]) -> None:
        """Further sentences behind the others: the keys and values of their sources, in parts."""
        rows, width = len(self._trees), self._width
        for owner, pair in memories[0].items():
            old = self._memory.get(owner, tuple(x[:0] for x in pair))
            new = zip(*(memory[owner] for memory in memories), strict=True)
            keys, values = (
                _behind(x[:rows, :, :width], x, parts) for x, parts in zip(old, new, strict=True)
            )
            self._memory[owner] = keys, values
        for keys, _ in (next(iter(memory.values())) for memory in memories):
            self._trees += [[] for _ in keys]
            self._width = max(self._width, keys.shape[2])

    def keep(self, trees: Sequence[int], width: int) -> None:
        """These sentences, in this order; none of their sources is longer than `width`."""
        for gone in set(range(len(self._trees))) - set(trees):
            self._free += self._trees[gone]
        self._trees = [self._trees[tree] for tree in trees]
        self._width = width
        moved = [(to, tree) for to, tree in enumerate(trees) if to != tree]
        stay = self._at_once == 1
        self._paths = [
            self._paths[to] if to == tree else () for to, tree in enumerate(trees)
        ] * stay
        if moved:
            to, tree = torch.tensor(moved, device=self.device).T
            for held in (x[:, :, :width] for pair in self._memory.values() for x in pair):
                held.index_copy_(0, to, held.index_select(0, tree))

    def ask(self, paths: Sequence[Path]) -> None:
        """A step then reads the last tokens of these hypotheses, as many of each sentence."""
        if len(paths) != self._at_once * len(self._trees):
            self._at_once, self._paths = len(paths) // len(self._trees), []
        self._paths += [()] * (len(paths) - len(self._paths))
        self.length = max(map(len, paths)) - 1
        self._make_room()
        brought, into, newest = [], [], []
        for row, (laid, path) in enumerate(zip(self._paths, paths, strict=True)):
            begin, place, slots = row * self._room, len(path) - 1, self._trees[row // self._at_once]
            if path[-1] == len(slots):  # else it is asked for twice at once
                slots.append(self._slot())
            newest.append((place, begin + place, slots[path[-1]]))
            while place and (place > len(laid) or laid[place - 1] != path[place - 1]):
                place -= 1
                brought.append(slots[path[place]])
                into.append(begin + place)
        self._paths = list(paths)
        self._positions, self._places, self._into = torch.tensor(newest, device=self.device).T
        if brought:
            self._bring(*torch.tensor([brought, into], device=self.device))

    def _slot(self) -> int:
        if not self._free:
            more = max(ROOM, self._most)
            self._free += range(self._most, self._most + more)
            self._most += more
        return self._free.pop()

    def _make_room(self) -> None:
        """For all rows and positions that there are now; more rows may have fewer positions.

        What is not written yet is zero: a weight of zero times anything else might spoil a sum.
        """
        rows = len(next(iter(self._laid.values()))[0]) if self._laid else 0
        if self.length < self._room and len(self._paths) <= rows:
            return
        kept = min(self._room, self.length + 1)  # no hypothesis that is asked for now goes further
        self._room = max(ROOM, 2 * (self.length + 1))
        more = (max(rows, len(self._paths)), self._room)
        for owner, pair in self._laid.items():
            keys, values = (x.new_zeros(*more, *x.shape[2:]) for x in pair)
            keys[:rows, :kept], values[:rows, :kept] = (x[:, :kept] for x in pair)
            self._laid[owner] = keys, values

    def _bring(self, slots: Brought, into: Brought) -> None:
        found, begin = self._slots.index_select(0, slots), 0
        for held in (x for pair in self._laid.values() for x in pair):
            heads, channels = held.shape[2:]
            part = found[:, begin : begin + heads * channels].unflatten(1, (heads, channels))
            held.flatten(0, 1).index_copy_(0, into, part)
            begin += heads * channels

    def look(
        self, rule: Rule, length: int, real: Real | None, device: torch.device
    ) -> AttentionMask:
        """The sight of the last tokens on their pasts."""
        assert isinstance(rule, Causal)
        assert length == 1
        assert real is None
        every = torch.arange(self.length + 1, device=device)[None]
        return AttentionMask(rule, self._positions[:, None], every)

    def extend(self, owner: nn.Module, keys: NewKeys, values: NewValues) -> KeysAndValues:
        """Put the last tokens behind their pasts; gives the rows as far as the longest goes."""
        if owner not in self._laid:
            first, other = (
                x.new_zeros(len(x), self._room, *x[0, :, 0].shape) for x in (keys, values)
            )
            self._laid[owner] = first, other
        found = []
        for held, new in zip(self._laid[owner], (keys[:, :, 0], values[:, :, 0]), strict=True):
            held.flatten(0, 1).index_copy_(0, self._places, new)
            self._newest.append(new.flatten(1))
            found.append(rearrange(held[: len(new), : self.length + 1], "n s g c -> n g s c"))
        return found[0], found[1]

    def newest(
        self, owner: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor | None:
        """What the last tokens see is computed from what `extend` gives."""
        return None

    def once(self, owner: nn.Module, compute: Callable[[], KeysAndValues]) -> KeysAndValues:
        """What was added of the sources."""
        keys, values = (x[: len(self._trees), :, : self._width] for x in self._memory[owner])
        return keys, values

    def advance(self, positions: int) -> None:
        """What was computed of the last tokens goes into their slots."""
        new = torch.cat(self._newest, 1)
        self._newest.clear()
        if len(self._slots) < self._most:
            old, self._slots = self._slots, new.new_empty(self._most, new.shape[1])
            self._slots[: len(old)] = old
        self._slots.index_copy_(0, self._into, new)


def _behind(kept: Memory, held: Memory, parts: Sequence[Memory]) -> Memory:
    """Further rows, in parts, behind those that are kept of what is held; in place if they fit."""
    rows = len(kept) + sum(map(len, parts))
    width = max(x.shape[2] for x in (kept, *parts))
    if len(held) < rows or held.shape[2] < width:
        _, heads, _, channels = held.shape
        held = parts[0].new_zeros(rows, heads, width, channels)
        held[: len(kept), :, : kept.shape[2]] = kept
    begin = len(kept)
    for new in parts:
        held[begin : begin + len(new), :, : new.shape[2]] = new
        begin += len(new)
    return held
