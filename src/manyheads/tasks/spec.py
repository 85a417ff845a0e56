"""One row of the task table: everything the program asks about a task.

A task module offers a `TaskSpec`; `table.TASKS` lists them. A row knows neither run folders nor
weight files: it gets the settings of a run (`RunSettings`) or a loaded model (`LoadedModel`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from manyheads.decode.beam import Decode
from manyheads.decode.translate import AnyTranslator
from manyheads.evaluate.scores import Scores
from manyheads.exchange.folder import in_frame
from manyheads.models.vit import ReadsImages
from manyheads.tasks.encode import TextEncoder
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.loop import Task
from manyheads.train.optimizer import Train

Ability = Literal["translate", "generate", "encode", "label"]
EXAMPLE = "The small dog sees the tree."


class RunSettings(Protocol):
    """The settings of a run, as far as a task reads them (`manyheads.run.Run`)."""

    @property
    def task(self) -> str: ...
    @property
    def start(self) -> str: ...
    @property
    def data(self) -> Any: ...
    @property
    def tokens(self) -> Any: ...
    @property
    def objective(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def train(self) -> Train: ...
    @property
    def decode(self) -> Decode: ...
    @property
    def seed(self) -> int: ...


class LoadedModel(Protocol):
    """A model ready to use, as far as an evaluation needs it (`manyheads.loading.LoadedRun`)."""

    @property
    def folder(self) -> Path: ...
    @property
    def run(self) -> RunSettings: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def translator(self) -> AnyTranslator: ...
    def encoder(self) -> TextEncoder: ...
    def labeller(self) -> ReadsImages: ...
    def torch_model(self) -> Any:
        """The PyTorch module; refused for a model that another program runs."""


Prepare = Callable[[RunSettings, Any, Any, Any, torch.device], Task[Any]]


def part_strings(part: Any) -> list[str]:
    """Texts know their strings themselves."""
    strings: list[str] = part.strings()
    return strings


def keep_tokenizer(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    return tokenizer


def add_frame(tokenizer: Tokenizer, run: RunSettings) -> Tokenizer:
    """With the special tokens around a text that an encoder reads ([CLS] … [SEP])."""
    return in_frame(tokenizer, run.decode, run.model)


def no_check(run: RunSettings) -> None:
    pass


def keep_config(run: RunSettings, part: Any) -> Any:
    return run.model


def keep_pretrained(config: Any, run: RunSettings) -> Any:
    return config


def keep_model(model: nn.Module, run: RunSettings) -> nn.Module:
    return model


def no_pages(run: RunSettings) -> list[str]:
    return []


def plain_example(run: RunSettings) -> str:
    return EXAMPLE


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

    # Training. `prepare` is None where a task is only for models that came from elsewhere.
    check: Callable[[RunSettings], None] = no_check  # of settings that do not go together
    strings: Callable[[Any], list[str]] = part_strings  # a tokenizer's training text
    fit_tokenizer: Callable[[Tokenizer, RunSettings], Tokenizer] = keep_tokenizer
    fit_model: Callable[[RunSettings, Any], Any] = keep_config  # what the data decides of a model
    prepare: Prepare | None = None  # (run, train, valid, tokenizer, device) → trainer task
    wrap: Callable[[nn.Module, RunSettings], nn.Module] = keep_model  # what is trained
    finetune: Callable[[Any, RunSettings], Any] = keep_pretrained  # a trained model's config
    finetunes: tuple[type, ...] = ()  # configurations that it starts from next to the run's own

    # Use. `evaluate` is None where nothing scores a trained model; `no_scores` says why.
    evaluate: Callable[..., Scores] | None = None  # (loaded, data, split) → scores
    no_scores: str = ""
    takes_stride: bool = False
    offers: tuple[Ability, ...] = ("encode",)
    served_as: Literal["translations", "completions", ""] = ""  # over HTTP
    default_data: Callable[[Any], Any] | None = None  # by the model, where `data[0]` is not it
    pages: Callable[[RunSettings], list[str]] = no_pages  # of the web view, beyond the usual
    example: Callable[[RunSettings], str] = plain_example

    def data_for(self, model: Any) -> Any:
        """Settings of data, to be filled in, for a model that came without any."""
        return self.data[0]() if self.default_data is None else self.default_data(model)


def shared_arguments(run: RunSettings, device: torch.device) -> dict[str, Any]:
    """Arguments that every task over texts takes."""
    return {"max_length": run.model.max_length, "seed": run.seed, "device": device}
