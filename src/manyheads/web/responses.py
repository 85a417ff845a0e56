"""Requests and responses: checked fields, JSON, tensors as bytes, and one error format."""

import json
import re
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


PART = 2**20  # numbers converted at once


class Problem(Exception):
    """An error response: HTTP status, machine-readable type and message."""

    def __init__(self, status: int, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind or TYPES.get(status, "error")


def error_answer(status: int, message: str, kind: str) -> JSONResponse:
    """The error format: {"error": {"message", "type"}}."""
    return JSONResponse({"error": {"message": message, "type": kind}}, status)


def problem_of(error: Exception) -> Problem:
    """Convert an exception to a `Problem`; unexpected exceptions are reported without details."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException):
        return Problem(error.status_code, error.detail)
    if isinstance(error, OSError):  # a run that is being moved or deleted
        return Problem(422, f"cannot read its files ({error.strerror})")
    if isinstance(error, RecursionError):
        return Problem(422, "its files are nested too deeply")
    for kind, status in STATUS.items():
        if isinstance(error, kind):
            return Problem(status, without_folders(str(error)))
    return Problem(500, "internal error: see the terminal of the server", "internal")


def without_folders(message: str) -> str:
    """A message with the names of files only: where they are is nobody else's business."""
    return re.sub(r"(?<![\w/.:])/(?:[^/\s]+/)+", "", message)


def answer_of(error: Exception) -> JSONResponse:
    """Convert an exception to an error response."""
    problem = problem_of(error)
    return error_answer(problem.status, str(problem), problem.kind)


@dataclass(frozen=True)
class Fields:
    """The named values of a request, from its query or JSON body, validated on access."""

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
            raise Problem(400, "the body is not valid JSON: send an object", "json") from None
        if not isinstance(values, dict):
            raise Problem(400, "the body is not a JSON object: send one with named values", "json")
        return cls(values)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise Problem(400, f"'{name}' must be a string, not {json.dumps(value)[:40]}")
        return _valid_unicode(name, value)

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.values.get(name) is not None else None

    def number(self, name: str, most: int) -> int | None:
        """An integer from 0 to `most`, or None if it is missing."""
        value = self.values.get(name)
        if value is None:
            return None
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):  # JSON allows 1e999
            number = -1
        if not 0 <= number <= most:
            raise Problem(400, f"'{name}' must be an integer from 0 to {most}")
        return number

    def texts(self, name: str, most: int) -> list[str]:
        """A list of at most `most` strings; empty if it is missing."""
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise Problem(400, f"'{name}' must be a list of strings")
        if len(value) > most:
            raise Problem(413, f"'{name}' has {len(value)} strings, more than {most}")
        return [_valid_unicode(name, text) for text in value]


def _valid_unicode(name: str, text: str) -> str:
    """Raise if the text has a lone surrogate, which JSON allows but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Problem(400, f"'{name}' is not valid Unicode: it has a lone surrogate") from None
    return text


def json_answer(values: Any) -> JSONResponse:
    """Values as JSON; raise if a number is not finite."""
    try:
        return JSONResponse(values)
    except ValueError:
        raise Problem(422, "the model returns nan or inf: its weights are broken", "nan") from None


def dtype_of(name: str) -> Dtype:
    if name not in get_args(Dtype):
        raise Problem(400, f"dtype={name} is not one of {', '.join(get_args(Dtype))}", "dtype")
    return name  # type: ignore[return-value]


def tensor_answer(tensor: Tensor, dtype: Dtype, low: float | None, high: float | None) -> Response:
    """A tensor as little-endian bytes in row-major order.

    u8 is round(255 · (x − low) / (high − low)), with low and high in X-Low and X-High. They default
    to the minimum and maximum of the tensor.
    """
    headers = {"X-Shape": ",".join(map(str, tensor.shape)), "X-Dtype": dtype}
    if dtype == "u8":
        low = float(tensor.min()) if low is None else low
        high = float(tensor.max()) if high is None else high
        headers |= {"X-Low": repr(low), "X-High": repr(high)}
        scale = 255 / (high - low) if high > low else 0.0
        # Convert in parts: all floats at once would be much larger than the response.
        parts = (((part - low) * scale).round() for part in tensor.flatten().split(PART))
        numbers = torch.cat([part.clamp(0, 255).to(torch.uint8) for part in parts])
    else:
        numbers = tensor.to(torch.float16 if dtype == "f16" else torch.float32)
    body = numbers.contiguous().numpy().tobytes()
    return Response(body, media_type="application/octet-stream", headers=headers)
