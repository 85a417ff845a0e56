"""Beam search over a batch of sentences, all of it in tensors.

A hypothesis y is ranked by log P(y) / lp(y), where |y| counts what was written, the end included.
A sentence is done when its stopping rule says so, or earlier when no living hypothesis can still
come among the n best that are wanted; what it gets never hangs on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.data.translation import Frame
from manyheads.decode.hypotheses import (
    NEVER,
    Hypotheses,
    Stopping,
    continuations,
    in_beam,
    take,
)
from manyheads.decode.logits import foremost, log_mass
from manyheads.errors import UserError, check_at_least
from manyheads.tokenizer.tokenizer import Tokenizer

# Settings that are a token, and the tokenizer's tokens that are never written.
TOKENS = ("first", "start", "end", "source_start")
UNWRITTEN = ("pad", "start", "unknown", "mask", "separator", "classify")

SMALLER = 8  # a batch becomes smaller when one of so many sentences is done
AT_ONCE, WRITTEN_ON_A_GPU = 4096, 32768  # tokens of a batch, unless told

WIDEST = 1000  # beam: what a search holds grows with its square

Penalty = Literal["gnmt", "length"]
Order = Literal["length", "best-first"]
# So far as the penalty of a long text is a number in float32.
PENALTIES: dict[Penalty, tuple[int, int]] = {"gnmt": (0, 10), "length": (-5, 5)}


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How a trained model writes. Beam 1 is greedy, whatever penalty, stopping rule and order are.

    `penalty`: lp is ((5 + |y|) / 6)^α or |y|^α, with α = `length_penalty`.

    `stopping`: a sentence is done when `beam` hypotheses have ended ("beam-ended"); or when, with
    as many ended, no living one would be better than the worst of them if it ended at the present
    length ("none-better-now"); or when none can become better at any length ("none-better-ever").

    `order`: the model is asked for whole beams, one length after another ("length"), or always for
    the likeliest hypothesis that is open ("best-first"), on a CPU: a model that is sure of itself
    is asked less often. With none-better-ever both orders find the same, but
    for ties. Best first, none-better-now drops a hypothesis when it would be no better than the
    worst of the n best that have ended if it ended at its next token, and that cost nothing; the
    rules speak of the n that are wanted, not of the whole beam, so that with this one the best
    may be another where more are wanted.

    `at_limit`: where the longest text ends, only the end may be written ("end"), or it is written
    and costs no probability ("free-end"), or the text is cut as it stands ("cut").

    `first` is a token that every text begins with, at no cost; `shortest` is the fewest tokens
    before the end. `start`, `end` and `banned` (never written) are the tokenizer's own unless
    told, and `source_start` is a token before every source, for models that were trained so.

    `batch_tokens` are written or scored together, those of all hypotheses counted; unless told,
    as many as keep the device busy.
    """

    beam: int = 4
    length_penalty: float = 0.6
    penalty: Penalty = "gnmt"
    stopping: Stopping = "beam-ended"
    order: Order = "length"
    at_limit: Literal["end", "free-end", "cut"] = "end"
    shortest: int = 0
    longest_ratio: float = 2.0
    longest_extra: int = 20
    first: int | None = None
    start: int | None = None
    end: int | None = None
    banned: tuple[int, ...] | None = None
    source_start: int | None = None
    batch_tokens: int | None = None
    validate_sentences: int = 200

    def __post_init__(self) -> None:
        for name in ("beam", "longest_extra", "batch_tokens"):
            check_at_least(f"decode.{name}", getattr(self, name), 1)
        for name in ("longest_ratio", "validate_sentences", "shortest", *TOKENS):
            check_at_least(f"decode.{name}", getattr(self, name), 0)
        if self.beam > WIDEST:
            raise UserError(f"decode.beam={self.beam} is wider than {WIDEST}: lower it")
        least, most = PENALTIES[self.penalty]
        if not least <= self.length_penalty <= most:
            raise UserError(
                f"decode.length_penalty={self.length_penalty} must be from {least} to {most} "
                f"with decode.penalty={self.penalty}"
            )
        if self.best_first and self.stopping == "beam-ended":
            raise UserError(
                "decode.order=best-first fills no beams that could end: set "
                "decode.stopping=none-better-ever or decode.stopping=none-better-now"
            )

    @property
    def best_first(self) -> bool:
        """Whether a search goes by log P; one hypothesis alone has no order."""
        return self.order == "best-first" and self.beam > 1

    def refuse_best_first(self) -> None:
        """For all that searches by length alone."""
        if self.best_first:
            raise UserError(
                "decode.order=best-first is for one Transformer that translates, run by PyTorch, "
                "with dense, fused or flex attention and without experts: set decode.order=length"
            )

    @property
    def read_at_once(self) -> int:
        """Tokens of a batch of which each has its logits."""
        return self.batch_tokens or AT_ONCE

    def written_at_once(self, device: torch.device) -> int:
        """Tokens of a batch in which each row has the logits of its newest one alone."""
        most = WRITTEN_ON_A_GPU if device.type == "cuda" else AT_ONCE
        return self.batch_tokens or most

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


