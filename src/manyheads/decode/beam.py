"""Beam search over a batch of sentences, with its settings and its constraints on tokens.

A hypothesis y is ranked by log P(y) / lp(y), where |y| includes the end token. A sentence is done
when its stopping rule says so, or as soon as no living hypothesis can reach the n best. Results do
not depend on the rest of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.config import Between, Count, Natural, NonNegative, Renamed
from manyheads.data.translation import Frame
from manyheads.errors import UserError
from manyheads.ops import has_fused_topk, logsumexp, topk
from manyheads.tokenizer.tokenizer import Tokenizer

NEVER = float("-inf")  # the logit, or log P, of what cannot be generated

# Settings that name a token; and the tokenizer's special tokens that are never generated.
TOKEN_SETTINGS = ("forced_bos", "start", "end", "source_start")
NEVER_GENERATED = ("pad", "start", "unknown", "mask", "separator", "classify")

SHRINK = 8  # finished sentences leave the batch when they are at least 1/8 of it
CHECK_EVERY = 16  # steps on a GPU between two checks for the end; each check waits for the GPU
CPU_TOKENS, GPU_TOKENS = 4096, 32768  # default number of tokens in a batch
MAX_BEAM = 1000  # the memory of a search grows with the square of the beam

Penalty = Literal["gnmt", "length"]
Stopping = Literal["early", "heuristic", "exact"]
# Ranges of α in which the penalty of a long text is finite in float32.
PENALTIES: dict[Penalty, tuple[int, int]] = {"gnmt": (0, 10), "length": (-5, 5)}

Logits = Float[Tensor, "rows v"]
Totals = Float[Tensor, "rows 1"]
Parents = Int[Tensor, "n k"]


# --- Settings -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How a trained model generates. Beam 1 is greedy search; penalty and stopping do not apply.

    `stopping`: a sentence is done when `beam` hypotheses have ended ("early"); or when, with as
    many ended, no living one would be better than the worst of them if it ended at the present
    length ("heuristic"); or when none can become better at any length ("exact"). Hugging Face
    calls these early_stopping=True, False and "never".
    """

    beam: Annotated[int, Between(1, MAX_BEAM), "Beam width; 1 is greedy search"] = 4
    length_penalty: Annotated[float, "α of the length penalty: more favours longer texts"] = 0.6
    penalty: Annotated[Penalty, "Scores are divided by ((5 + length) / 6)^α (gnmt) or length^α"] = (
        "gnmt"
    )
    stopping: Annotated[
        Stopping,
        Renamed(
            beam_ended="early",
            none_better_now="heuristic",
            none_better_ever="exact",
            true="early",
            false="heuristic",
            never="exact",
        ),
        "When a beam search stops (Hugging Face: early_stopping=true|false|never)",
    ] = "early"
    at_limit: Annotated[
        Literal["force-eos", "force-eos-free", "truncate"],
        Renamed(end="force-eos", free_end="force-eos-free", cut="truncate"),
        "At the length limit: force the end token, the same without its cost, or truncate",
    ] = "force-eos"
    min_length: Annotated[Natural, "Fewest tokens before the end"] = 0
    max_length_ratio: Annotated[NonNegative, "Length limit: so many times the source length"] = 2.0
    max_length_extra: Annotated[Count, "Length limit: tokens added to that"] = 20
    forced_bos: Annotated[Natural | None, "Token that every text begins with, at no cost"] = None
    start: Annotated[Natural | None, "Start token, if not the tokenizer's"] = None
    end: Annotated[Natural | None, "End token, if not the tokenizer's"] = None
    suppress_tokens: Annotated[
        tuple[int, ...] | None, "Tokens never generated, if not the tokenizer's special tokens"
    ] = None
    source_start: Annotated[Natural | None, "Token before every source text"] = None
    batch_tokens: Annotated[Count | None, "Tokens generated at once, all hypotheses counted"] = None
    bleu_sentences: Annotated[Natural, "Validation sentences for BLEU during training"] = 200

    REMOVED: ClassVar[dict[str, tuple[object, ...]]] = {"order": ("length", "best-first")}
    RENAMED: ClassVar[dict[str, str]] = {
        "shortest": "min_length",
        "longest_ratio": "max_length_ratio",
        "longest_extra": "max_length_extra",
        "first": "forced_bos",
        "banned": "suppress_tokens",
        "validate_sentences": "bleu_sentences",
    }

    def __post_init__(self) -> None:
        low, high = PENALTIES[self.penalty]
        if not low <= self.length_penalty <= high:
            raise UserError(
                f"decode.length_penalty={self.length_penalty} must be from {low} to {high} "
                f"with decode.penalty={self.penalty}"
            )

    @property
    def forward_tokens(self) -> int:
        """Tokens of a batch in which every token has logits."""
        return self.batch_tokens or CPU_TOKENS

    def decode_tokens(self, device: torch.device) -> int:
        """Tokens of a batch in which only the newest token of a row has logits."""
        return self.batch_tokens or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)

    def limit(self, source_length: int, max_length: int) -> int:
        """The most tokens of a translation, its end included."""
        by_source = int(min(max_length, self.max_length_ratio * source_length))
        return min(max_length, by_source + self.max_length_extra)


