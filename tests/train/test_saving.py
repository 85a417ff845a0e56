"""Saves that are written behind the training: of the moment that they were asked for, in order."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_runs import assert_same_bits, hurt

from manyheads.errors import DataError
from manyheads.recipes import read_recipe
from manyheads.train import checkpoint
from manyheads.train.async_checkpoint import Saver
from manyheads.train.checkpoint import Progress, read_tensors
from manyheads.train.loop import Stopped
from manyheads.training import train

SETTINGS = """data.train_pairs=60 data.valid_pairs=20 tokens.vocab_size=300 model.dim=16
    model.hidden=16 model.layers=1 model.heads=2 train.steps=6 train.save_every=1
    train.validate_every=3 train.average=3 train.batch_tokens=300 decode.validate_sentences=2"""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file is written until this is set."""
    event, write = threading.Event(), checkpoint.write_tensors

    def waiting(*given: Any) -> None:
        assert event.wait(60)
        write(*given)

    monkeypatch.setattr(checkpoint, "write_tensors", waiting)
    return event


def test_a_save_is_of_the_moment_when_it_was_asked_for(
    tmp_path: Path, held: threading.Event
) -> None:
    weight, progress = torch.ones(3), Progress(step=4, snapshots=[4])
    saver = Saver(tmp_path, behind=True)
    saver.save({"model.w": weight}, {"w": weight}, progress)
    weight.zero_()
    progress.step = 5
    progress.snapshots.append(5)
    assert not (tmp_path / checkpoint.LAST).exists()  # the training goes on meanwhile
    held.set()
    saver.wait()
    tensors, about = read_tensors(tmp_path / checkpoint.LAST)
    assert torch.equal(tensors["model.w"], torch.ones(3))
    assert (about["step"], about["snapshots"]) == (4, [4])
    [snapshot] = (tmp_path / checkpoint.STATE).glob("weights-*")
    assert torch.equal(read_tensors(snapshot)[0]["w"], torch.ones(3))


def test_saves_are_written_in_order(tmp_path: Path, held: threading.Event) -> None:
    saver = Saver(tmp_path, behind=True)
    saver.save({"model.w": torch.ones(1)}, None, Progress(step=1))
    later = threading.Thread(
        target=lambda: saver.save({"model.w": torch.ones(2)}, None, Progress(step=2))
    )
    later.start()
    later.join(0.05)
    assert later.is_alive()  # it waits for the first
    held.set()
    later.join()
    saver.wait()
    assert read_tensors(tmp_path / checkpoint.LAST)[1]["step"] == 2


def test_what_cannot_be_written_is_told_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    saver = Saver(tmp_path, behind=True)
    saver.save({"model.w": torch.ones(1)}, None, Progress(step=1))
    with pytest.raises(DataError, match="No space left"):
        saver.save({"model.w": torch.ones(1)}, None, Progress(step=2))
    saver.wait()  # it is told once


def test_a_run_that_saves_behind_leaves_the_same(tmp_path: Path) -> None:
    """Also where it is stopped, and goes on."""
    run = read_recipe("phrasebook", SETTINGS.split())
    whole, behind = tmp_path / "whole", tmp_path / "behind"
    train(run, whole, torch.device("cpu")).run()
    trainer = train(run, behind, torch.device("cpu"))
    trainer.saver.behind = True
    hurt(trainer, 3, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped):
        trainer.run()
    assert trainer.saver.pending is None
    assert read_tensors(behind / checkpoint.LAST)[1]["step"] == 4
    trainer = train(run, behind, torch.device("cpu"))
    trainer.saver.behind = True
    trainer.run()
    assert_same_bits(whole, behind)
