"""A growing cache in which hypotheses never move: what a beam computed stays where it is.

Until a text has spread into k beams its keys and values are the same for all of them, and there is
one of each. From then on position p has k slots, one a beam, and a table says for each hypothesis
by which beam its token at p was read. To go on from other hypotheses is to reorder that table;
keys and values are copied only when sentences leave.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor, nn

from manyheads.decode.cache import KeyValueCache
from manyheads.decode.recorded import steady
from manyheads.nn.attention import KeysAndValues
from manyheads.nn.masks import Rule, Sight
from manyheads.nn.shapes import Real

Table = Int[Tensor, "n k after"]
BeamPlaces = Int[Tensor, "1 k 1"]
Slots = Int[Tensor, "1 1 slots"]


@dataclass(frozen=True, eq=False)
class Lineage(Rule):
    """A hypothesis sees what all beams share, and of the slots after it those of its own past."""

    table: Table
    shared: int
    kind: ClassVar[str] = "lineage"

    @property
    def past_only(self) -> bool:
        return True

    def __call__(self, queries: BeamPlaces, keys: Slots) -> Bool[Tensor, "n k slots"]:
        sentences, k, _ = self.table.shape
        beams = torch.arange(k, device=keys.device)
        own = rearrange(self.table[..., None] == beams, "n k p j -> n k (p j)")
        return torch.cat([own.new_ones(sentences, k, self.shared), own], dim=-1)


class BeamCache(KeyValueCache):
    """Keys and values [sentences, heads, shared + k · after, channels], each written once."""

    def __init__(self) -> None:
        super().__init__()
        self.beams = 1
        self.shared = 0  # positions before the beams part
        self.table = torch.empty(0)

    @property
    def _slots(self) -> int:
        return self.shared + self.beams * (self._length - self.shared)

    def look(self, rule: Rule, length: int, real: Real | None, device: torch.device) -> Sight:
        if self.beams == 1:
            return super().look(rule, length, real, device)
        own = torch.arange(self.beams, device=device).expand(len(self.table), -1)
        self.table = torch.cat([self.table, own[..., None]], dim=-1)
        before = torch.arange(self.shared, device=device)
        after = torch.arange(self.shared, self._length + 1, device=device)
        keys = torch.cat([before, after.repeat_interleave(self.beams)])[None]
        return Sight(Lineage(self.table, self.shared), keys[:, -self.beams :], keys)

    def extend(self, owner: nn.Module, keys: Tensor, values: Tensor) -> KeysAndValues:
        if self.beams == 1:
            return super().extend(owner, keys, values)
        return self._append(owner, keys, values, self._slots)

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """The first time rows are sentences, each k times; later they are hypotheses."""
        if self.beams == 1:
            sentences, times = torch.unique_consecutive(rows, return_counts=True)
            self._keep(sentences)
            if len(rows) > len(sentences):  # else some have left, and none has spread
                self.beams, self.shared = int(times[0]), self._length
                self.table = rows.new_empty(len(sentences), self.beams, 0)
            return
        parents = rearrange(rows % self.beams, "(n k) -> n k", k=self.beams)
        sentences = rows[:: self.beams] // self.beams
        table = self.table[sentences] if len(sentences) < len(self.table) else self.table
        self._keep(sentences)
        self.table = table.gather(1, parents[..., None].expand(-1, -1, table.shape[2]))

    def _keep(self, sentences: Int[Tensor, " kept"]) -> None:
        for owner, pair in self._grown.items():
            if len(sentences) < len(pair[0]):
                keys, values = (x.index_select(0, sentences) for x in pair)
                self._grown[owner] = keys, values


def cache_for(model: nn.Module) -> KeyValueCache:
    """One in which hypotheses stay, where all that a model remembers are keys and values."""
    return BeamCache() if steady(model) else KeyValueCache()
