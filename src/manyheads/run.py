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
from typing import Any, Literal

import torch
from torch import nn

from manyheads.baselines.bytenet import ByteNetConfig
from manyheads.baselines.elmo import ElmoConfig
from manyheads.config import dump, parse, read_toml, to_toml
from manyheads.data.images import ImageData
from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.data.masking import Causal, Masked, Objective
from manyheads.data.music import MusicData
from manyheads.data.summaries import SummaryData
from manyheads.data.translation import FilesData, PhrasebookData
from manyheads.decode.beam import Decode
from manyheads.errors import DataError, UserError
from manyheads.fileio import PARTIAL, check_sound, with_sums, write_text
from manyheads.models.bert import BertConfig
from manyheads.models.heads import Classify
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.exact_attention import Dense
from manyheads.presets import ModelConfig
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
# A recipe for each kind of model that is trained on text.
RECIPE_OF = {"gpt": "gpt-mini", "bert": "bert-mini", "seq2seq": "t5-mini", "elmo": "elmo-mini"}
MODEL_OF = {  # the kind of model that an objective trains
    "causal": "gpt",
    "masked": "bert",
    "replaced": "bert",
    "spans": "seq2seq",
    "denoising": "seq2seq",
    "both-ways": "elmo",
}
# What may change between two calls that train the same run.
FREE = {
    "train.steps",
    "train.epochs",
    "train.validate_every",
    "train.save_every",
    "train.log_every",
    "train.parallel",
    "train.compile",
    "train.recompute",
}


Task = Literal[
    "translation", "summaries", "language", "pretraining", "classification", "text", "images"
]
Data = PhrasebookData | FilesData | SummaryData | TextData | LabelledData | ImageData | MusicData
# Kinds of models that read a text and write another.
WRITERS = ("seq2seq", "joined", "rnn", "gnmt", "convs2s", "bytenet")
# What a model of each kind is for, where nothing says more.
TASKS: dict[str, Task] = {
    **dict.fromkeys(WRITERS, "translation"),
    "gpt": "language",
    "bert": "text",
    "elmo": "text",
    "vit": "images",
}


@dataclass(frozen=True)
class Fitting:
    """What goes together with a task: kinds of models, of data, and of objectives."""

    models: tuple[str, ...]
    data: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ()


FITTING: dict[Task, Fitting] = {
    "translation": Fitting(WRITERS, ("phrasebook", "files")),
    "summaries": Fitting(WRITERS, ("summaries", "files")),
    "language": Fitting(("gpt",), ("text", "music"), ("causal",)),
    "pretraining": Fitting(
        ("bert", "seq2seq", "elmo"),
        ("text",),
        ("masked", "replaced", "spans", "denoising", "both-ways"),
    ),
    "classification": Fitting(("bert", "elmo"), ("labelled",)),
    "text": Fitting(("bert", "elmo"), ("text", "labelled")),
    "images": Fitting(("vit",), ("images",)),
}


