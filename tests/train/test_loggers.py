"""Metrics go to the library of `train.log_to` and to a callback, the same as to metrics.jsonl."""

import importlib.machinery
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.test_cli import TINY

import manyheads
from manyheads.errors import UserError
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer, read_run

Record = tuple[int, str, dict[str, float]]


def written(folder: Path) -> list[Record]:
    """The lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [(line.pop("step"), line.pop("split"), line) for line in lines]


class Fake(ModuleType):
    """Has the functions that wandb and trackio share, and records their arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.began: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **named: Any) -> None:
        self.began.append(named)

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_trackers_get_every_metric(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, folder = Fake(library), tmp_path / "mine"
    monkeypatch.setitem(sys.modules, library, fake)
    monkeypatch.setenv(f"{library.upper()}_PROJECT", "experiments")
    manyheads.train("phrasebook", [*TINY, f"train.log_to={library}"], folder, "cpu")
    [began] = fake.began
    assert (began["project"], began["name"]) == ("experiments", "mine")
    assert began["resume"] == "allow"  # a resumed run continues its record
    assert began["config"]["model"]["dim"] == 16
    assert fake.finished == 1
    assert fake.logged == [
        (step, {f"{split}/{name}": value for name, value in scores.items()})
        for step, split, scores in written(folder)
    ]
    assert {step for step, _ in fake.logged} == {3, 6}
    # A finished run is only loaded; another library needs no new folder.
    manyheads.train("phrasebook", TINY, folder, "cpu")
    assert len(fake.began) == 1


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_the_libraries_themselves_store_every_metric(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline; `make test-libraries` installs them."""
    pytest.importorskip(library)
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    for name in ("WANDB_DIR", "TRACKIO_DIR"):  # read at the import of trackio: in a new process
        monkeypatch.setenv(name, str(tmp_path))
    folder = tmp_path / "mine"
    command = ["-m", "manyheads", "train", "phrasebook", *TINY, f"train.log_to={library}"]
    subprocess.run([sys.executable, *command, "--out", str(folder)], check=True, timeout=600)
    files = [*tmp_path.rglob("*.wandb"), *tmp_path.glob("*.db*")]
    stored = b"".join(file.read_bytes() for file in files)
    for _, split, scores in written(folder):
        for metric, value in scores.items():
            assert f"{split}/{metric}".encode() in stored
            assert json.dumps(value).encode() in stored


def test_tensorboard_files_hold_the_metrics_and_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, settings = tmp_path / "run", [*TINY, "train.log_to=tensorboard"]
    manyheads.train("phrasebook", [*settings, "train.steps=3"], folder, "cpu")
    manyheads.train("phrasebook", settings, folder, "cpu")
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    for split in ("train", "valid"):
        expected = [
            (step, scores["loss"]) for step, name, scores in written(folder) if name == split
        ]
        scalars = [(scalar.step, scalar.value) for scalar in events.Scalars(f"{split}/loss")]
        assert [step for step, _ in scalars] == [step for step, _ in expected] == [3, 6]
        assert [value for _, value in scalars] == pytest.approx([value for _, value in expected])


def test_callback_gets_every_line_and_nothing_else_is_written(tmp_path: Path) -> None:
    records: list[Record] = []
    folder = tmp_path / "run"
    manyheads.train(
        "phrasebook", TINY, folder, "cpu", callback=lambda *record: records.append(record)
    )
    assert records == written(folder)
    assert not (folder / "tensorboard").exists()
    assert read_run(folder).train.log_to is None


def test_a_missing_library_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyheads.train.metrics.find_spec", lambda name: None)
    run = read_recipe("phrasebook", [*TINY, "train.log_to=wandb"])
    with pytest.raises(UserError, match=r"train\.log_to=wandb needs wandb: pip install wandb"):
        make_trainer(run, tmp_path / "run", torch.device("cpu"))
