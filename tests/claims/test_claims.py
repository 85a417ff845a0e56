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
    "approximations": (
        {
            "exact": 1.0,
            "longformer, small": 0.2,
            "longformer, large": 0.3,
            "linformer, small": 0.2,
            "linformer, large": 0.3,
            "performer, small": 0.5,
            "performer, large": 0.8,
            "longformer, small near": 0.9,
            "longformer, small flops": 0.1,
            "longformer, large flops": 0.2,
            "linformer, small flops": 0.2,
            "linformer, large flops": 0.5,
            "performer, small flops": 0.2,
            "performer, large flops": 0.5,
        },
        {"performer, large": 1.0},
    ),
    "attention-aligns": (
        {"places": 0.8, "LSTM": 0.1, "Transformer": 0.2}
        | {"LSTM, untrained": 0.8, "Transformer, untrained": 0.8},
        {"Transformer": 0.7},
    ),
    "beam-size": (
        {"greedy": 50.0, "beam 4": 52.0, "beam 16": 51.0}
        | {"likelier": 0.5, "length": 0.9, "penalised length": 0.95},
        {"beam 4": 49.0},
    ),
    "both-directions": (
        {"words both": 0.9, "words causal": 0.8, "texts both": 0.7, "texts causal": 0.6},
        {"texts both": 0.6},
    ),
    "bottleneck": (
        {"attention, short": 1.0, "attention, long": 0.95}
        | {"one vector, short": 1.0, "one vector, long": 0.3},
        {"one vector, long": 0.9},
    ),
    "feed-forward-needed": (
        {"attention": 1e-9, "with feed-forward": 0.5, "with residuals": 0.4, "with both": 0.5},
        {"with feed-forward": 1e-9},
    ),
    "five-scores": (
        {
            f"{where}, {kind}": 1.0
            for where in ("Transformer", "LSTM", "time")
            for kind in ("dot", "scaled-dot", "bilinear", "reduced-rank", "additive")
        }
        | {"time, additive": 9.0, "time, bilinear": 3.0},
        {"LSTM, scaled-dot": 0.8},
    ),
    "flash-moves-less": (
        {
            "apart": 1e-6,
            "dense memory, n": 2.0,
            "tiled memory, n": 0.5,
            "fused memory, n": 1.0,
            "memory": 30.0,
            "moved": 3.0,
            "moved, small memory": 1.1,
            "tiled faster": 0.9,
            "fused faster": 2.0,
        },
        {"tiled memory, n": 1.9},
    ),
    "label-smoothing": (
        {"plain BLEU": 50.0, "smoothed BLEU": 52.0}
        | {"plain perplexity": 2.0, "smoothed perplexity": 2.3},
        {"smoothed BLEU": 49.0},
    ),
    "layer-norm-speed": (
        {"2 layers": 0.5, "8 layers": 0.5, "8 layers, small at first without norms": 0.5},
        {"8 layers": 1.0},
    ),
    "masking-recipe": (
        {
            **{f"{what}, 80/10/10": 0.9 for what in ("word", "sense", "tuned")},
            **{f"{what}, masks alone": 0.8 for what in ("word", "sense", "tuned")},
        },
        {"sense, 80/10/10": 0.8},
    ),
    "masking-trains-all-at-once": ({"apart": 1e-14, "leak": 0.0, "faster": 9.0}, {"leak": 1e-3}),
    "norm-and-warmup": (
        {
            "post, nats learned": 1.0,
            "post, same rate": 0.3,
            "post, own rate": 0.5,
            "pre, nats learned": 2.0,
            "pre, same rate": 1.0,
            "pre, own rate": 1.0,
        },
        {"pre, same rate": 0.5},
    ),
    "order-needs-positions": ({"none": 0.0, "rotary": 0.3}, {"rotary": 1e-15}),
    "parallel-over-places": (
        {
            "transformer steps, n": 0.0,
            "lstm steps, n": 1.0,
            "transformer keeps": 0.7,
            "lstm keeps": 0.1,
            "faster at the longest": 5.0,
        },
        {"transformer steps, n": 1.0},
    ),
    "path-length": (
        {
            "transformer, near": 40.0,
            "transformer, far": 50.0,
            "lstm, near": 50.0,
            "lstm, far": 400.0,
            "opened, near": 40.0,
            "opened, far": 200.0,
            "limit": 400.0,
            "distance": 96.0,
        },
        {"transformer, far": 400.0},
    ),
    "positions-beyond-training": (
        {"learned": 1.0, "sinusoidal": 2.0, "rotary": 4.0, "alibi": 8.0},
        {"learned": 2.0},
    ),
    "pretraining-and-labels": (
        {
            "pretrained few": 0.9,
            "scratch few": 0.4,
            "pretrained many": 1.0,
            "scratch many": 1.0,
        },
        {"pretrained few": 0.4},
    ),
    "rare-words": (
        {
            "unknown, pieces": 0.0,
            "unknown, words": 1.0,
            "unknown, characters": 0.0,
            "rare, pieces": 0.8,
            "rare, words": 0.0,
            "rare, characters": 0.5,
            "common, pieces": 1.0,
            "common, words": 1.0,
            "common, characters": 0.9,
            "length, pieces": 5.0,
            "length, words": 1.0,
            "length, characters": 12.0,
        },
        {"unknown, pieces": 0.1},
    ),
    "residuals": (
        {
            "layers": 12.0,
            "deepest with": 12.0,
            "deepest without": 1.0,
            "slope with": 1.0,
            "slope without": 1e-3,
        },
        {"deepest with": 1.0},
    ),
    "rotary-distance": ({"rotary": 1e-15, "sinusoidal": 0.7}, {"rotary": 0.2}),
    "scaled-scores": ({"plain": 0.1, "scaled": 1.0}, {"scaled": 0.2}),
    "several-heads": (
        {
            "parameters": 1.0,
            "FLOPs": 1.0,
            "time, short": 1.0,
            "time, long": 1.1,
            "errors, 1 head": 0.4,
            "errors, 4 heads": 0.01,
        },
        {"errors, 4 heads": 0.4},
    ),
    "squares-of-length": (
        {
            "attention, n": 2.0,
            "attention, d": 1.0,
            "lstm, n": 1.0,
            "lstm, d": 2.0,
            "crossing in widths": 4.0,
        },
        {"attention, n": 1.0},
    ),
    "tied-embeddings": ({"saved": 0.3, "tied": 3.6, "untied": 3.7}, {"tied": 3.9}),
    "where-parameters-go": (
        {
            "parameters, least": 0.666,
            "parameters, most": 0.667,
            "compute, smallest": 0.52,
            "compute, largest": 0.65,
            "growth": 0.01,
            "majority from": 0.1,
            "overtaken at, smallest": 3072.0,
            "overtaken at, largest": 49152.0,
        },
        {"parameters, least": 0.33},
    ),
}
# Those that take a moment, and can be run here.
QUICK = (
    "masking-trains-all-at-once",
    "order-needs-positions",
    "rotary-distance",
    "scaled-scores",
)


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


@pytest.mark.parametrize("name", QUICK)
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
