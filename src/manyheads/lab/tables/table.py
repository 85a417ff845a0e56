"""A table of the lectures with our rows next to the published ones.

`published.toml` has the numbers as printed, `measured.toml` our scores with the commands that made
them. Parameters and training FLOPs are counted when the table is printed, for the published models
that have a preset and for ours: three forward passes (`manyheads.summary`) for every token seen.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from manyheads.config import nearest, override_all
from manyheads.errors import UserError
from manyheads.lab.training_cost import training_flops
from manyheads.presets import ModelConfig, preset
from manyheads.recipes import read_recipe
from manyheads.summary import summarize

FOLDER = Path(__file__).parent
COUNTED = ("parameters, counted", "training FLOPs, counted")
Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system. `like` is the published row that a row of ours belongs to, else empty.

    `models` is the size of an ensemble, for which `parameters` and `flops` are summed. `note` says
    what is missing in a published row, or how ours was made.
    """

    system: str
    cells: dict[str, str]
    like: str = ""
    parameters: int | None = None
    flops: float | None = None
    note: str = ""
    command: str = ""
    page: str = ""


@dataclass(frozen=True, kw_only=True)
class LectureTable:
    """A table as printed by the lectures, followed by our rows for each system."""

    name: str
    title: str
    paper: str
    slides: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    remarks: tuple[str, ...]


@cache
def _read(file: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / file).read_text(encoding="utf-8"))


def names() -> list[str]:
    return list(titles())


def titles() -> dict[str, str]:
    return {name: table["title"] for name, table in _read("published.toml").items()}


@cache
def lecture_table(name: str) -> LectureTable:
    """A table by name, with parameters and FLOPs counted now."""
    if name not in names():
        raise UserError(f"there is no table '{name}': {nearest(name, names())}")
    printed, measured = _read("published.toml")[name], _read("measured.toml")
    rows, differences = [], []
    for entry in printed["rows"]:
        cells = dict(zip(printed["columns"], entry["values"], strict=True))
        parameters, flops = _count(entry)
        rows.append(
            Row(
                system=entry["system"],
                cells=cells,
                parameters=parameters,
                flops=flops,
                note=entry.get("missing", ""),
            )
        )
        for lecture, column, value in entry.get("differs", []):
            shown = f"prints {value}" if value else "leaves it out"
            differences.append(f"{entry['system']}, {column}: {lecture} {shown}")
        ours = (row for row in measured.get(name, []) if row["like"] == entry["system"])
        rows += [_ours(row, measured["experiments"]) for row in ours]
    return LectureTable(
        name=name,
        title=printed["title"],
        paper=printed["paper"],
        slides=tuple((lecture, slide) for lecture, slide in printed["slides"]),
        columns=tuple(printed["columns"]),
        rows=tuple(rows),
        differences=tuple(differences),
        remarks=tuple(printed["remarks"]),
    )


def _ours(entry: Entry, experiments: Mapping[str, Entry]) -> Row:
    experiment = experiments[entry["experiment"]]
    parameters, flops = _count({**experiment, **entry})
    return Row(
        system=entry["system"],
        like=entry["like"],
        cells=dict(entry["scores"]),
        parameters=parameters,
        flops=flops,
        note=experiment["about"],
        command=experiment["command"],
        page=experiment["page"],
    )


def _count(entry: Entry) -> tuple[int | None, float | None]:
    """Parameters and training FLOPs of a row that names a preset or a recipe."""
    if "preset" not in entry and "recipe" not in entry:
        return None, None
    summary = summarize(_config(entry), entry["length"])
    flops = training_flops(summary, entry["tokens"], entry.get("head_rate", 1.0))
    models = entry.get("models", 1)
    return models * summary.parameters, models * flops


def _config(entry: Entry) -> ModelConfig:
    settings = entry.get("settings", "").split()
    if "preset" in entry:
        return override_all(preset(entry["preset"]), settings)
    model = read_recipe(entry["recipe"], settings).model
    return dataclasses.replace(model, vocab_size=entry["vocab_size"])


def as_dict(table: LectureTable) -> dict[str, Any]:
    """Plain values, for JSON."""
    return dataclasses.asdict(table)


def as_text(table: LectureTable) -> RichTable:
    """Published rows, with ours indented below the row that they belong to."""
    shown = RichTable(title=f"{table.title} ({table.paper})", title_justify="left")
    shown.add_column("system", no_wrap=True)
    for column in (*table.columns, *COUNTED):
        shown.add_column(column, justify="right", no_wrap=column not in COUNTED)
    for index, row in enumerate(table.rows):
        if index and not row.like and table.rows[index - 1].like:
            shown.add_section()
        cells = [row.cells.get(column, "") for column in table.columns]
        size = "" if row.parameters is None else f"{row.parameters / 1e6:,.2f}M"
        flops = "" if row.flops is None else f"{row.flops:.2e}".replace("e+", "e")
        shown.add_row(f"  ours: {row.system}" if row.like else row.system, *cells, size, flops)
    return shown


def notes(table: LectureTable) -> list[str]:
    """The lines below a table: sources, what is missing, how ours was made."""
    lines = [f'{lecture}, slide "{slide}"' for lecture, slide in table.slides]
    lines += [f"{row.system}: {row.note}" for row in table.rows if row.note and not row.like]
    lines += table.differences
    made = dict.fromkeys((row.note, row.command, row.page) for row in table.rows if row.like)
    lines += [f"ours: {note}; {page}\n    {command}" for note, command, page in made]
    return [*lines, *table.remarks]
