"""kill -9 at random moments and at chosen ones: nothing is lost, and no bit is another."""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.small_run import (
    assert_same_bits,
    at_change,
    command,
    die,
    ending,
    fork,
    mistake,
    reached,
    train,
    until,
    used,
)

from manyheads.fileio import drop_partials, replace_files
from manyheads.run import locked
from manyheads.train import checkpoint
from manyheads.train.checkpoint import read_tensors, write_tensors

# Nearly all of such a run is saving: every step a snapshot, a state and often a model.
SAVING = (
    "train.steps=6",
    "train.average_checkpoints=3",
    "train.save_every=1",
    "train.validate_every=2",
)

KILLS = 10


@pytest.fixture(scope="module")
def saving(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saving") / "run"
    assert train(recipe, out, *SAVING)[0] == 0
    return out


def test_ten_kills_at_random_moments_change_no_bit(
    recipe: Path, whole: Path, tmp_path: Path
) -> None:
    """SIGKILL at ten steps, each time some moment later; then the same command again."""
    out, said, draw = tmp_path / "run", tmp_path / "said", random.Random(4)
    for step in sorted(draw.sample(range(2, 50), KILLS)):
        number = fork(until(command(recipe, out), step + 8), said)
        patience = time.monotonic() + 600
        while reached(out) < step:
            assert time.monotonic() < patience
            assert os.waitpid(number, os.WNOHANG)[0] == 0, said.read_text()
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        os.kill(number, signal.SIGKILL)
        assert ending(number) == -signal.SIGKILL
        state = out / "state/last.safetensors"
        saved = read_tensors(state)[1]["step"] if state.exists() else 0
        assert step - 5 <= saved <= step + 9
    number = fork(command(recipe, out), said)
    assert ending(number) == 0, said.read_text()
    assert f"resuming from step {saved}" in said.read_text()
    assert_same_bits(out, whole)
    assert not list(out.rglob(".*.partial"))  # a kill inside a save leaves no litter
    assert (out / "run.toml").read_bytes() == (whole / "run.toml").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()
    places = [(r["step"], r["split"]) for r in map(json.loads, (out / "metrics.jsonl").open())]
    assert len(places) == len(set(places)) == 60 + 6


@pytest.mark.parametrize("moment", ["save_file", "fsync", "replace"])
def test_killed_inside_a_save(moment: str, recipe: Path, saving: Path, tmp_path: Path) -> None:
    """The three moments of an atomic write, where a random kill seldom lands."""
    out = tmp_path / "run"

    def die_in_save() -> int:
        calls = [0]
        home: Any = checkpoint if moment == "save_file" else os
        plain = getattr(home, moment)

        def dying(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        setattr(home, moment, dying)
        return command(recipe, out, *SAVING)()

    number = fork(die_in_save, tmp_path / "said")
    assert ending(number) == -signal.SIGKILL, (tmp_path / "said").read_text()
    assert 0 < read_tensors(out / "state/last.safetensors")[1]["step"] < 6
    assert train(recipe, out, *SAVING)[0] == 0
    assert_same_bits(out, saving)
    assert not list(out.rglob(".*.partial"))


def test_killed_while_weights_are_written(tmp_path: Path) -> None:
    """In the middle of a file: the library writes to a temporary file of its own."""

    def write() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        write_tensors(tmp_path / "run" / "model.safetensors", {"w": torch.zeros(999)}, {})
        return 0

    assert ending(fork(write, tmp_path / "said")) == -signal.SIGXFSZ
    assert list((tmp_path / "run").rglob("*"))
    drop_partials(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*"))


def test_two_processes_on_one_folder(recipe: Path, tmp_path: Path) -> None:
    """The second is refused; a killed one holds nothing."""
    out = tmp_path / "run"
    ready, tell = os.pipe()

    def hold() -> int:
        with locked(out):
            os.write(tell, b"!")
            time.sleep(600)
        return 0

    number = fork(hold, tmp_path / "said")
    try:
        assert os.read(ready, 1) == b"!"
        result = train(recipe, out, "train.steps=5")
        assert result[0] == 2
        mistake(result, str(out), "another process")
        assert not (out / "run.toml").exists()
    finally:
        os.kill(number, signal.SIGKILL)
        ending(number)
        os.close(ready)
        os.close(tell)
    assert train(recipe, out, "train.steps=5")[0] == 0


def killed_at_change(number: int, recipe: Path, saving: Path, room: Path) -> bool:
    """Whether a run got as far as its n-th change of the disk; there it was killed, and went on."""
    out, said = room / "run", room / "said"
    process = fork(at_change(command(recipe, out, *SAVING), number, out, die), said)
    end = ending(process)
    if end == 0:
        return False
    assert end == -signal.SIGKILL, said.read_text()
    result = used(out)
    if result[0]:
        mistake(result)
    code, _, printed = train(recipe, out, *SAVING)
    assert code == 0, (number, printed)
    assert_same_bits(out, saving)
    for name in ("run.toml", "tokenizer.json", "model.safetensors"):
        assert (out / name).read_bytes() == (saving / name).read_bytes(), (number, name)
    assert not list(out.rglob(".*.partial"))
    return True


# The folder, the tokenizer, a first snapshot, a model, an old snapshot, the mean of the snapshots.
@pytest.mark.parametrize("number", [3, 8, 16, 22, 61, 64])
def test_killed_at_a_change_of_the_disk(
    number: int, recipe: Path, saving: Path, tmp_path: Path
) -> None:
    assert killed_at_change(number, recipe, saving, tmp_path)


@pytest.mark.slow
def test_killed_at_every_change_of_the_disk(recipe: Path, saving: Path, tmp_path: Path) -> None:
    """One run for each: while it begins, saves, validates, averages and drops old snapshots."""
    number = 1
    while True:
        room = tmp_path / str(number)
        room.mkdir()
        if not killed_at_change(number, recipe, saving, room):
            break
        number += 1
    print(f"killed {number - 1} times")
    assert number > 50


def writes(out: Path) -> Callable[[], int]:
    """What import and export do, with files of a few bytes."""

    def work() -> int:
        with replace_files(out, last="run.toml") as inside:
            for name in ("config.json", "model.safetensors", "run.toml"):
                (inside / name).write_bytes(name.encode())
        return 0

    return work


@pytest.mark.parametrize("number", range(1, 8))
def test_a_folder_of_import_or_export_is_whole_or_not_there(number: int, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "new"
    end = ending(fork(at_change(writes(out), number, tmp_path / "runs", die), tmp_path / "said"))
    assert end == -signal.SIGKILL
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    assert names in (set(), {"config.json", "model.safetensors", "run.toml"})
    if not names:
        assert writes(out)() == 0
        assert len(list(out.iterdir())) == 3
