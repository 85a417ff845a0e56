"""Published numbers are those of the lectures, and ours are counted from the models they name."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.test_cli import mistake, result

from manyheads.lab.tables.table import FOLDER, lecture_table, names, notes

ROOT = Path(__file__).parents[2]
# A copy of the lectures' tables: cells as printed, one object for each lecture and slide.
LECTURES = json.loads((Path(__file__).parent / "lecture_tables.json").read_text(encoding="utf-8"))
PUBLISHED = tomllib.loads((FOLDER / "published.toml").read_text(encoding="utf-8"))


def printed(name: str, lecture: str) -> dict[str, dict[str, str]]:
    """Our copy of a table as this lecture prints it: cells by system and column."""
    rows = {}
    for row in PUBLISHED[name]["rows"]:
        cells = dict(zip(PUBLISHED[name]["columns"], row["values"], strict=True))
        cells["system"] = row["system"]
        cells |= {column: value for who, column, value in row.get("differs", []) if who == lecture}
        rows[cells["system"]] = cells
    return rows


@pytest.mark.parametrize("table", LECTURES, ids=lambda t: f"{t['table']}-{t['lecture']}")
def test_every_number_is_that_of_the_lecture(table: dict[str, Any]) -> None:
    ours = printed(table["table"], table["lecture"])
    assert [table["lecture"], table["slide"]] in PUBLISHED[table["table"]]["slides"]
    for system, *cells in table["rows"]:
        assert [ours[system][column] for column in table["columns"]] == cells, system


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "sizes"])
def test_no_number_is_without_a_lecture(name: str) -> None:
    """`sizes` completes the lectures' rows with those of the papers."""
    seen = {
        (row[0], column, cell)
        for table in LECTURES
        if table["table"] == name
        for row in table["rows"]
        for column, cell in zip(table["columns"], row[1:], strict=True)
    }
    for row in PUBLISHED[name]["rows"]:
        for column, value in zip(PUBLISHED[name]["columns"], row["values"], strict=True):
            assert not value or (row["system"], column, value) in seen


@pytest.mark.parametrize("name", names())
def test_ours_belong_to_a_published_row_and_name_their_command(name: str) -> None:
    table = lecture_table(name)
    published = {row.system for row in table.rows if not row.like}
    for row in table.rows:
        assert row.cells.keys() <= set(table.columns)
        if row.like:
            assert row.like in published
            assert (ROOT / row.page).is_file()
            assert (ROOT / row.command.split()[1]).is_file()
    assert all(line in " ".join(notes(table)) for line in table.remarks)


def test_costs_are_counted() -> None:
    rows = {row.system: row for row in lecture_table("bleu").rows}
    base = rows["Transformer (base model)"]
    assert base.parameters == 63_082_496
    # 6 FLOPs per token and parameter that takes part in a product, so about 6 · 63e6 · 2.5e9.
    assert base.flops == pytest.approx(6 * 63e6 * 2.5e9, rel=0.05)
    # The research notes on 0.1 have these from the lengths of all texts that were read.
    pages = {"ByteNet, 10 + 10 layers of 164": 1.46e14, "GNMT of width 130": 1.39e14}
    for system, flops in pages.items():
        assert rows[system].flops == pytest.approx(flops, rel=0.01)
    readers = {row.system: row.flops for row in lecture_table("glue").rows}
    assert readers["BERT, 8 layers of 384"] == pytest.approx(6.07e15, rel=0.01)


def test_the_command_prints_all_of_it() -> None:
    text = result("tables", "bleu")
    assert all(
        word in text
        for word in ("23.75", "ours: ByteNet", "not built", "research-notes/release-0.1.md")
    )
    assert json.loads(result("tables", "glue", "--json"))["rows"][0]["cells"]["Average"] == "74.0"
    assert all(name in result("tables") for name in names())
    assert "did you mean 'summaries'" in mistake("tables", "summary")
