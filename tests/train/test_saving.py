"""Asynchronous checkpoints: the state at the time of the call, written in order."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_runs import assert_same_bits, hurt
from torch import nn

from manyheads.errors import DataError
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.train import checkpoint
from manyheads.train.checkpoint import Checkpointer, Progress, read_tensors
from manyheads.train.loop import Stopped
from manyheads.train.step import ONE_PROCESS

SETTINGS = """data.train_pairs=60 data.valid_pairs=20 tokens.vocab_size=300 model.dim=16
    model.ffn_dim=16 model.layers=1 model.heads=2 train.steps=6 train.save_every=1
    train.validate_every=3 train.average_checkpoints=3 train.batch_tokens=300
    decode.bleu_sentences=2"""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file is written until this is set."""
    event, write = threading.Event(), checkpoint.write_tensors

    def waiting(*arguments: Any) -> None:
        assert event.wait(600)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", waiting)
    return event


@pytest.fixture
def saver(tmp_path: Path) -> Checkpointer:
    model = nn.Linear(1, 3, bias=False)
    nn.init.ones_(model.weight)
    saver = Checkpointer(tmp_path, model, torch.optim.Adam([model.weight]), model, ONE_PROCESS)
    saver.is_asynchronous = True
    return saver


def test_a_save_holds_the_state_at_the_time_of_the_call(
    tmp_path: Path, saver: Checkpointer, held: threading.Event
) -> None:
    progress = Progress(step=4, snapshots=[4])
    saver.save(progress, snapshot=True)
    nn.init.zeros_(saver.model.weight)  # type: ignore[arg-type]
    progress.step = 5
    progress.snapshots.append(5)
    assert not (tmp_path / checkpoint.LAST).exists()  # the training continues meanwhile
    held.set()
    saver.close()
    tensors, about = read_tensors(tmp_path / checkpoint.LAST)
    assert torch.equal(tensors["model.weight"], torch.ones(3, 1))
    assert (about["step"], about["snapshots"]) == (4, [4])
    [snapshot] = (tmp_path / checkpoint.STATE).glob("weights-*")
    assert torch.equal(read_tensors(snapshot)[0]["weight"], torch.ones(3, 1))


def test_saves_are_written_in_order(
    tmp_path: Path, saver: Checkpointer, held: threading.Event
) -> None:
    saver.save(Progress(step=1))
    later = threading.Thread(target=lambda: saver.save(Progress(step=2)))
    later.start()
    later.join(0.05)
    assert later.is_alive()  # it waits for the first
    held.set()
    later.join()
    saver.close()
    assert read_tensors(tmp_path / checkpoint.LAST)[1]["step"] == 2


def test_a_failed_write_is_raised_at_the_next_save(
    saver: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    saver.save(Progress(step=1))
    with pytest.raises(DataError, match="No space left"):
        saver.save(Progress(step=2))
    saver.close()  # it is raised once


def test_a_run_with_asynchronous_checkpoints_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Also if it is stopped and resumed."""
    run = read_recipe("phrasebook", SETTINGS.split())
    whole, out = tmp_path / "whole", tmp_path / "asynchronous"
    make_trainer(run, whole, torch.device("cpu")).run()
    trainer = make_trainer(run, out, torch.device("cpu"))
    trainer.checkpointer.is_asynchronous = True
    hurt(trainer, 3, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped):
        trainer.run()
    assert trainer.checkpointer.pending is None
    assert read_tensors(out / checkpoint.LAST)[1]["step"] == 4
    trainer = make_trainer(run, out, torch.device("cpu"))
    trainer.checkpointer.is_asynchronous = True
    trainer.run()
    assert_same_bits(whole, out)
