"""Write small files, and catch the one line with which something is refused."""

import gzip
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from manyheads.errors import UserError


def write(path: Path, content: str | bytes) -> Path:
    """A file, packed if its name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(plain) if path.suffix == ".gz" else plain)
    return path


def refusal(kind: type[UserError], call: Callable[..., Any], *arguments: Any) -> str:
    """The message of exactly this error, one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert type(caught.value) is kind, caught.value
    assert "\n" not in str(caught.value)
    return str(caught.value)


def is_close(count: float, trials: int, probability: float) -> bool:
    """Within 3 standard errors of what so many independent trials give."""
    error = sqrt(trials * probability * (1 - probability))
    return abs(count - trials * probability) <= 3 * error


def is_uniform(counts: list[int]) -> bool:
    """By chi-square: its mean is one less than the cells, its variance twice that."""
    expected, free = sum(counts) / len(counts), len(counts) - 1
    return sum((count - expected) ** 2 / expected for count in counts) <= free + 3 * sqrt(2 * free)
