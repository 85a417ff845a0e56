"""The demo keeps its promises; run by hand with `make test-slow`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_reaches_its_figures(tmp_path: Path) -> None:
    """A few minutes on a CPU to unseen sentences, unseen combinations and alignments."""
    out = tmp_path / "demo"
    words = [sys.executable, "-m", "manyheads", "demo", "--out", str(out), "--device", "cpu"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    scores = json.loads((out / "scores.json").read_text())
    assert scores["bleu"] >= 90
    assert scores["compositional_bleu"] >= 70
    assert scores["alignment_error"] <= 0.25
    assert (out / "attention.png").stat().st_size > 10_000
    assert "Next:" in shown
