"""Beam search in fixed shapes: the same search as in `beam`, with its length on the device.

Sentences that are done stay in the batch, frozen. The host asks only now and then whether all are.
"""

from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Int
from torch import Tensor

from manyheads.decode.beam import BeamSearch, Hypothesis, length_penalty
from manyheads.decode.cuda_graphs import ASKED, Recorded, compiled
from manyheads.decode.hypotheses import NEVER, Hypotheses, continuations, in_beam, take
from manyheads.decode.logits import foremost, log_mass
from manyheads.decode.steady import AllowedAnywhere, Steps


class Searching:
    """A search with the settings of another one, over as many sentences as there is room for."""

    def __init__(
        self, steps: Steps, search: BeamSearch, pool: Any = None, *, compile: bool = False
    ) -> None:
        cache, device = steps.cache, steps.cache.place.device
        n, k, room = cache.sentences, cache.beams, cache.room
        self.steps, self.search = steps, search
        self.allowed = AllowedAnywhere(search.allowed, steps.vocabulary, device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        logs = torch.full((3, n, k), NEVER, device=device)
        self.held = Hypotheses(
            limits=self.length.new_zeros(n),
            alive=self.length.new_zeros(n, k, room + 1),
            alive_log=logs[0],
            ended=self.length.new_zeros(n, k, room),
            ended_log=logs[1],
            ended_score=logs[2],
            ended_length=self.length.new_zeros(n, k),
        )
        # Computed by the host, as the other search does, for every length there will be.
        lp = [float(search.lp(max(1, length))) for length in range(room + 2)]
        self.lp = torch.tensor(lp, device=device)
        self.lp_at_limit = torch.ones(n, device=device)
        self.all_done = torch.zeros((), dtype=torch.bool, device=device)
        self.read_newest = compiled(steps.step) if compile else steps.step
        self.step = Recorded(self._step, device, pool)

    def __call__(
        self, start: int | Int[Tensor, " n"], limits: Int[Tensor, " n"]
    ) -> list[list[Hypothesis]]:
        """For each sentence its hypotheses, best first, after `steps` has read."""
        self._begin(start, limits)
        for number in range(1, int(limits.max()) + 1):
            self.step()
            if number % ASKED == 0 and bool(self.all_done):
                break
        return self._found(len(limits))

    def bytes(self) -> int:
        """What the cache holds, next to which the rest is little."""
        return self.steps.cache.bytes()

    def _begin(self, start: int | Int[Tensor, " n"], limits: Int[Tensor, " n"]) -> None:
        held, n = self.held, len(limits)
        self.length.zero_()
        held.limits.zero_()
        held.limits[:n] = limits
        held.alive[:n, :, 0] = torch.as_tensor(start, device=limits.device).expand(n)[:, None]
        for log in (held.alive_log, held.ended_log, held.ended_score):
            log.fill_(NEVER)
        # One living hypothesis a sentence; its copies cannot win until it has spread.
        held.alive_log[:n, 0] = 0.0
        at_limit = length_penalty(held.limits.clamp(min=1), self.search.alpha, self.search.penalty)
        self.lp_at_limit.copy_(torch.as_tensor(at_limit))

    def _step(self) -> None:
        held, search, k = self.held, self.search, self.search.beam
        newest = held.alive.index_select(2, self.length)
        self.length += 1
        logits = self.allowed.fine(self.read_newest(rearrange(newest, "n k 1 -> (n k)")))
        total = log_mass(logits)
        last = held.limits == self.length
        last_rows = repeat(last, "n -> (n k)", k=k) if self.allowed.forces else None
        self.allowed.apply(logits, total, self.length, last_rows)
        log, parents, tokens = continuations(held.alive_log, logits, total)
        grown = take(held.alive, parents).index_copy_(2, self.length, tokens[..., None])
        ending = search.allowed.ends(tokens, last)
        now = self.lp.index_select(0, self.length)
        self._end(grown, tokens, log.masked_fill(~in_beam(ending, k), NEVER), now)
        living, order = foremost(log.masked_fill(ending, NEVER), k)
        held.alive.copy_(take(grown, order))
        held.alive_log.copy_(living)
        self.steps.cache.reorder(parents.gather(-1, order))
        ahead = self.lp.index_select(0, self.length + 1)
        greatest = self.lp_at_limit if search.alpha >= 0 else ahead
        done = held.done(self.length, search.stopping, search.n_best, now, greatest)
        # A done sentence is frozen at once.
        held.alive_log.masked_fill_(done[:, None], NEVER)
        self.all_done.copy_(done.all())

    def _end(self, grown: Tensor, tokens: Tensor, log: Tensor, now: Tensor) -> None:
        """Let new endings compete with the old ones for the k places."""
        held = self.held
        both = torch.cat([held.ended_score, log / now], 1)
        scores, order = foremost(both, self.search.beam)
        lengths = self.length - (tokens == self.search.end).long()
        held.ended_score.copy_(scores)
        held.ended.copy_(take(torch.cat([held.ended, grown[..., 1:]], 1), order))
        held.ended_log.copy_(torch.cat([held.ended_log, log], 1).gather(1, order))
        held.ended_length.copy_(torch.cat([held.ended_length, lengths], 1).gather(1, order))

    def _found(self, sentences: int) -> list[list[Hypothesis]]:
        held = self.held
        columns = (held.ended, held.ended_length, held.ended_log, held.ended_score)
        rows = zip(*(column[:sentences].tolist() for column in columns), strict=True)
        return [
            [
                Hypothesis(tokens[:size], log, score)
                for tokens, size, log, score in zip(*row, strict=True)
                if score > NEVER
            ]
            for row in rows
        ]
