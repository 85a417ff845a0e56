"""Figures of the lectures show what the formulas and the models give, as picture and as CSV."""

import csv
import math
import shutil
from pathlib import Path

import pytest
import torch
from tests.golden.record import LANGUAGE_FOLDER
from tests.test_cli import mistake, result
from tests.view.test_figures import png
from tests.web.small_pages import make_runs

from manyheads.lab.figures.complexity import Complexity
from manyheads.lab.figures.depth import Depth
from manyheads.lab.figures.drawing import Drawing
from manyheads.lab.figures.flash import (
    AttentionTime,
    FlashTiles,
    MemoryHierarchy,
    tile_steps,
)
from manyheads.lab.figures.gradients import VanishingGradients
from manyheads.lab.figures.head_roles import relations, score
from manyheads.lab.figures.kaplan import Kaplan, best_for_budget
from manyheads.lab.figures.schedule import Schedule
from manyheads.lab.figures.two_landscapes import TwoLandscapes
from manyheads.lab.scaling.prediction import Prediction, Trained
from manyheads.lab.scaling.prediction import _write as write_prediction
from manyheads.loading import load_torch_run
from manyheads.nn.attend import attend
from manyheads.phrasebook import english
from manyheads.phrasebook.grammar import Grammar

pytest.importorskip("matplotlib")

TINY = {
    "schedule": Schedule(dims=(512,), warmups=(40,), steps=100, points=20),
    "vanishing-gradients": VanishingGradients(length=12, dim=8, seeds=2),
    "depth": Depth(layers=(1, 2), dim=8, steps=3, warmup=1, sentences=60),
    "two-landscapes": TwoLandscapes(layers=1, dim=8, steps=2, size=3, sentences=60),
    "flash-tiles": FlashTiles(),
    "memory-hierarchy": MemoryHierarchy(),
    "attention-time": AttentionTime(length=32, heads=1, rounds=1),
    "complexity": Complexity(n=32, dim=8, window=8, lengths=(16, 32), rows=1, rounds=1),
}


@pytest.mark.parametrize("name", TINY)
def test_a_figure_is_a_picture_with_its_numbers(name: str, tmp_path: Path) -> None:
    drawing: Drawing = TINY[name].make()
    written = drawing.save([tmp_path / "a.png"])
    assert [path.suffix for path in written] == [".png", ".csv"]
    width, height, colours = png(tmp_path / "a.png")
    assert 500 < width < 3000
    assert 300 < height < 2000
    assert colours > 30
    columns, *rows = csv.reader((tmp_path / "a.csv").open(encoding="utf-8"))
    assert columns == list(drawing.columns)
    assert len(rows) == len(drawing.rows)


def test_the_schedule_is_its_formula() -> None:
    rows = TINY["schedule"].make().rows
    peak = max(rows, key=lambda row: row[3])
    assert peak[2] == 40
    assert peak[3] == pytest.approx(512**-0.5 * 40**-0.5)
    assert rows[0][3] == pytest.approx(512**-0.5 * 40**-1.5)


def test_tiles_end_with_exact_attention() -> None:
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (3, 7, 7))
    steps = tile_steps((q @ k.mT)[0, 0] / 2, v[0, 0], block=3)
    assert len(steps) == 3
    assert torch.allclose(steps[-1].output, attend(q, k, v)[0, 0])
    first = attend(q, k[:, :, :3], v[:, :, :3])[0, 0]
    assert torch.allclose(steps[0].output, first)


def test_complexities_are_the_papers() -> None:
    table = Complexity(n=100, dim=10, kernel=5, window=20)
    operations = {layer: table.formulas(layer)[0][1] for layer in table.layers}
    assert operations == {
        "attention": 100_000,
        "lstm": 10_000,
        "convolution": 50_000,
        "restricted": 20_000,
    }
    assert table.formulas("lstm")[1:] == (("n", 100), ("n", 100.0))
    assert table.formulas("convolution")[2][1] == pytest.approx(math.log(100, 5))


# --- heads ---


def test_relations_are_those_of_the_tree() -> None:
    """Articles stand before their nouns, and a word is related to what it belongs to."""
    grammar = Grammar("test")
    checked = 0
    for _ in range(40):
        tree = grammar.sentence()
        words = [word for word, _ in english.sentence(tree)]
        text, spans, pairs = relations(tree)
        assert [text[a:b].lower() for a, b in spans] == [word.lower() for word in words]
        for article, noun in pairs["article → noun"]:
            assert article < noun
            assert (noun, article) in pairs["noun → article"]
            checked += words[article] in ("a", "an", "the", "my", "this")
        for verb, subject in pairs["verb → subject"]:
            assert (subject, verb) in pairs["subject → verb"]
        assert all(words[q].lower() == words[k].lower() for q, k in pairs["same word"])
    assert checked > 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("run", ["translator", "deep/writer", "reader"])
def test_roles_of_heads_are_shares_of_weight(folder: Path, run: str) -> None:
    scores = score(load_torch_run(folder / run), sentences=8, seed=1)
    causal = run == "deep/writer"
    assert ("next word" not in scores.counts) == causal
    for name in scores.counts:
        assert scores.share(name).shape == (2, 2)
        assert 0 <= scores.share(name).min() <= scores.share(name).max() <= 1.0001
        assert 0 < scores.baseline(name) < 1
        layer, head, share = scores.best(name)
        assert scores.share(name)[layer - 1, head - 1] == pytest.approx(share)


# --- scaling laws ---


def test_a_folder_may_be_named_like_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(LANGUAGE_FOLDER, "x=1")
    numbers = set()
    for words in (["./x=1", "head-roles"], ["x=1", "head-roles"], ["head-roles", "./x=1"]):
        result("figure", *words, "sentences=2", "--out", "roles.svg")
        numbers.add(Path("roles.csv").read_text("utf-8"))
    assert len(numbers) == 1
    assert "./x=1" in mistake("translate", "./x=1", "x=1")  # what to write for a file x=1
    assert "not a file" in mistake("translate", "./x=1", "./x=1")


def test_the_best_size_of_a_budget_lies_on_the_law(tmp_path: Path) -> None:
    runs = tuple(
        Trained(
            name=f"{n}-{d}",
            parameters=n,
            tokens=d,
            flops=6 * n * d,
            loss=2 + 10 / n**0.3 + 20 / d**0.4,
        )
        for n in (10**4, 10**5, 10**6)
        for d in (10**5, 10**6, 10**7)
    )
    made = Prediction(
        made="now",
        level=0.9,
        parameters=10**7,
        tokens=10**8,
        flops=6 * 10**15,
        loss=2.1,
        low=2.0,
        high=2.2,
        fitted=runs,
    )
    write_prediction(tmp_path, made)
    drawing = Kaplan(run=str(tmp_path), budget_flops=1e13).make()
    *_, (_, size, tokens, budget, loss) = drawing.rows
    assert 6 * size * tokens == pytest.approx(budget, rel=1e-3)
    near = [
        2 + 10 / (size * f) ** 0.3 + 20 / (tokens / f) ** 0.4 for f in (0.5, 0.9, 1.0, 1.1, 2.0)
    ]
    assert min(near) == near[2] == pytest.approx(loss, rel=1e-3)
    drawing.save([tmp_path / "kaplan.png"])
    assert best_for_budget(tmp_path, 1e13)["parameters"] == size
