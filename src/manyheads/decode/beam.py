"""Beam search over a batch of sentences, all of it in tensors.

A hypothesis y is ranked by log P(y) / lp(y), where |y| counts its end. A sentence is done when its
stopping rule says so, or earlier when no living hypothesis can still come among the n best that
are wanted. Its result does not depend on the other sentences of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.config import Between, Count, Natural, NonNegative, Renamed
from manyheads.data.translation import Frame
from manyheads.decode.constraints import NEVER, LogitsConstraints
from manyheads.errors import UserError
from manyheads.ops import logsumexp, topk
from manyheads.tokenizer.tokenizer import Tokenizer

# Settings that are a token, and the tokenizer's tokens that are never generated.
TOKENS = ("forced_bos", "start", "end", "source_start")
NEVER_GENERATED = ("pad", "start", "unknown", "mask", "separator", "classify")

SHRINK = 8  # a batch shrinks when one of so many sentences is done
CHECK_EVERY = 16  # steps between two checks whether all is done on a GPU; each waits for it
CPU_TOKENS, GPU_TOKENS = 4096, 32768  # default tokens of a batch
BLOCK = 64  # tokens of which a CPU sorts only those of the best blocks
LARGE_VOCABULARY = 1024  # from which that pays

MAX_BEAM = 1000  # the memory of a search grows with its square

Penalty = Literal["gnmt", "length"]
Stopping = Literal["early", "heuristic", "exact"]
# So far as the penalty of a long text is a number in float32.
PENALTIES: dict[Penalty, tuple[int, int]] = {"gnmt": (0, 10), "length": (-5, 5)}


@dataclass(frozen=True, kw_only=True)
class Decode:
    """How a trained model generates. Beam 1 is greedy search, whatever penalty and stopping are.

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

    RENAMED: ClassVar[dict[str, str]] = {
        "shortest": "min_length",
        "longest_ratio": "max_length_ratio",
        "longest_extra": "max_length_extra",
        "first": "forced_bos",
        "banned": "suppress_tokens",
        "validate_sentences": "bleu_sentences",
    }

    def __post_init__(self) -> None:
        least, most = PENALTIES[self.penalty]
        if not least <= self.length_penalty <= most:
            raise UserError(
                f"decode.length_penalty={self.length_penalty} must be from {least} to {most} "
                f"with decode.penalty={self.penalty}"
            )

    @property
    def read_at_once(self) -> int:
        """Tokens of a batch in which every token has its logits."""
        return self.batch_tokens or CPU_TOKENS

    def written_at_once(self, device: torch.device) -> int:
        """Tokens of a batch in which only the newest token of a row has logits."""
        most = GPU_TOKENS if device.type == "cuda" else CPU_TOKENS
        return self.batch_tokens or most

    def limit(self, source_length: int, max_length: int) -> int:
        """The most tokens a translation may have, its end included."""
        by_source = int(min(max_length, self.max_length_ratio * source_length))
        return min(max_length, by_source + self.max_length_extra)


@dataclass(frozen=True)
class Hypothesis:
    """Tokens without start and end, log P, and the score by which it was ranked."""

    tokens: list[int]
    log_probability: float
    score: float


@runtime_checkable
class DecoderSession(Protocol):
    """A model in the middle of decoding n sentences with k hypotheses each.

    Until the first `reorder` the hypotheses of a sentence are one.
    """

    def step(self, tokens: Int[Tensor, "n k"]) -> Float[Tensor, "n k v"]:
        """Logits of the token after the newest one of each hypothesis."""

    def reorder(self, parents: Int[Tensor, "n k"]) -> None:
        """Continue with these hypotheses of each sentence."""

    def keep_sentences(self, sentences: Int[Tensor, " kept"]) -> None:
        """Forget the other sentences."""


def length_penalty(
    length: Tensor | int | float, alpha: float, penalty: Penalty = "gnmt"
) -> Tensor | float:
    """((5 + |y|) / 6)^α of the GNMT paper, or |y|^α."""
    return ((5.0 + length) / 6.0 if penalty == "gnmt" else length) ** alpha


