"""One row of the task table: everything the program asks about a task.

A task module offers a `TaskSpec`; `table.TASKS` lists them. A row knows neither run folders nor
weight files: it gets the settings of a run (`RunSettings`) or a loaded model (`LoadedModel`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from manyheads.decode.beam import Decode
from manyheads.decode.translate import BaseTranslator
from manyheads.evaluate.scores import Scores
from manyheads.exchange.folder import in_frame
from manyheads.models.vit import ImageClassifier
from manyheads.tasks.encode import TextEncoder
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.optimizer import Train
from manyheads.train.step import Task

Ability = Literal["translate", "generate", "encode", "label"]
EXAMPLE = "The small dog sees the tree."


class RunSettings:
    """The settings of a run, as far as a task reads them; `manyheads.run.Run` has more."""

    data: Any
    tokens: Any
    objective: Any
    model: Any
    train: Train
    decode: Decode
    seed: int


class LoadedModel:
    """A model ready to use, as far as an evaluation needs it; see `manyheads.loading`."""

    folder: Path
    run: Any  # `RunSettings`

    @property
    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    def translator(self) -> BaseTranslator:
        raise NotImplementedError

    def encoder(self) -> TextEncoder:
        raise NotImplementedError

    def labeller(self) -> ImageClassifier:
        raise NotImplementedError

    def torch_model(self) -> Any:
        """The PyTorch module; refused for a model that another program runs."""
        raise NotImplementedError


def add_frame(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    """With the special tokens around a text that an encoder reads ([CLS] … [SEP])."""
    return in_frame(tokenizer, run.decode, run.model)


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task: what it needs, how it is trained and scored, what a trained model then offers.

    Several rows may share the value of the setting `task`; data and objective choose among them.
    """

    task: str  # the value of the setting `task`
    models: tuple[type, ...]  # configurations; the first is the default
    data: tuple[type, ...]  # the first is the default for a model that came without data
    objectives: tuple[type, ...] = ()
    default_objective: Any = None  # a row with objectives and without this needs one
    special_tokens: tuple[str, ...] = ()  # which the tokenizer must have
    train_settings: tuple[str, ...] = ()  # of `train`, that only such tasks take
    recipe: str = ""  # a built-in recipe of this task, to point to
    reads_text: bool = True
    is_default: bool = False  # the task of an imported model of these kinds

    # Refuse settings that do not go together.
    check: Callable[[RunSettings], None] = lambda run: None
    # The text that a tokenizer is trained on, of a split that was read.
    strings: Callable[[Any], list[str]] = lambda part: part.strings()
    # Add the special tokens that the task needs.
    fit_tokenizer: Callable[[Tokenizer, RunSettings], Tokenizer] = lambda tokenizer, run: tokenizer
    # The model's settings with what the data decides: labels, pixel means.
    fit_model: Callable[[RunSettings, Any], Any] = lambda run, part: run.model
    # (run, train split, valid split, tokenizer, device) → what the trainer trains on; None where
    # a task is only for imported models.
    prepare: Callable[[RunSettings, Any, Any, Any, torch.device], Task[Any]] | None
    # The module to train, where that is more than the model.
    wrap: Callable[[nn.Module, RunSettings], nn.Module] = lambda model, run: model
    # A trained model's settings with the heads that this task needs; `finetunes` are kinds that
    # it starts from in addition to the run's own.
    finetune: Callable[[Any, RunSettings], Any] = lambda config, run: config
    finetunes: tuple[type, ...] = ()

    # (loaded model, data, split) → scores; None where nothing scores a trained model.
    evaluate: Callable[..., Scores] | None
    no_scores: str = ""  # the reason
    takes_stride: bool = False
    offers: tuple[Ability, ...] = ("encode",)
    served_as: Literal["translations", "completions", ""] = ""  # over HTTP
    # Settings of data by the model, where `data[0]` is not the default.
    default_data: Callable[[Any], Any] | None = None
    # Of the web view: pages beyond those of every model, and a text to begin with.
    pages: Callable[[RunSettings], list[str]] = lambda run: []
    example: Callable[[RunSettings], str] = lambda run: EXAMPLE

    def data_for(self, model: Any) -> Any:
        """Settings of data, to be filled in, for a model that came without any."""
        return self.data[0]() if self.default_data is None else self.default_data(model)
