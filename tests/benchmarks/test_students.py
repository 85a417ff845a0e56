"""benchmarks/students.py: the BLEU and the rate of each side, the first of which is the measure."""

import json
from pathlib import Path

import pytest

from benchmarks import students
from manyheads import train

SMALL = {
    "data.train_pairs": 200,
    "data.valid_pairs": 8,
    "train.steps": 2,
    "train.batch_tokens": 400,
    "model.dim": 16,
    "model.layers": 1,
    "model.heads": 2,
    "tokens.vocab_size": 300,
    "decode.bleu_sentences": 0,
}


def test_sides_are_measured_next_to_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ctranslate2")
    train("phrasebook", SMALL, tmp_path / "run", "cpu")
    sides = [f"{tmp_path / 'run'}:2", f"{tmp_path / 'run'}:1"]
    capsys.readouterr()
    students.main([*sides, "--rounds", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["side"] for row in rows] == sides
    assert rows[0]["times_as_fast"] == 1.0
    ratio = rows[1]["sentences_per_second"] / rows[0]["sentences_per_second"]
    assert rows[1]["times_as_fast"] == pytest.approx(ratio, rel=0.02, abs=0.01)
