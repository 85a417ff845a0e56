"""Keys and values of the positions already read, so that a step costs one position.

The cache is keyed by the attention module, so that layers need not know their number. Because
rules and position schemes speak of positions, a cached step is the same function as a full pass.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.nn.attention import KeysAndValues, Position, SelfAttention
from manyheads.nn.masks import AttentionMask, Rule, make_mask
from manyheads.nn.shapes import Real
from manyheads.nn.states import States

ROOM = 16  # positions to grow by, so that a step seldom copies


class KeyValueCache:
    """Self-attention keys and values that grow, cross-attention ones computed once.

    Of a recurrent module only its newest states are kept, of a convolution the last places that
    it will read again.
    """

    beams = 1  # each row has keys of its own

    def __init__(self) -> None:
        self._length = 0
        self._grown: dict[nn.Module, KeysAndValues] = {}
        self._spare: dict[nn.Module, KeysAndValues] = {}
        self._fixed: dict[nn.Module, KeysAndValues] = {}
        self._states: dict[nn.Module, States] = {}

    @property
    def length(self) -> int:
        """Positions that are already in the cache."""
        return self._length

    def end(self, length: int) -> int:
        return self._length + length

    def mask(
        self, rule: Rule, length: int, real: Real | None, device: torch.device
    ) -> AttentionMask:
        """The mask of the next positions over all positions so far."""
        self._pending = length
        return make_mask(rule, length, start=self._length, padding_mask=real, device=device)

    def advance(self, positions: int | None = None) -> None:
        """Called by the model once a pass is through all its layers."""
        self._length += self._pending if positions is None else positions

    def attend(
        self,
        module: SelfAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        position: Position,
    ) -> Tensor:
        keys, values = self.extend(module, k, v)
        return module.attend(q, keys, values, mask, position)

    def cross_kv(self, owner: nn.Module, compute: Callable[[], KeysAndValues]) -> KeysAndValues:
        return self.once(owner, compute)

    def cut(self, length: int) -> None:
        """Forget the positions from there on."""
        self._length = length

    def extend(self, owner: nn.Module, keys: Tensor, values: Tensor) -> KeysAndValues:
        """Append the new positions of one module; gives all positions so far."""
        return self._append(owner, keys, values, self._length)

    def _append(self, owner: nn.Module, keys: Tensor, values: Tensor, begin: int) -> KeysAndValues:
        end = begin + keys.shape[2]
        if owner not in self._grown or self._grown[owner][0].shape[2] < end:
            room = end + max(ROOM, end // 2)
            old = self._grown.get(owner)
            self._grown[owner] = (
                _roomier(old and old[0], keys, begin, room),
                _roomier(old and old[1], values, begin, room),
            )
        all_keys, all_values = self._grown[owner]
        all_keys[:, :, begin:end] = keys
        all_values[:, :, begin:end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def held(self) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """The keys and values of each module that grow, as far as they have grown."""
        for owner, (keys, values) in self._grown.items():
            yield owner, keys[:, :, : self._length], values[:, :, : self._length]

    def once(self, owner: nn.Module, compute: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Keys and values of the memory: the same at every step."""
        if owner not in self._fixed:
            keys, values = compute()
            self._fixed[owner] = keys.contiguous(), values.contiguous()
        return self._fixed[owner]

    def recall(self, owner: nn.Module) -> States | None:
        """The states of a module after the last position; None before the first."""
        return self._states.get(owner)

    def remember(self, owner: nn.Module, states: States) -> None:
        """Put the newest states in the place of the last ones."""
        self._states[owner] = states

    @torch.no_grad()
    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these hypotheses, in this order (a row may be kept several times)."""
        for owner, pair in self._grown.items():
            # Two sets of buffers take turns, so that a step copies once and allocates nothing.
            spare = self._spare.get(owner)
            room = (len(rows), pair[0].shape[2])
            if spare is None or (spare[0].shape[0], spare[0].shape[2]) != room:
                spare = (_empty(pair[0], *room), _empty(pair[1], *room))
            for old, new in zip(pair, spare, strict=True):
                old, new = old[:, :, : self._length], new[:, :, : self._length]
                torch.index_select(old, 0, rows, out=new)
            self._grown[owner], self._spare[owner] = spare, pair
        for owner, states in self._states.items():
            self._states[owner] = tuple(x.index_select(1, rows) for x in states)

    def keep_sentences(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the memories of these sentences; the others are finished."""
        for owner, pair in self._fixed.items():
            keys, values = (x.index_select(0, rows) for x in pair)
            self._fixed[owner] = (keys, values)

    def bytes(self) -> int:
        """What the cached positions take, room to grow apart."""
        grown = [x[:, :, : self._length] for pair in self._grown.values() for x in pair]
        fixed = [x for pair in self._fixed.values() for x in pair]
        states = [x for own in self._states.values() for x in own]
        return sum(x.numel() * x.element_size() for x in (*grown, *fixed, *states))


def _roomier(old: Tensor | None, new: Tensor, filled: int, room: int) -> Tensor:
    bigger = _empty(new, new.shape[0], room)
    if old is not None:
        bigger[:, :, :filled] = old[:, :, :filled]
    return bigger


def _empty(like: Tensor, rows: int, positions: int) -> Tensor:
    return like.new_empty(rows, like.shape[1], positions, like.shape[3])
