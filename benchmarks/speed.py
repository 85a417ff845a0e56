"""Rows of the speed benchmarks: measured in turns, kept line by line, shown as tables.

    python benchmarks/speed.py runs/bench-*.jsonl                       # tables of ratios
    python benchmarks/speed.py runs/bench-*.jsonl --picture speed.png   # throughput against size

A row is one comparison: `bench` and `row` say of what, `sides` has the figures of each side with
its tokens a second round by round, `ratios` of ours to the others (medians over paired rounds),
`errors` the error of a side. If several rows have one name, the last without errors counts.
"""

import argparse
import atexit
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Rates = dict[str, list[float]]
TINY = "tiny: "  # prefix of rows of --tiny, which only show that the program works
# Figures of a side in addition to its tokens per second: column title and digits.
COLUMNS = {
    "training": {
        "first_step_seconds": ("first step, s", 1),
        "compile_seconds": ("compiling, s", 1),
        "compiled_first_epoch": ("graphs compiled in the first epoch", 0),
        "compiled_later": ("later", 0),
        "recorded": ("passes recorded", 0),
        "recorded_later": ("later", 0),
        "peak_gib": ("peak GiB", 2),
    },
    "decoding": {
        "first_seconds": ("first call, s", 1),
        "compiled": ("graphs compiled in it", 0),
        "equal": ("texts equal to ours", 3),
        "same_until": ("of a text until it differs", 3),
    },
    "translator": {
        "equal": ("texts equal to ours", 3),
        "bleu": ("BLEU", 2),
    },
}
SHOWN = 40  # kernels of a profile
NAMED = ("torch", "transformers", "triton", "ctranslate2", "x-transformers")


