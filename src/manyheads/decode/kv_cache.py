"""The growing KV cache: a step computes one position and attends to all earlier ones.

Keys and values are stored by attention module. Beam search passes the newest tokens of the k
hypotheses of a sentence as k queries at one position. With exact attention (`shared`) keys and
values of hypotheses never move: each step fills k new slots of a sentence, a mask has the slots
that each hypothesis sees, and reordering hypotheses reorders the mask. Other attention needs its
keys in order, so each hypothesis has a row, which is copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.nn.attention import Cache, KeysAndValues, SelfAttention
from manyheads.nn.masks import AttentionMask, Rule, make_mask
from manyheads.nn.positions import Position
from manyheads.nn.shapes import PaddingMask

GROWTH = 16  # fewest positions to grow by, so that few steps copy
Rows = Int[Tensor, " rows"]
Parents = Int[Tensor, "n k"]
BeamQueries = Int[Tensor, "#n k 1"]
Slots = Int[Tensor, "#n 1 slots"]
OwnSlots = Bool[Tensor, "n k slots"]


@dataclass(frozen=True, eq=False)
class Lineage(Rule):
    """A hypothesis sees the slots of its past."""

    seen: OwnSlots
    kind: ClassVar[str] = "lineage"

    @property
    def is_causal(self) -> bool:
        return True

    def __call__(self, queries: BeamQueries, keys: Slots) -> OwnSlots:
        return self.seen


class KVCache(Cache):
    """Self-attention keys and values that grow."""

    length: int

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.beams = 1  # hypotheses of a sentence, once they differ
        self.length = 0
        self._new = 0  # positions of the current forward pass
        self._slots = 0  # filled ones; equal to `length`, unless hypotheses share them
        self._row_mask: AttentionMask | None = None
        self._seen = torch.empty(0)  # [n k slots], the slots that each hypothesis sees
        self._positions = torch.empty(0)  # [1 slots], position of each slot

    def end(self, length: int) -> int:
        return self.length + length // self.beams

    def mask(
        self, rule: Rule, length: int, padding: PaddingMask | None, device: torch.device
    ) -> AttentionMask:
        self._new = length // self.beams
        if self.beams == 1:
            return make_mask(rule, length, start=self.length, padding_mask=padding, device=device)
        positions = torch.full((1, length), self.length, device=device)
        if not self.shared:
            self._row_mask = make_mask(
                rule, 1, start=self.length, padding_mask=padding, device=device
            )
            return AttentionMask(rule, positions, self._row_mask.key_positions)
        self._see_itself()
        self._positions = torch.cat([self._positions, positions], dim=1)
        return AttentionMask(Lineage(self._seen), positions, self._positions)

    def _see_itself(self) -> None:
        """Each hypothesis sees its own new slot."""
        itself = torch.eye(self.beams, dtype=torch.bool, device=self._seen.device)
        self._seen = torch.cat([self._seen, itself.expand(len(self._seen), -1, -1)], dim=-1)

    def advance(self, positions: int | None = None) -> None:
        new = self._new if positions is None else positions
        self.length += new
        self._slots += new * self.beams if self.shared else new

    def attend(
        self,
        module: SelfAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        position: Position,
    ) -> Tensor:
        if self._row_mask is None:
            return module.attend(q, *self.append(module, k, v), mask, position)
        q, k, v = (_as_rows(x) for x in (q, k, v))
        out = module.attend(q, *self.append(module, k, v), self._row_mask, position)
        return rearrange(out, "(n k) h 1 c -> n h k c", k=self.beams)

    def append(self, module: nn.Module, keys: Tensor, values: Tensor) -> KeysAndValues:
        """Append the new positions of one module; returns all positions so far."""
        end = self._slots + keys.shape[2]
        old = self._kv.get(module, (None, None))
        all_keys = _write(old[0], keys, self._slots)
        all_values = _write(old[1], values, self._slots)
        self._kv[module] = all_keys, all_values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def items(self) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """Each module with its self-attention keys and values."""
        for module, (keys, values) in self._kv.items():
            yield module, keys[:, :, : self._slots], values[:, :, : self._slots]

    @torch.no_grad()
    def reorder(self, parents: Parents) -> None:
        """Continue with these hypotheses of each sentence; the first time all are the same."""
        n, k = parents.shape
        if k == 1:
            return
        first_row = torch.arange(n, device=parents.device)[:, None] * self.beams
        is_first, self.beams = self.beams == 1, k
        if not self.shared:
            self.select_rows(
                (first_row.expand(n, k) if is_first else first_row + parents).flatten()
            )
        elif is_first:
            self._positions = torch.arange(self.length, device=parents.device)[None]
            self._seen = torch.ones(n, k, self.length, dtype=torch.bool, device=parents.device)
        else:
            self._seen = torch.take_along_dim(self._seen, parents[..., None], 1)

    @torch.no_grad()
    def select_rows(self, rows: Rows) -> None:
        """Keep these rows, in this order (a row may be kept several times)."""
        self._kv = {module: _select(pair, rows) for module, pair in self._kv.items()}
        for module, states in self._states.items():
            self._states[module] = tuple(x.index_select(1, rows) for x in states)

    @torch.no_grad()
    def keep_sentences(self, sentences: Rows) -> None:
        """Forget the other sentences; differing hypotheses are reordered before the next step."""
        self._cross = {module: _select(pair, sentences) for module, pair in self._cross.items()}
        if not self.shared:
            beams = torch.arange(self.beams, device=sentences.device)
            self.select_rows((sentences[:, None] * self.beams + beams).flatten())
            return
        self.select_rows(sentences)
        if self.beams > 1:
            self._seen = self._seen[sentences]

    def bytes(self) -> int:
        """Size of all cached tensors, without unfilled slots."""
        grown = [x for _, *pair in self.items() for x in pair]
        others = [x for group in (*self._cross.values(), *self._states.values()) for x in group]
        return sum(x.numel() * x.element_size() for x in (*grown, *others))


def _as_rows(x: Float[Tensor, "n h k c"]) -> Float[Tensor, "rows h 1 c"]:
    """Hypotheses as rows; with the strides of rows, on which sums of approximations depend."""
    if x.is_contiguous():
        return rearrange(x, "n h k c -> (n k) h 1 c")
    return rearrange(x, "n h k c -> (n k) 1 h c").transpose(1, 2)


def _select(pair: KeysAndValues, rows: Rows) -> KeysAndValues:
    return pair[0].index_select(0, rows), pair[1].index_select(0, rows)


def _write(buffer: Tensor | None, new: Tensor, start: int) -> Tensor:
    """Write positions from `start` on into a buffer, or into a larger copy if it is full."""
    rows, heads, positions, channels = new.shape
    end = start + positions
    if buffer is None or buffer.shape[2] < end:
        larger = new.new_empty(rows, heads, end + max(GROWTH, end // 2), channels)
        if buffer is not None:
            larger[:, :, :start] = buffer[:, :, :start]
        buffer = larger
    buffer[:, :, start:end] = new
    return buffer