def _drops(model: ModelConfig) -> bool:
    """Whether two readings of the same text differ; a side may have a dropout of its own."""
    sides = [getattr(model, side, None) for side in ("encoder", "decoder")]
    own = [getattr(side, "dropout", None) for side in sides]
    dropouts = [model.dropout if one is None else one for one in own]
    return any([*dropouts, getattr(model, "attention_dropout", 0.0)])


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run is made of; a model from elsewhere comes without data and tokens.

    `objective` is what a text is made into something to predict by, where the task leaves a
    choice; `start` the folder of the model whose weights this one began with.
    """

    task: Task = "translation"
    start: str = ""
    data: Data | None
    tokens: Tokens | None
    objective: Objective | None = None
    model: ModelConfig
    train: Train = field(default_factory=Train)
    decode: Decode = field(default_factory=Decode)
    seed: int = 1

    def __post_init__(self) -> None:
        fitting = FITTING[self.task]
        if self.model.kind not in fitting.models:
            fits = " or ".join(fitting.models)
            raise UserError(
                f"task={self.task} is not what a {self.model.kind} model does, but {fits}: take "
                "another recipe"
            )
        for name, part, known in (
            ("data", self.data, fitting.data),
            ("objective", self.objective, fitting.objectives),
        ):
            if part is not None and part.kind not in known:
                wanted = " or ".join(known) or "none"
                raise UserError(
                    f"task={self.task} has {name}={wanted} (not {part.kind}): leave it out, or "
                    "take another recipe"
                )
        if self.task == "pretraining":
            self._check_pretraining()
        if self.task == "classification" and not isinstance(
            getattr(self.model, "head", None), Classify
        ):
            raise UserError(
                "task=classification needs model.head=classify: set it where model= is set, else "
                "leave model.head out"
            )
        if self.train.agreement and self.task not in ("translation", "summaries"):
            raise UserError("train.agreement is for translation and summaries: leave it out")
        if self.train.segmentations > 1 and self.task not in ("translation", "summaries"):
            raise UserError("train.segmentations are for translation and summaries: leave it out")
        if self.train.segmentations > 1 and self.tokens is not None and self.tokens.kind != "bpe":
            raise UserError("train.segmentations are of the merges of tokens=bpe: leave it out")
        if self.train.agreement and not _drops(self.model):
            raise UserError("train.agreement needs two readings that differ: set model.dropout")
        packed = isinstance(self.objective, Causal) and self.objective.packing != "stream"
        if isinstance(self.data, MusicData) and packed:
            raise UserError(
                "a piece of music begins after the end of another, which "
                "objective.packing=documents hides: choose objective.packing=stream"
            )
        core = getattr(self.model, "core", Dense())
        # What sees less than everything sees by places in a row; documents begin anywhere in it.
        if packed and not getattr(core, "keeps_apart", core.exact):
            raise UserError(
                f"model.core={core.kind} cannot read packed documents as if each were alone: "
                "choose objective.packing=stream, or another model.core"
            )
        if packed and getattr(getattr(self.model, "position", None), "period", None):
            raise UserError(
                "model.position.period counts from the beginning of a row, and packed documents "
                "begin anywhere in it: choose objective.packing=stream"
            )
        if self.task == "images" and self.tokens is not None:
            raise UserError("task=images reads no text: leave out tokens")
        for place, part in {"": self.model, **vars(self.model)}.items():
            layers = getattr(part, "layers", None)
            if isinstance(layers, int) and layers > MOST_LAYERS:  # they would be built one by one
                name = f"model.{place}.layers" if place else "model.layers"
                raise UserError(f"{name}={layers} must be at most {MOST_LAYERS:,}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must be at least 0, below 2^63")

    def _check_pretraining(self) -> None:
        model, objective = self.model, self.objective
        if objective is None:
            raise UserError("task=pretraining needs an objective, e.g. objective=masked")
        needed = MODEL_OF[objective.kind]
        if model.kind != needed:
            raise UserError(
                f"objective={objective.kind} trains a model of kind {needed}, not {model.kind}: "
                f"take the recipe {RECIPE_OF[needed]}"
            )
        if not isinstance(model, BertConfig):
            return
        head = "detect" if objective.kind == "replaced" else "masked"
        if model.head is None or model.head.kind != head:
            raise UserError(f"objective={objective.kind} needs model.head={head}")
        paired = isinstance(objective, Masked) and objective.pairs == "next-sentence"
        if paired and (model.next_sentence is None or (model.embed.segments or 1) < 2):
            raise UserError(
                "objective.pairs=next-sentence needs model.embed.segments=2, model.pooler=tanh and "
                "model.next_sentence.classes=2"
            )


def parse_run(table: dict[str, Any]) -> Run:
    """A run from its TOML table; task and objective say which kind of model where it does not."""
    decode = table.get("decode")
    if isinstance(decode, dict):
        # Release 0.1 had another order of search, which is gone.
        table = {**table, "decode": {k: v for k, v in decode.items() if k != "order"}}
    model = table.get("model")
    if isinstance(model, dict) and "kind" not in model:
        table = {**table, "model": {**model, "kind": _kind_of_model(table)}}
    return parse(Run, table)


def _kind_of_model(table: dict[str, Any]) -> str:
    objective = table.get("objective")
    word = objective.get("kind") if isinstance(objective, dict) else objective
    if word in MODEL_OF:
        return MODEL_OF[word]
    fitting = FITTING.get(table.get("task", "translation"))
    return fitting.models[0] if fitting else "seq2seq"


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
    """Names the settings that decide what weights mean: all but how they are computed with.

    What a setting is unless told does not count, so that a setting to come changes no name.
    """
    table = _said(_exact_alike(model))
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def _exact_alike(model: ModelConfig) -> ModelConfig:
    """The same model with one core for all exact ones, of which none computes anything else."""
    if isinstance(model, ByteNetConfig | ElmoConfig):
        return model  # it has none
    if model.core.exact:
        model = dataclasses.replace(model, core=Dense())
    if isinstance(model, Seq2SeqConfig):
        # A side's own exact core says something only where the model's is another.
        alike = None if model.core.exact else Dense()
        for name in ("encoder", "decoder"):
            side = getattr(model, name)
            if side.core is not None and side.core.exact:
                own: dict[str, Any] = {name: dataclasses.replace(side, core=alike)}
                model = dataclasses.replace(model, **own)
    return model


def _said(config: Any) -> dict[str, Any]:
    """The settings that are not as they are unless told, and the kinds of the parts."""
    table: dict[str, Any] = {"kind": type(config).kind} if hasattr(type(config), "kind") else {}
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        made = one.default_factory
        if value == (one.default if made is dataclasses.MISSING else made()):
            continue
        table[one.name] = _said(value) if dataclasses.is_dataclass(value) else value
    return table


def save_scores(folder: Path, scores: dict[str, Any]) -> None:
    write_text(folder / SCORES, json.dumps(scores, indent=2) + "\n")
