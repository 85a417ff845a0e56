"""The row of a task, the table of all rows, and the code that tasks share.

A task module offers a `TaskSpec` for `table.TASKS` and a `BaseTask` for the trainer. Neither knows
run folders or weight files: they get the settings of a run (`RunSettings`) or a loaded model
(`LoadedModel`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn

from manyheads.config import nearest
from manyheads.data.batching import Rows, split, to_device
from manyheads.decode.beam import Decode
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores
from manyheads.exchange.folder import frame_for_model
from manyheads.models.vit import Vit
from manyheads.tasks.encode import TextEncoder
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.optimizer import Train
from manyheads.train.step import Loss, Task

Ability = Literal["translate", "generate", "encode", "label"]
B = TypeVar("B")  # a batch
EXAMPLE = "The small dog sees the tree."
SHOWN = 5  # examples that an error message names


class RunSettings:
    """The settings of a run, as far as a task uses them; `manyheads.run.Run` has more."""

    data: Any
    tokens: Any
    target_tokens: Any
    objective: Any
    model: Any
    train: Train
    decode: Decode
    seed: int


class LoadedModel:
    """A model ready to use, as far as an evaluation needs it; see `manyheads.loading`."""

    folder: Path
    run: Any  # `RunSettings`
    translator: Callable[..., BaseTranslator]
    encoder: Callable[[], TextEncoder]
    labeller: Callable[[], Vit]
    model: Any

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError


class BaseTask(Generic[B]):
    """The part of a `train.step.Task` that tasks share.

    `load` encodes the data and sets `order`, `digest` and `per_epoch`. A step trains on some rows
    of the data, `rows(step)`: a pure function of seed and step, so that a resumed run equals one
    that was never stopped.
    """

    examples = "examples"  # what `describe` calls the rows
    order: Any  # has rows(step)
    digest: str
    per_epoch: int

    def __init__(
        self, run: RunSettings, part: Any, valid: Any, tokenizer: Any, device: torch.device
    ) -> None:
        self.run, self.train, self.tokenizer, self.device = run, run.train, tokenizer, device
        self.notes = [*part.notes, *valid.notes]
        self.load(part, valid)
        self.notes = list(dict.fromkeys(self.notes))  # held-out data may come from the same files

    def load(self, part: Any, valid: Any) -> None:
        """Encode the training and the validation split."""
        raise NotImplementedError

    def rows(self, step: int) -> Rows:
        rows: Rows = self.order.rows(step)
        return rows

    def batch(self, rows: Rows) -> B:
        raise NotImplementedError

    def micro_batches(self, step: int) -> list[B]:
        return [self.batch(rows) for rows in split(self.rows(step), self.train.accumulate)]

    def batches(self, step: int) -> list[B]:
        return [to_device(batch, self.device) for batch in self.micro_batches(step)]

    def tokens(self, batch: B) -> int:
        return batch.tokens.numel()  # type: ignore[attr-defined]

    def number(self, row: int) -> int:
        """A row as a user counts it."""
        return row + 1

    def describe(self, step: int) -> str:
        rows = self.rows(step)
        shown = ", ".join(str(self.number(int(row))) for row in rows[:SHOWN])
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        return f"{self.examples} {shown}{more}"


@torch.no_grad()
def total_nll(model: nn.Module, losses: Iterable[Loss]) -> tuple[float, int]:
    """Σ −log P and the number of predictions, over losses that are computed one after the other."""
    model.eval()
    nll, count = 0.0, 0
    for loss in losses:
        nll, count = nll + float(loss.nll), count + loss.count
    return nll, count


def token_unit(tokenizer: Tokenizer) -> str:
    """The kind and number of tokens, for the signature of a score per token."""
    return f"{tokenizer.kind}, {tokenizer.vocab_size} tokens"


def add_frame(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    """Add the special tokens around a text that an encoder was trained with ([CLS] … [SEP])."""
    return frame_for_model(tokenizer, run.decode, run.model)


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task: its inputs, its training and scoring, and the abilities of a trained model.

    Several rows may share the value of the setting `task`; data and objective choose among them.
    """

    task: str  # the value of the setting `task`
    models: tuple[type, ...]  # configurations; the first is the default
    data: tuple[type, ...]  # the first is the default for a model that came without data
    objectives: tuple[type, ...] = ()
    default_objective: Any = None  # a row with objectives and without this needs one
    special_tokens: tuple[str, ...] = ()  # which the tokenizer must have
    train_settings: tuple[str, ...] = ()  # settings of `train` that only such tasks accept
    recipe: str = ""  # a built-in recipe of this task, for error messages
    reads_text: bool = True
    is_default: bool = False  # the task of an imported model of these kinds

    # Refuse settings that do not go together.
    check: Callable[[RunSettings], None] = lambda run: None
    # The text of a split that a tokenizer is trained on.
    strings: Callable[[Any], list[str]] = lambda part: part.strings()
    # Add the special tokens that the task needs.
    fit_tokenizer: Callable[[Tokenizer, RunSettings], Tokenizer] = lambda tokenizer, run: tokenizer
    # The model's settings with what the training split decides: labels, pixel means.
    fit_model: Callable[[RunSettings, Any], Any] = lambda run, part: run.model
    # (run, train split, valid split, tokenizer, device) → the task for the trainer; None if the
    # row is only for imported models.
    prepare: Callable[[RunSettings, Any, Any, Any, torch.device], Task[Any]] | None
    # (task, model, run folder) → what records the model during training, for the Watch page.
    probe: Callable[[Any, nn.Module, Path], Any] = lambda task, model, folder: None
    # The module to train, if that is more than the model.
    wrap: Callable[[nn.Module, RunSettings], nn.Module] = lambda model, run: model
    # A trained model's settings with the heads that this task needs; `finetunes` are kinds that
    # it starts from in addition to the run's own.
    finetune: Callable[[Any, RunSettings], Any] = lambda config, run: config
    finetunes: tuple[type, ...] = ()

    # (loaded model, data, split) → scores; None if a trained model has no scores.
    evaluate: Callable[..., Scores] | None
    no_scores: str = ""  # the reason
    scoring: tuple[str, ...] = ()  # options of `manyheads evaluate` that such a run accepts
    offers: tuple[Ability, ...] = ("encode",)
    # Over HTTP; "" for a task that is not served.
    served_as: Literal["translations", "completions", "encodings", "images", ""] = "encodings"
    # Settings of data for a model that came without data, if `data[0]()` does not fit all.
    default_data: Callable[[Any], Any] | None = None
    # Web page: pages in addition to those of every model, and the first text shown.
    pages: Callable[[RunSettings], list[str]] = lambda run: []
    example: Callable[[RunSettings], str] = lambda run: EXAMPLE

    def check_scoring(self, options: Iterable[str]) -> None:
        """Refuse options of an evaluation that the task does not have."""
        for name in options:
            if name not in self.scoring:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} does not work with task={self.task}: leave it out")

    def data_for(self, model: Any) -> Any:
        """Settings of data, to be filled in, for a model that came without data."""
        return self.data[0]() if self.default_data is None else self.default_data(model)


class TaskTable(dict[str, TaskSpec]):
    """The rows of all tasks by name."""

    def rows(self, task: str) -> list[TaskSpec]:
        """The rows that share a value of the setting `task`."""
        rows = [row for row in self.values() if row.task == task]
        if not rows:
            raise UserError(f"task={task}: {nearest(task, {row.task for row in self.values()})}")
        return rows

    def find(self, task: str, data: Any = None, objective: Any = None) -> TaskSpec:
        """The row of a run; data and objective choose if several rows share its `task`."""
        rows = self.rows(task)
        for row in rows:
            fits_data = data is None or isinstance(data, row.data)
            if fits_data and (objective is None or isinstance(objective, row.objectives)):
                return row
        return rows[0]

    def default(self, model: Any) -> str:
        """The task of an imported model."""
        rows = self.values()
        return next(row.task for row in rows if row.is_default and isinstance(model, row.models))


def kinds(configs: tuple[type, ...]) -> list[str]:
    """The names of these configurations in settings."""
    return [config.kind for config in configs]  # type: ignore[attr-defined]
