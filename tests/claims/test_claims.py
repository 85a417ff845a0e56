"""Claims: verdicts are computed, every criterion can fail, results are shown as they are."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from manyheads.claims import runner
from manyheads.claims.claim import Claim, Judged, Measured, Setting, holds_if
from manyheads.claims.report import as_html, as_markdown, counted
from manyheads.cli import app
from manyheads.errors import BadData, Mistake
from manyheads.nn import masks
from manyheads.nn.positions import RotaryPosition, SinusoidalPosition

ONCE = Setting(seeds=(1,))
# Numbers that a broken model would give, of each claim, and which of them breaks it.
BROKEN = {
    "masking-trains-all-at-once": ({"apart": 1e-14, "leak": 0.0, "faster": 9.0}, {"leak": 1e-3}),
    "order-needs-positions": ({"none": 0.0, "rotary": 0.3}, {"rotary": 1e-15}),
    "rotary-distance": ({"rotary": 1e-15, "sinusoidal": 0.7}, {"rotary": 0.2}),
    "scaled-scores": ({"plain": 0.1, "scaled": 1.0}, {"scaled": 0.2}),
}


def judged(name: str, numbers: dict[str, float]) -> Judged:
    return runner.find(name).judge(Measured(numbers={key: [x] for key, x in numbers.items()}))


@pytest.mark.parametrize("name", list(runner.claims()))
def test_a_criterion_can_be_met_and_can_fail(name: str) -> None:
    good, bad = BROKEN[name]
    assert judged(name, good).verdict == "holds"
    assert judged(name, good | bad).verdict != "holds"


@pytest.mark.parametrize("name", list(runner.claims()))
def test_a_claim_is_told_in_whole_sentences(name: str) -> None:
    claim = runner.find(name)
    assert claim.sentence.endswith(".")
    assert re.fullmatch(r"00[0-4](, 00[0-4])*", claim.deck)
    assert claim.criterion
    assert not claim.criterion.endswith(".")


@pytest.mark.parametrize("name", list(BROKEN))
def test_quick_claims_come_out_as_the_decks_say(name: str) -> None:
    result = runner.run(name, ONCE)
    assert result.verdict == "holds"
    assert result.numbers.keys() >= set(BROKEN[name][0]) - {"rotary", "sinusoidal"}


def test_a_broken_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks.Causal, "__call__", lambda self, q, k: k <= q + 1)
    monkeypatch.setattr(masks.Sight, "is_triangle", lambda self: False)
    assert runner.run("masking-trains-all-at-once", ONCE).verdict == "fails"


def test_broken_positions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def grown(self: object, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x * (1 + positions[:, None, :, None])

    monkeypatch.setattr(RotaryPosition, "rotate", grown)
    monkeypatch.setattr(SinusoidalPosition, "embed", lambda self, x, positions: x)
    assert runner.run("rotary-distance", ONCE).verdict == "fails"
    assert runner.run("order-needs-positions", ONCE).verdict == "fails"


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A claim of its own that notes each time that it is measured."""
    calls: list[int] = []

    def measure(setting: Setting) -> Measured:
        calls.append(len(setting.seeds))
        numbers = [float(seed) for seed in setting.seeds]
        lines = {"a <line>": [(1.0, 2.0), (2.0, 4.0)]}
        return Measured(numbers={"x": numbers}, lines=lines, across="n", up="x")

    claim = Claim(
        sentence="One & one is <two>.",
        deck="000",
        criterion="x above 0",
        measure=measure,
        judge=lambda measured: holds_if(measured.least("x") > 0, f"x is {measured.told('x')}"),
    )
    monkeypatch.setattr(runner, "claims", lambda: {"counting": claim})
    return calls


def call(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["claims", *words], catch_exceptions=True)
    return found.exit_code, found.output if found.exception is None else str(found.exception)


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
    assert "One &amp; one is &lt;two&gt;." in page
    assert "data:image/png;base64," in page
    assert not re.search(r"(src|href)=.?https?:", page)
    (tmp_path / "out" / "counting.json").write_text("{")
    with pytest.raises(BadData, match="delete it"):
        runner.kept("counting", Setting(), tmp_path / "out")


def test_pages_are_made_of_the_results_alone(counting: list[int], tmp_path: Path) -> None:
    result = runner.run("counting", Setting(seeds=(1, 3)))
    failed = dataclasses.replace(result, verdict="fails", why="no")
    assert counted([result, failed, result]) == "2 hold, 1 fail"
    assert "2 ± 1.4" in as_html([result], tmp_path)
    lines = as_markdown([result, failed], "manyheads claims --all").splitlines()
    assert sum("**holds**" in line for line in lines) == 1
    assert sum("**fails**" in line for line in lines) == 1


def test_mistakes_are_said_before_anything_runs(counting: list[int]) -> None:
    for words in (
        ["--run", "countin"],
        ["--run", "counting", "--all"],
        ["--report", "somewhere"],
        ["--all", "--seeds", "1,x"],
        ["--all", "--seeds", "1,1"],
    ):
        with pytest.raises(Mistake) as caught:
            CliRunner().invoke(app, ["claims", *words], catch_exceptions=False)
        assert "\n" not in str(caught.value)
    assert counting == []
    assert call()[1].startswith("counting: One & one")
