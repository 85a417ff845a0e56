"""Beam search over a batch of sentences, all of it in tensors.

A hypothesis y is ranked by log P(y) / lp(y), with the length penalty of the GNMT paper,
lp(y) = ((5 + |y|) / 6)^α. A sentence is done when `beam` hypotheses have ended, or earlier when
no living one can still come among the n best that are wanted; what it gets never hangs on its
neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.errors import Mistake, check_at_least

NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How a trained model writes. Beam 1 is greedy."""

    beam: int = 4
    length_penalty: float = 0.6
    longest_ratio: float = 2.0
    longest_extra: int = 20
    batch_tokens: int = 4096
    validate_sentences: int = 200

    def __post_init__(self) -> None:
        for name in ("beam", "longest_extra", "batch_tokens"):
            check_at_least(f"decode.{name}", getattr(self, name), 1)
        for name in ("longest_ratio", "validate_sentences"):
            check_at_least(f"decode.{name}", getattr(self, name), 0)
        if not 0 <= self.length_penalty <= 10:
            raise Mistake(f"decode.length_penalty={self.length_penalty} must be from 0 to 10")

    def limit(self, source_length: int, max_length: int) -> int:
        """The most tokens a translation may have, its end included."""
        by_source = int(min(max_length, self.longest_ratio * source_length))
        return min(max_length, by_source + self.longest_extra)


@dataclass(frozen=True)
class Hypothesis:
    """Tokens without start and end, log P, and the score by which it was ranked."""

    tokens: list[int]
    log_probability: float
    score: float


@runtime_checkable
class Stepper(Protocol):
    """A model in the middle of writing: rows are hypotheses, `beam` of them a sentence."""

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows v"]:
        """Logits of the token after the newest one of each row."""

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Continue from these rows."""

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        """Forget the sentences that are not among these."""


def length_penalty(length: Tensor | int | float, alpha: float) -> Tensor | float:
    """((5 + |y|) / 6)^α."""
    return ((5.0 + length) / 6.0) ** alpha


@dataclass
class _Search:
    """The state of a search over n sentences with k beams; `home` is a sentence's place."""

    home: Int[Tensor, " n"]
    limits: Int[Tensor, " n"]
    alive: Int[Tensor, "n k length"]
    alive_log: Float[Tensor, "n k"]
    ended: Int[Tensor, "n k room"]
    ended_log: Float[Tensor, "n k"]
    ended_score: Float[Tensor, "n k"]
    ended_length: Int[Tensor, "n k"]

    def keep(self, sentences: Int[Tensor, " kept"]) -> None:
        for name, value in vars(self).items():
            setattr(self, name, value[sentences])


