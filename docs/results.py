"""Write the tables of results into the pages, from docs/results/*.json.

    python docs/results.py            # rewrite the pages
    python docs/results.py --check    # exit with 1 if a page is out of date

A page marks each table with `<!-- results: EXPERIMENT -->` and `<!-- end of results -->`; a table
of an experiment with several is `EXPERIMENT/TABLE`. docs/results.md lists all experiments and data.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FOLDER = DOCS / "results"
END = "<!-- end of results -->"
MARK = re.compile(rf"<!-- results: ([\w/.-]+) -->\n.*?{END}", flags=re.DOTALL)
Value = float | str

# The table of the README: what, our row, the row it is compared with (experiment, system, setting,
# metric), and who is ahead.
HEADLINES = [
    (
        "Characters of tinyshakespeare, validation loss: our recipe; published: nanoGPT",
        ("small-text", "tinyshakespeare", "", "recipe `language`"),
        ("small-text", "tinyshakespeare", "", "nanoGPT's protocol"),
        "ours",
    ),
    (
        "Words of Penn Treebank, test perplexity: 18M parameters; published: Transformer-XL, 24M",
        ("penn-treebank", "8 layers of 384, 18M parameters", "", "test perplexity"),
        (
            "penn-treebank",
            "Transformer-XL, 24M parameters (Dai et al. 2019)",
            "",
            "test perplexity",
        ),
        "Transformer-XL",
    ),
    (
        "SST-2, accuracy: LoRA (1.9 % of the parameters) and full fine-tuning of MiniLM",
        ("lora", "LoRA of rank 8", "443,522 parameters, rate 1e-3", "SST-2 accuracy"),
        ("lora", "all weights", "22,713,986 parameters, rate 5e-5", "SST-2 accuracy"),
        "full",
    ),
    (
        "tinyshakespeare, validation loss (n = 1): Muon, ended at step 3,750 of 5,000; AdamW",
        (
            "shakespeare-variants",
            "Muon, weight decay 0.5, dropout 0.4, feed-forward dropout 0.1, rate falls to 0",
            "",
            "best validation loss",
        ),
        (
            "shakespeare-variants",
            "AdamW, weight decay 1.0, rate falls to 0",
            "",
            "best validation loss",
        ),
        "AdamW",
    ),
    (
        "Beam search on one CPU core, sentences/s: our PyTorch search; CTranslate2",
        ("runtimes", "`translate`, PyTorch", "float32, 1 thread", "sentences/s"),
        ("runtimes", "CTranslate2's `translate_batch`", "float32, 1 thread", "sentences/s"),
        "CTranslate2",
    ),
    (
        "The same: our default on a CPU, which runs CTranslate2; `transformers`",
        ("runtimes", "`translate`, CTranslate2", "float32, 1 thread", "sentences/s"),
        ("runtimes", "`transformers`, Marian", "float32, 1 thread", "sentences/s"),
        "ours",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric of one system: a value for each seed, or one value without a seed (a count).

    `range` is the minimum and maximum over the rounds of a benchmark; the value is their median.
    """

    system: str
    metric: str
    values: list[Value]
    setting: str = ""
    seeds: list[int] = field(default_factory=list)
    range: list[float] = field(default_factory=list)
    table: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Rows from one list of commands, with everything that is common to them.

    `decimals` has the digits that a metric is printed with; `*` is any other metric.
    """

    name: str
    page: str
    title: str
    commands: list[str]
    machine: str
    versions: str
    data: list[str]
    release: str
    rows: list[Row]
    head: str = "system"
    decimals: dict[str, int] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(seed for row in self.rows for seed in row.seeds))

    def tables(self) -> list[str]:
        return list(dict.fromkeys(row.table for row in self.rows))

    def row(self, system: str, setting: str, metric: str) -> Row:
        row_key = (system, setting, metric)
        (row,) = (row for row in self.rows if (row.system, row.setting, row.metric) == row_key)
        return row


@cache
def experiments() -> dict[str, Experiment]:
    by_name: dict[str, Experiment] = {}
    for file in sorted(FOLDER.glob("*.json")):
        for entry in [] if file.name == "data.json" else json.loads(file.read_text("utf-8")):
            rows = [Row(**row) for row in entry.pop("rows")]
            assert entry["name"] not in by_name, f"{file.name}: {entry['name']} is there twice"
            by_name[entry["name"]] = Experiment(**entry, rows=rows)
    return by_name


@cache
def data_sets() -> dict[str, Any]:
    """For each data set: its source, and the SHA-256 of each file."""
    content: dict[str, Any] = json.loads((FOLDER / "data.json").read_text("utf-8"))
    return content


def show(value: Value, decimals: int | None) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if decimals is None else f"{value:,.{decimals}f}"


def cell(row: Row, experiment: Experiment) -> str:
    """Mean ± standard deviation and the value of each seed; or the one value."""
    decimals = experiment.decimals.get(row.metric, experiment.decimals.get("*"))
    values = [show(value, decimals) for value in row.values]
    several = len(experiment.seeds) > 1
    if len(values) == 1:
        extent = "–".join(show(value, decimals) for value in row.range)
        note = extent or (f"seed {row.seeds[0]}" if row.seeds and several else "")
        return f"{values[0]} ({note})" if note else values[0]
    numbers = [float(value) for value in row.values]
    mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
    names = "" if row.seeds == experiment.seeds else f"seeds {', '.join(map(str, row.seeds))}: "
    return f"{show(mean, decimals)} ± {show(deviation, decimals)} ({names}{' '.join(values)})"


def markdown(head: list[str], rows: Iterator[list[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def table(experiment: Experiment, name: str = "") -> str:
    """A line for each system and setting, and a column for each metric."""
    rows = [row for row in experiment.rows if row.table == name]
    metrics = list(dict.fromkeys(row.metric for row in rows))
    settings = any(row.setting for row in rows)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells.setdefault((row.system, row.setting), {})[row.metric] = cell(row, experiment)

    def line(system: str, setting: str) -> list[str]:
        start = [system, setting] if settings else [system]
        return [*start, *(cells[system, setting].get(m, "") for m in metrics)]

    start = [experiment.head, "setting"] if settings else [experiment.head]
    return markdown([*start, *metrics], (line(*key) for key in cells))


def origin(experiment: Experiment) -> str:
    """The line below a table: machine, versions, data, seeds."""
    parts = [experiment.machine, experiment.versions]
    if experiment.data:
        names = ", ".join(f"`{name}`" for name in experiment.data)
        parts.append(f"[data](results.md#data) {names}")
    if len(experiment.seeds) > 1:
        seeds = ", ".join(map(str, experiment.seeds))
        parts.append(f"mean ± standard deviation and each value; seeds {seeds}")
    elif experiment.seeds:
        parts.append(f"seed {experiment.seeds[0]} (n = 1)")
    text = "; ".join(parts)
    return f"*{text[0].upper()}{text[1:]}.*"


def block(key: str) -> str:
    """The text between the marks of a page."""
    if key == "overview":
        head = ["experiment", "seeds", "machine", "versions", "data"]
        return markdown(head, overview())
    if key == "data":
        return "\n\n".join(sources())
    if key == "headlines":
        return markdown(["what", "ours", "compared with", "ahead"], headlines())
    name, _, part = key.partition("/")
    experiment = experiments()[name]
    shown = table(experiment, part)
    if part != experiment.tables()[0]:
        return shown
    commands = "\n".join(f"    {command}" for command in experiment.commands)
    return f"{commands}\n\n{shown}\n\n{origin(experiment)}"


def headlines() -> Iterator[list[str]]:
    for what, *keys, ahead in HEADLINES:
        known = [experiments()[key[0]] for key in keys]
        cells = (cell(e.row(*key[1:]), e) for e, key in zip(known, keys, strict=True))
        yield [what, *cells, ahead]


def overview() -> Iterator[list[str]]:
    for experiment in experiments().values():
        yield [
            f"[{experiment.title}]({experiment.page})",
            ", ".join(map(str, experiment.seeds)),
            experiment.machine,
            experiment.versions,
            ", ".join(f"`{name}`" for name in experiment.data),
        ]


def sources() -> Iterator[str]:
    """For each data set its source, and its files in the format of `sha256sum --check`."""
    for name, entry in data_sets().items():
        yield f"**{name}**: {entry['source']}."
        if files := entry["files"]:
            yield "\n".join(f"    {digest}  {file}" for file, digest in files.items())


def rewritten(text: str) -> str:
    """A page with the tables between its marks."""
    return MARK.sub(lambda mark: f"<!-- results: {mark[1]} -->\n\n{block(mark[1])}\n\n{END}", text)


def pages() -> list[Path]:
    more = [DOCS / "notebooks/README.md", DOCS / "lectures/checklist.md"]
    every = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")), *more]
    return [page for page in every if MARK.search(page.read_text("utf-8"))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of results into the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1")
    check = parser.parse_args().check
    changed = 0
    for page in pages():
        before = page.read_text("utf-8")
        after = rewritten(before)
        if after != before:
            changed += 1
            print(page.name)
            if not check:
                page.write_text(after, "utf-8")
    return int(check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
