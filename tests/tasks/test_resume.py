"""Each objective, killed and started again, ends with the same bits; parted batches add up."""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.tasks.small_texts import CASES, trainer, write_texts
from tests.train.small_runs import assert_same_bits, hurt, records

from manyheads.train.checkpoint import read_tensors
from manyheads.train.loop import Trainer


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


def run_and_kill(actual: Trainer, step: int) -> int:
    """How a process ends that trains and is killed when it asks for the batches of a step."""
    hurt(actual, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    number = os.fork()
    if not number:
        gc.freeze()  # as in tests/faults/small_run.py
        try:
            actual.run()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


@pytest.mark.parametrize("name", CASES)
def test_killed_and_started_again_ends_with_the_same_bits(
    name: str, texts: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    actual = trainer(name, texts, whole)
    assert actual.task.per_epoch < actual.train.steps  # it crosses epochs
    actual.run()
    assert run_and_kill(trainer(name, texts, out), 10) == -signal.SIGKILL
    assert read_tensors(out / "state/last.safetensors")[1]["step"] == 8
    trainer(name, texts, out).run()
    assert_same_bits(out, whole)
    for item in (out, whole):
        assert [line["step"] for line in records(item) if line["split"] == "train"] == [
            *range(1, 13)
        ]
    ours, theirs = ([line["loss"] for line in records(item)] for item in (out, whole))
    assert ours == theirs


@pytest.mark.parametrize("name", CASES)
def test_accumulated_batches_equal_one_large_batch(
    name: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each term of the loss has its own denominator, that of the whole step.

    What ELECTRA's generator draws is random like dropout, so here it takes the likeliest.
    """
    monkeypatch.setattr(torch, "multinomial", lambda chances, count: chances.topk(count).indices)
    actual = []
    plain = ("model.dropout=0", "train.steps=3", "train.eps=1e-6", "train.ema_decay=0")
    for rows, parts in ((8, 1), (4, 2)):
        out = tmp_path / str(parts)
        sizes = (f"train.batch_rows={rows}", f"train.accumulate={parts}")
        item = trainer(name, texts, out, *plain, *sizes)
        assert [len(item.task.batches(step)) for step in range(3)] == [parts] * 3
        item.model.double()
        item.run()
        actual.append(records(out))
    whole, parted = actual
    assert len(whole) == len(parted) == 4
    for ours, theirs in zip(parted, whole, strict=True):
        assert ours.keys() == theirs.keys()
        losses = [key for key in ours if key.endswith("loss")]
        assert len(losses) == (3 if "pairs" in name or name == "replaced" else 1)
        for key in losses:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-6), key
