"""What a run has measured: metrics.jsonl as curves."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from manyheads.errors import UserError

Curve = list[tuple[int, float]]


def measured(
    run: Path, warn: Callable[[str], None] = lambda line: None
) -> dict[tuple[str, str], Curve]:
    """(step, value) by split and name; `warn` is told of lines that cannot be read."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: nothing was measured there ({error.strerror})") from None
    found: dict[tuple[str, str], Curve] = {}
    broken = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line, parse_int=float)
            step, split = int(record.pop("step")), str(record.pop("split"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            broken += number < len(lines)  # the last one may be being written
            continue
        for name, value in record.items():
            if isinstance(value, float) and math.isfinite(value):
                found.setdefault((split, name), []).append((step, value))
    if broken:
        warn(f"{path}: lines that could not be read, and are left out: {broken}")
    return found
