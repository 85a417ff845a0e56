"""Where the time of writing goes, shown of models that are too small for it to mean anything."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
steps: Any = importlib.import_module("steps")

TINY = ["--tiny", "--device", "cpu", "--rounds", "1"]


def test_variants_are_measured_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    steps.main(
        [*TINY, "--only", "124M batch 1", "beam", "--variants", "attention.MAX_DECODE_QUERIES=3"]
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["variant"] for row in rows] == ["", "attention.MAX_DECODE_QUERIES=3"] * 2
    for row in rows:
        assert row["equal"] == 1.0
        assert row["tokens_per_second"] > 0
        # Both are parts of the whole, which is measured at another time.
        assert 0 < row["read_milliseconds"] < 3 * row["milliseconds"]
        assert 0 < row["step_microseconds"] / 1e3 < 3 * row["milliseconds"]