class BeamSearch:
    """Searches with given settings and special tokens."""

    def __init__(
        self,
        decode: Decode,
        *,
        start: int,
        end: int,
        banned: Sequence[int] = (),
        n_best: int | None = None,
    ) -> None:
        self.beam, self.alpha = decode.beam, decode.length_penalty
        self.n_best = min(n_best or decode.beam, decode.beam)
        self.start, self.end = start, end
        self.banned = [token for token in banned if token != end]

    @torch.no_grad()
    def __call__(self, stepper: Stepper, limits: Int[Tensor, " n"]) -> list[list[Hypothesis]]:
        """For each sentence its hypotheses, best first.

        `stepper` begins with one row a sentence, and goes on with `beam` of them.
        """
        search = self._begin(limits)
        results: list[list[Hypothesis]] = [[] for _ in limits]
        length = 0
        while len(search.home):
            length += 1
            logits = self._step(stepper, search, length)
            rows = self._extend(search, logits, length)
            if length == 1:
                rows = rows // self.beam
            done = self._done(search, length)
            # A done sentence is frozen at once, whenever its neighbours let it leave the batch.
            search.alive_log.masked_fill_(done[:, None], NEVER)
            # Shrinking the batch costs a copy of the cache: wait until it pays.
            if bool(done.any()) and (4 * int(done.sum()) >= len(done) or bool(done.all())):
                self._collect(search, done, results)
                kept = (~done).nonzero()[:, 0]
                stepper.reorder(rows[_rows_of(kept, self.beam)])
                stepper.keep_sentences(kept)
                search.keep(kept)
            elif self.beam > 1:
                stepper.reorder(rows)
        return results

    def _step(self, stepper: Stepper, search: _Search, length: int) -> Float[Tensor, "rows v"]:
        """The next logits of every row; at first all rows of a sentence are one."""
        newest = search.alive[:, :, -1]
        if length == 1:
            return stepper.step(newest[:, 0]).repeat_interleave(self.beam, dim=0)
        return stepper.step(rearrange(newest, "n k -> (n k)"))

    def _begin(self, limits: Int[Tensor, " n"]) -> _Search:
        n, k, device = len(limits), self.beam, limits.device
        # One living hypothesis a sentence; its copies cannot win until it has spread.
        alive_log = torch.full((n, k), NEVER, device=device)
        alive_log[:, 0] = 0.0
        return _Search(
            home=torch.arange(n, device=device),
            limits=limits,
            alive=torch.full((n, k, 1), self.start, device=device),
            alive_log=alive_log,
            ended=torch.zeros(n, k, int(limits.max()), dtype=torch.long, device=device),
            ended_log=torch.full((n, k), NEVER, device=device),
            ended_score=torch.full((n, k), NEVER, device=device),
            ended_length=torch.zeros(n, k, dtype=torch.long, device=device),
        )

    def _extend(
        self, search: _Search, logits: Float[Tensor, "rows v"], length: int
    ) -> Int[Tensor, " rows"]:
        """Grow every hypothesis by its best tokens; gives the rows that live on."""
        k = self.beam
        total = logits.logsumexp(-1, keepdim=True)
        if self.banned:
            logits[:, self.banned] = NEVER
        last_chance = (search.limits == length).repeat_interleave(k)
        # Twice the beam: even if every hypothesis ends, enough others live on.
        wide = min(2 * k, logits.shape[-1])
        best, tokens = logits.topk(wide, dim=-1)
        ends = torch.full_like(best, NEVER)
        ends[:, 0] = logits[:, self.end]
        best = torch.where(last_chance[:, None], ends, best)
        tokens = torch.where(last_chance[:, None], self.end, tokens)
        log = rearrange(search.alive_log, "n k -> (n k) 1") + (best - total)
        log = rearrange(log, "(n k) w -> n (k w)", k=k)
        log, order = log.topk(min(2 * k, log.shape[-1]), dim=-1)
        parents = order // wide
        tokens = rearrange(tokens, "(n k) w -> n (k w)", k=k).gather(-1, order)
        grown = torch.cat([_take(search.alive, parents), tokens[..., None]], dim=-1)
        ending = tokens == self.end
        # Only the first k places count: an end further down would not have been kept.
        in_beam = torch.arange(tokens.shape[1], device=tokens.device) < k
        self._end(search, grown, log.masked_fill(~(ending & in_beam), NEVER), length)
        living, order = log.masked_fill(ending, NEVER).topk(k, dim=-1)
        search.alive_log = living
        search.alive = _take(grown, order)
        first = torch.arange(len(parents), device=parents.device)[:, None] * k
        return (first + parents.gather(-1, order)).flatten()

    def _end(
        self,
        search: _Search,
        grown: Int[Tensor, "n w length"],
        log: Float[Tensor, "n w"],
        length: int,
    ) -> None:
        """Let new endings compete with the old ones for the k places."""
        if not bool((log > NEVER).any()):
            return
        score = log / length_penalty(length, self.alpha)
        room = search.ended.shape[2]
        new = torch.nn.functional.pad(grown[..., 1:], (0, room - length))
        scores, order = torch.cat([search.ended_score, score], 1).topk(self.beam, dim=1)
        search.ended_score = scores
        search.ended = _take(torch.cat([search.ended, new], 1), order)
        search.ended_log = torch.cat([search.ended_log, log], 1).gather(1, order)
        lengths = torch.full_like(new[..., 0], length - 1)
        search.ended_length = torch.cat([search.ended_length, lengths], 1).gather(1, order)

    def _done(self, search: _Search, length: int) -> Bool[Tensor, " n"]:
        """All places are taken, or the n best are decided, or the limit is reached.

        log P only falls and lp only grows, so that a living hypothesis can come to no better
        score than its log P now over lp at the limit.
        """
        full = (search.ended_score > NEVER).all(dim=1)
        reach = search.alive_log.amax(dim=1) / length_penalty(search.limits, self.alpha)
        decided = reach <= search.ended_score[:, self.n_best - 1]
        return full | decided | (search.limits <= length)

    def _collect(
        self, search: _Search, done: Bool[Tensor, " n"], results: list[list[Hypothesis]]
    ) -> None:
        for row in done.nonzero()[:, 0].tolist():
            found = []
            for place in range(self.beam):
                score = float(search.ended_score[row, place])
                if score > NEVER:
                    size = int(search.ended_length[row, place])
                    tokens = search.ended[row, place, :size].tolist()
                    found.append(Hypothesis(tokens, float(search.ended_log[row, place]), score))
            results[int(search.home[row])] = found


def _take(
    values: Int[Tensor, "n k length"], order: Int[Tensor, "n w"]
) -> Int[Tensor, "n w length"]:
    return values.gather(1, repeat(order, "n w -> n w length", length=values.shape[2]))


def _rows_of(sentences: Int[Tensor, " kept"], beam: int) -> Int[Tensor, " rows"]:
    beams = torch.arange(beam, device=sentences.device)
    return rearrange(sentences[:, None] * beam + beams, "n k -> (n k)")
