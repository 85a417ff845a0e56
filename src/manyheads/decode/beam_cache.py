"""A growing cache in which hypotheses do not move: what a beam computed stays where it is.

What is read before a text spreads into k beams lies there once for all of them. From then on each
step fills k slots more, one a beam, and a table says for each hypothesis in which slots its own
past lies. To go on from other hypotheses is to reorder that table. Beams soon have the same past
but for their last tokens, so that most slots are nobody's any more: keys and values are copied when
that is half of them, or when sentences leave.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor, nn

from manyheads.decode.kv_cache import KeyValueCache
from manyheads.nn.attention import KeysAndValues
from manyheads.nn.masks import AttentionMask, Rule
from manyheads.nn.shapes import Real

FREED = 16  # slots that are nobody's, for which a copy pays
Sentences = Int[Tensor, " kept"]
Table = Int[Tensor, "n k length"]
BeamPlaces = Int[Tensor, "1 k 1"]
Slots = Int[Tensor, "#n 1 slots"]


@dataclass(frozen=True, eq=False)
class Lineage(Rule):
    """A hypothesis sees the slots of its own past."""

    seen: Bool[Tensor, "n k slots"]
    kind: ClassVar[str] = "lineage"

    @property
    def is_causal(self) -> bool:
        return True

    def __call__(self, queries: BeamPlaces, keys: Slots) -> Bool[Tensor, "n k slots"]:
        return self.seen


class BeamCache(KeyValueCache):
    """Keys and values [sentences, heads, slots, channels], and whose they are."""

    def __init__(self) -> None:
        super().__init__()
        self.beams = 1
        self._slots = 0
        self.table = torch.empty(0)  # the slots of each hypothesis, in the order of its tokens
        self.places = torch.empty(0)  # the position of what lies in a slot

    def look(
        self, rule: Rule, length: int, real: Real | None, device: torch.device
    ) -> AttentionMask:
        if self.beams == 1:
            return super().look(rule, length, real, device)
        sentences, k, _ = self.table.shape
        own = torch.arange(self._slots, self._slots + k, device=device).expand(sentences, k)
        self.table = torch.cat([self.table, own[..., None]], dim=-1)
        now = self.places.new_full((1, k), self._length)
        self.places = torch.cat([self.places, now.expand(len(self.places), k)], dim=1)
        return AttentionMask(Lineage(self._seen()), now, self.places)

    def _seen(self) -> Bool[Tensor, "n k slots"]:
        """Which slots are whose."""
        sentences, k, _ = self.table.shape
        none = self.table.new_zeros(sentences, k, self.places.shape[1], dtype=torch.bool)
        return none.scatter_(2, self.table, True)

    def advance(self, positions: int) -> None:
        super().advance(positions)
        self._slots += self.beams * positions

    def cut(self, length: int) -> None:
        assert self.beams == 1  # later positions have several slots
        super().cut(length)
        self._slots = length

    def extend(self, owner: nn.Module, keys: Tensor, values: Tensor) -> KeysAndValues:
        return self._append(owner, keys, values, self._slots)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """The first time rows are sentences, each k times; later they are hypotheses."""
        if self.beams == 1:
            sentences, times = torch.unique_consecutive(rows, return_counts=True)
            if len(rows) > len(sentences):  # else some have left, and none has spread
                self.beams = int(times[0])
                self.places = torch.arange(self._length, device=rows.device)[None]
                self.table = self.places.repeat(len(sentences), self.beams, 1)
            self._keep(sentences)
            return
        parents = rearrange(rows % self.beams, "(n k) -> n k", k=self.beams)
        sentences = rows[:: self.beams] // self.beams
        left = len(sentences) < len(self.table)
        table = self.table[sentences] if left else self.table
        self.table = table.gather(1, parents[..., None].expand(-1, -1, table.shape[2]))
        if left and len(self.places) > 1:
            self.places = self.places[sentences]
        if not self._closed_up(sentences):
            self._keep(sentences)

    def _keep(self, sentences: Sentences) -> None:
        for owner, pair in self._grown.items():
            if len(sentences) < len(pair[0]):
                keys, values = (x.index_select(0, sentences) for x in pair)
                self._grown[owner] = keys, values

    def _closed_up(self, sentences: Sentences) -> bool:
        """Keep these sentences and the slots that are somebody's, if enough are nobody's."""
        if not len(sentences) or self._slots - self.table.shape[2] < FREED:
            return False  # one hypothesis alone has so many
        used = self._seen().any(1)
        most = int(used.sum(1).max())
        if self._slots - most < max(FREED, most):
            return False
        kept = used.sort(dim=1, descending=True, stable=True).indices[:, :most]
        moved = torch.empty_like(self.places.expand(len(kept), -1))
        moved.scatter_(1, kept, torch.arange(most, device=kept.device).expand(len(kept), -1))
        self.table = moved.gather(1, self.table.flatten(1)).view_as(self.table)
        self.places = self.places.expand(len(kept), -1).gather(1, kept)
        for owner, pair in self._grown.items():
            keys, values = (_taken(x, sentences, kept) for x in pair)
            self._grown[owner] = keys, values
        self._slots = most
        return True


def _taken(held: Tensor, sentences: Sentences, slots: Int[Tensor, "kept most"]) -> Tensor:
    """Of each sentence its own slots, in one copy."""
    heads, room, channels = held.shape[1:]
    head = torch.arange(heads, device=held.device)[:, None]
    rows = (sentences[:, None, None] * heads + head) * room + slots[:, None]
    return held.view(-1, channels).index_select(0, rows.flatten()).view(*rows.shape, channels)


def cache_for(model: nn.Module) -> KeyValueCache:
    """One in which hypotheses stay, where all that a model remembers are keys and values."""
    return KeyValueCache()
