"""Where the time of writing goes, shown of models that are too small for it to mean anything."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from manyheads.nn import exact_attention as cores

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
steps: Any = importlib.import_module("steps")

TINY = ["--tiny", "--device", "cpu", "--rounds", "1"]


def test_variants_are_measured_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    steps.main([*TINY, "--only", "124M batch 1", "beam", "--variants", "cores.FEW=3"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["variant"] for row in rows] == ["", "cores.FEW=3"] * 2
    for row in rows:
        assert row["equal"] == 1.0
        assert row["tokens_per_second"] > 0
        # Both are parts of the whole, which is measured at another time.
        assert 0 < row["read_milliseconds"] < 3 * row["milliseconds"]
        assert 0 < row["step_microseconds"] / 1e3 < 3 * row["milliseconds"]


def test_a_variant_holds_until_it_ends() -> None:
    few = cores.FEW
    with steps.changed("cores.FEW=3 cores.FEW=5"):
        assert cores.FEW == 5
    assert few == cores.FEW


@pytest.mark.parametrize("variant", ["cores.NOTHING=3", "nowhere.FEW=3", "cores.FEW=many", "FEW"])
def test_what_sets_no_number_is_refused(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        steps.main([*TINY, "--variants", variant])
    assert refused.value.code == 2
    assert variant in capsys.readouterr().err
