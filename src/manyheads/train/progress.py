"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Bar:
    """Steps done, a note (e.g. the loss) and the time left."""

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
