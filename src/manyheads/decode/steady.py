"""A model in the middle of writing, in shapes that are the same at every step.

What `recorded` records: the model's step over a cache of fixed room, the tokens that may come, and
the choice of one; in `search` the hypotheses instead. A batch is put at the same places as
the one before. It may have fewer sentences than there is room for: the others have no token to
write, and are done from the beginning.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.decode.beam import Allowed
from manyheads.decode.cuda_graphs import ASKED, Recorded, compiled, reads_filled_up, room_to_read
from manyheads.decode.hypotheses import NEVER
from manyheads.decode.kv_cache import KeyValueCache
from manyheads.decode.logits import has_kernel, log_mass
from manyheads.decode.sample import Sample, choose
from manyheads.decode.static_cache import FixedCache
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Memory, Seq2Seq
from manyheads.nn.attention import CrossAttention
from manyheads.nn.masks import full, make_mask

Texts = tuple[Tensor, ...]  # prompts; or sources, and what of them is real
Rows = Int[Tensor, " rows"]
Length = Int[Tensor, " 1"]


@runtime_checkable
class Steps(Protocol):
    """A model and its cache; one step reads the newest token of every row."""

    cache: FixedCache
    vocabulary: int

    def read(self, texts: Texts) -> None:
        """What comes before the first step, if short by a recording for the room that it fills."""
        ...

    def step(self, tokens: Rows) -> Float[Tensor, "rows v"]:
        """Logits of the token after the newest one of each row, in the model's own type."""
        ...


class GptSteps:
    """A decoder-only model."""

    def __init__(self, model: Gpt, cache: FixedCache, pool: Any = None) -> None:
        self.model, self.cache, self.pool = model, cache, pool
        self.vocabulary = model.tokens.num_embeddings
        self.prompts = cache.place.new_zeros(cache.sentences, cache.room)
        self.readings: dict[int, Recorded] = {}

    def read(self, texts: Texts) -> None:
        """All of the prompts but their last tokens, as one pass.

        What is behind them in their room is read too. Nothing before it sees it, and each of its
        slots is written again before it is seen.
        """
        [prompts] = texts
        rows, length = len(prompts), prompts.shape[1] - 1
        reading = self._reading(room_to_read(length)) if length else None
        if reading is None:
            self._read(prompts[:, :-1])
            return
        self.prompts[:rows, :length] = prompts[:, :-1]
        reading()
        self.cache.place.fill_(length)

    def _reading(self, room: int) -> Recorded | None:
        """What reads so many positions; None where that cannot be recorded."""
        if room not in self.readings:
            if not reads_filled_up(self.model.decoder, self.cache.sentences, room):
                return None
            work = partial(self._read, self.prompts[:, :room])
            self.readings[room] = Recorded(work, self.prompts.device, self.pool)
        return self.readings[room]

    def _read(self, tokens: Int[Tensor, "rows length"]) -> None:
        read = KeyValueCache()
        if tokens.shape[1]:
            self.model.hidden(tokens, cache=read)
        self.cache.fill(read)

    def step(self, tokens: Rows) -> Float[Tensor, "rows v"]:
        hidden = self.model.hidden(tokens[:, None], cache=self.cache)
        logits: Tensor = self.model.logits(hidden[:, -1])
        return logits


class Seq2SeqSteps:
    """An encoder–decoder; its encoder is no part of a step."""

    def __init__(self, model: Seq2Seq, cache: FixedCache, pool: Any = None) -> None:
        self.model, self.cache = model, cache
        self.vocabulary = model.target_table.num_embeddings
        rows, room, device = cache.sentences, cache.source_room, cache.place.device
        self.source = cache.place.new_zeros(rows, room)
        self.real = torch.ones(rows, room, dtype=torch.bool, device=device)
        self.sight = make_mask(full, room, padding_mask=self.real, device=device)
        filled_up = reads_filled_up(model.encoder, rows, room)
        work = partial(self._read, self.source, self.real)
        self.reading = Recorded(work, device, pool) if filled_up else None

    def read(self, texts: Texts) -> None:
        """The sources, as one pass; what is beyond them is not real, but for rows without one."""
        source, real = texts
        rows, width = real.shape
        self.real[:rows, :width] = real
        self.real[:rows, width:] = False
        self.real[rows:] = True
        if self.reading is None:
            self._read(source, real)
        else:
            self.source[:rows, :width] = source
            self.reading()
        self.cache.clear()

    def _read(self, source: Int[Tensor, "rows length"], real: Bool[Tensor, "rows length"]) -> None:
        states = self.model.encode(source, real).states
        for part in self.model.decoder.modules():
            if isinstance(part, CrossAttention):
                self.cache.put(part, *part.project_kv(states))

    def step(self, tokens: Rows) -> Float[Tensor, "rows v"]:
        # A new sight each time: what one holds would not change with what is real. The states of
        # the sources are not asked for: the cache has their keys and values.
        memory = Memory(self.real, replace(self.sight))
        hidden = self.model.decode(tokens[:, None], memory, cache=self.cache)
        logits: Tensor = self.model.logits(hidden[:, -1])
        return logits


