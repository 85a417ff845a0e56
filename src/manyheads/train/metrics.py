"""metrics.jsonl: what a run has measured, one object a line; and TensorBoard."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manyheads.errors import BadData
from manyheads.files import write_text


class Metrics:
    """metrics.jsonl, one object a line, and TensorBoard where it is installed."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            # Steps after the last save will be done again: forget what was said of them.
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            write_text(self.path, "".join(f"{line}\n" for line in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.folder, self.first = folder, step + 1
        self.board: Any = None
        self.has_board = find_spec("tensorboard") is not None

    def write(self, step: int, split: str, scores: dict[str, float]) -> None:
        try:
            self.file.write(json.dumps({"step": step, "split": split, **scores}) + "\n")
            self.file.flush()
        except OSError as error:
            raise BadData(
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


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short by a kill
