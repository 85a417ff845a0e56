"""A tiny sweep: ordinary runs, no run trained twice, and no prediction after the fact."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from manyheads import cli
from manyheads.errors import DataError, UserError
from manyheads.lab.scaling import prediction, sweep
from manyheads.lab.scaling.plan import TARGET, Planned, Sweep
from manyheads.lab.scaling.sweep import Scaling
from manyheads.loading import load_torch_run
from manyheads.recipes import read_recipe
from manyheads.run import read_run

CPU = torch.device("cpu")
REQUEST = Sweep(sizes=2, data=3)
SETTINGS = (
    *("model.dim=32", "model.layers=2", "model.heads=2", "model.max_length=16"),
    *("train.batch_tokens=64", "train.steps=80", "train.warmup_steps=8"),
    *("train.save_every=20", "train.log_every=20"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    drawn = random.Random(1)
    for name, count in (("a.train.txt", 1200), ("a.valid.txt", 60)):
        words = [" ".join(drawn.choices(("ba", "da", "ga", "la"), k=4)) for _ in range(count)]
        (folder / name).write_text("\n".join(words) + "\n", encoding="utf-8")
    return folder


def scaling(text: Path, out: Path, *settings: str) -> Scaling:
    run = read_recipe("shakespeare-char", [f"data.folder={text}", *SETTINGS, *settings])
    return Scaling(run, REQUEST, out, CPU)


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scale") / "out"
    scaling(text, out).go()
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A finished sweep that tests may damage."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def untrained(item: Scaling, planned: Planned) -> None:
    raise AssertionError(f"{planned.name} is trained again")


def test_every_run_is_an_ordinary_one_with_that_loss(text: Path, finished: Path) -> None:
    again = scaling(text, finished)
    results = again.results()
    assert list(results) == [item.name for item in again.plan.runs]
    for planned in (again.plan.fitted[0], again.plan.target):
        opened = load_torch_run(finished / planned.name, CPU)
        assert read_run(finished / planned.name).model == planned.run.model
        assert opened.run.data is not None
        actual = opened.evaluate(opened.run.data, "valid")["loss"]
        assert actual == pytest.approx(results[planned.name], rel=1e-4)


def test_what_is_done_is_not_done_again(
    text: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (out / prediction.FILE).read_bytes()
    monkeypatch.setattr(Scaling, "_train", untrained)
    monkeypatch.setattr(Scaling, "_seconds", lambda item: pytest.fail("planned again"))
    scaling(text, out).go()
    assert (out / prediction.FILE).read_bytes() == before


def test_a_sweep_that_was_stopped_goes_on(
    text: Path, finished: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted sweep resumes within a run and has the losses of an uninterrupted one."""
    full = scaling(text, finished)
    last = full.plan.fitted[-1]
    for name in (last.name, TARGET):
        shutil.rmtree(out / name)
    (out / prediction.FILE).unlink()
    saved = {name: loss for name, loss in full.results().items() if name not in (last.name, TARGET)}
    (out / sweep.RESULTS).write_text(json.dumps(saved))
    step, count = sweep.Trainer.step, [0]

    def stopping(trainer: sweep.Trainer, number: int) -> object:
        count[0] += 1
        if count[0] == 25:
            raise KeyboardInterrupt
        return step(trainer, number)

    monkeypatch.setattr(sweep.Trainer, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        scaling(text, out).go()
    assert not (out / prediction.FILE).exists()
    scaling(text, out).go()
    assert scaling(text, out).results() == full.results()
    # No more than since the last save is done twice.
    assert count[0] <= last.run.train.steps + full.plan.target.run.train.steps + 25 - 20


def test_nothing_is_predicted_after_the_fact(text: Path, out: Path) -> None:
    (out / prediction.FILE).unlink()
    with pytest.raises(UserError, match="cannot be made after the fact"):
        scaling(text, out).go()
    assert not (out / prediction.FILE).exists()


@pytest.mark.parametrize("name", ["loss", "low", "made", "flops"])
def test_a_prediction_that_was_changed_is_noticed(text: Path, out: Path, name: str) -> None:
    table = json.loads((out / prediction.FILE).read_text())
    table[name] = "2000-01-01" if name == "made" else table[name] + 1
    (out / prediction.FILE).write_text(json.dumps(table))
    with pytest.raises(DataError, match="was changed after it was made"):
        scaling(text, out).go()


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["manyheads", "scale", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_plan_alone_trains_nothing(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Scaling, "_train", untrained)
    words = ("shakespeare-char", f"data.folder={text}", *SETTINGS, "--sizes", 2, "--data", 3)
    words = (*words, "--out", tmp_path / "out", "--plan", "--json", "--device", "cpu")
    assert command(monkeypatch, *words) == 0
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert len(shown["runs"]) == 7
    fewest = min(item["tokens"] for item in shown["runs"]) // 64  # train.batch_tokens
    assert f"the shortest runs have {fewest} steps" in printed.err
    assert shown["seconds"] == pytest.approx(sum(item["seconds"] for item in shown["runs"]))
    assert shown["seconds"] > 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == [sweep.PLAN]
