"""Runs that differ in a few settings, side by side: one table, one picture."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from manyheads.errors import UserError
from manyheads.evaluate.scores import METRICS
from manyheads.lab.dry_run import measure, report_time
from manyheads.lab.figures.plots import curves
from manyheads.lab.match import check_match, matched, unequal
from manyheads.loading import load_torch_run, refuse_unscored
from manyheads.run import Run
from manyheads.sizing import fit_to_data

SHOWN = (
    "loss",
    "perplexity",
    "nll",
    "bleu",
    "chrf",
    "exact_match",
    "compositional_bleu",
    "alignment_error",
    "rouge1",
    "rouge2",
    "rougeL",
    "rougeLsum",
    "word_perplexity",
    "bits_per_character",
    "accuracy",
    "top5",
    "f1",
    "matthews",
    "pearson",
    "spearman",
)


def parse_sweeps(
    overrides: Sequence[str], sweeps: Sequence[str], warn: Callable[[str], None]
) -> tuple[list[str], list[list[str]]]:
    """Settings of all runs, and the values of each swept setting.

    Without --sweep, a comma in a setting means a sweep, as in release 0.1.
    """
    fixed = list(overrides)
    if not sweeps:
        sweeps = [setting for setting in overrides if "," in setting]
        fixed = [setting for setting in overrides if "," not in setting]
        if sweeps:
            warn(f"commas in settings are the old form: {' '.join(f'--sweep {s}' for s in sweeps)}")
    varied = []
    for text in sweeps:
        key, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError(f"--sweep {text} must be KEY=A,B,..., e.g. --sweep seed=1,2,3")
        varied.append([f"{key}={value}" for value in values.split(",")])
    if not varied:
        raise UserError("nothing to compare: add --sweep KEY=A,B, e.g. --sweep seed=1,2,3")
    return fixed, varied


def compare_variants(
    read: Callable[[list[str]], Run],
    overrides: Sequence[str],
    sweeps: Sequence[str],
    *,
    match: str | None,
    out: Path,
    split: str,
    device: torch.device,
    train: Callable[[Run, Path], None],
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], str]:
    """Train and score all combinations of swept settings: the rows of a table, and its title."""
    fixed, varied = parse_sweeps(overrides, sweeps, say)
    plans = {" ".join(choice): read([*fixed, *choice]) for choice in product(*varied)}
    for name, run in plans.items():
        refuse_unscored(run, name)
        if run.data is not None:
            run.data.read(split)  # a missing split is refused before anything is trained
        if run.data is not None and run.by_data:  # before runs are made equal
            plans[name], notes = fit_to_data(run, run.data.read("train"))
            say("\n".join(f"{name}: {note}" for note in notes))
    check_match(match, plans)
    if match is not None:
        plans, lines = matched(plans, match, lambda run: measure(run, device).seconds)
        say("\n".join([f"equal {match}:", *lines]))
    plan = measure(next(iter(plans.values())), device)
    seconds = sum(map(plan.seconds_of, plans.values()))
    say(f"{len(plans)} runs, about {report_time(seconds)} without validation")
    if match is None and (note := unequal(plans)):
        say(note)
    rows = compare_runs(plans, out, split, device, train)
    if match is not None:
        for row, run in zip(rows, plans.values(), strict=True):
            row |= {"dim": run.model.dim, "steps": run.train.steps}
    seeds = ", ".join(map(str, sorted({run.seed for run in plans.values()})))
    return rows, f"{split}, seed {seeds}" + (f", equal {match}" if match else "")


def compare_runs(
    plans: Mapping[str, Run],
    out: Path,
    split: str,
    device: torch.device,
    train: Callable[[Run, Path], None],
) -> list[dict[str, Any]]:
    """Train each plan into a folder of its own, score it, draw the curves."""
    rows: list[dict[str, Any]] = []
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, run in plans.items():
        folder = out / re.sub(r"[^\w.=-]+", "_", name)
        train(run, folder)
        opened = load_torch_run(folder, device)
        assert run.data is not None  # a recipe has them
        scores = opened.evaluate(run.data, split)
        count = sum(p.numel() for p in opened.model.parameters())
        rows.append({"settings": name, "parameters": count, "folder": str(folder), **scores})
        lines[name] = validation_curve(folder)
    picture = out / "compare.png"
    try:
        curves(lines, "validation loss", "loss", picture)
        said = f"picture: {picture}"
    except UserError as error:  # no matplotlib: the table is worth having all the same
        said = str(error)
    Console(stderr=True).print(said, markup=False, soft_wrap=True)
    return rows


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    """One line a run, one column a score; then the mean of the seeds, if there are several."""
    table = Table(title=title)
    known = [*SHOWN, *(metric.name for metric in METRICS)]
    columns = [name for name in known if any(name in row for row in rows)]
    sizes = [size for size in ("dim", "steps") if any(size in row for row in rows)]  # if matched
    for column in ("settings", "parameters", *sizes, *columns):
        first = column == "settings"
        table.add_column(column, justify="left" if first else "right", no_wrap=first)
    for row in rows:
        numbers = [f"{row[name]:.3f}" if name in row else "" for name in columns]
        about = [f"{row[size]:,}" for size in ("parameters", *sizes)]
        table.add_row(row["settings"], *about, *numbers)
    table.add_section()
    for name, members in by_seed(rows).items():
        if len(members) > 1:
            scores = [[row[column] for row in members if column in row] for column in columns]
            numbers = [f"{mean(x):.3f} ± {stdev(x):.3f}" if len(x) > 1 else "" for x in scores]
            title = f"{name} mean ± SD of {len(members)} seeds".lstrip()
            table.add_row(title, *[""] * (1 + len(sizes)), *numbers)
    return table


def by_seed(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows that differ only in the seed, by their other settings."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        others = [text for text in row["settings"].split() if not text.startswith("seed=")]
        groups.setdefault(" ".join(others), []).append(row)
    return groups


def validation_curve(folder: Path) -> list[tuple[int, float]]:
    """(step, validation loss) of a run, from its metrics."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["loss"]) for r in records if r["split"] == "valid"]