def length_penalty(
    length: Tensor | int | float, alpha: float, penalty: Penalty = "gnmt"
) -> Tensor | float:
    """((5 + |y|) / 6)^α of the GNMT paper, or |y|^α."""
    return ((5.0 + length) / 6.0 if penalty == "gnmt" else length) ** alpha


@dataclass(frozen=True)
class Marks:
    """The special tokens that a model writes with: those of `decode`, else the tokenizer's."""

    tokenizer: Tokenizer
    decode: Decode

    @property
    def start(self) -> int:
        return self.tokenizer.start if self.decode.start is None else self.decode.start

    @property
    def end(self) -> int:
        return self.tokenizer.end if self.decode.end is None else self.decode.end

    @property
    def own(self) -> bool:
        """Whether texts begin and end with the tokenizer's own tokens, as in training here."""
        return {self.decode.start, self.decode.end, self.decode.source_start} == {None}

    @property
    def banned(self) -> list[int]:
        """Tokens that are never written: unless told, the special ones that there are."""
        if self.decode.banned is not None:
            return list(self.decode.banned)
        return [token for name in UNWRITTEN for token in self._known(name)]

    @property
    def padding(self) -> int:
        """What fills up the shorter rows: never looked at, so that the end does where none is."""
        return next(iter(self._known("pad")), self.end)

    @property
    def frame(self) -> Frame:
        """What stands around texts, in training as in use."""
        return Frame(self.start, self.end, self.padding, self.decode.source_start)

    def source(self, ids: list[int]) -> list[int]:
        """A source as an encoder reads it."""
        return Frame(0, self.end, 0, self.decode.source_start).source(ids)

    def _known(self, name: str) -> list[int]:
        try:
            return [getattr(self.tokenizer, name)]
        except UserError:  # files from elsewhere do not have them all
            return []

    def check(self, vocabulary: int) -> None:
        """Refuse tokens of the settings that the model does not have."""
        named = [(name, getattr(self.decode, name)) for name in TOKENS]
        named += [("banned", token) for token in self.decode.banned or ()]
        for name, token in named:
            if token is not None and not 0 <= token < vocabulary:
                raise UserError(
                    f"decode.{name}={token} is no token of this model: it has 0 to {vocabulary - 1}"
                )


class Allowed:
    """Which tokens may be written at which place."""

    def __init__(self, decode: Decode, end: int, banned: Sequence[int]) -> None:
        self.end, self.first = end, decode.first
        self.shortest, self.at_limit = decode.shortest, decode.at_limit
        self.banned = [token for token in banned if token != end]

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that it hangs on."""
        return self.end, self.first, self.shortest, self.at_limit, tuple(self.banned)

    def apply(
        self,
        logits: Float[Tensor, "rows v"],
        total: Float[Tensor, "rows 1"],
        length: int | Int[Tensor, " rows"],
        last: Bool[Tensor, " rows"] | None,
    ) -> None:
        """Leave −∞ to the tokens that may not come at place `length` (from 1 on), of all rows or
        of each.

        `total` is the log of the whole mass: with it as its logit, a token costs nothing. `last`
        are the rows that this place is the last one of, if any.
        """
        price = logits[:, self.end].clone() if self.at_limit == "end" else total[:, 0]
        if self.banned:
            logits[:, self.banned] = NEVER
        if self.shortest and (early := _where(length <= self.shortest)) is not None:
            logits[early, self.end] = NEVER
        if self.first is not None and (begin := _where(length == 1)) is not None:
            logits[begin] = NEVER
            logits[begin, self.first] = total[begin, 0]
        if last is not None and self.at_limit != "cut":
            logits[last] = NEVER
            logits[last, self.end] = price[last]

    def ends(
        self, tokens: Int[Tensor, "n w"], last: Bool[Tensor, " n"] | None
    ) -> Bool[Tensor, "n w"]:
        """Where nothing follows: at the end, and in last places."""
        ended = tokens == self.end
        return ended if last is None else ended | last[:, None]


def _where(rows: Bool[Tensor, " rows"] | bool) -> Tensor | slice | None:
    """An index of the rows for which something holds; None where it holds for none."""
    if isinstance(rows, Tensor):
        return rows
    return slice(None) if rows else None


@dataclass
class _Search(Hypotheses):
    """The state of a search over n sentences with k beams; `home` is a sentence's place."""

    home: Int[Tensor, " n"]

    def keep(self, sentences: Int[Tensor, " kept"]) -> None:
        for name, value in vars(self).items():
            setattr(self, name, value[sentences])


