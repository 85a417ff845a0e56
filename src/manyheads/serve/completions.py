"""Completions: the API of OpenAI (/v1/completions, /v1/models), and rows generated together.

Errors are {"error": {"message", "type", "param", "code"}}. Rows of many requests form a batch, one
token a step. Prompts of different lengths are padded on the left: row r has `padding[r]` padding
positions, its first token has position 0, and no token attends to the padding.
"""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from manyheads.decode.generate import Detokenizer, Generator
from manyheads.decode.kv_cache import KVCache
from manyheads.decode.sample import Sample, Sampler, choose
from manyheads.errors import UserError
from manyheads.loading import LoadedRun, TorchRun
from manyheads.models.gpt import Gpt
from manyheads.nn.attention import Dense, Fused, SelfAttention
from manyheads.nn.masks import AttentionMask, Rule
from manyheads.nn.shapes import PaddingMask
from manyheads.serve.batching import Batcher, Bounds, Job, Work
from manyheads.serve.requests import collect, flag, number, read_fields, refuse, shown
from manyheads.web.decoding import LEAST_P, checked
from manyheads.web.responses import Fields, Problem

PATH = "/v1/completions"
MAX_LOGPROBS = 5
MAX_STOPS = 4
# Options that would change the text: refused unless they have one of these values.
UNSUPPORTED: dict[str, Sequence[Any]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
}
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


# --- Batches of rows ------------------------------------------------------------------------------


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


class Completions(Work[CompletionRequest]):
    def __init__(self, loaded: LoadedRun, bounds: Bounds) -> None:
        if not isinstance(loaded, TorchRun):
            raise UserError(f"{loaded.folder} was exported: serve the run that it came from")
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
        model, length = self.generator.model, 0
        prompts, padding = left_pad([row.prompt for row in rows], self.generator.device)
        cache, tokens = LeftPaddedCache(padding), prompts[:, -1]
        if prompts.shape[1] > 1:
            model.hidden(prompts[:, :-1], cache=cache)
        while active := [index for index, row in enumerate(rows) if row.is_active]:
            if len(active) < len(rows):
                rows = [rows[index] for index in active]
                selected = torch.tensor(active, dtype=torch.long, device=tokens.device)
                tokens = tokens[selected]
                cache.select_rows(selected)
            length += 1
            logits = model.logits(model.hidden(tokens[:, None], cache=cache)[:, -1]).float()
            tokens = self._step(rows, logits, length)
            _end_jobs(rows)

    def _step(self, rows: Sequence[Row], logits: Float[Tensor, "rows v"], length: int) -> Rows:
        """Choose the next token of each row."""
        reports = any(row.request.logprobs is not None for row in rows)
        log_probs = logits.log_softmax(-1) if reports else [None] * len(rows)
        tokens = logits.new_zeros(len(rows), dtype=torch.long)
        self.generator.constraints.apply(logits, torch.full_like(tokens[:1], length))
        groups: dict[Sample, list[int]] = {}  # rows with the same settings of sampling
        for index, row in enumerate(rows):
            groups.setdefault(replace(row.sampler.sample, seed=0), []).append(index)
        for sample, group in groups.items():
            uniforms = torch.cat([rows[index].sampler.uniforms(1)[:, 0] for index in group])
            tokens[group] = choose(logits[group], uniforms.to(logits.device), sample)
        for row, token, log_prob in zip(rows, tokens.tolist(), log_probs, strict=True):
            row.take(token, log_prob)
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


# --- The routes -----------------------------------------------------------------------------------


