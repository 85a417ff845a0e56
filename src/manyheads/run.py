"""A run: its settings, its folder, and what is done with it.

A run folder holds run.toml (resolved), tokenizer.json, model.safetensors, state/,
metrics.jsonl and scores.json; it can be moved and rebuilds the model alone.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyheads.config import dump, kinds_of, parse, read_toml, to_toml
from manyheads.data.images import ImageData
from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.data.masking import Objective
from manyheads.data.music import MusicData
from manyheads.data.summaries import SummaryData
from manyheads.data.translation import FilesData, PhrasebookData
from manyheads.decode.beam import Decode
from manyheads.errors import DataError, UserError
from manyheads.fileio import PARTIAL, check_sound, with_sums, write_text
from manyheads.nn.attention import Dense
from manyheads.presets import ModelConfig
from manyheads.tasks.spec import RunSettings, TaskSpec, kinds
from manyheads.tasks.table import TASKS
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Tokens
from manyheads.train import checkpoint
from manyheads.train.optimizer import Train

SETTINGS = "run.toml"
TOKENIZER = "tokenizer.json"
SCORES = "scores.json"
MOST_LAYERS = 10_000
# What tells a folder that another program is to read from a run.
EXPORTED = ("config.json", "model.bin", "*.onnx")
# What may change between two calls that train the same run.
FREE = {
    "train.steps",
    "train.epochs",
    "train.validate_every",
    "train.save_every",
    "train.log_every",
    "train.parallel",
    "train.compile",
    "train.activation_checkpointing",
}


Data = PhrasebookData | FilesData | SummaryData | TextData | LabelledData | ImageData | MusicData


@dataclass(frozen=True, kw_only=True)
class Run(RunSettings):
    """All settings of a run; an imported model comes without data and tokens.

    `objective` is what the model predicts of a text, where the task leaves a choice; `start` the
    folder of the trained model that the run started from.
    """

    task: str = "translation"
    start: str = ""
    data: Data | None
    tokens: Tokens | None
    objective: Objective | None = None
    model: ModelConfig
    train: Train = field(default_factory=Train)
    decode: Decode = field(default_factory=Decode)
    seed: int = 1

    @property
    def spec(self) -> TaskSpec:
        """The row of the task table for this run."""
        return TASKS.find(self.task, self.data, self.objective)

    def __post_init__(self) -> None:
        rows = TASKS.rows(self.task)
        for name, part in (("data", self.data), ("objective", self.objective)):
            self._check_part(name, part, rows)
        row = self.spec
        if row.objectives and row.default_objective is None and self.objective is None:
            example = kinds(row.objectives)[0]
            raise UserError(f"task={self.task} needs an objective, e.g. objective={example}")
        if not isinstance(self.model, row.models):
            objective = f" objective={self.objective.kind}" if self.objective else ""
            advice = f"try the recipe {row.recipe}" if row.recipe else "choose another model"
            raise UserError(
                f"task={self.task}{objective} needs model={' or '.join(kinds(row.models))} "
                f"(not {self.model.kind}): {advice}"
            )
        for name in sorted({name for row in TASKS.values() for name in row.train_settings}):
            default = getattr(Train(), name)
            if getattr(self.train, name) != default and name not in row.train_settings:
                fits = {other.task for other in TASKS.values() if name in other.train_settings}
                raise UserError(
                    f"train.{name} works only with task={' or '.join(sorted(fits))}: leave it out"
                )
        if not row.reads_text and self.tokens is not None:
            raise UserError(f"task={self.task} reads no text: leave out tokens")
        row.check(self)
        for place, part in {"": self.model, **vars(self.model)}.items():
            layers = getattr(part, "layers", None)
            if isinstance(layers, int) and layers > MOST_LAYERS:  # they would be built one by one
                name = f"model.{place}.layers" if place else "model.layers"
                raise UserError(f"{name}={layers} must be at most {MOST_LAYERS:,}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must be at least 0, below 2^63")

    def _check_part(self, name: str, part: Any, rows: list[TaskSpec]) -> None:
        """Refuse data or an objective that no row of the task takes."""
        fits = [kind for row in rows for kind in (row.data if name == "data" else row.objectives)]
        if part is not None and not isinstance(part, tuple(fits)):
            words = " or ".join(dict.fromkeys(kinds(tuple(fits)))) or "none"
            raise UserError(
                f"task={self.task} needs {name}={words} (not {part.kind}): leave it out, or take "
                "another recipe"
            )


def parse_run(table: dict[str, Any]) -> Run:
    """A run from its TOML table; task and objective decide the kind of model if it does not."""
    decode = table.get("decode")
    if isinstance(decode, dict):
        # Release 0.1 had another order of search, which is gone.
        table = {**table, "decode": {k: v for k, v in decode.items() if k != "order"}}
    model = table.get("model")
    if isinstance(model, dict) and "kind" not in model:
        table = {**table, "model": {**model, "kind": _default_model(table)}}
    return parse(Run, table)


def _default_model(table: dict[str, Any]) -> str:
    objective = table.get("objective")
    word = objective.get("kind") if isinstance(objective, dict) else objective
    rows = [row for row in TASKS.values() if word in kinds(row.objectives)]
    rows = rows or TASKS.rows(table.get("task", "translation"))
    return kinds(rows[0].models)[0]


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):
        raise UserError(f"device '{name}' is not here: use auto or cpu") from None
    return device


def check_folder(folder: Path) -> None:
    """A run may go into a new or empty folder, or one that holds a run already."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another folder with --out")
    if not folder.is_dir():
        return
    exported = [name for pattern in EXPORTED for name in folder.glob(pattern)]
    if exported:
        raise UserError(
            f"{folder} was exported or comes from elsewhere ({exported[0].name}): "
            "choose another folder with --out"
        )
    if (folder / SETTINGS).exists():
        return
    # What a run that was killed before its first step has left.
    own = {folder / TOKENIZER, folder / checkpoint.STATE, folder / checkpoint.STATE / "lock"}
    foreign = [path for path in folder.rglob("*") if path not in own and path.suffix != PARTIAL]
    if foreign:
        raise UserError(
            f"{folder} holds something else ({min(foreign).relative_to(folder)}): "
            "choose another folder with --out"
        )


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made ({error.strerror}): choose another --out"
        ) from None