def check_every(device: torch.device) -> int:
    """Steps between two checks whether all texts are done."""
    return CHECK_EVERY if device.type == "cuda" else 1


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
    def own(self) -> bool:
        """True if texts begin and end with the tokenizer's own tokens, as in training here."""
        return {self.decode.start, self.decode.end, self.decode.source_start} == {None}

    @property
    def banned(self) -> list[int]:
        """Tokens that are never generated: by default the special ones that exist."""
        if self.decode.suppress_tokens is not None:
            return list(self.decode.suppress_tokens)
        return [token for name in NEVER_GENERATED for token in self._known(name)]

    @property
    def padding(self) -> int:
        """Fills up shorter rows; never attended to, so that the end does where there is none."""
        return next(iter(self._known("pad")), self.end)

    @property
    def frame(self) -> Frame:
        """The tokens around texts, in training as in use."""
        return Frame(self.start, self.end, self.padding, self.decode.source_start)

    def source(self, ids: list[int]) -> list[int]:
        """A source as an encoder reads it."""
        return Frame(0, self.end, 0, self.decode.source_start).source(ids)

    def constraints(self, device: torch.device) -> LogitsConstraints:
        """Which tokens may be generated."""
        return LogitsConstraints(self.decode, self.end, self.banned, device)

    def _known(self, name: str) -> list[int]:
        try:
            return [getattr(self.tokenizer, name)]
        except UserError:  # files from elsewhere do not have them all
            return []

    def check(self, vocabulary: int) -> None:
        """Refuse tokens of the settings that the model does not have."""
        named = [(name, getattr(self.decode, name)) for name in TOKENS]
        named += [("suppress_tokens", token) for token in self.decode.suppress_tokens or ()]
        for name, token in named:
            if token is not None and not 0 <= token < vocabulary:
                raise UserError(
                    f"decode.{name}={token} is no token of this model: it has 0 to {vocabulary - 1}"
                )


class Candidates(NamedTuple):
    """The continuations that one step weighed, best first; `living` is an index of them."""

    log: Float[Tensor, "n w"]
    parents: Int[Tensor, "n w"]
    tokens: Int[Tensor, "n w"]
    ending: Bool[Tensor, "n w"]
    living: Int[Tensor, "n k"]


Step = Callable[[bool], Candidates | None]  # told whether some row is forced to one token
Observer = Callable[[int, Candidates], None]


