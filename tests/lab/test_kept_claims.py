"""Running claims: current results are reused, and reports show them unchanged."""

import dataclasses
import json
import re
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manyheads import __version__
from manyheads.cli import app
from manyheads.errors import DataError, UserError
from manyheads.lab.claims import report, runner
from manyheads.lab.claims.claim import LECTURES, Claim, Measured, Setting, holds_if


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A test claim that records each measurement."""
    calls: list[int] = []

    def measure(setting: Setting) -> Measured:
        calls.append(len(setting.seeds))
        numbers = [float(seed) for seed in setting.seeds]
        lines = {"a <line>": [(1.0, 2.0), (2.0, 4.0)]}
        return Measured(numbers={"x": numbers}, lines=lines, across="n", up="x")

    claim = Claim(
        sentence="One & one is <two>.",
        lectures="000",
        criterion="x above 0",
        measure=measure,
        judge=lambda measured: holds_if(measured.least("x") > 0, f"x is {measured.reported('x')}"),
    )
    for module in (runner, report):
        monkeypatch.setattr(module, "claims", lambda: {"counting": claim})
    return calls


def call(*words: str) -> tuple[int, str]:
    actual = CliRunner().invoke(app, ["claims", *words], catch_exceptions=True)
    return actual.exit_code, actual.output if actual.exception is None else str(actual.exception)


def test_results_are_kept_and_not_computed_again(counting: list[int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = str(tmp_path / "out")
    assert call("--all", "--report", out)[0] == 0
    assert call("--all", "--report", out)[0] == 0
    assert counting == [3]
    assert call("--all", "--report", out, "--seeds", "1,2")[0] == 0
    assert counting == [3, 2]
    assert call("--all", "--report", out, "--seeds", "1,2", "--again")[0] == 0
    assert counting == [3, 2, 2]
    [row] = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert row["numbers"] == {"x": [1.0, 2.0]}
    assert row["command"] == "manyheads claims --run counting --seeds 1,2 --device cpu"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<code>manyheads claims --all --seeds 1,2 --device cpu --report out</code>" in page
    assert "One &amp; one is &lt;two&gt;." in page
    assert f"release {__version__}</p>" in page
    text = (tmp_path / "out" / "claims.md").read_text()
    assert f"release {__version__}\n" in text
    assert f"Source: {LECTURES['000']}." in text
    assert "data:image/png;base64," in page
    assert not re.search(r"(src|href)=.?https?:", page)
    for broken in ("{", "3", json.dumps({**row, "numbers": {"x": 1}})):
        (tmp_path / "out" / "counting.json").write_text(broken)
        with pytest.raises(DataError, match="delete it"):
            runner.kept("counting", Setting(), tmp_path / "out")


def test_an_interrupt_reports_what_is_saved(
    counting: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(setting: Setting) -> Measured:
        raise KeyboardInterrupt

    claim = runner.find("counting")
    stopping = dataclasses.replace(claim, measure=stop)
    monkeypatch.setattr(runner, "claims", lambda: {"a": claim, "b": stopping})
    monkeypatch.setattr(runner, "draw", lambda name, measured, path: None)
    with pytest.raises(UserError, match=r"stopped in b.*the same command resumes") as caught:
        CliRunner().invoke(
            app, ["claims", "--all", "--report", str(tmp_path / "out")], catch_exceptions=False
        )
    assert caught.value.exit_code == 130
    assert (tmp_path / "out" / "a.json").is_file()


def test_a_result_is_reused_while_setting_and_code_are_the_same(
    counting: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "draw", lambda name, measured, path: path.write_bytes(b""))
    (tmp_path / "claims").mkdir()
    setting = Setting(seeds=(1, 2))
    result = runner.run("counting", setting, tmp_path)
    assert runner.kept("counting", setting, tmp_path) == result
    for other in ({"seeds": (1, 3)}, {"large": True}, {"threads": 1}):
        assert runner.kept("counting", dataclasses.replace(setting, **other), tmp_path) is None
    for words in ({"threads": result.threads + 1}, {"code": "00000000"}, {"release": "0.1"}):
        text = json.dumps({**result.as_json(), **words})
        (tmp_path / "counting.json").write_text(text)
        assert runner.kept("counting", setting, tmp_path) is None
    old = {name: value for name, value in result.as_json().items() if name != "code"}
    (tmp_path / "counting.json").write_text(json.dumps(old))
    assert runner.kept("counting", setting, tmp_path) is None
    (tmp_path / "counting.json").write_text(json.dumps(result.as_json()))
    assert runner.kept("counting", setting, tmp_path) == result
    (tmp_path / "claims" / "counting.png").unlink()
    assert runner.kept("counting", setting, tmp_path) is None


def test_infinite_values_and_nan_survive_saving_and_loading(
    counting: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    numbers = {"x": [1.0, inf, 2.0], "y": [nan, 1.0, 2.0], "z": [inf, -inf, 1.0]}
    points = [(1.0, inf), (2.0, 1.0), (3.0, nan)]
    measured = Measured(numbers=numbers, lines={"x": points}, logarithmic=("up",))
    claim = dataclasses.replace(
        runner.find("counting"),
        measure=lambda setting: measured,
        judge=lambda measured: holds_if(False, " ".join(map(measured.reported, "xyz"))),
    )
    monkeypatch.setattr(runner, "claims", lambda: {"counting": claim})
    status, printed = call("--all", "--json", "--report", str(tmp_path))
    assert status == 0

    def read(text: str) -> Any:
        return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    row = read((tmp_path / "counting.json").read_text())
    assert row["numbers"] == {k: [x if isfinite(x) else str(x) for x in numbers[k]] for k in "xyz"}
    assert row["why"] == "inf nan nan"
    assert read((tmp_path / "claims.json").read_text()) == [row]
    assert read(printed[printed.index("{") : printed.rindex("}") + 1]) == {"claims": [row]}
    actual = runner.kept("counting", Setting(), tmp_path)
    assert actual is not None
    assert str(actual.numbers) == str(numbers)  # NaN is not equal to itself
