"""A full disk, a read-only folder: one line says what, and the last good checkpoint stays."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.small_run import (
    ON,
    SHORT,
    assert_same_bits,
    at_change,
    call,
    command,
    ending,
    fork,
    full,
    limited,
    mistake,
    train,
    used,
)

from manyheads.train import checkpoint
from manyheads.train.checkpoint import read_tensors


def test_a_disk_that_is_truly_full(recipe: Path, standing: Path, tmp_path: Path) -> None:
    """No file may grow past a limit that lets the metrics grow and the weights not."""
    before = {path: path.read_bytes() for path in standing.rglob("*.safetensors")}
    smallest = min(map(len, before.values()))

    number = fork(limited(command(recipe, standing, *ON), smallest // 2), tmp_path / "said")
    assert ending(number) == 3, (tmp_path / "said").read_text()
    line = mistake(
        (3, "", (tmp_path / "said").read_text()), "could not be saved", "free disk space"
    )
    assert "the previous one is untouched" in line
    assert "last.safetensors" in line or "model.safetensors" in line
    assert {path: path.read_bytes() for path in standing.rglob("*.safetensors")} == before
    assert not list(standing.rglob(".*.partial"))
    code, _, said = train(recipe, standing, *ON)
    assert code == 0
    assert "resuming from step 10" in said
    assert read_tensors(standing / "state/last.safetensors")[1]["step"] == 20


@pytest.mark.parametrize("moment", ["save_file", "fsync", "replace"])
def test_no_space_left_for_a_checkpoint(
    moment: str, recipe: Path, standing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be refused when it is written, flushed or renamed."""
    before = {path: path.read_bytes() for path in standing.rglob("*.safetensors")}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint if moment == "save_file" else os, moment, full)
        result = train(recipe, standing, *ON)
    assert result[0] == 3
    mistake(result, "could not be saved", "No space left on device", "untouched")
    assert {path: path.read_bytes() for path in standing.rglob("*.safetensors")} == before
    assert not list(standing.rglob(".*.partial"))
    assert train(recipe, standing, *ON)[0] == 0


def test_no_space_left_for_the_first_checkpoint(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save_file", full)
    result = train(recipe, tmp_path / "run")
    assert result[0] == 3
    mistake(result, "could not be saved", "nothing was written")


@pytest.mark.parametrize(("name", "most"), [("tokenizer.json", 2000), ("run.toml", 1000)])
def test_no_space_left_to_begin(
    name: str, most: int, recipe: Path, good: Path, tmp_path: Path
) -> None:
    out, said = tmp_path / "run", tmp_path / "said"
    assert most < (good / name).stat().st_size
    if name == "run.toml":  # the tokenizer, which is larger, is there already
        out.mkdir()
        (out / "tokenizer.json").write_bytes((good / "tokenizer.json").read_bytes())
        (out / "run.toml").write_bytes((good / "run.toml").read_bytes())
    number = fork(limited(command(recipe, out, *SHORT), most), said)
    assert ending(number) == 3, said.read_text()
    mistake((3, "", said.read_text()), "arge")
    if name == "run.toml":
        assert (out / name).read_bytes() == (good / name).read_bytes()
    else:
        assert not (out / name).exists()
    assert train(recipe, out, *SHORT)[0] == 0


def test_no_space_left_for_metrics(recipe: Path, whole: Path, tmp_path: Path) -> None:
    out, said = shutil.copytree(whole, tmp_path / "run"), tmp_path / "said"
    size = (out / "metrics.jsonl").stat().st_size
    assert size > (out / "run.toml").stat().st_size
    number = fork(
        limited(command(recipe, out, "train.steps=70", "train.probes=0"), size + 20), said
    )
    assert ending(number) == 3, said.read_text()
    mistake((3, "", said.read_text()), "metrics.jsonl could not be saved")
    assert_same_bits(out, whole)
    assert train(recipe, out, "train.steps=70")[0] == 0
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()]
    assert sorted(set(steps)) == list(range(1, 71))


def failing(code: int) -> Callable[[str], None]:
    """A disk that refuses from now on: one that is full still lets go of files."""

    def refuse(event: str) -> None:
        if code != errno.ENOSPC or event not in ("os.remove", "os.rmdir"):
            raise OSError(code, os.strerror(code))

    return refuse


def refused_at_change(number: int, code: int, recipe: Path, good: Path, room: Path) -> bool:
    """Whether a run got as far as its n-th change; from there all failed, until it went on."""
    out, said = room / "run", room / "said"
    broken = at_change(command(recipe, out, *SHORT), number, out, failing(code))
    end = ending(fork(broken, said))
    if end == 0:
        return False
    assert end in (2, 3), said.read_text()
    mistake((end, "", said.read_text()), os.strerror(code))
    result = used(out)
    if result[0]:
        mistake(result)
    assert train(recipe, out, *SHORT)[0] == 0
    assert_same_bits(out, good)
    return True


# The lock, the metrics, a state; the tokenizer, a model.
@pytest.mark.parametrize(
    ("number", "code"),
    [*((n, errno.ENOSPC) for n in (4, 12, 16)), *((n, errno.EROFS) for n in (6, 18))],
)
def test_a_disk_that_fails_from_some_change_on(
    number: int, code: int, recipe: Path, good: Path, tmp_path: Path
) -> None:
    assert refused_at_change(number, code, recipe, good, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_at_every_change(
    code: int, recipe: Path, good: Path, tmp_path: Path
) -> None:
    number = 1
    while True:
        room = tmp_path / str(number)
        room.mkdir()
        if not refused_at_change(number, code, recipe, good, room):
            break
        number += 1
    print(f"{errno.errorcode[code]}: {number - 1} times")
    assert number > 15


def test_a_clock_that_jumps_changes_nothing(
    recipe: Path, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back to 1970 and on to 2100, from one look at it to the next; the other clocks as well."""
    looks = [0]

    def jumping() -> float:
        looks[0] += 1
        return (4.1e9, 0.0, 1.7e9, -1e6)[looks[0] % 4]

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        for name in ("time", "monotonic", "perf_counter"):
            patch.setattr(time, name, jumping)
        code, _, said = train(recipe, out, *SHORT)
        assert code == 0, said
        assert used(out)[0] == 0
        assert call("info", out)[0] == 0
    assert looks[0] > 5
    assert_same_bits(out, good)
