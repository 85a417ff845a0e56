"""Metrics of training: means over steps, metrics.jsonl, TensorBoard, and progress on stderr."""

import json
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from manyheads.errors import DataError
from manyheads.fileio import replace_file
from manyheads.train.step import StepStats

SECONDS_BETWEEN_LINES = 10.0


class LogWindow:
    """The steps since the last log line."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.checked = 0
        self.began = time.monotonic()

    def unchecked_nlls(self) -> Iterator[tuple[int, float]]:
        """(How many steps ago, nll) of the steps since the last call; waits for the device."""
        for index in range(self.checked, len(self.steps)):
            yield len(self.steps) - index, self.steps[index].nll()
        self.checked = len(self.steps)

    def scores(self) -> dict[str, float]:
        """The weighted loss, the mean of each term where there are several, and throughput."""
        means, loss = {}, 0.0
        for name, weight in self.steps[-1].weights.items():
            count = max(1, sum(step.counts[name] for step in self.steps))
            mean = float(sum(step.sums[name] for step in self.steps)) / count
            means[f"{name}_loss"] = mean
            loss += weight * mean
        terms = means if len(means) > 1 else {}
        for name in self.steps[-1].extra:
            numerators, denominators = zip(*(step.extra[name] for step in self.steps), strict=True)
            terms[name] = float(sum(numerators)) / float(sum(denominators))
        tokens = sum(step.tokens for step in self.steps)
        seconds = max(1e-9, time.monotonic() - self.began)
        return {"loss": loss, **terms, "tokens_per_second": tokens / seconds}

    def note(self) -> str:
        """The scores in short, for the progress bar."""
        scores = self.scores()
        extra = "".join(f"  {name} {scores[name]:.1%}" for name in self.steps[-1].extra)
        return f"loss {scores['loss']:.3f}{extra}  {scores['tokens_per_second']:,.0f} tokens/s"


class Metrics:
    """metrics.jsonl, one object a line, and TensorBoard if it is installed.

    Lines after `step`, the step to resume from, are dropped, since their steps will be repeated; so
    are damaged ones.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path, self.first_step = folder / "metrics.jsonl", step + 1
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        past = b"".join(line + b"\n" for line in lines if 0 <= step_of(line) <= step)
        replace_file(self.path, lambda partial: partial.write_bytes(past))
        self.file = self.path.open("a", encoding="utf-8")
        self.board: Any = None
        self.has_tensorboard = find_spec("tensorboard") is not None

    def write(self, step: int, split: str, scores: dict[str, float]) -> None:
        try:
            self.file.write(json.dumps({"step": step, "split": split, **scores}) + "\n")
            self.file.flush()
        except OSError as error:
            raise DataError(
                f"{self.path} could not be saved ({error}): free disk space and try again"
            ) from None
        if self.has_tensorboard and self.board is None:
            # Imported late: it takes seconds.
            from torch.utils.tensorboard.writer import SummaryWriter

            self.board = SummaryWriter(
                str(self.path.with_name("tensorboard")), purge_step=self.first_step
            )
        for name, value in scores.items() if self.board is not None else ():
            self.board.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


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
