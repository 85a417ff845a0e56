"""Completions: rows of many requests generated together, one token a step.

Prompts of different lengths are padded on the left. Row r has `padding[r]` padding positions; its
first token has position 0, and no token attends to the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.generate import Generator
from manyheads.decode.kv_cache import KVCache
from manyheads.decode.sample import Sample, Sampler, choose
from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.models.gpt import Gpt
from manyheads.nn.attention import Dense, Fused, SelfAttention
from manyheads.nn.masks import AttentionMask, Rule
from manyheads.nn.shapes import PaddingMask
from manyheads.serve.batching import Bounds, Job, Work
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web.responses import Problem

REPLACEMENT = "\ufffd"  # decoded from bytes that are not a character yet
Prompts = Int[Tensor, "rows length"]
Logits = Float[Tensor, "rows v"]
Rows = Int[Tensor, " rows"]


@dataclass(frozen=True)
class CompletionRequest:
    """A request: `n` continuations of each prompt, with at most `max_tokens` tokens.

    `logprobs` is how many alternatives to report for each token, None for no log-probabilities;
    `echo` repeats the prompt.
    """

    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: int
    sample: Sample
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False

    @property
    def rows(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompt_length(self) -> int:
        return max(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True)
class TokenLogProb:
    """A token, its offset in the text, its log P (None for the first) and the alternatives."""

    token: int
    offset: int
    log_prob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Chunk:
    """New text of one row; the last chunk has the reason for the end in `finish`."""

    row: int
    text: str
    logprobs: tuple[TokenLogProb, ...]
    tokens: int
    finish: str | None


class Detokenizer:
    """The text after a prompt, token by token. `add` and `end` return the text that is final.

    A character of several tokens waits for its last one, and the possible beginning of a stop
    text waits until it is decided.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.ids = list(prompt)
        self.prompt_text = self.decoded = tokenizer.decode(self.ids)
        self.pending = ""
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters after the prompt, pending ones included."""
        return len(self.decoded) - len(self.prompt_text)

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith(REPLACEMENT):
            return ""
        # By length: later bytes may change the last character.
        new, self.decoded = text[len(self.decoded) :], text
        return self._final(new)

    def end(self) -> str:
        """The pending text, once no token follows."""
        if self.stopped:
            return ""
        last = self._final(self.tokenizer.decode(self.ids)[len(self.decoded) :])
        stops = [at for stop in self.stops if (at := self.pending.find(stop)) >= 0]
        self.stopped = self.stopped or bool(stops)
        pending, self.pending = self.pending[: min(stops, default=len(self.pending))], ""
        return last + pending

    def _final(self, new: str) -> str:
        self.pending += new
        may_stop = (at for at in range(len(self.pending)) if self._may_stop(at))
        at = next(may_stop, len(self.pending))
        final, self.pending = self.pending[:at], self.pending[at:]
        if self.stops and self.pending.startswith(self.stops):
            self.stopped, self.pending = True, ""
        return final

    def _may_stop(self, at: int) -> bool:
        return any(stop.startswith(self.pending[at : at + len(stop)]) for stop in self.stops)


class LeftPaddedCache(KVCache):
    """A KV cache whose rows begin with padding."""

    def __init__(self, padding: Rows) -> None:
        super().__init__()
        self.padding = padding
        self.has_padding = bool(padding.any())

    def mask(
        self, rule: Rule, length: int, padding: PaddingMask | None, device: torch.device
    ) -> AttentionMask:
        mask = super().mask(rule, length, padding, device)
        if not self.has_padding:
            return mask
        positions = torch.arange(self.length + length, device=device) - self.padding[:, None]
        # Padding queries have position 0, so that they attend to something.
        keys = positions.clamp(min=0)
        return AttentionMask(rule, keys[:, self.length :], keys, positions >= 0)

    def select_rows(self, rows: Rows) -> None:
        super().select_rows(rows)
        self.padding = self.padding[rows]


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Prompts, Rows]:
    """Prompts that end at the same position, and the padding before each."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(rows, device=device), torch.tensor(padding, device=device)


def supports_left_padding(model: Gpt) -> bool:
    """True if every attention depends only on positions and mask, not on the index in the row."""
    modules = (module for module in model.modules() if isinstance(module, SelfAttention))
    return all(type(module.core) in (Dense, Fused) for module in modules)