def reported(error: BaseException) -> str:
    """An error on one line."""
    line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {line[:300]}"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all speed benchmarks share."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small models: the program itself")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows with one of these in the name"
    )
    parser.add_argument("--rows", type=Path, help="a file to add the rows to")
    parser.add_argument(
        "--skip", type=Path, nargs="*", default=[], help="files of rows that are not measured again"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many")
    parser.add_argument("--names", action="store_true", help="say which rows it would measure")


def device_of(parser: argparse.ArgumentParser, inputs: argparse.Namespace) -> Any:
    """The requested device; an error if it is missing or would take days."""
    import torch

    device = torch.device(inputs.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: use --tiny --device cpu to try the program")
    if device.type == "cpu" and not inputs.tiny and not inputs.names:
        parser.error("this needs a GPU: --tiny shows the program itself")
    return device


def compilations() -> int:
    """The number of graphs compiled so far: one per frame and per recompilation."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in the main thread after so many seconds, if they are finite."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds if seconds < math.inf else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class Rows:
    """The rows of one benchmark: those still to measure, and the file to append them to."""

    def __init__(self, bench: str, inputs: argparse.Namespace, where: Row) -> None:
        self.bench, self.arguments, self.begun = bench, inputs, time.perf_counter()
        self.where = where | {"versions": versions(), "tiny": inputs.tiny}
        # A fresh cache, so that compilation times do not depend on earlier processes.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
        old = read(inputs.skip)
        self.done = {row["row"] for row in old if row["bench"] == bench and full(row)}
        self.met, self.summary = False, dict[str, Row]()
        atexit.register(self._say_if_none)

    def _say_if_none(self) -> None:
        if not self.met:
            print("no row has that in its name: --names lists all", file=sys.stderr)

    def add(self, name: str, measure: Callable[[], Row]) -> None:
        """Measure a row if it is selected. An error gives a row too, and the next row follows."""
        name = TINY + name if self.arguments.tiny else name
        if not any(part in name for part in self.arguments.only):
            return
        self.met = True
        if name in self.done:
            return
        if self.arguments.names:
            print(name)
            return
        begun = time.perf_counter()
        if begun - self.begun > self.arguments.seconds:
            print(json.dumps({"bench": self.bench, "left": name}), flush=True)
            return
        try:
            figures = measure()
        except Exception as error:  # an error in one row must not stop the others
            figures = {"errors": {"all": reported(error)}}
        seconds = round(time.perf_counter() - begun, 1)
        row = {"bench": self.bench, "row": name, "seconds": seconds, **self.where, **figures}
        line = json.dumps(row, ensure_ascii=False)
        print(line, flush=True)
        if self.arguments.rows:
            self.arguments.rows.parent.mkdir(parents=True, exist_ok=True)
            with self.arguments.rows.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        sides = {key: x.get("tokens_per_second") for key, x in row.get("sides", {}).items()}
        picked = {key: row[key] for key in ("seconds", "mbu", "errors") if row.get(key)}
        self.summary[name] = {"tokens_per_second": sides, **picked}

    def close(self) -> None:
        """Print all figures as one JSON object, the last line of a benchmark."""
        seconds = round(time.perf_counter() - self.begun, 1)
        print(json.dumps({"bench": self.bench, "seconds": seconds, "rows": self.summary}))


def versions() -> dict[str, str]:
    installed = {}
    for name in NAMED:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def full(row: Row) -> bool:
    return not row.get("errors")


def read(files: Iterable[Path]) -> Iterator[Row]:
    """The rows of files; incomplete lines of interrupted runs are skipped."""
    for file in files:
        if file.is_file():
            for line in file.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    row = json.loads(line)
                    if "row" in row:
                        yield row


def in_turns(
    sides: dict[str, Callable[[int], float]], rounds: int, errors: dict[str, str]
) -> Rates:
    """Tokens per second of each side, round by round, in alternating order.

    A side that fails is left out from then on and reported in `errors`.
    """
    rates: Rates = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(rates)[:: -1 if turn % 2 else 1]:
            try:
                rates[name].append(sides[name](turn))
            except Exception as error:  # a figure of the other side is still one
                errors[name] = reported(error)
                del rates[name]
    return rates


def kernels_of(work: Callable[[], object], device: Any, times: int = 1) -> list[Any]:
    """The kernels of some work, by milliseconds, with their number of calls.

    `times` is how often the work repeats itself; figures are per repetition.
    """
    from torch import profiler

    on_gpu = device.type == "cuda"
    kind = profiler.ProfilerActivity.CUDA if on_gpu else profiler.ProfilerActivity.CPU
    with profiler.profile(activities=[kind]) as records:
        work()
    spent = {
        event.key: (event.device_time_total if on_gpu else event.self_cpu_time_total, event.count)
        for event in records.key_averages()
    }
    most = sorted(spent.items(), key=lambda item: -item[1][0])[:SHOWN]
    return [
        [name[:100], round(time / 1000 / times, 3), count / times] for name, (time, count) in most
    ]


def compared(rates: Rates, ours: Iterable[str]) -> Row:
    """Medians, and ratios of ours to the others by paired rounds."""
    row: Row = {"rounds": max(map(len, rates.values()), default=0)}
    row["sides"] = {
        name: {"tokens_per_second": median(each), "rates": [round(item, 1) for item in each]}
        for name, each in rates.items()
    }
    row["ratios"] = {}
    for base in (name for name in ours if name in rates):
        row["ratios"][base] = {}
        for name, each in rates.items():
            if name != base:
                paired = [a / b for a, b in zip(rates[base], each, strict=True)]
                spread = {"median": median(paired), "least": min(paired), "most": max(paired)}
                row["ratios"][base][name] = {key: round(x, 4) for key, x in spread.items()}
    return row


def median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


@dataclass(frozen=True)
class Goal:
    """A target value: its path in which row, and the value to reach."""

    bench: str
    row: str
    what: str
    path: tuple[str, ...]
    goal: float
    unit: str = "×"
    at_most: bool = False

    def shown(self, rows: list[Row]) -> str:
        """A line of the table of goals for each row that has it."""
        lines = []
        for row in rows:
            value: Any = row
            for key in self.path:
                value = value.get(key) if isinstance(value, dict) else None
            name = row["row"].removeprefix(TINY)
            if row["bench"] == self.bench and self.row in ("", name) and value is not None:
                lines.append(self._line(row, value))
        return "\n".join(lines or [f"| {self.what} | {self._set()} | not measured | | |"])

    def _set(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.goal:g} {self.unit}"

    def _line(self, row: Row, value: Any) -> str:
        figure, spread = value, ""
        what = self.what if self.row else f"{self.what}, {row['row']}"
        if isinstance(value, dict):
            figure = value["median"]
            spread = f"{value['least']:.2f}–{value['most']:.2f}, {row.get('rounds', '?')} rounds"
        held = figure <= self.goal if self.at_most else figure >= self.goal
        cells = (what, self._set(), f"{figure:.4g} {self.unit}")
        return f"| {' | '.join(cells)} | {spread} | {'yes' if held else '**no**'} |"


def goals() -> list[Goal]:
    """The targets for speed, in the order of the page."""

    def ratio(peer: str, ours: str = "ours") -> tuple[str, ...]:
        return ("ratios", ours, peer)

    later = ("sides", "ours", "compiled_later")
    base, beam = "transformer-base", "transformer-base beam 5 batch 64"
    listed = [
        Goal("training", "gpt 124M", "GPT 124M training", ratio("transformers"), 1.25),
        Goal(
            *("training", "gpt 124M, theirs aligned", "GPT 124M training, theirs aligned"),
            *(ratio("transformers"), 1.25),
        ),
        Goal("training", "size 350M", "GPT 350M training", ("teraflops",), 500, "TFLOP/s"),
        Goal("training", "bert-base 128", "BERT-base at 128", ratio("transformers"), 1.5),
        Goal("training", "bert-base 512", "BERT-base at 512", ratio("transformers"), 1.5),
        Goal("training", base, "translation, buckets", ratio("transformers"), 1.6),
        Goal("training", base, "translation, unsorted", ratio("transformers unsorted"), 3),
        Goal("training", "gpt 124M", "peak memory", ("sides", "ours", "peak_gib"), 12, "GiB", True),
        Goal("training", "", "compiled after the first epoch", later, 0, "graphs", True),
    ]
    static, eager = ratio("transformers compiled"), ratio("transformers")
    share = ("weights", "ours", "of_a_copy")
    listed += [
        Goal("decoding", "gpt 124M batch 1", "124M, one text", static, 4),
        Goal("decoding", "gpt 1.3B batch 1", "1.3B, one text", static, 3),
        Goal("decoding", "gpt 1.3B batch 1", "weights read", share, 0.5, "of a copy"),
        Goal("decoding", "gpt 124M batch 32", "124M, 32 texts, eager", eager, 4),
        Goal("decoding", "gpt 1.3B batch 32", "1.3B, 32 texts, eager", eager, 4),
        Goal("decoding", beam, "beam 5, 64 sentences", eager, 8),
    ]
    equal = ("equal_float32", "ours")
    listed.append(Goal("decoding", "", "equal to eager in float32", equal, 1, "of the texts"))
    for batches in ("own batches", "same batches"):
        for peer, goal in (("transformers", 1.5), ("x-transformers", 1.3)):
            what = f"CPU, training, {batches}, {peer}"
            listed.append(Goal("translator", f"training, {batches}", what, ratio(peer), goal))
        for peer, goal in (("transformers", 2.0), ("ctranslate2", 1.0)):
            what = f"CPU, beam 5, {batches}, {peer}"
            listed.append(Goal("translator", f"decoding, {batches}", what, ratio(peer), goal))
    return listed


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def number(value: Any, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def sides_table(rows: list[Row], bench: str) -> str:
    """Each side of each row: its tokens per second and its other figures."""
    lines = []
    for row in rows:
        if row["bench"] == bench and not is_size(row):
            for name, side in row.get("sides", {}).items():
                ratio = row["ratios"].get("ours", {}).get(name, {}).get("median")
                cells = [number(side.get("tokens_per_second")), number(ratio, 2)]
                cells += [
                    number(side.get(key), digits) for key, (_, digits) in COLUMNS[bench].items()
                ]
                lines.append([row["row"], name, *cells, str(row["rounds"])])
    titles = [title for title, _ in COLUMNS[bench].values()]
    return table(["", "", "tokens/s", "ours is × as fast", *titles, "rounds"], lines)


def is_size(row: Row) -> bool:
    return row["row"].removeprefix(TINY).startswith("size")


def sizes(rows: list[Row]) -> list[Row]:
    chosen = [row for row in rows if is_size(row) and "teraflops" in row]
    return sorted(chosen, key=lambda row: row["parameters"])


def sizes_table(rows: list[Row]) -> str:
    lines = []
    for row in sizes(rows):
        side = row["sides"]["ours"]
        share = number(100 * row["of_ceiling"], 0) + " %"
        flops = [number(row["teraflops"], 2), share]
        memory = number(side.get("peak_gib"), 2)
        rate = number(side["tokens_per_second"])
        size = number(row["parameters"] / 1e6, 1) + "M"
        lines.append([size, row["batch"], rate, *flops, memory])
    head = ["parameters", "batch", "tokens/s", "TFLOP/s", "of the matrix product's", "peak GiB"]
    return table(head, lines)


def draw(rows: list[Row], path: Path) -> None:
    """Tokens a second and memory against the parameters, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ordered = sizes(rows)
    sides = [row["sides"]["ours"] for row in ordered]
    shown = {
        "tokens a second": [side["tokens_per_second"] for side in sides],
        "share of the matrix product's FLOP/s": [row["of_ceiling"] for row in ordered],
        "peak memory, GiB": [side.get("peak_gib") for side in sides],
    }
    shown = {label: up for label, up in shown.items() if None not in up}
    figure, axes = pyplot.subplots(1, len(shown), figsize=(11, 3.4), layout="constrained")
    for place, (label, up) in zip(axes, shown.items(), strict=True):
        place.plot([row["parameters"] for row in ordered], up, marker="o")
        place.set(xscale="log", xlabel="parameters", title=label)
        place.set_yscale("linear" if label.startswith("share") else "log")
        place.set_ylim(bottom=0 if label.startswith("share") else None)
        place.grid(alpha=0.3)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--tiny", action="store_true", help="show rows of tiny models, no others")
    parser.add_argument("--picture", type=Path, help="draw throughput against size into this file")
    inputs = parser.parse_args()
    missing = [str(path) for path in inputs.files if not path.is_file()]
    if missing:
        parser.error(f"{missing[0]} not found: make bench and make bench-gpu write such files")
    latest: dict[tuple[str, str], Row] = {}
    for row in read(inputs.files):
        key = (row["bench"], row["row"])
        if row["row"].startswith(TINY) == inputs.tiny and (key not in latest or full(row)):
            latest[key] = row
    rows = list(latest.values())
    if not rows:
        other = "leave out --tiny" if inputs.tiny else "rows of tiny models are shown with --tiny"
        parser.error(f"these files have no such rows: {other}")
    if not inputs.tiny:  # targets hold for full sizes
        print("## Goals\n")
        head = ["", "goal", "measured", "least and most", "held"]
        print(table(head, []), *(goal.shown(rows) for goal in goals()), sep="\n")
    for bench, title in (
        ("training", "Training on a GPU"),
        ("decoding", "Decoding on a GPU"),
        ("translator", "A small translator on the CPU"),
    ):
        if any(row["bench"] == bench for row in rows):
            print(f"\n## {title}\n\n{measured_on(rows, bench)}\n\n{sides_table(rows, bench)}")
    if sizes(rows):
        print(f"\n## Throughput against size\n\n{sizes_table(rows)}")
    for row in rows:
        for side, error in row.get("errors", {}).items():
            print(f"\n{row['bench']}, {row['row']}, {side}: {error}")
    if inputs.picture:
        draw(rows, inputs.picture)


def measured_on(rows: list[Row], bench: str) -> str:
    """Devices, precisions and versions, without duplicates."""
    machines = {
        f"{row['device']}, {row.get('dtype', '')}, "
        + ", ".join(f"{name} {item}" for name, item in row["versions"].items())
        for row in rows
        if row["bench"] == bench
    }
    return "; ".join(sorted(machines))


if __name__ == "__main__":
    main()
