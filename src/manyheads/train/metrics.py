"""metrics.jsonl: what a run has measured, one object a line; and TensorBoard."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manyheads.errors import DataError
from manyheads.fileio import replace_file


class Metrics:
    """metrics.jsonl, one object a line, and TensorBoard where it is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        self.broken = 0
        if self.path.exists():
            # Steps after the last save will be done again: forget what was said of them.
            lines = self.path.read_bytes().splitlines()
            steps = [step_of(line) for line in lines]
            pairs = zip(lines, steps, strict=True)
            kept = [line + b"\n" for line, at in pairs if at is not None and at <= step]
            self.broken = steps[:-1].count(None)  # the last one may be cut short by a kill
            replace_file(self.path, lambda beside: _write(beside, b"".join(kept)))
        self.file = self.path.open("a", encoding="utf-8")
        self.folder, self.first = folder, step + 1
        self.board: Any = None
        self.has_board = find_spec("tensorboard") is not None

    def write(self, step: int, split: str, scores: dict[str, float]) -> None:
        try:
            self.file.write(json.dumps({"step": step, "split": split, **scores}) + "\n")
            self.file.flush()
        except OSError as error:
            raise DataError(
                f"{self.path} could not be saved ({error}): make room and go on"
            ) from None
        if self.has_board and self.board is None:
            # Only now: importing it takes seconds.
            from torch.utils.tensorboard.writer import SummaryWriter

            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.first)
        if self.board is not None:
            for name, value in scores.items():
                self.board.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def step_of(line: bytes) -> int | None:
    """The step that a line tells of, if it can be read."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