class AllowedAnywhere:
    """`Allowed` where the place is a number on the device: the same kernels at every place."""

    def __init__(self, allowed: Allowed, vocabulary: int, device: torch.device) -> None:
        self.rules = allowed
        self.banned = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.banned[allowed.banned] = True
        # Whether the log of the whole mass is asked for: a pass over all logits.
        self.wants_total = allowed.first is not None or allowed.at_limit == "free-end"
        self.forces = allowed.at_limit != "cut"  # an end, where there is no room for more

    def fine(self, logits: Float[Tensor, "rows v"]) -> Float[Tensor, "rows v"]:
        """In a type for what will be written among them, and for whoever chooses from them."""
        return logits.float() if self.wants_total or not has_kernel(logits) else logits

    def apply(
        self,
        logits: Float[Tensor, "rows v"],
        total: Float[Tensor, "rows 1"] | None,
        length: Length,
        last: Bool[Tensor, " rows"] | None,
    ) -> None:
        """Leave −∞ to the tokens that may not come at place `length`, as `Allowed` does."""
        rules, end = self.rules, self.rules.end
        never = self.banned[None]
        if rules.first is not None:
            begins = length == 1
            never = never | begins[:, None]
        if last is not None:
            never = never | last[:, None]
            price = logits[:, end].clone()
        if rules.at_limit == "free-end":
            assert total is not None
            price = total[:, 0]
        if rules.banned or rules.first is not None or self.forces:
            logits.masked_fill_(never, NEVER)
        if rules.shortest:
            logits[:, end].masked_fill_(length <= rules.shortest, NEVER)
        if rules.first is not None:
            assert total is not None
            opens = begins if last is None else begins & ~last
            logits[:, rules.first] = torch.where(opens, total[:, 0], logits[:, rules.first])
        if last is not None:
            logits[:, end] = torch.where(last, price, logits[:, end])


class Drawing:
    """Tokens by chance or the likeliest ones, one a row and step, in fixed shapes."""

    def __init__(
        self,
        steps: Steps,
        allowed: Allowed,
        sample: Sample,
        pool: Any = None,
        *,
        compile: bool = False,
    ) -> None:
        cache, device = steps.cache, steps.cache.place.device
        rows, room = cache.sentences, cache.room
        self.steps, self.sample = steps, sample
        self.allowed = AllowedAnywhere(allowed, steps.vocabulary, device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self.newest, self.limits = (self.length.new_zeros(rows) for _ in range(2))
        self.ends = torch.full_like(self.newest, allowed.end)
        self.written = self.length.new_zeros(rows, room)
        self.chances = torch.zeros(rows, room, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.all_done = torch.zeros((), dtype=torch.bool, device=device)
        self.step = Recorded(compiled(self._step) if compile else self._step, device, pool)

    def begin(self, newest: Rows, limits: Rows, chances: Float[Tensor, "rows steps"]) -> None:
        """After `steps` has read: the tokens to go on from, and the random numbers to come."""
        rows, steps = chances.shape
        self.length.zero_()
        self.newest[:rows] = newest
        self.limits.zero_()
        self.limits[:rows] = limits
        self.chances[:rows, :steps] = chances.to(self.chances.device)
        self.done.copy_(self.limits < 1)

    def _step(self) -> None:
        end = self.allowed.rules.end
        place = self.length.clone()
        self.length += 1
        logits = self.allowed.fine(self.steps.step(self.newest))
        total = log_mass(logits) if self.allowed.wants_total else None
        last = self.limits == self.length if self.allowed.forces else None
        self.allowed.apply(logits, total, self.length, last)
        drawn = self.sample.temperature > 0
        chance = self.chances.index_select(1, place)[:, 0] if drawn else self.chances[:, 0]
        torch.where(self.done, self.ends, choose(logits, chance, self.sample), out=self.newest)
        self.written.index_copy_(1, place, self.newest[:, None])
        self.done |= (self.newest == end) | (self.limits <= self.length)
        torch.all(self.done, 0, out=self.all_done)

    def bytes(self) -> int:
        """What the cache holds, next to which the rest is little."""
        return self.steps.cache.bytes()

    def collect(self, rows: int, most: int) -> list[list[int]]:
        """What is written to the end of all these rows, at most so much, without the ends."""
        for number in range(1, most + 1):
            self.step()
            if number % ASKED == 0 and bool(self.all_done):
                break
        end = self.allowed.rules.end
        found = self.written[:rows, :number].tolist()
        return [[token for token in row if token != end] for row in found]

    def follow(self, rows: int, most: int) -> Iterator[Rows]:
        """The tokens of each step, as soon as they are there; a row that is done has the end."""
        for _ in range(most):
            self.step()
            yield self.newest[:rows].clone()
            if bool(self.all_done):
                return
