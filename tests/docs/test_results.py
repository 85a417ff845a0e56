"""The numbers of pages, recipes and lecture tables are those of docs/results."""

import importlib.util
import re
import statistics
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.test_docs import ROOT, known_commands

from manyheads import __version__
from manyheads.commands.catalogue import headers
from manyheads.lab.claims.runner import claims


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results", ROOT / "docs" / "results.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["results"] = module
    spec.loader.exec_module(module)
    return module


results = load()
NAMES = list(results.experiments())
RELEASE = ".".join(__version__.split(".")[:2])


@pytest.mark.parametrize("page", results.pages(), ids=lambda page: page.name)
def test_tables_are_those_of_the_data(page: Path) -> None:
    """Rewrite them with docs/results.py."""
    text = page.read_text("utf-8")
    assert results.rewritten(text) == text, f"{page.name}: run `python docs/results.py`"


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_can_be_repeated(name: str) -> None:
    """It has commands that exist, known data, and every table of it stands on its page."""
    experiment = results.experiments()[name]
    assert experiment.commands
    for command in experiment.commands:
        program = re.match(r"(?:python (?:-m )?|manyheads )([\w./-]+)", command)
        assert program, command
        if command.startswith("manyheads"):
            assert program[1] in known_commands()
        else:
            file = (
                program[1] if program[1].endswith(".py") else f"{program[1].replace('.', '/')}.py"
            )
            assert (ROOT / file).is_file(), command
    assert set(experiment.data) <= set(results.data_sets())
    text = (ROOT / "docs" / experiment.page).read_text("utf-8")
    for table in experiment.tables():
        assert f"<!-- results: {name}{'/' if table else ''}{table} -->" in text
    for row in experiment.rows:
        assert len(row.values) == max(1, len(row.seeds))


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_was_measured_with_the_present_release(name: str) -> None:
    """Repeat its commands, or move its table to docs/research-notes."""
    assert results.experiments()[name].release == RELEASE


def test_the_claims_were_measured_with_the_present_release() -> None:
    """Repeat the command at the top of the page."""
    runs = re.findall(r"^- run: .*$", (ROOT / "docs/claims.md").read_text("utf-8"), flags=re.M)
    assert len(runs) == len(claims())
    assert all(f", release {RELEASE}." in run for run in runs)


def test_no_table_of_results_is_written_by_hand() -> None:
    """A mean ± deviation stands only between marks, and on the page that `claims` writes."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs").glob("how-to/*.md"),
    ]
    for page in pages:
        if page.name != "claims.md":
            text = results.MARK.sub("", page.read_text("utf-8"))
            assert not re.findall(r"\d ± \d", text), page.name


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", text))


@pytest.mark.parametrize(
    "recipe", [r for r in headers() if {"time", "score"} & r.facts.keys()], ids=lambda r: r.name
)
def test_the_score_and_time_of_a_recipe_are_results(recipe) -> None:  # type: ignore[no-untyped-def]
    experiment = results.experiments()[f"recipe-{recipe.name}"]
    cells = {results.cell(row, experiment) for row in experiment.rows}
    score = re.sub(r"test_\w+", "", recipe.facts["score"])
    assert numbers(score)
    assert numbers(score) <= cells
    assert " ".join(recipe.facts["time"].split()[:2]) in cells


def test_times_of_the_readme_are_results() -> None:
    experiments = results.experiments().values()
    cells = {results.cell(row, experiment) for experiment in experiments for row in experiment.rows}
    times = re.findall(r"\b\d+ (?:min|h)\b", (ROOT / "README.md").read_text("utf-8"))
    assert times
    assert set(times) <= cells


def test_scores_of_the_lecture_tables_are_those_of_the_notes() -> None:
    """`measured.toml` has the mean ± standard deviation of a row of the notes on release 0.1."""
    file = ROOT / "src/manyheads/lab/tables/measured.toml"
    measured = tomllib.loads(file.read_text("utf-8"))
    text = (ROOT / "docs/research-notes/release-0.1.md").read_text("utf-8")
    sections = dict(part.split("\n", 1) for part in text.split("\n### ")[1:])
    compared = 0
    for table in ("bleu", "glue", "summaries"):
        for entry in measured[table]:
            section = sections[measured["experiments"][entry["experiment"]]["section"]]
            rows = [line for line in section.splitlines() if line.startswith("|")]
            if "row" in entry:
                rows = [line for line in rows if line.startswith(f"| {entry['row']} |")]
            cells = {cell.partition(" (")[0] for row in rows for cell in row.split(" | ")}
            for score in entry["scores"].values():
                assert score.partition(" (")[0] in cells, (entry["system"], score)
                compared += 1
    assert compared > 30


def test_the_quickstart_shows_the_scores_of_the_demo() -> None:
    experiment = results.experiments()["recipe-phrasebook"]
    text = (ROOT / "README.md").read_text("utf-8")
    shown = re.findall(
        r"^ {4}(?:test BLEU|compositional BLEU|exact matches|alignment error) +([\d.]+)", text, re.M
    )
    assert shown == [results.cell(row, experiment) for row in experiment.rows[:4]]


def test_a_cell_has_the_mean_the_deviation_and_each_value() -> None:
    values = [36.5, 35.8, 36.1]
    row = results.Row(system="a", metric="BLEU", seeds=[1, 2, 3], values=values)
    experiment = results.Experiment(
        name="n",
        page="p",
        title="t",
        commands=[],
        machine="m",
        versions="v",
        data=[],
        release="0.2",
        rows=[row],
        decimals={"BLEU": 2},
    )
    deviation = statistics.stdev(values)
    assert results.cell(row, experiment) == f"36.13 ± {deviation:.2f} (36.50 35.80 36.10)"
