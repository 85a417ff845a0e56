"""Shared by the three APIs: bodies as JSON or form, checked values, errors in their format."""

import asyncio
import json
import re
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manyheads.serve.scheduler import Bounds, Scheduler
from manyheads.web.guard import ApiStyle, token_in
from manyheads.web.responses import TYPES, Fields, Problem, problem_of

FORM = "application/x-www-form-urlencoded"
MAX_FIELDS = 10_000
NO_TOKEN = (
    "the token is missing or wrong: send it as Authorization: Bearer TOKEN, as DeepL-Auth-Key "
    "TOKEN, or to /translate as api_key"
)
R = TypeVar("R")
W = TypeVar("W")
N = TypeVar("N", int, float)


async def read_fields(request: Request) -> Fields:
    """The values of a JSON or form body; a repeated name of a form gives a list."""
    if not request.headers.get("content-type", "").lower().startswith(FORM):
        return await Fields.of_body(request)
    try:
        pairs = parse_qsl(
            (await request.body()).decode(),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError:
        raise Problem(
            400, f"the body is not a form in UTF-8 of at most {MAX_FIELDS} fields: send one", "form"
        ) from None
    lists: dict[str, list[str]] = {}
    for name, value in pairs:
        lists.setdefault(name, []).append(value)
    return Fields({name: texts[0] if len(texts) == 1 else texts for name, texts in lists.items()})


def work_of_kind(request: Request, *kinds: type[W]) -> W:
    """The work that the server does, if it is of such a kind."""
    served: Any = request.app.state.scheduler.work
    if not isinstance(served, kinds):
        raise wrong_path(request)
    return served


def wrong_path(request: Request) -> Problem:
    paths = request.app.state.scheduler.work.paths
    return Problem(404, f"this model is served at {paths}", "not_found")


def check_model(request: Request, fields: Fields) -> str:
    """The name of the model; a request may name no other one."""
    name: str = request.app.state.name
    if (model := fields.text("model", name)) != name:
        raise Problem(404, f"{shown(model)} is not served: it is {name}", "model_not_found")
    return name


def check_size(texts: int, tokens: int, bounds: Bounds) -> None:
    """Refuse a request that is larger than a batch."""
    if texts > bounds.rows or tokens > bounds.tokens:
        raise Problem(
            413,
            f"{texts} texts of {tokens} tokens exceed the limit of {bounds.rows} texts and "
            f"{bounds.tokens} tokens: send them in parts",
        )


def texts_of(fields: Fields, name: str) -> tuple[list[str], bool]:
    """A text or a list of texts, and whether it is a list."""
    value = fields.values.get(name)
    if isinstance(value, str):
        return [value], False
    return fields.texts(name, most=10_000), True


def number(fields: Fields, name: str, default: Any, low: N, high: N) -> Any:
    """An integer in a range, or any number if the range is one of floats; a form has it as text."""
    value, kinds = fields.values.get(name), (int,) if isinstance(low, int) else (int, float)
    if value is None:
        return default
    if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) not in kinds or not low <= value <= high:
        kind = "an integer" if len(kinds) == 1 else "a number"
        raise Problem(400, f"'{name}' must be {kind} from {low} to {high}: {shown(value)}")
    return type(low)(value)


def flag(fields: Fields, name: str) -> bool:
    value = fields.values.get(name) or False
    if not isinstance(value, bool):
        raise Problem(400, f"'{name}' must be true or false: {shown(value)}")
    return value


def shown(value: object) -> str:
    return json.dumps(value)[:40]


async def collect(request: Request, scheduler: Scheduler[R], parsed: R) -> list[Any]:
    """All parts of an answer. A client that disconnects leaves the queue."""
    job = scheduler.submit(parsed)

    async def all_parts() -> list[Any]:
        return [part async for part in job.parts()]

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting = asyncio.ensure_future(all_parts())
    disconnecting = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({collecting, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise Problem(499, "the client has disconnected", "gone")
        return collecting.result()
    finally:
        collecting.cancel()
        disconnecting.cancel()
        scheduler.drop(job)


def refuse(path: str, error: Exception) -> Response:
    """An error in the format that the API of this path documents."""
    problem = problem_of(error)
    if problem.kind == "token":
        problem = Problem(problem.status, NO_TOKEN, "invalid_api_key")
    status, text = problem.status, str(problem)
    if path.startswith("/v1/"):  # OpenAI: a request that is too large is 400
        status = 400 if status == 413 else status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        # The message begins with the field that is wrong; a general problem has no code.
        field = re.match(r"'(\w+)'", text)
        code = None if problem.kind in TYPES.values() else problem.kind
        values = {"message": text, "type": kind, "param": field and field[1], "code": code}
        answer = JSONResponse({"error": values}, status)
    elif path.startswith("/v2/"):  # DeepL: a wrong key is forbidden, not unauthorized
        answer = JSONResponse({"message": text}, 403 if status == 401 else status)
    else:  # LibreTranslate: 400 for a wrong request, 403 for a wrong key
        translated = {401: 403, 413: 400, 422: 400}.get(status, status)
        answer = JSONResponse({"error": text}, translated)
    if status == 503:
        answer.headers["Retry-After"] = "1"
    return answer


def key_in(headers: Headers) -> str | None:
    """The token: as `Bearer`, or as DeepL's clients send their key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "deepl-auth-key" else token_in(headers)


# LibreTranslate's key is in the body, so its routes check it.
API_STYLE = ApiStyle(
    bodies=frozenset({"application/json", FORM}),
    open=("/health", "/translate", "/detect", "/languages"),
    token=key_in,
    refuse=refuse,
)
