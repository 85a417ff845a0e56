"""Endpoints of the Runs and Train pages: the list of runs, their settings and metrics."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manyheads.data.translation import PhrasebookData
from manyheads.errors import UserError
from manyheads.run import SCORES, SETTINGS, Run, read_run
from manyheads.summary import count_parameters
from manyheads.tasks.probes import FOLDER as PROBE_FOLDER
from manyheads.tasks.probes import PROBES, WEIGHTS
from manyheads.tasks.spec import EXAMPLE
from manyheads.tasks.translation import language_pair
from manyheads.train.optimizer import Train, learning_rate
from manyheads.web.library import Library
from manyheads.web.responses import Fields, problem_of

METRICS = "metrics.jsonl"
# "you" is dir, euch or Ihnen: beam search has hypotheses of almost equal score.
AMBIGUOUS = "His father asks whether Tom is lending you five hats now."
MOST_BYTES = 4 * 2**20  # bytes of a metrics file read per response
POINTS = 400  # points of the schedule curve
SPARKS = 48  # points of the loss curve in a summary
MOST = sys.float_info.max


async def runs(request: Request) -> Response:
    """GET: all runs with a summary of each, without loading models."""
    library: Library = request.app.state.library
    summaries = await run_in_threadpool(_all, library)
    return JSONResponse({"folder": library.folder.resolve().name, "runs": summaries})


def _all(library: Library) -> list[dict[str, Any]]:
    return [summary(name, folder) for name, folder in library.folders().items()]


def summary(name: str, folder: Path) -> dict[str, Any]:
    """The summary of a run, cached until one of its files changes."""
    files = (SETTINGS, METRICS, SCORES, f"{PROBE_FOLDER}/{PROBES}")
    return _summary(name, folder, *(_stamp(folder / file) for file in files))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=1024)
def _summary(name: str, folder: Path, *stamps: tuple[int, int]) -> dict[str, Any]:
    """A run that cannot be read has an `error` and does not hide the others."""
    try:
        if not (folder / SETTINGS).is_file():
            return {"name": name, "kind": "imported", "task": "", "example": EXAMPLE}
        run = read_run(folder)
        parameters = count_parameters(run.model)
    except (UserError, OSError, RecursionError) as error:
        return {"name": name, "error": str(problem_of(error))}
    records = list(all_records(folder / METRICS))
    valid = [r for r in records if r.get("split") == "valid" and _is_number(r.get("loss"))]
    best = min(valid, key=lambda record: record["loss"], default=None)
    return {
        "name": name,
        "kind": run.model.kind,
        "task": run.task,
        "languages": [code for code in language_pair(run.data) if code],
        "command": command(name, folder),
        "losses": losses(records),
        "probed": any(size for _, size in stamps[3:]),
        "kept": kept_steps(folder),
        "parameters": parameters,
        "steps": run.train.steps if run.train.epochs is None else None,
        "step": max((r["step"] for r in records), default=0),
        "best_loss": None if best is None else best["loss"],
        "scores": _scores(folder),
        "can": run.spec.pages(run),
        "example": run.spec.example(run),
        "ambiguous": AMBIGUOUS if isinstance(run.data, PhrasebookData) else None,
    }


def losses(records: list[dict[str, Any]]) -> list[list[Any]]:
    """[step, training loss] of a training, at most `SPARKS` of them with the first and the last."""
    points = [[r["step"], r["loss"]] for r in records if r["split"] == "train" and "loss" in r]
    chosen = np.linspace(0, len(points) - 1, min(SPARKS, len(points))).round().astype(int)
    return [points[at] for at in chosen]


def kept_steps(folder: Path) -> list[int]:
    """The steps of a training whose weights were kept (train.probe_weights)."""
    files = (folder / PROBE_FOLDER / WEIGHTS).glob("*.safetensors")
    return sorted(int(path.stem) for path in files if path.stem.isdecimal())


def command(name: str, folder: Path) -> str:
    """The command that repeats a training; an absolute path stays on the server."""
    path = Path(name) if folder.is_absolute() else folder
    return shlex.join(["manyheads", "train", str(path / SETTINGS), "--out", "NEW"])


def _scores(folder: Path) -> dict[str, float]:
    """The scalar values of scores.json."""
    try:
        scores = json.loads((folder / SCORES).read_text(encoding="utf-8"))
        return {name: value for name, value in scores.items() if _is_number(value)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -MOST <= value <= MOST  # `isfinite` raises for larger integers


async def settings(request: Request) -> Response:
    """GET ?run: the text of run.toml, and the command that repeats the training."""
    name = Fields.of_query(request).text("run")
    library: Library = request.app.state.library
    return await run_in_threadpool(_settings, name, library)


def _settings(name: str, library: Library) -> Response:
    folder = library.find(name)
    read_run(folder)
    text = (folder / SETTINGS).read_text(encoding="utf-8")
    return JSONResponse({"name": name, "settings": text, "command": command(name, folder)})


async def metrics(request: Request) -> Response:
    """GET ?run&since&version: the records after byte `since`, and the next offset.

    A resumed run replaces its metrics file, which changes `version`; the response then starts at
    byte 0 (`reset`). `more` is true if the file continues after this response. `age` is the time
    since the last line, `seconds` the time between the start of the training and that line.
    """
    fields = Fields.of_query(request)
    library: Library = request.app.state.library
    return await run_in_threadpool(_metrics, fields, library)


def _metrics(fields: Fields, library: Library) -> Response:
    folder = library.find(fields.text("run"))
    since = fields.number("since", 2**53) or 0
    answer = read_metrics(folder / METRICS, since, fields.text("version", ""))
    if since == 0 or answer["reset"]:
        run = read_run(folder) if (folder / SETTINGS).is_file() else None
        # An imported model has default settings, but no data: it was not trained with them.
        answer["schedule"] = None if run is None or run.data is None else schedule(run)
    begun, written = (_stamp(folder / file)[0] / 1e9 for file in (SETTINGS, METRICS))
    answer["age"], answer["seconds"] = max(0.0, time.time() - written), max(0.0, written - begun)
    return JSONResponse(answer)


def read_metrics(path: Path, since: int = 0, version: str = "") -> dict[str, Any]:
    """The records of a metrics file after byte `since`."""
    return read_records(path, since, version, _record)


def read_records(
    path: Path, since: int, version: str, parse: Callable[[bytes], dict[str, Any] | None]
) -> dict[str, Any]:
    """The complete lines of a file after byte `since`; a partial last line is skipped."""
    try:
        status = path.stat()
        current_version = f"{status.st_ino:x}"
        reset = bool(version) and (version != current_version or since > status.st_size)
        begin = 0 if reset else since
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(MOST_BYTES)
    except OSError:  # nothing measured yet
        empty = {"records": [], "broken": 0, "next": 0, "version": ""}
        return {**empty, "reset": bool(version), "more": False}
    complete = data[: data.rfind(b"\n") + 1]
    parsed = [parse(line) for line in complete.splitlines()]
    records = [record for record in parsed if record is not None]
    answer = {
        "records": records,
        "broken": len(parsed) - len(records),
        "next": begin + len(complete),
    }
    more = len(data) == MOST_BYTES and len(complete) > 0
    return {**answer, "version": current_version, "reset": reset, "more": more}


def all_records(path: Path) -> Iterator[dict[str, Any]]:
    """All records of a metrics file, read in parts."""
    since, more = 0, True
    while more:
        part = read_metrics(path, since)
        since, more = part["next"], part["more"]
        yield from part["records"]


def _record(line: bytes) -> dict[str, Any] | None:
    """The finite numbers of a line; None if the line is broken."""
    try:
        values = json.loads(line)
        step = int(values["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    numbers = {name: value for name, value in values.items() if _is_number(value)}
    return {**numbers, "step": step, "split": str(values.get("split", ""))}


def formula(train: Train) -> str:
    """The formula of `learning_rate`."""
    if train.schedule == "transformer":
        first = "d^−½" if train.learning_rate is None else "peak · warmup^½"
        return f"{first} · min(step^−½, step · warmup^−3⁄2)"
    left = {
        "cosine": "½ (1 + cos(π · done))",
        "linear": "(1 − done)",
        "constant": "1",
        "wsd": f"min(1, (steps + 1 − step) ⁄ ({train.decay_ratio:g} · steps))",
    }[train.schedule]
    if train.min_lr_ratio:
        left = f"{train.min_lr_ratio} + {1 - train.min_lr_ratio:g} · {left}"
    done = ", done = max(0, step − 1 − warmup) ⁄ (steps − warmup)" if "done" in left else ""
    return f"peak · min(step ⁄ warmup, {left}){done}"


def schedule(run: Run) -> dict[str, Any]:
    """The learning-rate schedule: its formula and its values at selected steps."""
    about: dict[str, Any] = {
        "name": run.train.schedule,
        "formula": formula(run.train),
        "points": [],
    }
    if run.train.epochs is not None:
        reason = "The run counts epochs; the number of steps depends on its data."
        return {**about, "reason": reason}
    train = run.train.settled(1)  # steps per epoch have no effect without epochs
    # Include the logged steps, so that formula and measurement can be compared.
    strides = (max(1, train.steps // POINTS), max(train.log_every, train.steps // POINTS))
    steps = {step for stride in strides for step in range(stride, train.steps + 1, stride)}
    steps |= {1, min(train.warmup_steps, train.steps) or 1, train.steps}
    points = [[step, learning_rate(train, run.model.dim, step)] for step in sorted(steps)]
    peak = max(rate for _, rate in points)
    about |= {"warmup_steps": train.warmup_steps, "peak": peak, "dim": run.model.dim}
    return {**about, "points": points, "steps": train.steps}


ROUTES = [
    Route("/api/runs", runs),
    Route("/api/settings", settings),
    Route("/api/metrics", metrics),
]