def length_penalty(
    length: Tensor | int | float, alpha: float, penalty: Penalty = "gnmt"
) -> Tensor | float:
    """lp(y) = ((5 + |y|) / 6)^α of the GNMT paper, or |y|^α."""
    return ((5.0 + length) / 6.0 if penalty == "gnmt" else length) ** alpha


def check_every(device: torch.device) -> int:
    """Steps between two checks whether all texts are done."""
    return CHECK_EVERY if device.type == "cuda" else 1


# --- Tokens that may be generated -----------------------------------------------------------------


class LogitsConstraints:
    """Sets logits to −∞: those of suppressed tokens, of an early end, of all but a forced token.

    Positions are counted from 1 and are tensors on the device.
    """

    def __init__(
        self, decode: Decode, end: int, suppressed: Sequence[int], device: torch.device
    ) -> None:
        self.end, self.first = end, decode.forced_bos
        self.min_length, self.at_limit = decode.min_length, decode.at_limit
        # The end stays possible, also if a tokenizer uses one token as separator and end.
        tokens = [token for token in suppressed if token != end]
        self.suppressed = torch.tensor(tokens, dtype=torch.long, device=device)

    def prepare(self, logits: Logits) -> Logits:
        """Logits in float32, except where kernels take lower precision and no total is stored."""
        stores_total = self.first is not None or self.at_limit == "force-eos-free"
        return logits.float() if stores_total or not has_fused_topk(logits) else logits

    def apply(
        self,
        logits: Logits,
        length: Int[Tensor, " texts"],
        last: Bool[Tensor, " n"] | None = None,
        total: Totals | None = None,
    ) -> None:
        """Change, in place, the logits of position `length`; in texts `last` it is the limit.

        Each text has as many rows; one length is that of all texts.

        A forced token is free: its logit becomes `total`, log Σ exp of its row. Without `total`
        the logits are only good for choosing.
        """
        free = logits.new_zeros(len(logits)) if total is None else total[:, 0]
        end_logits = logits[:, self.end].clone() if self.at_limit == "force-eos" else free
        if len(self.suppressed):
            logits.index_fill_(1, self.suppressed, NEVER)
        if self.min_length:
            is_short = _by_row(length <= self.min_length, logits)
            logits[:, self.end].masked_fill_(is_short, NEVER)
        if self.first is not None:
            self._force(logits, _by_row(length == 1, logits), self.first, free)
        if last is not None and self.at_limit != "truncate":
            self._force(logits, _by_row(last, logits), self.end, end_logits)

    @staticmethod
    def _force(
        logits: Logits, rows: Bool[Tensor, " rows"], token: int, value: Float[Tensor, " rows"]
    ) -> None:
        logits.masked_fill_(rows[:, None], NEVER)
        logits[:, token] = torch.where(rows, value.to(logits.dtype), logits[:, token])