class BeamSearch:
    """Searches with given settings and special tokens."""

    def __init__(
        self,
        decode: Decode,
        *,
        start: int | Int[Tensor, " n"],
        end: int,
        banned: Sequence[int] = (),
        n_best: int | None = None,
    ) -> None:
        """`start` is what every text begins with, or for each the last token of its beginning."""
        decode.refuse_best_first()
        self.beam, self.alpha, self.penalty = decode.beam, decode.length_penalty, decode.penalty
        # The rules of stopping speak of several hypotheses: a single one ends and is done.
        self.stopping: Stopping = decode.stopping if decode.beam > 1 else "beam-ended"
        self.n_best = min(n_best or decode.beam, decode.beam)
        self.start, self.end = start, end
        self.allowed = Allowed(decode, end, banned)

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that a search hangs on, but for where it begins."""
        stops = self.stopping, self.n_best, *self.allowed.settings
        return self.beam, self.alpha, self.penalty, *stops

    @torch.no_grad()
    def __call__(self, stepper: Stepper, limits: Int[Tensor, " n"]) -> list[list[Hypothesis]]:
        """For each sentence its hypotheses, best first.

        `stepper` begins with one row a sentence, and goes on with `beam` of them.
        """
        search = self._begin(limits)
        results: list[list[Hypothesis]] = [[] for _ in limits]
        last_places = set(limits.tolist())
        length = 0
        while len(search.home):
            length += 1
            logits = self._step(stepper, search, length)
            last = search.limits == length if length in last_places else None
            rows = self._extend(search, logits, length, last)
            if length == 1:
                rows = rows // self.beam
            done = self._done(search, length)
            # A done sentence is frozen at once, whenever its neighbours let it leave the batch.
            search.alive_log.masked_fill_(done[:, None], NEVER)
            # Shrinking the batch costs a copy of the cache: wait until it pays.
            if bool(done.any()) and (SMALLER * int(done.sum()) >= len(done) or bool(done.all())):
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
        start = torch.as_tensor(self.start, device=device).expand(n)
        # One living hypothesis a sentence; its copies cannot win until it has spread.
        alive_log = torch.full((n, k), NEVER, device=device)
        alive_log[:, 0] = 0.0
        return _Search(
            home=torch.arange(n, device=device),
            limits=limits,
            alive=repeat(start, "n -> n k 1", k=k),
            alive_log=alive_log,
            ended=torch.zeros(n, k, int(limits.max()), dtype=torch.long, device=device),
            ended_log=torch.full((n, k), NEVER, device=device),
            ended_score=torch.full((n, k), NEVER, device=device),
            ended_length=torch.zeros(n, k, dtype=torch.long, device=device),
        )

    def _extend(
        self,
        search: _Search,
        logits: Float[Tensor, "rows v"],
        length: int,
        last: Bool[Tensor, " n"] | None,
    ) -> Int[Tensor, " rows"]:
        """Grow every hypothesis by its best tokens; gives the rows that live on."""
        k = self.beam
        total = log_mass(logits)
        last_rows = None if last is None else last.repeat_interleave(k)
        self.allowed.apply(logits, total, length, last_rows)
        log, parents, tokens = continuations(search.alive_log, logits, total)
        grown = torch.cat([take(search.alive, parents), tokens[..., None]], dim=-1)
        ending = self.allowed.ends(tokens, last)
        self._end(search, grown, log.masked_fill(~in_beam(ending, k), NEVER), length)
        living, order = foremost(log.masked_fill(ending, NEVER), k)
        search.alive_log = living
        search.alive = take(grown, order)
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
        score = log / self.lp(length)
        room = search.ended.shape[2]
        new = torch.nn.functional.pad(grown[..., 1:], (0, room - length))
        scores, order = foremost(torch.cat([search.ended_score, score], 1), self.beam)
        search.ended_score = scores
        search.ended = take(torch.cat([search.ended, new], 1), order)
        search.ended_log = torch.cat([search.ended_log, log], 1).gather(1, order)
        lengths = length - (grown[..., -1] == self.end).long()
        search.ended_length = torch.cat([search.ended_length, lengths], 1).gather(1, order)

    def lp(self, length: Tensor | int) -> Tensor | float:
        return length_penalty(length, self.alpha, self.penalty)

    def _done(self, search: _Search, length: int) -> Bool[Tensor, " n"]:
        """The greatest lp to come is that at the limit or, if lp falls, that of the next token."""
        greatest = self.lp(search.limits if self.alpha >= 0 else length + 1)
        return search.done(length, self.stopping, self.n_best, self.lp(length), greatest)

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


def _rows_of(sentences: Int[Tensor, " kept"], beam: int) -> Int[Tensor, " rows"]:
    beams = torch.arange(beam, device=sentences.device)
    return rearrange(sentences[:, None] * beam + beams, "n k -> (n k)")