class Row:
    """One continuation in a batch."""

    def __init__(self, job: Job[CompletionRequest], number: int, generator: Generator) -> None:
        request = job.request
        self.job, self.number, self.request = job, number, request
        self.prompt = request.prompts[number // request.n]
        self.detokenizer = Detokenizer(generator.tokenizer, self.prompt, request.stops)
        self.sampler = Sampler(request.sample, [number])
        self.end = generator.special_tokens.end
        self.text, self.logprobs, self.tokens = "", list[TokenLogProb](), 0
        self.finish: str | None = None

    @property
    def is_active(self) -> bool:
        return self.finish is None and not self.job.cancelled

    def take(self, token: int, log_probs: Float[Tensor, " v"] | None) -> None:
        """Append the next token; `log_probs` are those of the vocabulary, if requested."""
        before = len(self.detokenizer.prompt_text) if self.request.echo else 0
        offset = before + self.detokenizer.length
        if token == self.end:
            self.finish = "stop"
        else:
            self.tokens += 1
            if log_probs is not None:
                self.add_log_prob(token, offset, log_probs)
            self.text += self.detokenizer.add(token)
            if self.detokenizer.stopped:
                self.finish = "stop"
        self.close()

    def add_log_prob(self, token: int, offset: int, log_probs: Float[Tensor, " v"]) -> None:
        best, ids = log_probs.topk(min(self.request.logprobs or 0, len(log_probs)))
        top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
        self.logprobs.append(TokenLogProb(token, offset, float(log_probs[token]), top))

    def close(self) -> None:
        """End the row at its limit; send a chunk if it is the last or if the client streams."""
        if self.finish is None and self.tokens >= self.request.max_tokens:
            self.finish = "length"
        if self.finish is not None:
            self.text += self.detokenizer.end()
            self.finish = "stop" if self.detokenizer.stopped else self.finish
        if self.finish is not None or (self.request.stream and self.text):
            logprobs = tuple(self.logprobs)
            self.job.send(Chunk(self.number, self.text, logprobs, self.tokens, self.finish))
            self.text, self.logprobs = "", []


class Completions(Work[CompletionRequest]):
    def __init__(self, loaded: LoadedRun, bounds: Bounds) -> None:
        generator = loaded.generator(at_limit="truncate")
        if not isinstance(generator, Generator):
            raise UserError(f"{loaded.folder} was exported: serve the run that it came from")
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
        if not self._in_bounds([request]):
            raise Problem(
                413,
                f"{request.rows} texts of up to {length} tokens are too many: at most "
                f"{self.bounds.rows} texts and {self.bounds.tokens} tokens",
                "too_large",
            )
        return request

    def _in_bounds(self, requests: Sequence[CompletionRequest]) -> bool:
        rows = sum(request.rows for request in requests)
        tokens = rows * _width(requests)
        return rows <= self.bounds.rows and tokens <= max(self.bounds.tokens, self.context)

    def fits(self, requests: Sequence[CompletionRequest]) -> bool:
        """In bounds; and a position table must hold the longest prompt and continuation."""
        positions = self.generator.positions
        lengths = {len(prompt) for request in requests for prompt in request.prompts}
        return (
            self._in_bounds(requests)
            and (positions is None or _width(requests) <= positions + 1)
            and (self.left_padding or len(lengths) == 1)
        )

    @torch.no_grad()
    def compute(self, jobs: Sequence[Job[CompletionRequest]]) -> None:
        rows = [
            Row(job, number, self.generator) for job in jobs for number in range(job.request.rows)
        ]
        self.generator.model.eval()
        if self.left_padding:
            self._generate(rows)
            return
        for length in sorted({len(row.prompt) for row in rows}):  # one request may have several
            self._generate([row for row in rows if len(row.prompt) == length])

    def _generate(self, rows: list[Row]) -> None:
        model = self.generator.model
        prompts, padding = left_pad([row.prompt for row in rows], self.generator.device)
        cache = LeftPaddedCache(padding)
        hidden = None
        if prompts.shape[1] > 1:
            hidden = model.hidden(prompts[:, :-1], cache=cache)
        for index, row in enumerate(rows):
            self._echo(row, None if hidden is None else hidden[index, int(padding[index]) :])
        tokens, length = prompts[:, -1], 0
        while True:
            _end_jobs(rows)
            active = [index for index, row in enumerate(rows) if row.is_active]
            if len(active) < len(rows):
                rows = [rows[index] for index in active]
                selected = torch.tensor(active, dtype=torch.long, device=tokens.device)
                tokens = tokens[selected]
                cache.select_rows(selected)
            if not rows:
                return
            length += 1
            logits = model.logits(model.hidden(tokens[:, None], cache=cache)[:, -1]).float()
            tokens = self._step(rows, logits, length)

    def _echo(self, row: Row, hidden: Float[Tensor, "n d"] | None) -> None:
        """The prompt and the log P of its tokens, if requested."""
        request, prompt = row.request, row.prompt
        if request.echo:
            row.text = row.detokenizer.prompt_text
            if request.logprobs is not None:
                row.logprobs.append(TokenLogProb(prompt[0], 0, None, ()))
                logits = None if hidden is None else self.generator.model.logits(hidden)
                for at, token in enumerate(prompt[1:], start=1):
                    assert logits is not None
                    offset = len(self.generator.tokenizer.decode(prompt[:at]))
                    row.add_log_prob(token, offset, logits[at - 1].float().log_softmax(-1))
        row.close()

    def _step(self, rows: Sequence[Row], logits: Logits, length: int) -> Rows:
        """Choose the next token of each row."""
        reports = [row.request.logprobs is not None for row in rows]
        log_probs = logits.log_softmax(-1) if any(reports) else None
        tokens = logits.new_zeros(len(rows), dtype=torch.long)
        self.generator.constraints.apply(logits, torch.full_like(tokens[:1], length))
        groups: dict[Sample, list[int]] = {}  # rows with the same settings of sampling
        for index, row in enumerate(rows):
            groups.setdefault(replace(row.sampler.sample, seed=0), []).append(index)
        for sample, group in groups.items():
            uniforms = torch.cat([rows[index].sampler.uniforms(1)[:, 0] for index in group])
            tokens[group] = choose(logits[group], uniforms.to(logits.device), sample)
        for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            reported = log_probs is not None and reports[index]
            row.take(token, log_probs[index] if reported and log_probs is not None else None)
        return tokens


def _width(requests: Sequence[CompletionRequest]) -> int:
    """The longest prompt and the longest continuation, which may be of different requests."""
    longest = max(request.prompt_length for request in requests)
    return longest + max(request.max_tokens for request in requests)


def _end_jobs(rows: Sequence[Row]) -> None:
    """A request with all its rows need not wait for the rest of the batch."""
    active = {id(row.job) for row in rows if row.is_active}
    for row in rows:
        if id(row.job) not in active:
            row.job.end()
