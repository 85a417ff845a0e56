"""A run by length and best first, shown of a model that has learned next to nothing."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.decode.translate import Seq2SeqForest, Seq2SeqStepper
from manyheads.recipes import read_recipe
from manyheads.training import train

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
orders: Any = importlib.import_module("orders")
speed: Any = importlib.import_module("speed")

SETTINGS = """train.steps=3 train.validate_every=3 train.save_every=3 train.batch_tokens=600
    data.train_pairs=60 data.valid_pairs=20 tokens.vocab_size=300 model.dim=8 model.layers=1
    decode.beam=3 decode.stopping=none-better-ever decode.longest_extra=6 decode.longest_ratio=0
    decode.length_penalty=0 decode.validate_sentences=0"""


def trained(out: Path, *more: str) -> str:
    run = read_recipe("phrasebook", [*SETTINGS.split(), *more])
    train(run, out, torch.device("cpu")).run()
    return str(out)


def test_each_order_is_measured_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / "run", "model.heads=2", "model.hidden=8")
    rows = tmp_path / "rows.jsonl"
    capsys.readouterr()
    steps = Seq2SeqStepper.step, Seq2SeqForest.step
    asked = ["--split", "valid", "--rounds", "1", "--sentences", "6", "--rows", str(rows)]
    assert orders.main([run, *asked, "decode.shortest=1"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert not row["errors"]
    ours, first, now = (row["sides"][side] for side in orders.SIDES)
    assert (first["equal"], first["bleu"]) == (1.0, ours["bleu"])
    assert 0 < now["asked"] <= first["asked"] <= ours["asked"]
    assert all(side["tokens_per_second"] > 0 for side in (ours, first, now))
    assert row["sentences"] == 6
    assert row["signature"].keys() == {"bleu", "chrf"}
    assert (Seq2SeqStepper.step, Seq2SeqForest.step) == steps  # no longer counted
    monkeypatch.setattr(sys, "argv", ["speed.py", str(rows)])
    speed.main()
    assert f"| {run}, valid, decode.shortest=1 | ours, best first |" in capsys.readouterr().out


def test_what_has_no_other_order_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "rnn", "model=rnn")
    for arguments, words in (
        ([run], "by length alone"),
        ([str(tmp_path / "none")], "no run folder"),
    ):
        capsys.readouterr()
        assert orders.main(arguments) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1