async def completions(request: Request) -> Response:
    """POST {prompt, max_tokens, temperature, top_p, n, stop, seed, logprobs, stream, …}."""
    fields = await read_fields(request)
    batcher: Batcher[CompletionRequest] = request.app.state.batcher
    work, name = batcher.work, request.app.state.name
    if not isinstance(work, Completions):
        raise Problem(404, "this model translates: use /translate or /v2/translate", "not_found")
    if (model := fields.text("model", name)) != name:
        raise Problem(404, f"{shown(model)} is not served: it is {name}", "model_not_found")
    parsed = await run_in_threadpool(_parse, fields, work)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
    }
    if parsed.stream:
        options = fields.values.get("stream_options") or {}
        if not isinstance(options, dict):
            raise Problem(400, "'stream_options' must be an object")
        with_usage = flag(Fields(options), "include_usage")
        events = _events(batcher, batcher.submit(parsed), work, head, with_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    chunks: list[Chunk] = await collect(request, batcher, parsed)
    choices = [_choice(chunk, work, parsed) for chunk in sorted(chunks, key=lambda c: c.row)]
    usage = _usage(parsed, sum(chunk.tokens for chunk in chunks))
    return JSONResponse({**head, "choices": choices, "usage": usage})


def _parse(fields: Fields, work: Completions) -> CompletionRequest:
    for name, harmless in UNSUPPORTED.items():
        if fields.values.get(name) not in harmless:
            raise Problem(400, f"'{name}' is not supported: leave it out")
    n = number(fields, "n", 1, 1, 128)
    if number(fields, "best_of", n, 1, 128) != n:
        raise Problem(400, "'best_of' must equal 'n': leave it out")
    sample = Sample(
        temperature=number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=max(number(fields, "top_p", 1.0, 0.0, 1.0), LEAST_P),  # OpenAI's 0 is greedy
        seed=number(fields, "seed", secrets.randbits(40), -(2**63), 2**63 - 1),
    )
    request = CompletionRequest(
        prompts=_prompts(fields.values.get("prompt"), work),
        n=n,
        max_tokens=number(fields, "max_tokens", 16, 1, 10**9),
        sample=checked(sample),
        stops=_stops(fields),
        logprobs=number(fields, "logprobs", None, 0, MAX_LOGPROBS),
        stream=flag(fields, "stream"),
    )
    return work.check(request)


def _prompts(value: Any, work: Completions) -> tuple[tuple[int, ...], ...]:
    """Of a text, texts, tokens or lists of tokens."""
    values = [value or ""] if value is None or isinstance(value, str) else value
    if isinstance(values, list) and values:
        values = [values] if _are_tokens(values) else values
        if all(isinstance(prompt, str) or _are_tokens(prompt) for prompt in values):
            return tuple(work.encode(x) if isinstance(x, str) else tuple(x) for x in values)
    raise Problem(400, f"'prompt' must be text, tokens, or a list of either: {shown(value)}")


def _are_tokens(values: Any) -> bool:
    return isinstance(values, list) and all(type(token) is int for token in values)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    valid = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not valid or len(stops) > MAX_STOPS:
        raise Problem(400, f"'stop' must be up to {MAX_STOPS} texts, none of them empty")
    return tuple(stops)


async def _events(
    batcher: Batcher[CompletionRequest],
    job: Job[CompletionRequest],
    work: Completions,
    head: dict[str, Any],
    with_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events: one for each chunk, then `[DONE]`. A disconnected client is dropped."""
    tokens: dict[int, int] = {}
    try:
        async for chunk in job.parts():
            tokens[chunk.row] = chunk.tokens
            yield _event({**head, "choices": [_choice(chunk, work, job.request)]})
        if with_usage:
            usage = _usage(job.request, sum(tokens.values()))
            yield _event({**head, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status has been sent: the error becomes an event
        yield f"data: {bytes(refuse(PATH, error).body).decode()}\n\n"
        raise
    finally:
        batcher.drop(job)


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"


def _usage(request: CompletionRequest, tokens: int) -> dict[str, int]:
    prompt_tokens = sum(len(prompt) for prompt in request.prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


def _choice(chunk: Chunk, work: Completions, request: CompletionRequest) -> dict[str, Any]:
    entries, names = chunk.logprobs, work.generator.tokenizer.subwords
    if chunk.finish == "stop" and not request.stream:  # the text does not contain the stop text
        entries = [entry for entry in entries if entry.offset < len(chunk.text)]
    logprobs = {
        "tokens": names([entry.token for entry in entries]),
        "token_logprobs": [entry.log_prob for entry in entries],
        "top_logprobs": [
            dict(zip(names(list(entry.top)), entry.top.values(), strict=True)) for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }
    return {
        "text": chunk.text,
        "index": chunk.row,
        "logprobs": None if request.logprobs is None else logprobs,
        "finish_reason": chunk.finish,
    }


async def models(request: Request) -> Response:
    """GET: the one model."""
    state = request.app.state
    model = {"object": "model", "created": state.started, "owned_by": "manyheads"}
    return JSONResponse({"object": "list", "data": [{"id": state.name, **model}]})


ROUTES = [Route(PATH, completions, methods=["POST"]), Route("/v1/models", models)]
