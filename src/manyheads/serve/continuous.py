"""Continuous batching of language models: rows join and leave a running batch between two steps.

The scheduler has the queue, `CompletionBatch` the rows with their cache, and `Completions` decides
which requests may join. Rows of different lengths are padded on the left: row r has
`padding[r]` padding positions, its first token has position 0, and no token attends to the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.baselines.rnn import LanguageModel
from manyheads.decode.generate import Detokenizer, Generator
from manyheads.decode.kv_cache import KVCache, Lineage
from manyheads.decode.sample import Sample, Sampler, choose
from manyheads.loading import LoadedRun
from manyheads.models.gpt import Gpt
from manyheads.nn.attention import Dense, Fused, SelfAttention
from manyheads.nn.masks import AttentionMask, Rule
from manyheads.nn.shapes import PaddingMask
from manyheads.serve.scheduler import Bounds, Job, Take, Work, run_batch, take_none
from manyheads.web.responses import Problem

Prompts = Int[Tensor, "rows length"]
Rows = Int[Tensor, " rows"]


@dataclass(frozen=True)
class CompletionRequest:
    """A request: `n` continuations of each prompt, with at most `max_tokens` tokens.

    `logprobs` is how many alternatives to report for each token, None for no log-probabilities.
    """

    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: int
    sample: Sample
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    stream: bool = False

    @property
    def rows(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompt_length(self) -> int:
        return max(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True)
class TokenLogProb:
    """A token, its offset in the text, its log P, and the likeliest tokens with theirs."""

    token: int
    offset: int
    log_prob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Chunk:
    """New text of one row; the last chunk has the reason for the end in `finish`."""

    row: int
    text: str
    logprobs: list[TokenLogProb]
    tokens: int
    finish: str | None


class Row:
    """One continuation in a batch; `unfinished` are the active rows of its request."""

    def __init__(
        self,
        job: Job[CompletionRequest],
        number: int,
        unfinished: set[int],
        generator: Generator,
    ) -> None:
        request = job.request
        self.job, self.number, self.request, self.unfinished = job, number, request, unfinished
        self.prompt = request.prompts[number // request.n]
        self.detokenizer = Detokenizer(generator.tokenizer, self.prompt, request.stops)
        self.sampler = Sampler(request.sample, [number])
        self.end = generator.special_tokens.end
        self.text, self.logprobs, self.tokens = "", list[TokenLogProb](), 0
        self.finish: str | None = None

    @property
    def is_active(self) -> bool:
        return self.finish is None and not self.job.cancelled

    def leave(self) -> None:
        """The last row of a request ends it: an answer need not wait for the batch."""
        self.unfinished.discard(self.number)
        if not self.unfinished:
            self.job.end()

    def take(self, token: int, log_probs: Float[Tensor, " v"] | None) -> None:
        """Append the next token; `log_probs` are those of the vocabulary.

        Sends a chunk if the row has ended or if the client streams.
        """
        if token == self.end:
            self.finish = "stop"
        else:
            self.tokens += 1
            if log_probs is not None and self.request.logprobs is not None:
                best = log_probs.topk(min(self.request.logprobs, len(log_probs)))
                top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                entry = TokenLogProb(token, self.detokenizer.length, float(log_probs[token]), top)
                self.logprobs.append(entry)
            self.text += self.detokenizer.add(token)
            if self.tokens >= self.request.max_tokens:
                self.finish = "length"
        if self.finish is not None:
            self.text += self.detokenizer.end()
        if self.detokenizer.stopped:
            self.finish = "stop"
        if self.finish is not None or (self.request.stream and self.text):
            self.job.send(Chunk(self.number, self.text, self.logprobs, self.tokens, self.finish))
            self.text, self.logprobs = "", []


# --- The cache ------------------------------------------------------------------------------------


class LeftPaddedCache(KVCache):
    """A KV cache whose rows begin with padding and end at the same position.

    In a beam search hypotheses differ from the first step on.
    """

    def __init__(self, padding: Rows, beams: int = 1) -> None:
        super().__init__(shared=True)
        self.padding, self.beams = padding, beams
        self.has_padding = bool(padding.any())
        self._seen = torch.zeros(len(padding), beams, 0, dtype=torch.bool, device=padding.device)

    def mask(
        self, rule: Rule, length: int, padding: PaddingMask | None, device: torch.device
    ) -> AttentionMask:
        mask = super().mask(rule, length, padding, device) if self.beams == 1 else None
        if mask is not None and not self.has_padding:
            return mask
        self._new = length // self.beams
        steps = torch.arange(self.length + self._new, device=device).repeat_interleave(self.beams)
        positions = steps - self.padding[:, None]
        # Padding queries have position 0, so that they attend to something.
        keys = positions.clamp(min=0)
        if mask is not None:
            return AttentionMask(rule, keys[:, self.length :], keys, positions >= 0)
        self._see_itself()
        return AttentionMask(Lineage(self._seen), keys[:, self._slots :], keys)

    def select_rows(self, rows: Rows) -> None:
        """Keep these rows, and no position that is padding in all of them."""
        super().select_rows(rows)
        for module, (keys, values) in self._cross.items():
            self._cross[module] = keys[rows], values[rows]
        self.padding, self._seen = self.padding[rows], self._seen[rows]
        self._resize(self.length - int(self.padding.min()))

    def join(self, other: "LeftPaddedCache") -> None:
        """Add the rows of another cache; the shorter one gets more padding."""
        longest = max(self.length, other.length)
        self._resize(longest)
        other._resize(longest)
        rows, slots = len(other.padding), self._slots
        for module, *pair in list(self.items()):
            # A prompt of one token, or a translation, has no keys and values yet.
            added = other._kv.get(module, [x.new_zeros(rows, *x.shape[1:]) for x in pair])
            keys, values = (
                torch.cat([x, y[:, :, :slots]]) for x, y in zip(pair, added, strict=True)
            )
            self._kv[module] = keys, values
        for module, ours in self._cross.items():
            keys, values = (cat_padded(*x) for x in zip(ours, other._cross[module], strict=True))
            self._cross[module] = keys, values
        self.padding = torch.cat([self.padding, other.padding])
        self._seen = torch.cat([self._seen, other._seen])
        self.has_padding = bool(self.padding.any())

    def _resize(self, length: int) -> None:
        """Add or remove positions on the left."""
        extra = (length - self.length) * self.beams
        if extra:
            self._kv = {
                module: (F.pad(keys, (0, 0, extra, 0)), F.pad(values, (0, 0, extra, 0)))
                for module, keys, values in self.items()
            }
            self._seen = F.pad(self._seen, (extra if self.beams > 1 else 0, 0))
            self.padding = self.padding + length - self.length
            self.length, self._slots = length, length * self.beams
        self.has_padding = bool(self.padding.any())


def cat_padded(x: Tensor, y: Tensor) -> Tensor:
    """Rows of both; in the shorter one, zeros follow in the last dimension but one."""
    longest = max(x.shape[-2], y.shape[-2])
    return torch.cat([F.pad(z, (0, 0, 0, longest - z.shape[-2])) for z in (x, y)])


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Prompts, Rows]:
    """Prompts that end at the same position, and the padding before each."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(rows, device=device), torch.tensor(padding, device=device)