def _by_row(texts: Bool[Tensor, " n"], logits: Logits) -> Bool[Tensor, " rows"]:
    return repeat(texts, "n -> (n k)", k=len(logits) // len(texts))


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model: those of `decode`, else the tokenizer's."""

    tokenizer: Tokenizer
    decode: Decode

    @property
    def start(self) -> int:
        return self.tokenizer.start if self.decode.start is None else self.decode.start

    @property
    def end(self) -> int:
        return self.tokenizer.end if self.decode.end is None else self.decode.end

    @property
    def are_default(self) -> bool:
        """True if texts begin and end with the tokenizer's tokens, as in training here."""
        return {self.decode.start, self.decode.end, self.decode.source_start} == {None}

    @property
    def suppressed(self) -> list[int]:
        """Tokens that are never generated: by default the special ones that exist."""
        if self.decode.suppress_tokens is not None:
            return list(self.decode.suppress_tokens)
        tokens = (self._find(name) for name in NEVER_GENERATED)
        return [token for token in tokens if token is not None]

    @property
    def padding(self) -> int:
        """Fills shorter rows; nothing attends to it, so the end token serves if there is none."""
        pad = self._find("pad")
        return self.end if pad is None else pad

    @property
    def frame(self) -> Frame:
        """The tokens around texts, in training and in decoding."""
        return Frame(self.start, self.end, self.padding, self.decode.source_start)

    def source(self, ids: list[int]) -> list[int]:
        """A source as an encoder gets it; a model without a start token has one too."""
        return Frame(0, self.end, 0, self.decode.source_start).source(ids)

    def constraints(self, device: torch.device) -> LogitsConstraints:
        return LogitsConstraints(self.decode, self.end, self.suppressed, device)

    def check(self, vocabulary: int) -> None:
        """Refuse tokens in the settings that the model does not have."""
        settings = [(name, getattr(self.decode, name)) for name in TOKEN_SETTINGS]
        settings += [("suppress_tokens", token) for token in self.decode.suppress_tokens or ()]
        for name, token in settings:
            if token is not None and not 0 <= token < vocabulary:
                raise UserError(
                    f"decode.{name}={token} is not a token of this model (0 to {vocabulary - 1})"
                )

    def _find(self, name: str) -> int | None:
        try:
            return int(getattr(self.tokenizer, name))
        except UserError:  # imported tokenizers may lack some
            return None


# --- Search ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hypothesis:
    """Tokens without start and end, log P, and the score by which it is ranked."""

    tokens: list[int]
    log_probability: float
    score: float


@runtime_checkable
class DecoderSession(Protocol):
    """A model in the middle of decoding n sentences with k hypotheses each.

    Until the first `reorder` all hypotheses of a sentence are the same.
    """

    def step(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        """Logits of the token after the newest one of each hypothesis."""

    def reorder(self, parents: Parents) -> None:
        """Continue with these hypotheses of each sentence."""

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        """Forget the other sentences."""


class Candidates(NamedTuple):
    """The continuations that one step compared, best first; `living` indexes those kept."""

    log: Float[Tensor, "n w"]
    parents: Int[Tensor, "n w"]
    tokens: Int[Tensor, "n w"]
    ending: Bool[Tensor, "n w"]
    living: Int[Tensor, "n k"]


Step = Callable[[], Candidates | None]
Forget = Callable[[Int[Tensor, " kept"]], None]
Observer = Callable[[int, Candidates], None]


class BeamSearch:
    """Beam search with fixed settings; calling it searches one batch."""

    def __init__(
        self, decode: Decode, constraints: LogitsConstraints, n_best: int | None = None
    ) -> None:
        self.decode, self.constraints, self.beam = decode, constraints, decode.beam
        # Stopping rules compare hypotheses: greedy search stops when its only one ends.
        self.stopping: Stopping = decode.stopping if decode.beam > 1 else "early"
        self.n_best = min(n_best or decode.beam, decode.beam)

    def lp(self, length: Tensor | int) -> Tensor | float:
        return length_penalty(length, self.decode.length_penalty, self.decode.penalty)

    @torch.no_grad()
    def __call__(
        self,
        session: DecoderSession,
        start: int | Int[Tensor, " n"],
        limits: Int[Tensor, " n"],
        observe: Observer | None = None,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence, best first.

        `start` is the token before the first generated one, `limits` the most tokens, the end
        included. `observe` gets the candidates of each length.
        """
        beams = Beams(self, len(limits), int(limits.max()), limits.device)
        beams.begin(start, limits)
        return beams.run(partial(beams.step, session), session.keep_sentences, observe)


class Beams:
    """The state of a search over n sentences, in tensors of fixed shape.

    Living hypotheses form a trellis: the token and the parent of each beam at each length. Ended
    ones are the k best so far, stored as the point where they leave the trellis. Each sentence has
    its own length, so that others can join a running search (`join`).
    """

    def __init__(
        self, search: BeamSearch, sentences: int, max_length: int, device: torch.device
    ) -> None:
        self.search, n, k = search, sentences, search.beam
        self.length = torch.zeros(n, dtype=torch.long, device=device)
        self.limits = self.length.new_zeros(n)
        self.newest = self.length.new_zeros(n, k)
        self.origin = self.length.new_zeros(n, k)  # the parents of the newest tokens
        self.alive_log = torch.full((n, k), NEVER, device=device)
        # By length, from 1 on.
        self.tokens = self.length.new_zeros(n, max_length + 1, k)
        self.parents = torch.zeros_like(self.tokens)
        self.ended_log, self.ended_score = (torch.full_like(self.alive_log, NEVER) for _ in "ls")
        # Where ended hypotheses leave the trellis: length, parent and token [n k 3].
        self.ended = self.length.new_zeros(n, k, 3)
        # Computed on the host in float64, for every length that can occur.
        lp = [float(search.lp(max(1, length))) for length in range(max_length + 2)]
        self.lp = torch.tensor(lp, device=device)
        self.lp_at_limit = torch.ones(n, device=device)
        self.done = torch.zeros(n, dtype=torch.bool, device=device)

    def begin(self, start: int | Int[Tensor, " n"], limits: Int[Tensor, " n"]) -> None:
        """Start a batch; rows beyond it have limit 0 and generate nothing."""
        self.sentences = n = len(limits)
        self.longest = int(limits.max())
        self.length.zero_()
        self.limits.zero_()
        self.limits[:n] = limits
        self.newest[:n] = torch.as_tensor(start, device=limits.device).expand(n)[:, None]
        for log in (self.alive_log, self.ended_log, self.ended_score):
            log.fill_(NEVER)
        # One living hypothesis per sentence; its copies have log P = −∞ until they differ.
        self.alive_log[:n, 0] = 0.0
        self.lp_at_limit.copy_(torch.as_tensor(self.search.lp(self.limits.clamp(min=1))))

    def step(self, session: DecoderSession) -> Candidates:
        """Continue every hypothesis by its best tokens; never waits for a value of the device.

        On a GPU its time is the number of kernels, so results are written where they stay (`out`).
        """
        constraints, k = self.search.constraints, self.search.beam
        self.length += 1
        logits = constraints.prepare(session.step(self.newest).flatten(0, 1))
        total = logsumexp(logits)
        last = self.limits == self.length
        constraints.apply(logits, self.length, last, total)
        log, parents, tokens = continuations(self.alive_log, logits, total)
        ending = (tokens == constraints.end) | last[:, None]
        # There are 2k candidates: even if k of them end, k live on. An ending beyond the first k
        # is worse than all of them and is dropped.
        lp = self.lp.index_select(0, self.length)
        ended_log = torch.where(ending[:, :k], log[:, :k], NEVER)
        self._end(ended_log, parents[:, :k], tokens[:, :k], lp)
        alive_log, living = topk(log.masked_fill(ending, NEVER), k)
        self.alive_log.copy_(alive_log)
        torch.gather(tokens, 1, living, out=self.newest)
        torch.gather(parents, 1, living, out=self.origin)
        position = self.length[:, None, None].expand(-1, 1, k)
        self.tokens.scatter_(1, position, self.newest[:, None])
        self.parents.scatter_(1, position, self.origin[:, None])
        self._check_done(lp)
        self.alive_log.masked_fill_(self.done[:, None], NEVER)
        if k > 1:
            session.reorder(self.origin)
        return Candidates(log, parents, tokens, ending, living)

    def _end(
        self,
        log: Float[Tensor, "n k"],
        parents: Parents,
        tokens: Int[Tensor, "n k"],
        lp: Float[Tensor, " n"],
    ) -> None:
        """Keep the k best of the new and the earlier endings."""
        self.ended_score[:], order = topk(
            torch.cat([self.ended_score, log / lp[:, None]], 1), self.search.beam
        )
        torch.gather(torch.cat([self.ended_log, log], 1), 1, order, out=self.ended_log)
        leaves = torch.stack([self.length[:, None].expand_as(parents), parents, tokens], -1)
        index = repeat(order, "n k -> n k 3")
        torch.gather(torch.cat([self.ended, leaves], 1), 1, index, out=self.ended)

    def _check_done(self, lp: Float[Tensor, " n"]) -> None:
        """The stopping rule is met, or the n best are decided, or the limit is reached.

        log P only falls. So the best score that a living hypothesis can reach is its present log P
        over the largest lp to come: the one at the limit or, if α < 0, the one of the next token.
        """
        search, living = self.search, self.alive_log.amax(dim=1)
        largest_lp = self.lp_at_limit
        if search.decode.length_penalty < 0:
            largest_lp = self.lp.index_select(0, self.length + 1)
        decided = living / largest_lp <= self.ended_score[:, search.n_best - 1]
        torch.logical_or(decided, self.limits <= self.length, out=self.done)
        worst = self.ended_score[:, -1]
        if search.stopping == "early":
            self.done |= worst > NEVER
        elif search.stopping == "heuristic":
            self.done |= (worst > NEVER) & (living / lp <= worst)

    @torch.no_grad()
    def run(
        self, step: Step, forget: Forget | None = None, observe: Observer | None = None
    ) -> list[list[Hypothesis]]:
        """Step until every sentence is done.

        With `forget`, finished sentences leave the batch when that pays: it keeps the others.
        """
        every = check_every(self.length.device)
        results: list[list[Hypothesis]] = [[] for _ in range(self.sentences)]
        numbers = list(range(self.sentences))  # rows of the batch → sentences
        for length in range(1, self.longest + 1):
            candidates = step()
            if observe is not None and candidates is not None:
                observe(length, candidates)
            if length % every:
                continue
            done = self.done.tolist()
            if all(done):
                break
            if forget is not None and SHRINK * sum(done) >= len(done):
                gone, left = (x.nonzero()[:, 0] for x in (self.done, ~self.done))
                for row, hypotheses in zip(gone, self.hypotheses(gone, length), strict=True):
                    results[numbers[row]] = hypotheses
                numbers = [numbers[row] for row in left]
                forget(left)
                self.keep(left)
        for number, hypotheses in zip(
            numbers, self.hypotheses(slice(len(numbers)), length), strict=True
        ):
            results[number] = hypotheses
        return results

    def keep(self, sentences: Int[Tensor, " kept"]) -> None:
        """Forget the other sentences."""
        for name, value in self._by_sentence():
            setattr(self, name, value[sentences])

    def join(self, other: "Beams") -> None:
        """Add the sentences of another search with the same settings."""
        for name, value in self._by_sentence():
            pair = [value, getattr(other, name)]
            if name in ("tokens", "parents"):
                longest = max(x.shape[1] for x in pair)
                pair = [F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in pair]
            setattr(self, name, torch.cat(pair))
        self.lp = max(self.lp, other.lp, key=len)

    def _by_sentence(self) -> list[tuple[str, Tensor]]:
        """All tensors that have a row for each sentence."""
        values = vars(self).items()
        return [(name, x) for name, x in values if isinstance(x, Tensor) and name != "lp"]

    def hypotheses(
        self, rows: Int[Tensor, " some"] | slice, length: int
    ) -> Iterator[list[Hypothesis]]:
        """The n best ended hypotheses of some sentences, followed back through the trellis."""
        best, k = slice(self.search.n_best), self.search.beam
        trellis = (self.tokens[:, 1 : length + 1], self.parents[:, 1 : length + 1])
        tokens, parents, ended = (x[rows].cpu().numpy() for x in (*trellis, self.ended))
        logs, scores = (x[rows, best].tolist() for x in (self.ended_log, self.ended_score))
        size, beam, last = np.moveaxis(ended[:, best], -1, 0)
        # Flat indices of the trellis: where each text leaves it, then always its predecessor.
        # Before its first token a path has no meaning and is not read; its index may be negative.
        texts, lengths = np.arange(len(tokens))[:, None, None], np.arange(length)[:, None]
        predecessors = (texts * length + lengths - 1) * k + parents
        at = (texts[..., 0] * length + size.clip(1, length) - 2) * k + beam
        path = []
        for _ in range(length):
            path.append(at)
            at = predecessors.take(at)
        reverse = tokens.take(np.stack(path, -1))
        end = self.search.constraints.end
        for sentence in zip(
            *(x.tolist() for x in (reverse, size, last)), logs, scores, strict=True
        ):
            yield [
                Hypothesis(text[: size - 1][::-1] + ([] if last == end else [last]), log, score)
                for text, size, last, log, score in zip(*sentence, strict=True)
                if score > NEVER
            ]


def continuations(
    alive_log: Float[Tensor, "n k"], logits: Logits, total: Totals
) -> tuple[Float[Tensor, "n w"], Int[Tensor, "n w"], Int[Tensor, "n w"]]:
    """The 2k best continuations of each sentence, in order: log P, parents and tokens."""
    k = alive_log.shape[1]
    width = min(2 * k, logits.shape[-1])
    best, tokens = topk(logits, width)
    log = rearrange(alive_log, "n k -> (n k) 1") + (best - total)
    log = rearrange(log, "(n k) w -> n (k w)", k=k)
    log, order = topk(log, min(2 * k, log.shape[-1]))
    tokens = rearrange(tokens, "(n k) w -> n (k w)", k=k).gather(-1, order)
    return log, order // width, tokens
