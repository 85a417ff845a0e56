"""What the three interfaces share: bodies in two forms, values checked, errors in their shape."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manyheads.serve.batching import Batcher, Job
from manyheads.web.guard import Manner, token_in
from manyheads.web.responses import Fields, Problem, problem_of

FORM = "application/x-www-form-urlencoded"
NO_TOKEN = (
    "the token is missing or wrong: send it as Authorization: Bearer TOKEN, as DeepL-Auth-Key "
    "TOKEN, or to /translate as api_key"
)
A = TypeVar("A")


async def read(request: Request) -> Fields:
    """The named values of a body, JSON or a form; a name that comes again makes a list."""
    if not request.headers.get("content-type", "").lower().startswith(FORM):
        return await Fields.of_body(request)
    try:
        pairs = parse_qsl((await request.body()).decode(), keep_blank_values=True, errors="strict")
    except ValueError:
        raise Problem(400, "the body is no form in UTF-8: send one", "form") from None
    values: dict[str, Any] = {}
    for name, value in pairs:
        before = values.get(name)
        if before is None:
            values[name] = value
        else:
            values[name] = [*before, value] if isinstance(before, list) else [before, value]
    return Fields(values)


def several(fields: Fields, name: str) -> tuple[list[str], bool]:
    value = fields.values.get(name)
    if isinstance(value, str):
        return [value], False
    return fields.texts(name, most=10_000), True


def whole(fields: Fields, name: str, default: int | None, low: int, high: int) -> int | None:
    """A whole number in these bounds; in a form it is written out."""
    value = fields.values.get(name)
    if value is None:
        return default
    if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Problem(400, f"'{name}' must be a whole number from {low} to {high}: {shown(value)}")
    return value


def real(fields: Fields, name: str, default: float, low: float, high: float) -> float:
    value = fields.values.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise Problem(400, f"'{name}' must be a number from {low:g} to {high:g}: {shown(value)}")
    return float(value)


def flag(fields: Fields, name: str) -> bool:
    value = fields.values.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise Problem(400, f"'{name}' must be true or false: {shown(value)}")
    return value


def shown(value: object) -> str:
    return json.dumps(value)[:40]


async def whole_answer(request: Request, batcher: Batcher[A], ask: A) -> list[Any]:
    """All parts of an answer. A client that goes away meanwhile leaves the queue."""
    job = batcher.submit(ask)
    collecting = asyncio.ensure_future(_all(job))
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise Problem(499, "the client has gone", "gone")
        return collecting.result()
    finally:
        collecting.cancel()
        leaving.cancel()
        batcher.drop(job)


async def _all(job: Job[A]) -> list[Any]:
    return [part async for part in job.news()]


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refuse(path: str, error: Exception) -> Response:
    """A failure in the shape that the interface of this path documents."""
    problem = problem_of(error)
    if problem.kind == "token":
        problem = Problem(problem.status, NO_TOKEN, "invalid_api_key")
    if path.startswith("/v1/"):
        answer = _as_openai(problem)
    elif path.startswith("/v2/"):
        # A key that is wrong is forbidden there, not unauthorized.
        status = 403 if problem.status == 401 else problem.status
        answer = JSONResponse({"message": str(problem)}, status)
    else:
        answer = JSONResponse({"error": str(problem)}, _libretranslate_status(problem.status))
    if problem.status == 503:
        answer.headers["Retry-After"] = "1"
    return answer


def _as_openai(problem: Problem) -> JSONResponse:
    """{"error": {"message", "type", "param", "code"}}; what is too long is a bad request there."""
    status = 400 if problem.status == 413 else problem.status
    types: Sequence[tuple[int, str]] = ((500, "server_error"), (400, "invalid_request_error"))
    kind = next(name for least, name in types if status >= least)
    if status == 401:
        kind = "authentication_error"
    about = {"message": str(problem), "type": kind, "param": None, "code": problem.kind}
    return JSONResponse({"error": about}, status)


def _libretranslate_status(status: int) -> int:
    """What is wrong with a request is 400 there, what is wrong with a key 403."""
    return {401: 403, 413: 400, 422: 400}.get(status, status)


def key_in(headers: Headers) -> str | None:
    """The token: as `Bearer`, or as DeepL's clients send their key."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "deepl-auth-key" else token_in(headers)


# LibreTranslate's key stands in the body: its routes look there themselves.
MANNER = Manner(
    bodies=frozenset({"application/json", FORM}),
    open=("/health", "/translate", "/detect", "/languages"),
    token=key_in,
    refuse=refuse,
)