def supports_left_padding(model: LanguageModel) -> bool:
    """True if every attention depends only on positions and mask, not on the index in the row."""
    modules = (module for module in model.modules() if isinstance(module, SelfAttention))
    exact = all(type(module.core) in (Dense, Fused) for module in modules)
    return exact and isinstance(model, Gpt)


# --- The runner -----------------------------------------------------------------------------------


class CompletionBatch:
    """Rows that are generated together, one token a step."""

    cache: LeftPaddedCache
    tokens: Rows

    def __init__(self, generator: Generator) -> None:
        self.generator, self.rows = generator, list[Row]()

    def _prefill(self, rows: Sequence[Row]) -> tuple[LeftPaddedCache, Rows]:
        """The cache of all prompts without their last tokens, and these."""
        prompts, padding = left_pad([row.prompt for row in rows], self.generator.device)
        cache = LeftPaddedCache(padding)
        if prompts.shape[1] > 1:
            self.generator.model.hidden(prompts[:, :-1], cache=cache)
        return cache, prompts[:, -1]

    def join(self, rows: list[Row]) -> None:
        cache, tokens = self._prefill(rows)
        if self.rows:
            self.cache.join(cache)
            self.tokens = torch.cat([self.tokens, tokens])
        else:
            self.cache, self.tokens = cache, tokens
        self.rows = self.rows + rows

    def step(self) -> None:
        """Append a token to each row; rows that end, or whose clients disconnected, leave."""
        model = self.generator.model
        logits = model.logits(model.hidden(self.tokens[:, None], cache=self.cache)[:, -1]).float()
        self.tokens = self._choose(logits)
        active = [index for index, row in enumerate(self.rows) if row.is_active]
        if len(active) == len(self.rows):
            return
        for row in self.rows:
            if not row.is_active:
                row.leave()
        self.rows = [self.rows[index] for index in active]
        if active:
            selected = torch.tensor(active, device=self.tokens.device)
            self.tokens = self.tokens[selected]
            self.cache.select_rows(selected)

    def _choose(self, logits: Float[Tensor, "rows v"]) -> Rows:
        rows = self.rows
        reports = any(row.request.logprobs is not None for row in rows)
        log_probs = logits.log_softmax(-1) if reports else [None] * len(rows)
        tokens = logits.new_zeros(len(rows), dtype=torch.long)
        lengths = torch.tensor([row.tokens + 1 for row in rows], device=logits.device)
        self.generator.constraints.apply(logits, lengths)
        groups: dict[Sample, list[int]] = {}  # rows with the same settings of sampling
        for index, row in enumerate(rows):
            groups.setdefault(replace(row.sampler.sample, seed=0), []).append(index)
        for sample, group in groups.items():
            uniforms = torch.cat([rows[index].sampler.uniforms(1)[:, 0] for index in group])
            tokens[group] = choose(logits[group], uniforms.to(logits.device), sample)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs, strict=True):
            row.take(token, log_prob)
        return tokens


