"""What the server says: JSON, tensors as bytes, and every error in one form."""

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from manyheads.errors import DataError, UserError

Dtype = Literal["f32", "f16", "u8"]
TYPES = {400: "mistake", 404: "not-found", 405: "method", 413: "too-large", 422: "bad-data"}
STATUS: dict[type[Exception], int] = {DataError: 422, UserError: 400}


PART = 2**20  # numbers that are made bytes at once


class Problem(Exception):
    """An answer that is no result: a status, a type that programs read, a line that people read."""

    def __init__(self, status: int, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind or TYPES.get(status, "error")


def error_answer(status: int, message: str, kind: str) -> JSONResponse:
    """{"error": {"message", "type"}}: all that a program has to know of a failure."""
    return JSONResponse({"error": {"message": message, "type": kind}}, status)


def problem_of(error: Exception) -> Problem:
    """Any failure as what is told of it; what nobody expected is not told to the outside."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException):
        return Problem(error.status_code, error.detail)
    if isinstance(error, OSError):  # a run that is being moved or deleted
        return Problem(422, f"its files could not be read ({error.strerror})")
    if isinstance(error, RecursionError):
        return Problem(422, "its files are nested too deeply to be read")
    for kind, status in STATUS.items():
        if isinstance(error, kind):
            return Problem(status, str(error))
    return Problem(500, "the server failed at this: see where it was started", "internal")


def answer_of(error: Exception) -> JSONResponse:
    """Any failure as an answer."""
    problem = problem_of(error)
    return error_answer(problem.status, str(problem), problem.kind)


@dataclass(frozen=True)
class Fields:
    """The named values of a request, from its query or its JSON body, checked as they are read."""

    values: dict[str, Any]

    @classmethod
    def of_query(cls, request: Request) -> "Fields":
        return cls(dict(request.query_params))

    @classmethod
    async def of_body(cls, request: Request) -> "Fields":
        """A JSON object; anything else is refused."""
        try:
            values = json.loads(await request.body())
        except (ValueError, RecursionError):
            raise Problem(400, "the body is no JSON: send one object", "json") from None
        if not isinstance(values, dict):
            raise Problem(400, "the body is no JSON object: send one with named values", "json")
        return cls(values)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise Problem(400, f"'{name}' must be a text: {json.dumps(value)[:40]} is none")
        return _whole(name, value)

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.values.get(name) is not None else None

    def number(self, name: str, most: int) -> int | None:
        """A whole number from 0 to `most`, or None where it is left out."""
        value = self.values.get(name)
        if value is None:
            return None
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):  # 1e999 is a number in JSON
            number = -1
        if not 0 <= number <= most:
            raise Problem(400, f"'{name}' must be a whole number from 0 to {most}")
        return number

    def texts(self, name: str, most: int) -> list[str]:
        """A list of at most so many texts; none where it is left out."""
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise Problem(400, f"'{name}' must be a list of texts")
        if len(value) > most:
            raise Problem(413, f"'{name}' has {len(value)} texts, at most {most} are taken")
        return [_whole(name, one) for one in value]


def _whole(name: str, text: str) -> str:
    """JSON can name a half of a character, which no text has and nothing can be made of."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Problem(400, f"'{name}' is no Unicode: it has a half of a character") from None
    return text


def json_answer(values: Any) -> JSONResponse:
    """Values as JSON, which has no numbers but finite ones."""
    try:
        return JSONResponse(values)
    except ValueError:
        raise Problem(
            422, "the model gives numbers that are none (nan, inf): its weights are broken", "nan"
        ) from None


def dtype_of(name: str) -> Dtype:
    if name not in get_args(Dtype):
        raise Problem(400, f"dtype={name} is none of {', '.join(get_args(Dtype))}", "dtype")
    return name  # type: ignore[return-value]


def tensor_answer(tensor: Tensor, dtype: Dtype, low: float | None, high: float | None) -> Response:
    """Numbers as little-endian bytes in the order of their indices, first index slowest.

    u8 is round(255 · (x − low) / (high − low)): X-Low and X-High say how to read it back. Where
    they are not given they are the least and the greatest number.
    """
    headers = {"X-Shape": ",".join(map(str, tensor.shape)), "X-Dtype": dtype}
    if dtype == "u8":
        low = float(tensor.min()) if low is None else low
        high = float(tensor.max()) if high is None else high
        headers |= {"X-Low": repr(low), "X-High": repr(high)}
        scale = 255 / (high - low) if high > low else 0.0
        # Part by part: all of them as floats would be many times as large as the answer.
        parts = (((part - low) * scale).round() for part in tensor.flatten().split(PART))
        numbers = torch.cat([part.clamp(0, 255).to(torch.uint8) for part in parts])
    else:
        numbers = tensor.to(torch.float16 if dtype == "f16" else torch.float32)
    body = numbers.contiguous().numpy().tobytes()
    return Response(body, media_type="application/octet-stream", headers=headers)
