"""The growing KV cache: a step costs one position, whatever was read before.

It is keyed by attention module, so that layers need not know their number. Beam search reads the
newest tokens of a sentence's k hypotheses as k queries at one position. With exact attention
(`shared`) keys and values of hypotheses never move: each step fills k new slots of a sentence, and
a table holds the slots of each hypothesis. Reordering hypotheses reorders that table. Other
attention needs its text in order: there each hypothesis has a row of its own, which is copied.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.nn.attention import KeysAndValues, SelfAttention
from manyheads.nn.masks import AttentionMask, Rule, make_mask
from manyheads.nn.positions import Position
from manyheads.nn.shapes import PaddingMask
from manyheads.nn.states import States

GROWTH = 16  # least positions to grow by, so that a step seldom copies
UNUSED = 16  # least unused slots for which a copy pays
Rows = Int[Tensor, " rows"]
Parents = Int[Tensor, "n k"]
BeamQueries = Int[Tensor, "1 k 1"]
Slots = Int[Tensor, "#n 1 slots"]
OwnSlots = Bool[Tensor, "n k slots"]


@dataclass(frozen=True, eq=False)
class Lineage(Rule):
    """A hypothesis sees the slots of its own past."""

    seen: OwnSlots
    kind: ClassVar[str] = "lineage"

    @property
    def is_causal(self) -> bool:
        return True

    def __call__(self, queries: BeamQueries, keys: Slots) -> OwnSlots:
        return self.seen


class KVCache:
    """Self-attention keys and values that grow, cross-attention ones computed once.

    Recurrent and convolutional modules keep their newest states here.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.beams = 1  # hypotheses of a sentence, once they differ
        self.length = 0
        self._read = 0  # positions of the present pass
        self._slots = 0  # filled ones; `length`, unless hypotheses share them
        self._row_mask: AttentionMask | None = None
        self._kv: dict[nn.Module, KeysAndValues] = {}
        self._spare: dict[nn.Module, KeysAndValues] = {}
        self._cross: dict[nn.Module, KeysAndValues] = {}
        self._states: dict[nn.Module, States] = {}
        self._table = torch.empty(0)  # [n k length], slots of each hypothesis in reading order
        self._positions = torch.empty(0)  # [1 or n, slots], position of each slot
        self._left: Rows | None = None  # sentences to keep when keys and values are next copied

    def end(self, length: int) -> int:
        return self.length + length // self.beams

    def mask(
        self, rule: Rule, length: int, padding: PaddingMask | None, device: torch.device
    ) -> AttentionMask:
        self._read = length // self.beams
        if self.beams == 1:
            return make_mask(rule, length, start=self.length, padding_mask=padding, device=device)
        now = torch.full((1, length), self.length, device=device)
        if not self.shared:
            self._row_mask = make_mask(
                rule, 1, start=self.length, padding_mask=padding, device=device
            )
            return AttentionMask(rule, now, self._row_mask.key_positions)
        new = torch.arange(self._slots, self._slots + length, device=device)
        new = new.expand(len(self._table), length)[..., None]
        self._table = torch.cat([self._table, new], dim=-1)
        rows = len(self._positions)
        self._positions = torch.cat([self._positions, now.expand(rows, length)], dim=1)
        return AttentionMask(Lineage(self._seen()), now, self._positions)

    def _seen(self) -> OwnSlots:
        slots = self._positions.shape[1]
        none = self._table.new_zeros(*self._table.shape[:2], slots, dtype=torch.bool)
        return none.scatter_(2, self._table, True)

    def advance(self, positions: int | None = None) -> None:
        read = self._read if positions is None else positions
        self.length += read
        self._slots += read * self.beams if self.shared else read

    def cut(self, length: int) -> None:
        """Forget the positions from `length` on."""
        assert self.beams == 1
        self.length = self._slots = length

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
        begin, end = self._slots, self._slots + keys.shape[2]
        if module not in self._kv or self._kv[module][0].shape[2] < end:
            size = end + max(GROWTH, end // 2)
            old = self._kv.get(module, (None, None))
            self._kv[module] = (
                _enlarged(old[0], keys, begin, size),
                _enlarged(old[1], values, begin, size),
            )
        all_keys, all_values = self._kv[module]
        all_keys[:, :, begin:end] = keys
        all_values[:, :, begin:end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def items(self) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """Each module with its self-attention keys and values."""
        for module, (keys, values) in self._kv.items():
            yield module, keys[:, :, : self._slots], values[:, :, : self._slots]

    def cross_kv(self, module: nn.Module, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        if module not in self._cross:
            keys, values = project()
            self._cross[module] = keys.contiguous(), values.contiguous()
        return self._cross[module]

    def state(self, module: nn.Module) -> States | None:
        return self._states.get(module)

    def set_state(self, module: nn.Module, states: States) -> None:
        self._states[module] = states

    @torch.no_grad()
    def reorder(self, parents: Parents) -> None:
        """Continue with these hypotheses of each sentence; the first time all are one."""
        n, k = parents.shape
        if k == 1:
            return
        first = torch.arange(n, device=parents.device)[:, None] * self.beams
        spreads, self.beams = self.beams == 1, k
        if not self.shared:
            self.select_rows((first.expand(n, k) if spreads else first + parents).flatten())
        elif spreads:
            self._positions = torch.arange(self.length, device=parents.device)[None]
            self._table = self._positions.repeat(n, k, 1)
        else:
            index = parents[..., None].expand(-1, -1, self._table.shape[2])
            self._table = self._table.gather(1, index)
            self._compact()
            self._drop_sentences()

    @torch.no_grad()
    def select_rows(self, rows: Rows) -> None:
        """Keep these rows, in this order (a row may be kept several times)."""
        for module, pair in self._kv.items():
            # Two sets of buffers take turns, so that a step copies once and allocates nothing.
            spare, size = self._spare.get(module), (len(rows), pair[0].shape[2])
            if spare is None or (spare[0].shape[0], spare[0].shape[2]) != size:
                spare = _empty(pair[0], *size), _empty(pair[1], *size)
            for old, new in zip(pair, spare, strict=True):
                old, new = old[:, :, : self._slots], new[:, :, : self._slots]
                torch.index_select(old, 0, rows, out=new)
            self._kv[module], self._spare[module] = spare, pair
        for module, states in self._states.items():
            self._states[module] = tuple(x.index_select(1, rows) for x in states)

    @torch.no_grad()
    def keep_sentences(self, sentences: Rows) -> None:
        """Forget the other sentences; differing hypotheses are reordered before the next step."""
        self._cross = {m: _select(pair, sentences) for m, pair in self._cross.items()}
        if not self.shared:
            beams = torch.arange(self.beams, device=sentences.device)
            self.select_rows((sentences[:, None] * self.beams + beams).flatten())
            return
        self._drop_sentences()
        self._left = sentences
        if self.beams == 1:
            self._drop_sentences()
            return
        self._table = self._table[sentences]
        if len(self._positions) > 1:
            self._positions = self._positions[sentences]

    def _drop_sentences(self) -> None:
        if self._left is not None:
            self._kv = {m: _select(pair, self._left) for m, pair in self._kv.items()}
            self._left = None

    def _compact(self) -> None:
        """Give up the slots that no hypothesis uses, once they are the most."""
        n, k, length = self._table.shape
        if self._slots - length < UNUSED:
            return
        used = self._seen().any(1)
        most = int(used.sum(1).max())
        if self._slots - most < max(UNUSED, most):
            return
        kept = used.sort(dim=1, descending=True, stable=True).indices[:, :most]
        moved = torch.empty_like(self._positions.expand(n, -1))
        moved.scatter_(1, kept, torch.arange(most, device=kept.device).expand(n, -1))
        self._table = moved.gather(1, self._table.flatten(1)).view(n, k, length)
        self._positions = self._positions.expand(n, -1).gather(1, kept)
        rows = torch.arange(n, device=kept.device) if self._left is None else self._left
        for module, (keys, values) in self._kv.items():
            self._kv[module] = _select_slots(keys, rows, kept), _select_slots(values, rows, kept)
        self._slots, self._left = most, None

    def bytes(self) -> int:
        """Size of what is cached, unfilled slots not counted."""
        grown = [x for _, *pair in self.items() for x in pair]
        cross = [x for pair in self._cross.values() for x in pair]
        states = [x for own in self._states.values() for x in own]
        return sum(x.numel() * x.element_size() for x in (*grown, *cross, *states))


def _as_rows(x: Float[Tensor, "n h k c"]) -> Float[Tensor, "rows h 1 c"]:
    """Hypotheses as rows; with the strides of rows, on which sums of approximations depend."""
    if x.is_contiguous():
        return rearrange(x, "n h k c -> (n k) h 1 c")
    return rearrange(x, "n h k c -> (n k) 1 h c").transpose(1, 2)


def _select(pair: KeysAndValues, rows: Rows) -> KeysAndValues:
    return pair[0].index_select(0, rows), pair[1].index_select(0, rows)


def _select_slots(held: Tensor, sentences: Rows, slots: Int[Tensor, "n most"]) -> Tensor:
    """For each of these sentences its own slots, in one copy."""
    _, heads, size, channels = held.shape
    head = torch.arange(heads, device=held.device)[:, None]
    rows = (sentences[:, None, None] * heads + head) * size + slots[:, None]
    return held.view(-1, channels).index_select(0, rows.flatten()).view(*rows.shape, channels)


def _enlarged(old: Tensor | None, new: Tensor, filled: int, size: int) -> Tensor:
    larger = _empty(new, new.shape[0], size)
    if old is not None:
        larger[:, :, :filled] = old[:, :, :filled]
    return larger


def _empty(like: Tensor, rows: int, positions: int) -> Tensor:
    return like.new_empty(rows, like.shape[1], positions, like.shape[3])
