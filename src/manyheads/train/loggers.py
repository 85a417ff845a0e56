"""Metrics to TensorBoard, Weights & Biases or trackio (`train.log_to`).

A logger is called with the step, the split and the scores of each line of metrics.jsonl, as a
callback in Python is. Offline modes are those of the library, e.g. WANDB_MODE=offline.
"""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from manyheads.errors import UserError

PROJECT = "manyheads"  # unless WANDB_PROJECT or TRACKIO_PROJECT names another
Callback = Callable[[int, str, dict[str, float]], None]


@runtime_checkable
class Logger(Protocol):
    def __call__(self, step: int, split: str, scores: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder; those after `step`, from which a run resumes, are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

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
