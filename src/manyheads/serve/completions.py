"""Completions: the API of OpenAI (/v1/completions, /v1/models).

Errors are {"error": {"message", "type", "param", "code"}}.
"""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from manyheads.decode.sample import Sample
from manyheads.serve.continuous import Chunk, CompletionRequest, Completions
from manyheads.serve.requests import (
    check_model,
    collect,
    flag,
    number,
    read_fields,
    refuse,
    shown,
    work_of_kind,
)
from manyheads.serve.scheduler import Job, Scheduler
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


async def completions(request: Request) -> Response:
    """POST {prompt, max_tokens, temperature, top_p, n, stop, seed, logprobs, stream, …}."""
    fields = await read_fields(request)
    scheduler: Scheduler[CompletionRequest] = request.app.state.scheduler
    work, name = work_of_kind(request, Completions), check_model(request, fields)
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
        events = _events(scheduler, scheduler.submit(parsed), work, head, with_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    chunks: list[Chunk] = await collect(request, scheduler, parsed)
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
    scheduler: Scheduler[CompletionRequest],
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
        scheduler.drop(job)


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
