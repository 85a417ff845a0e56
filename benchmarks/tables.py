"""The lectures' tables of BLEU and of GLUE, redrawn at small scale.

    python benchmarks/tables.py rates multi30k --systems bytenet --rates 2e-3,5e-3 --device cuda
    python benchmarks/tables.py bleu multi30k --seeds 1,2,3 --device cuda > bleu.jsonl
    python benchmarks/tables.py glue glue --text text --keep runs/glue --device cuda > glue.jsonl
    python benchmarks/tables.py --table bleu.jsonl glue.jsonl

bleu: six systems translate English to German, each with about as many parameters (the mixture of
experts: as many that a token meets), as many steps, the same batches for the same seed, and a
learning rate of its own; `rates` prints the validation loss that each of several rates comes to.
glue: readers of about as many parameters (bert-large: three times as many) are pretrained on the
text of a folder, or on the training sentences of SST-2, for as many steps of as many tokens, kept
in --keep, and fine-tuned on each task; `bilstm` and `…-scratch` have the same sizes and the same
vocabulary, and weights drawn at random. Scores are of the test split by the weights of the best
validation loss, for GLUE of the validation rows by the last weights. One JSON object a line, as
soon as it is measured; no run begins after --until seconds. Settings a.b=c come last, for all
systems (of GLUE, for fine-tuning).

Training FLOPs are those of the matrix products (`manyheads.summary`), three passes for every token
seen, padding left out, at the length of the text that a token stands in on average. A masked
language model has its output layer at the masked positions only; frozen weights have no backward
pass.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyheads.errors import UserError
from table_readers import READERS, SCRATCH, TASKS, classify, pretrain, sentences
from table_runs import SYSTEMS, Asked, Row, translate

STEPS = {"bleu": 1500, "rates": 300, "glue": 4000}
SHOWN = [("sst-2", "accuracy"), ("mrpc", "f1"), ("mrpc", "accuracy"), ("cola", "matthews")]


def each(jobs: list[Callable[[], Row]], until: float) -> bool:
    """Measure one after the other; whether all were, that were begun."""
    begun, sound = time.monotonic(), True
    for number, job in enumerate(jobs):
        if time.monotonic() - begun > until:
            print(f"the time is up: {len(jobs) - number} runs were not begun", file=sys.stderr)
            break
        try:
            print(json.dumps(job()), flush=True)
        except Exception as error:  # what one cannot do, the others may
            sound = False
            if isinstance(error, UserError):
                print(error, file=sys.stderr)
            else:
                traceback.print_exc()
        gc.collect()  # a trainer holds itself, and what it has recorded
        torch.cuda.empty_cache()
    return sound


def rows_of(paths: list[Path]) -> list[Row]:
    """The measured rows of files."""
    rows: list[Row] = []
    for path in paths:
        try:
            rows += map(json.loads, path.read_text("utf-8").splitlines())
        except OSError:
            raise UserError(f"{path} cannot be read (seen from here): give files of rows") from None
        except ValueError:
            raise UserError(f"{path} holds other lines than rows of this program") from None
    return rows


def table(paths: list[Path]) -> None:
    """Print the tables; if a run was measured twice, the last row counts."""
    last: dict[tuple[Any, ...], Row] = {}
    for row in rows_of(paths):
        last[tuple(row.get(key) for key in ("table", "system", "task", "seed", "rate"))] = row
    by_table: defaultdict[str, defaultdict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(last.values(), key=lambda row: row.get("seed", 0)):
        by_table[row["table"]][row["system"]].append(row)
    if by_table["bleu"]:
        bleu_table(by_table["bleu"])
    if by_table["glue"]:
        before = {name: rows[0]["flops"] for name, rows in by_table["pretraining"].items()}
        glue_table(by_table["glue"], before)


def bleu_table(by_system: dict[str, list[Row]]) -> None:
    shown = ("parameters", "training FLOPs", "seconds", "target tokens/s", "valid loss", "BLEU")
    print(f"| system | {' | '.join(shown)} |")
    print("|---" * (1 + len(shown)) + "|")
    shapes = {"seconds": ".0f", "tokens_per_second": ",.0f", "valid_loss": ".3f", "bleu": ".1f"}
    for system in filter(by_system.get, SYSTEMS):
        rows = by_system[system]
        cells = [_size(rows[0]), f"{statistics.mean(row['flops'] for row in rows):.2e}"]
        cells += [_cell([row[key] for row in rows], shape) for key, shape in shapes.items()]
        print(f"| {system} | {' | '.join(cells)} |")


def glue_table(by_system: dict[str, list[Row]], before: dict[str, float]) -> None:
    """Fine-tuning FLOPs are those of all tasks together."""
    names = " | ".join(f"{task} {metric}" for task, metric in SHOWN)
    print(f"\n| system | parameters | pretraining FLOPs | fine-tuning FLOPs | {names} |")
    print("|---" * (4 + len(SHOWN)) + "|")
    for system in filter(by_system.get, READERS):
        tuning, cells = 0.0, []
        for task in TASKS:
            flops = [row["flops"] for row in by_system[system] if row["task"] == task]
            tuning += statistics.mean(flops) if flops else 0.0
        for task, metric in SHOWN:
            rows = [row for row in by_system[system] if row["task"] == task]
            cells.append(_cell([100 * row["scores"][metric] for row in rows], ".1f"))
        name = READERS[system][0]
        pretraining = "0" if name.endswith(SCRATCH) else f"{before.get(name, math.nan):.2e}"
        costs = [_size(by_system[system][0]), pretraining, f"{tuning:.2e}"]
        print(f"| {system} | {' | '.join([*costs, *cells])} |")


def _size(row: Row) -> str:
    met = "" if row["met"] == row["parameters"] else f" ({row['met'] / 1e6:.2f}M a token)"
    return f"{row['parameters'] / 1e6:.2f}M{met}"


def _cell(values: list[float], shape: str) -> str:
    """Mean ± standard deviation over the seeds, and each seed's own where there are several."""
    if len(values) < 2:
        return "".join(f"{value:{shape}}" for value in values)
    each = " ".join(f"{value:{shape}}" for value in values)
    mean, spread = statistics.mean(values), statistics.stdev(values)
    return f"{mean:{shape}} ± {spread:{shape}} ({each})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=[*STEPS])
    parser.add_argument("folder", nargs="?", help="of Multi30k (train.en, val.en, …), or of GLUE")
    parser.add_argument("settings", nargs="*", help="a.b=c, for all systems")
    parser.add_argument("--systems", help="names with commas between; all of them")
    parser.add_argument("--seeds", default="1", help="with commas between; 1")
    parser.add_argument("--steps", type=int, help="of a training, for glue of a pretraining")
    parser.add_argument("--rates", default="2e-3,5e-3,1e-2")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--text", default="", help="a folder of text to pretrain on")
    parser.add_argument("--keep", type=Path, default=Path("runs/tables"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--table", type=Path, nargs="+")
    inputs = parser.parse_intermixed_args()
    if inputs.table:
        try:
            table(inputs.table)
        except UserError as error:
            parser.error(str(error))
        return
    if inputs.what is None or inputs.folder is None:
        parser.error("say what is to be measured, and give the folder of its data")
    if not Path(inputs.folder).is_dir():
        parser.error(f"{inputs.folder} is not a folder (seen from here): give that of the data")
    if inputs.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {inputs.device} is not here: use cpu")
    try:
        seeds = [int(seed) for seed in inputs.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds {inputs.seeds} must be whole numbers between commas, e.g. 1,2,3")
    known = READERS if inputs.what == "glue" else SYSTEMS
    systems = (inputs.systems or ",".join(known)).split(",")
    for name, names in ((systems, known), (inputs.tasks.split(","), TASKS)):
        for item in name:
            if item not in names:
                parser.error(f"there is no {item}: {', '.join(names)}")
    steps = inputs.steps or STEPS[inputs.what]
    requested = Asked(
        inputs.folder, inputs.device, steps, inputs.settings, inputs.text, inputs.keep
    )
    pairs = [(seed, system) for seed in seeds for system in systems]
    jobs: list[Callable[[], Row]] = []
    if inputs.what == "bleu":
        jobs += [partial(translate, requested, system, seed) for seed, system in pairs]
    elif inputs.what == "rates":
        rates = inputs.rates.split(",")
        jobs += [
            partial(translate, requested, name, seed, rate)
            for seed, name in pairs
            for rate in rates
        ]
    else:
        requested = requested if requested.text else replace(requested, text=sentences(requested))
        kinds = dict.fromkeys(READERS[system][0].removesuffix(SCRATCH) for system in systems)
        jobs += [partial(pretrain, requested, kind) for kind in kinds]
        tasks = inputs.tasks.split(",")
        jobs += [
            partial(classify, requested, name, task, seed) for seed, name in pairs for task in tasks
        ]
    sys.exit(0 if each(jobs, inputs.until) else 1)


if __name__ == "__main__":
    main()
