"""What a run has measured: metrics.jsonl as curves."""

import json
import math
from pathlib import Path

from manyheads.errors import BadData, Mistake

Curve = list[tuple[int, float]]


def measured(run: Path) -> dict[tuple[str, str], Curve]:
    """(step, value) by split and name. A line that is not whole, and what is no number, is none."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Mistake(f"{path}: nothing was measured there ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadData(f"{path} is not UTF-8: it is no file of a run") from None
    found: dict[tuple[str, str], Curve] = {}
    for line in lines:
        try:
            record = json.loads(line)
            step, split = int(record.pop("step")), str(record.pop("split"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        for name, value in record.items():
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault((split, name), []).append((step, float(value)))
    return found
