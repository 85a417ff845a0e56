"""Metrics of training: means over steps, metrics.jsonl, loggers, and progress on stderr.

A logger (TensorBoard, Weights & Biases or trackio, `train.log_to`) is called with the step, the
split and the scores of each line of metrics.jsonl, as a callback in Python is. Offline modes are
those of the library, e.g. WANDB_MODE=offline.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from manyheads.errors import DataError, UserError
from manyheads.fileio import make_subfolder, replace_file
from manyheads.train.step import StepStats

SECONDS_BETWEEN_LINES = 10.0
PROJECT = "manyheads"  # unless WANDB_PROJECT or TRACKIO_PROJECT names another
Callback = Callable[[int, str, dict[str, float]], None]


class LogWindow(StepStats):
    """Sums over the steps since the last log line; their losses may be `unchecked` yet."""

    def __init__(self) -> None:
        super().__init__()
        self.unchecked: list[StepStats] = []
        self.steps = 0
        self.began = time.monotonic()

    def add_step(self, step: StepStats) -> None:
        self.add_counts(step.tokens, step.counts)
        for name, nll in step.sums.items():
            self.sums[name] = self.sums[name] + nll if name in self.sums else nll
        self.weights = step.weights
        self.dropped, self.routed = self.dropped + step.dropped, self.routed + step.routed
        self.grad_norm, self.steps = self.grad_norm + step.grad_norm, self.steps + 1
        self.unchecked.append(step)

    def scores(self) -> dict[str, float]:
        """The weighted loss, the mean of each term where there are several, the mean norm of the
        gradient, and throughput."""
        means = {name: float(nll) / max(1, self.counts[name]) for name, nll in self.sums.items()}
        scores = {"loss": sum(weight * means[name] for name, weight in self.weights.items())}
        if len(means) > 1:
            scores |= {f"{name}_loss": mean for name, mean in means.items()}
        if self.routed:
            scores["dropped"] = float(self.dropped) / float(self.routed)
        scores["grad_norm"] = float(self.grad_norm) / max(1, self.steps)
        seconds = max(1e-9, time.monotonic() - self.began)
        return scores | {"tokens_per_second": self.tokens / seconds}

    def note(self) -> str:
        """The scores in short, for the progress bar."""
        scores = self.scores()
        dropped = f"  dropped {scores['dropped']:.1%}" if self.routed else ""
        return f"loss {scores['loss']:.3f}{dropped}  {scores['tokens_per_second']:,.0f} tokens/s"


@runtime_checkable
class Logger(Protocol):
    def __call__(self, step: int, split: str, scores: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder; those after `step`, from which a run resumes, are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        make_subfolder(folder / "tensorboard")
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def __call__(self, step: int, split: str, scores: dict[str, float]) -> None:
        for name, value in scores.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class Tracker:
    """wandb or trackio, which have the same three functions; the run is named as its folder."""

    def __init__(self, library: str, folder: Path, settings: dict[str, Any]) -> None:
        self.module: Any = import_module(library)
        project = os.environ.get(f"{library.upper()}_PROJECT", PROJECT)
        self.module.init(project=project, name=folder.name, config=settings, resume="allow")

    def __call__(self, step: int, split: str, scores: dict[str, float]) -> None:
        self.module.log({f"{split}/{name}": value for name, value in scores.items()}, step=step)

    def close(self) -> None:
        self.module.finish()


def check_installed(log_to: str | None) -> None:
    """Refuse a missing library before anything is trained."""
    if log_to is not None and find_spec(log_to) is None:
        raise UserError(f"train.log_to={log_to} needs {log_to}: pip install {log_to}")


def open_logger(log_to: str, folder: Path, step: int, settings: dict[str, Any]) -> Logger:
    """Imported late: it takes seconds."""
    if log_to == "tensorboard":
        return TensorBoard(folder, step)
    return Tracker(log_to, folder, settings)


class Metrics:
    """metrics.jsonl, one object a line, which also go to a logger (`log_to`) and a callback.

    Lines after `step`, the step to resume from, are dropped, since their steps will be repeated; so
    are damaged ones.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        log_to: str | None = None,
        settings: dict[str, Any] | None = None,
        callback: Callback | None = None,
    ) -> None:
        self.path, self.step, self.log_to = folder / "metrics.jsonl", step, log_to
        self.settings, self.callback = settings or {}, callback
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        past = b"".join(line + b"\n" for line in lines if 0 <= step_of(line) <= step)
        replace_file(self.path, lambda partial: partial.write_bytes(past))
        self.file = self.path.open("a", encoding="utf-8")
        self.logger: Logger | None = None

    def write(self, step: int, split: str, scores: dict[str, float]) -> None:
        try:
            self.file.write(json.dumps({"step": step, "split": split, **scores}) + "\n")
            self.file.flush()
        except OSError as error:
            raise DataError(
                f"{self.path} could not be saved ({error}): free disk space and try again"
            ) from None
        if self.log_to is not None and self.logger is None:
            self.logger = open_logger(self.log_to, self.path.parent, self.step, self.settings)
        for listener in (self.logger, self.callback):
            if listener is not None:
                listener(step, split, scores)

    def close(self) -> None:
        self.file.close()
        if self.logger is not None:
            self.logger.close()


def step_of(line: bytes) -> int:
    """The step of a line of metrics.jsonl, -1 if the line is damaged."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1


class Bar:
    """A bar on a terminal, plain lines elsewhere: steps done, a note (the loss), the time left."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.name, self.total, self.first = name, total, done
        self.began = self.printed = time.monotonic()
        self.live = sys.stderr.isatty()
        self.progress = Progress(
            TextColumn(name),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self.task = self.progress.add_task(name, total=total, completed=done, note="")

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def update(self, done: int, note: str) -> None:
        self.progress.update(self.task, completed=done, note=note)
        now = time.monotonic()
        if not self.live and (done == self.total or now - self.printed >= SECONDS_BETWEEN_LINES):
            self.printed = now
            rate = (done - self.first) / max(1e-9, now - self.began)
            left = (self.total - done) / rate if rate else 0.0
            self.say(f"{self.name} {done}/{self.total}  {note}  {left:.0f} s left")

    def say(self, line: str) -> None:
        """A line above the bar."""
        self.console.print(line, markup=False, soft_wrap=True)
