"""OpenAI's interface: /v1/completions and /v1/models.

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
from manyheads.serve.batching import Batcher, Job
from manyheads.serve.completing import Completion, Completions, Piece, Told
from manyheads.serve.requests import flag, read, real, refuse, shown, whole, whole_answer
from manyheads.web.decoding import checked
from manyheads.web.responses import Fields, Problem

PATH = "/v1/completions"
MOST_LIKELIEST = 5
MOST_STOPS = 4
# What would change the text and does not here: refused unless it is what it is without being set.
NOT_DONE: dict[str, Sequence[Any]] = {
    "suffix": (None, ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
}


async def completions(request: Request) -> Response:
    """POST {prompt, max_tokens, temperature, top_p, n, stop, seed, logprobs, echo, stream, …}."""
    fields = await read(request)
    batcher: Batcher[Completion] = request.app.state.batcher
    work = batcher.work
    if not isinstance(work, Completions):
        raise Problem(404, "this model translates: ask /translate or /v2/translate", "not_found")
    name = request.app.state.name
    if (asked := fields.text("model", name)) != name:
        raise Problem(404, f"there is no model {shown(asked)}: it is {name}", "model_not_found")
    ask = await run_in_threadpool(_ask, fields, work)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
    }
    if ask.stream:
        usage = _wants_usage(fields)
        job = batcher.submit(ask)
        events = _events(batcher, job, work, head, usage)
        return StreamingResponse(events, media_type="text/event-stream")
    pieces: list[Piece] = await whole_answer(request, batcher, ask)
    choices = [_choice(piece, work, ask) for piece in sorted(pieces, key=lambda piece: piece.row)]
    written = sum(piece.tokens for piece in pieces)
    return JSONResponse({**head, "choices": choices, "usage": _usage(ask, written)})


def _ask(fields: Fields, work: Completions) -> Completion:
    for name, harmless in NOT_DONE.items():
        if fields.values.get(name) not in harmless:
            raise Problem(400, f"'{name}' is not done here: leave it out")
    each = whole(fields, "n", 1, 1, 128) or 1
    if whole(fields, "best_of", each, 1, 128) != each:
        raise Problem(400, "'best_of' is not done here: leave it out, or give what 'n' is")
    seed = whole(fields, "seed", None, -(2**63), 2**63 - 1)
    sample = Sample(
        temperature=real(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=real(fields, "top_p", 1.0, 0.0, 1.0),
        seed=secrets.randbits(40) if seed is None else seed,
    )
    echo = flag(fields, "echo")
    ask = Completion(
        prompts=_prompts(fields.values.get("prompt"), work),
        each=each,
        most=whole(fields, "max_tokens", 16, 0 if echo else 1, 10**9) or 0,
        sample=checked(sample),
        stops=_stops(fields),
        likeliest=whole(fields, "logprobs", None, 0, MOST_LIKELIEST),
        echo=echo,
        stream=flag(fields, "stream"),
    )
    return work.check(ask)


def _prompts(value: Any, work: Completions) -> tuple[tuple[int, ...], ...]:
    if value is None or isinstance(value, str):
        return (work.encode(value or ""),)
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return tuple(work.encode(one) for one in value)
        if _are_tokens(value):
            return (tuple(value),)
        if all(isinstance(one, list) and _are_tokens(one) for one in value):
            return tuple(map(tuple, value))
    raise Problem(
        400, f"'prompt' must be a text, a list of texts, tokens, or lists of them: {shown(value)}"
    )


def _are_tokens(values: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in values)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    fine = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not fine or len(stops) > MOST_STOPS:
        raise Problem(400, f"'stop' must be up to {MOST_STOPS} texts, none of them empty")
    return tuple(stops)


def _wants_usage(fields: Fields) -> bool:
    options = fields.values.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Problem(400, "'stream_options' must be an object")
    return flag(Fields(options), "include_usage")


async def _events(
    batcher: Batcher[Completion],
    job: Job[Completion],
    work: Completions,
    head: dict[str, Any],
    usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events: one for each piece, and `[DONE]`. Whoever stops listening is dropped."""
    written: dict[int, int] = {}
    try:
        async for piece in job.news():
            written[piece.row] = piece.tokens
            yield _event({**head, "choices": [_choice(piece, work, job.ask)]})
        if usage:
            yield _event({**head, "choices": [], "usage": _usage(job.ask, sum(written.values()))})
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is sent already: what is wrong becomes an event
        yield f"data: {bytes(refuse(PATH, error).body).decode()}\n\n"
        raise
    finally:
        batcher.drop(job)


def _event(about: dict[str, Any]) -> str:
    return f"data: {json.dumps(about, ensure_ascii=False)}\n\n"


def _usage(ask: Completion, written: int) -> dict[str, int]:
    read = sum(len(prompt) for prompt in ask.prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def _choice(piece: Piece, work: Completions, ask: Completion) -> dict[str, Any]:
    told = piece.told
    if piece.finish == "stop" and not ask.stream:  # tokens of the stop text are not in the text
        told = tuple(one for one in told if one.offset < len(piece.text))
    return {
        "text": piece.text,
        "index": piece.row,
        "logprobs": None if ask.likeliest is None else _logprobs(told, work),
        "finish_reason": piece.finish,
    }


def _logprobs(told: Sequence[Told], work: Completions) -> dict[str, Any]:
    """Lists of the same length: tokens, their log P, the likeliest there, where they begin."""
    pieces = work.generator.tokenizer.subwords
    return {
        "tokens": pieces([one.token for one in told]),
        "token_logprobs": [one.log_probability for one in told],
        "top_logprobs": [
            dict(
                zip(
                    pieces([t for t, _ in one.likeliest]),
                    (p for _, p in one.likeliest),
                    strict=True,
                )
            )
            if one.log_probability is not None
            else None
            for one in told
        ],
        "text_offset": [one.offset for one in told],
    }


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(request)]})


async def model(request: Request) -> Response:
    about = _model(request)
    if request.path_params["name"] != about["id"]:
        raise Problem(404, f"there is no such model: it is {about['id']}", "model_not_found")
    return JSONResponse(about)


def _model(request: Request) -> dict[str, Any]:
    state = request.app.state
    made = {"object": "model", "created": state.started, "owned_by": "manyheads"}
    return {"id": state.name, **made}


ROUTES = [
    Route(PATH, completions, methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
]
