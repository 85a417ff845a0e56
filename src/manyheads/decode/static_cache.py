"""The static KV cache: every step runs the same kernels on the same tensors (for CUDA graphs).

Keys and values have a slot for every position from the start, and the length is on the device. An
unfilled slot is never seen: masks compare positions, and its position is in the future.

Hypotheses never move. Beam j of a sentence writes position p into slot p · k + j. A table holds,
for each hypothesis and position, the beam that wrote its token there (its ancestor); reordering
hypotheses reorders the table.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.decode.kv_cache import BeamQueries, KVCache, OwnSlots, Parents, Slots
from manyheads.nn.attention import Cache, Fused, KeysAndValues, SelfAttention
from manyheads.nn.masks import AttentionMask, Causal, Rule
from manyheads.nn.positions import Position, RotaryPosition
from manyheads.nn.scores import InnerScore
from manyheads.nn.shapes import PaddingMask
from manyheads.ops import append_attention, write_kv


@dataclass(frozen=True, eq=False)
class Ancestors(Rule):
    """A hypothesis sees the slots that its ancestors wrote."""

    table: Int[Tensor, "n k size"]
    beams: Int[Tensor, " k"]
    kind: ClassVar[str] = "ancestors"

    @property
    def is_causal(self) -> bool:
        return True

    def __call__(self, queries: BeamQueries, keys: Slots) -> OwnSlots:
        is_ancestor = rearrange(self.table[..., None] == self.beams, "n k p j -> n k (p j)")
        return is_ancestor & (keys <= queries)


class StaticCache(Cache):
    """`size` positions of `sentences` with k beams each, and `source_size` of their sources.

    `fill` stores a prompt, `set_cross_kv` a source; then each step adds one position. The caller
    checks that the model has `size` positions.
    """

    def __init__(
        self, sentences: int, beams: int, size: int, device: torch.device, source_size: int = 0
    ) -> None:
        super().__init__()
        self.sentences, self.beams = sentences, beams
        self.size, self.source_size = size, source_size
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self.ancestors = torch.zeros(sentences, beams, size, dtype=torch.long, device=device)
        self._beams = torch.arange(beams, device=device)
        self._positions = torch.arange(size, device=device).repeat_interleave(beams)[None]
        self._slots = self._beams
        self._counter = torch.zeros(0, dtype=torch.int32, device=device)

    def end(self, length: int) -> int:
        return 0

    def mask(
        self, rule: Rule, length: int, padding: PaddingMask | None, device: torch.device
    ) -> AttentionMask:
        assert isinstance(rule, Causal)
        assert length == self.beams
        assert padding is None
        queries = self.length.expand(1, self.beams)
        if self.beams == 1:
            self._slots = self.length
            return AttentionMask(rule, queries, self._positions)
        self._slots = self.length * self.beams + self._beams
        newest = repeat(self._beams, "k -> n k 1", n=self.sentences)
        self.ancestors.index_copy_(2, self.length, newest)
        return AttentionMask(Ancestors(self.ancestors, self._beams), queries, self._positions)

    def advance(self, positions: int | None = None) -> None:
        self.length += 1

    def attend(
        self,
        module: SelfAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        position: Position,
    ) -> Tensor:
        keys, values = self._buffers(module, k, v)
        scale = _plain_scale(module, position)
        if scale is not None and self.beams == 1:
            rows = q.shape[0] * q.shape[1]
            if len(self._counter) < rows:
                self._counter = self._counter.new_zeros(rows)
            out = append_attention(q, k, v, keys, values, self.length, self._counter, scale)
            if out is not None:
                return out
        write_kv(keys, values, self._slots, k, v)
        return module.attend(q, keys, values, mask, position)

    def reorder(self, parents: Parents) -> None:
        """Continue with these hypotheses of each sentence; a parent may have several children."""
        index = repeat(parents, "n k -> n k size", size=self.size)
        self.ancestors.copy_(self.ancestors.gather(1, index))

    def clear(self) -> None:
        """Start again; old keys and values are overwritten before they are seen."""
        self.length.zero_()
        self._counter.zero_()
        self.ancestors.zero_()

    def fill(self, prompts: KVCache) -> None:
        """Start after prompts; all beams of a sentence share the slots of beam 0."""
        self.clear()
        for module, *pair in prompts.items():
            for buffer, new in zip(self._buffers(module, *pair), pair, strict=True):
                buffer[: len(new), :, : prompts.length * self.beams : self.beams] = new
        self.length.fill_(prompts.length)

    def set_cross_kv(self, module: nn.Module, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of the sources."""
        if module not in self._cross:
            self._cross[module] = self._zeros(keys, values, self.source_size)
        for buffer, new in zip(self._cross[module], (keys, values), strict=True):
            buffer[: len(new), :, : new.shape[2]] = new

    def bytes(self) -> int:
        """Size of all tensors, filled or not."""
        buffers = [x for pair in (*self._kv.values(), *self._cross.values()) for x in pair]
        return sum(x.numel() * x.element_size() for x in (self.ancestors, *buffers))

    def _buffers(self, module: nn.Module, keys: Tensor, values: Tensor) -> KeysAndValues:
        if module not in self._kv:
            self._kv[module] = self._zeros(keys, values, self.size * self.beams)
        return self._kv[module]

    def _zeros(self, keys: Tensor, values: Tensor, slots: int) -> KeysAndValues:
        """Buffers of zeros: uninitialised memory may hold NaN, and 0 · NaN is NaN."""
        rows = self.sentences
        return (
            keys.new_zeros(rows, keys.shape[1], slots, keys.shape[3]),
            values.new_zeros(rows, values.shape[1], slots, values.shape[3]),
        )


def _plain_scale(module: SelfAttention, position: Position) -> float | None:
    """The scale, if attention is softmax(q kᵀ · scale) v with nothing added or dropped."""
    score: Any = module.score
    plain = type(module.core) is Fused and type(score) is InnerScore
    rotated = position.is_absolute or type(position) is RotaryPosition
    drops = module.training and module.config.dropout > 0
    return float(score.scale) if plain and rotated and not drops else None