def forget(folder: Path, *, folder_too: bool) -> None:
    """Take away what a run that could not begin has made, or all of its folder."""
    if folder_too:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in (folder / SETTINGS, folder / TOKENIZER):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / checkpoint.STATE, ignore_errors=True)


def read_run(folder: Path) -> Run:
    """The settings of a run folder."""
    if not folder.is_dir():
        raise UserError(
            f"there is no run folder {folder}: train one with `manyheads train`, or give the "
            "folder of a model (nothing is fetched)"
        )
    if not (folder / SETTINGS).is_file():
        raise DataError(f"{folder} is no run folder: it has no {SETTINGS}")
    table = read_toml(folder / SETTINGS)
    check_sound(folder / SETTINGS, SETTINGS)
    try:
        return parse_run(table)
    except UserError as error:
        raise DataError(f"{folder / SETTINGS} does not describe a run: {error}") from None


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a run folder: the very one that its settings were written beside."""
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    check_sound(folder / SETTINGS, TOKENIZER)
    return tokenizer


def settings_text(run: Run, folder: Path | None) -> str:
    """What run.toml is to hold: settings, after check sums of the tokenizer and of themselves.

    Without a folder there is no tokenizer that we wrote.
    """
    return with_sums(to_toml(dump(run)), SETTINGS, folder and folder / TOKENIZER)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One training process a folder: a second one is refused, and a killed one leaves no trace."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    make_folder(folder / checkpoint.STATE)
    with (folder / checkpoint.STATE / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is being trained by another process: wait for it") from None
        yield


def differences(new: dict[str, Any], old: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings that must not change between two calls that train the same run, and did."""
    found = []
    # What decides the others comes first.
    for key in sorted(new.keys() | old.keys(), key=lambda key: (key not in ("task", "kind"), key)):
        a, b, name = new.get(key), old.get(key), f"{prefix}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{name}.")
        elif a != b and name not in FREE and not name.startswith("decode."):
            found.append(f"{name} is {b} there and {a} here")
    return found


def save_run(run: Run, tokenizer: Tokenizer | None, model: nn.Module, folder: Path) -> None:
    """A model that was not trained here as a run folder."""
    make_folder(folder)
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    about = {"model": model_digest(run.model)}
    checkpoint.write_tensors(folder / checkpoint.WEIGHTS, dict(model.state_dict()), about)
    write_text(folder / SETTINGS, settings_text(run, folder))


def model_digest(model: ModelConfig) -> str:
    """A name for the settings that decide what weights mean.

    Left out are the choice among exact attentions, and settings at their default: so a setting
    that is added later changes no digest.
    """
    table = _non_defaults(_with_dense_core(model))
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def _with_dense_core(model: ModelConfig) -> ModelConfig:
    """The same model with one attention for all exact ones: they compute the same function."""
    attention = getattr(model, "attention", None)
    if attention is None:
        return model
    changes: dict[str, Any] = {"attention": Dense()} if attention.exact else {}
    # A side's exact attention matters only where the model's is approximate.
    for name in ("encoder", "decoder"):
        side: Any = getattr(model, name, None)
        if getattr(side, "attention", None) is not None and side.attention.exact:
            dense = None if attention.exact else Dense()
            changes[name] = dataclasses.replace(side, attention=dense)
    return dataclasses.replace(model, **changes)


def _non_defaults(config: Any) -> dict[str, Any]:
    """The settings that differ from their defaults, and the kinds of the parts.

    By the names of release 0.1, so that digests in its files stay valid.
    """
    table: dict[str, Any] = {}
    if hasattr(type(config), "kind"):
        table["kind"] = kinds_of(config)[-1]
    old_names = {new: old for old, new in getattr(config, "RENAMED", {}).items()}
    for setting in dataclasses.fields(config):
        value = getattr(config, setting.name)
        factory = setting.default_factory
        if value == (setting.default if factory is dataclasses.MISSING else factory()):
            continue
        nested = dataclasses.is_dataclass(value)
        name = old_names.get(setting.name, setting.name)
        table[name] = _non_defaults(value) if nested else value
    return table


def save_scores(folder: Path, scores: dict[str, Any]) -> None:
    write_text(folder / SCORES, json.dumps(scores, indent=2) + "\n")
