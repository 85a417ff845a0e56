"""The table of goals: each goal beside the row that it was set for, and no other."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
speed: Any = importlib.import_module("speed")


@pytest.mark.parametrize("before", ["", speed.TINY])
def test_a_goal_is_shown_for_its_own_row_alone(before: str) -> None:
    rows = [
        {
            "bench": "training",
            "row": before + name,
            "ratios": {"ours": {"transformers": {"median": ratio, "least": 1, "most": 9}}},
        }
        for name, ratio in (("gpt 124M", 1.5), ("gpt 124M, theirs aligned", 1.2))
    ]
    shown = [goal.shown(rows) for goal in speed.goals() if goal.row.startswith("gpt 124M")]
    lines = [line for lines in shown for line in lines.splitlines() if "GPT 124M" in line]
    assert [("1.5 ×" in line, "1.2 ×" in line) for line in lines] == [(True, False), (False, True)]
    assert ["yes" in line for line in lines] == [True, False]