class BeamSearch:
    """Beam search with given settings."""

    def __init__(
        self, decode: Decode, constraints: LogitsConstraints, n_best: int | None = None
    ) -> None:
        self.beam, self.alpha, self.penalty = decode.beam, decode.length_penalty, decode.penalty
        # Stopping rules compare hypotheses: greedy search stops when its only one ends.
        self.stopping: Stopping = decode.stopping if decode.beam > 1 else "early"
        self.n_best = min(n_best or decode.beam, decode.beam)
        self.constraints = constraints
        # All that a search depends on, except where it begins.
        self.settings: tuple[Any, ...] = (
            self.beam,
            self.alpha,
            self.penalty,
            self.stopping,
            self.n_best,
            *constraints.settings,
        )

    def lp(self, length: Tensor | int) -> Tensor | float:
        return length_penalty(length, self.alpha, self.penalty)

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
        included. `observe` sees the candidates of each length.
        """
        beams = Beams(self, len(limits), int(limits.max()), limits.device)
        beams.begin(start, limits)
        return beams.run(partial(beams.step, session), session, observe)


class Beams:
    """The state of a search over n sentences, in tensors of fixed shape.

    Living hypotheses are a trellis: the token and the parent of each beam at each length. Ended
    ones are the k best so far, by where they leave it.
    """

    def __init__(
        self, search: BeamSearch, sentences: int, max_length: int, device: torch.device
    ) -> None:
        self.search, n, k = search, sentences, search.beam
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self.limits = self.length.new_zeros(n)
        self.newest = self.length.new_zeros(n, k)
        self.origin = self.length.new_zeros(n, k)  # the parents of the newest tokens
        self.alive_log = torch.full((n, k), NEVER, device=device)
        self.tokens = self.length.new_zeros(n, max_length, k)
        self.parents = self.length.new_zeros(n, max_length, k)
        self.ended_log, self.ended_score = (torch.full_like(self.alive_log, NEVER) for _ in "ls")
        # Where ended hypotheses leave the trellis: length, parent and token [n k 3].
        self.ended = self.length.new_zeros(n, k, 3)
        # By the host in float64, for every length there will be.
        lp = [float(search.lp(max(1, length))) for length in range(max_length + 2)]
        self.lp = torch.tensor(lp, device=device)
        self.lp_at_limit = torch.ones(n, device=device)
        self.done = torch.zeros(n, dtype=torch.bool, device=device)

    def begin(self, start: int | Int[Tensor, " n"], limits: Int[Tensor, " n"]) -> None:
        """A new batch; sentences beyond it have no token to generate."""
        n, most = len(limits), limits.tolist()
        self.sentences, self.longest = n, max(most)
        self.forced = self.search.constraints.forced_lengths(most)
        self.length.zero_()
        self.limits.zero_()
        self.limits[:n] = limits
        self.newest[:n] = torch.as_tensor(start, device=limits.device).expand(n)[:, None]
        for log in (self.alive_log, self.ended_log, self.ended_score):
            log.fill_(NEVER)
        # One living hypothesis a sentence; its copies cannot win until it has spread.
        self.alive_log[:n, 0] = 0.0
        self.lp_at_limit.copy_(torch.as_tensor(self.search.lp(self.limits.clamp(min=1))))

    def step(self, session: DecoderSession, forces: bool = True) -> Candidates:
        """Continue every hypothesis by its best tokens; no value of the device is read."""
        search, k = self.search, self.search.beam
        position = self.length.clone()
        self.length += 1
        logits = rearrange(session.step(self.newest), "n k v -> (n k) v")
        logits = search.constraints.prepare(logits)
        total = logsumexp(logits)
        last = self.limits == self.length
        rows = repeat(last, "n -> (n k)", k=k) if search.constraints.forces_end else None
        search.constraints.apply(logits, self.length, rows, total, forces=forces)
        log, parents, tokens = continuations(self.alive_log, logits, total)
        ending = (tokens == search.constraints.end) | last[:, None]
        # Twice as many candidates as beams: even if k of them end, k live on. An ending beyond
        # the first k would not have been kept.
        now = self.lp.index_select(0, self.length)
        ended_log = log[:, :k].masked_fill(~ending[:, :k], NEVER)
        self._end(ended_log, parents[:, :k], tokens[:, :k], now)
        alive_log, living = topk(log.masked_fill(ending, NEVER), k)
        self.alive_log.copy_(alive_log)
        self.newest.copy_(tokens.gather(1, living))
        self.origin.copy_(parents.gather(1, living))
        self.tokens.index_copy_(1, position, self.newest[:, None])
        self.parents.index_copy_(1, position, self.origin[:, None])
        self.done.copy_(self._is_done(now))
        self.alive_log.masked_fill_(self.done[:, None], NEVER)
        return Candidates(log, parents, tokens, ending, living)

    def _end(
        self,
        log: Float[Tensor, "n k"],
        parents: Int[Tensor, "n k"],
        tokens: Int[Tensor, "n k"],
        now: Float[Tensor, " 1"],
    ) -> None:
        """Let new endings compete with the old ones for the k best; `now` is lp at this length."""
        best, order = topk(torch.cat([self.ended_score, log / now], 1), self.search.beam)
        self.ended_score.copy_(best)
        self.ended_log.copy_(torch.cat([self.ended_log, log], 1).gather(1, order))
        leaves = torch.stack([self.length.expand_as(parents), parents, tokens], -1)
        index = repeat(order, "n k -> n k 3")
        self.ended.copy_(torch.cat([self.ended, leaves], 1).gather(1, index))

    def _is_done(self, now: Float[Tensor, " 1"]) -> Bool[Tensor, " n"]:
        """The stopping rule is met, or the n best are decided, or the limit is reached.

        log P only falls, so that a living hypothesis can come to no better score than its log P
        now over the greatest lp to come: that at the limit or, if lp falls, that of the next token.
        """
        search, living = self.search, self.alive_log.amax(dim=1)
        greatest = self.lp_at_limit
        if search.alpha < 0:
            greatest = self.lp.index_select(0, self.length + 1)
        decided = living / greatest <= self.ended_score[:, search.n_best - 1]
        done = decided | (self.limits <= self.length)
        worst = self.ended_score[:, -1]
        if search.stopping == "early":
            return done | (worst > NEVER)
        if search.stopping == "heuristic":
            return done | ((worst > NEVER) & (living / now <= worst))
        return done

    @torch.no_grad()
    def run(
        self,
        step: Step,
        session: DecoderSession | None = None,
        observe: Observer | None = None,
    ) -> list[list[Hypothesis]]:
        """Step until every sentence is done.

        With `session`, hypotheses are reordered here and not by the step, and done sentences leave
        the batch when that pays.
        """
        every = check_every(self.length.device)
        results: list[list[Hypothesis]] = [[] for _ in range(self.sentences)]
        numbers = list(range(self.sentences))  # of the sentences that are left
        for length in range(1, self.longest + 1):
            candidates = step(length in self.forced)
            if observe is not None and candidates is not None:
                observe(length, candidates)
            if length % every == 0:
                done = self.done.tolist()
                if all(done):
                    break
                if session is not None and SHRINK * sum(done) >= len(done):
                    gone = [row for row, is_done in enumerate(done) if is_done]
                    for row, found in zip(gone, self._hypotheses(gone, length), strict=True):
                        results[numbers[row]] = found
                    numbers = [n for n, is_done in zip(numbers, done, strict=True) if not is_done]
                    left = (~self.done).nonzero()[:, 0]
                    session.keep_sentences(left)
                    self._keep(left)
            if session is not None and self.search.beam > 1:
                session.reorder(self.origin)
        rows = list(range(len(numbers)))
        for number, found in zip(numbers, self._hypotheses(rows, length), strict=True):
            results[number] = found
        return results

    def _keep(self, sentences: Int[Tensor, " kept"]) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in ("length", "lp"):
                setattr(self, name, value[sentences])

    def _hypotheses(self, rows: list[int], length: int) -> list[list[Hypothesis]]:
        """The ended hypotheses of some sentences, followed back through the trellis."""
        tokens, parents = (x[rows, :length].cpu().numpy() for x in (self.tokens, self.parents))
        ended = self.ended[rows].cpu().numpy()
        at, beam, last = ended[..., 0], ended[..., 1], ended[..., 2]
        texts = np.zeros((*at.shape, length), dtype=np.int64)
        for position in range(length - 2, -1, -1):  # all hypotheses at once
            before = np.take_along_axis(tokens[:, position], beam, 1)
            texts[..., position] = np.where(position < at - 1, before, 0)
            origin = np.take_along_axis(parents[:, position], beam, 1)
            beam = np.where(position < at - 1, origin, beam)
        logs, scores = (x[rows].tolist() for x in (self.ended_log, self.ended_score))
        results: list[list[Hypothesis]] = []
        for row, text in enumerate(texts.tolist()):
            found = []
            for k, score in enumerate(scores[row]):
                if score > NEVER:
                    ids = text[k][: at[row, k] - 1]
                    if last[row, k] != self.search.constraints.end:
                        ids.append(int(last[row, k]))
                    found.append(Hypothesis(ids, logs[row][k], score))
            results.append(found)
        return results


def continuations(
    alive_log: Float[Tensor, "n k"],
    logits: Float[Tensor, "rows v"],
    total: Float[Tensor, "rows 1"],
) -> tuple[Float[Tensor, "n w"], Int[Tensor, "n w"], Int[Tensor, "n w"]]:
    """The 2k best of each sentence, in order: their log P, their parents, their tokens."""
    k = alive_log.shape[1]
    most = 2 * k
    if logits.device.type == "cpu" and logits.shape[-1] >= LARGE_VOCABULARY:
        return _among_blocks(alive_log, logits, total, most)
    wide = min(most, logits.shape[-1])
    best, tokens = topk(logits, wide)
    log = rearrange(alive_log, "n k -> (n k) 1") + (best - total)
    log = rearrange(log, "(n k) w -> n (k w)", k=k)
    log, order = topk(log, min(most, log.shape[-1]))
    tokens = rearrange(tokens, "(n k) w -> n (k w)", k=k).gather(-1, order)
    return log, order // wide, tokens


def _among_blocks(
    alive_log: Float[Tensor, "n k"],
    logits: Float[Tensor, "rows v"],
    total: Float[Tensor, "rows 1"],
    wide: int,
) -> tuple[Float[Tensor, "n w"], Int[Tensor, "n w"], Int[Tensor, "n w"]]:
    """The same, where the greatest of a block is found many times as fast as the order of a row.

    The w best tokens are in the w blocks whose best are best, or in what no block has room for.
    """
    (n, k), blocks = alive_log.shape, logits.shape[-1] // BLOCK
    before, cut = alive_log.view(n * k, 1), blocks * BLOCK
    whole = logits[:, :cut].unflatten(1, (blocks, BLOCK))
    tallest = (before + (whole.amax(-1) - total)).view(n, k * blocks)
    chosen = tallest.topk(min(wide, k * blocks), sorted=False).indices
    parents, block = chosen // blocks, chosen % blocks
    rows = torch.arange(n)[:, None] * k + parents
    inside = before[rows] + (whole[rows, block] - total[rows])
    beyond = before + (logits[:, cut:] - total)
    log, order = torch.cat([inside.view(n, -1), beyond.view(n, -1)], 1).topk(wide)
    left = logits.shape[-1] - cut
    tokens = (block[..., None] * BLOCK + torch.arange(BLOCK)).view(n, -1)
    tokens = torch.cat([tokens, torch.arange(cut, cut + left).repeat(n, k)], 1)
    others = torch.arange(k).repeat_interleave(left).expand(n, -1)
    parents = torch.cat([parents.repeat_interleave(BLOCK, 1), others], 1)
    return log, parents.gather(1, order), tokens.gather(1, order)