class Completions(Work[CompletionRequest]):
    """Continues prompts; requests that arrive while a batch runs join it."""

    paths = "/v1/completions"

    def __init__(self, loaded: LoadedRun, bounds: Bounds) -> None:
        reason = "CTranslate2 has no sampling with a seed"
        engine = loaded.engine.only_torch(reason, loaded.device)
        generator = loaded.with_engine(engine).generator(at_limit="truncate")
        assert isinstance(generator, Generator)
        self.generator, self.bounds = generator, bounds
        self.context = generator.context
        self.left_padding = supports_left_padding(generator.model)

    def encode(self, text: str) -> tuple[int, ...]:
        tokenizer = self.generator.tokenizer
        return (*tokenizer.frame()[0], *tokenizer.encode(text))

    def check(self, request: CompletionRequest) -> CompletionRequest:
        """The request with a start token in empty prompts; refuse what cannot be computed."""
        start, vocabulary = self.generator.special_tokens.start, self.generator.vocabulary
        tokens = [token for prompt in request.prompts for token in prompt]
        if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
            raise Problem(400, f"token {unknown[0]} is not in the vocabulary of {vocabulary}")
        prompts = tuple(prompt or (start,) for prompt in request.prompts)
        request = replace(request, prompts=prompts)
        length = request.prompt_length + request.max_tokens
        if length > self.context:
            raise Problem(
                413,
                f"{request.prompt_length} tokens of the prompt and max_tokens "
                f"{request.max_tokens} exceed the context of {self.context}: shorten one of them",
                "context_length_exceeded",
            )
        if not self._in_bounds(request.rows, length):
            raise Problem(
                413,
                f"{request.rows} texts of up to {length} tokens are too many: at most "
                f"{self.bounds.rows} texts and {self.bounds.tokens} tokens",
                "too_large",
            )
        return request

    def _in_bounds(self, rows: int, width: int) -> bool:
        tokens = max(self.bounds.tokens, self.context)
        return rows <= self.bounds.rows and rows * width <= tokens

    def fits(self, requests: Sequence[CompletionRequest], running: Sequence[Row] = ()) -> bool:
        """True if these requests and the running rows fit into one batch.

        A position table must hold the longest row and the longest continuation, which may be of
        different requests.
        """
        lengths = [len(prompt) for request in requests for prompt in request.prompts]
        if not self.left_padding and len({*lengths}) > 1:
            return False
        longest = max([*lengths, *(len(row.prompt) + row.tokens for row in running)])
        remaining = [row.request.max_tokens - row.tokens for row in running]
        width = longest + max([*remaining, *(request.max_tokens for request in requests)])
        positions = self.generator.positions
        return self._in_bounds(
            len(running) + sum(request.rows for request in requests), width
        ) and (positions is None or width <= positions + 1)

    def compute(
        self, jobs: Sequence[Job[CompletionRequest]], take: Take[CompletionRequest] = take_none
    ) -> None:
        self.generator.model.eval()

        def more(running: list[Row]) -> list[Row]:
            return self._rows(take(partial(self.fits, running=running)))

        rows = self._rows(jobs)
        if self.left_padding:
            run_batch(CompletionBatch(self.generator), rows, more)
            return
        for length in sorted({len(row.prompt) for row in rows}):
            group = [row for row in rows if len(row.prompt) == length]
            run_batch(CompletionBatch(self.generator), group)

    def _rows(self, jobs: Sequence[Job[CompletionRequest]]) -> list[Row]:
        rows = []
        for job in jobs:
            unfinished = set(range(job.request.rows))
            rows += [Row(job, number, unfinished, self.generator) for number in [*unfinished]]
        return rows
