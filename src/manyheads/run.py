"""A run: its settings, its folder, and what is done with it.

A run folder holds run.toml (resolved), tokenizer.json, model.safetensors, state/,
metrics.jsonl and scores.json; it can be moved and rebuilds the model alone.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from manyheads.config import dump, nearest, override_all, parse, read_toml, to_toml
from manyheads.data.translation import Corpus, TranslationData
from manyheads.decode.beam import Decode
from manyheads.errors import BadData, Mistake
from manyheads.files import PARTIAL, drop_partials, write_text
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.cores import Dense
from manyheads.presets import ModelConfig
from manyheads.tasks.translation import TranslationTask
from manyheads.tokens import Tokenizer, Tokens
from manyheads.train import checkpoint
from manyheads.train.loop import Trainer
from manyheads.train.optimizer import Train

SETTINGS = "run.toml"
TOKENIZER = "tokenizer.json"
SCORES = "scores.json"
# What tells a folder that another program is to read from a run.
EXPORTED = ("config.json", "model.bin", "*.onnx")
# What may change between two calls that train the same run.
FREE = {"train.steps", "train.validate_every", "train.save_every", "train.log_every"}


Task = Literal["translation", "language", "text", "images"]
# What a model of each kind is for.
TASKS: dict[str, Task] = {
    "seq2seq": "translation",
    "gpt": "language",
    "bert": "text",
    "vit": "images",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run is made of; a model from elsewhere comes without data and tokens."""

    task: Task = "translation"
    data: TranslationData | None
    tokens: Tokens | None
    model: ModelConfig
    train: Train = field(default_factory=Train)
    decode: Decode = field(default_factory=Decode)
    seed: int = 1

    def __post_init__(self) -> None:
        if self.task != TASKS[self.model.kind]:
            raise Mistake(f"task={self.task} is not what a {self.model.kind} model does")
        if not 0 <= self.seed < 2**63:
            raise Mistake(f"seed={self.seed} must be at least 0, below 2^63")


def recipes() -> list[str]:
    """The names of the built-in recipes."""
    folder = resources.files("manyheads") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir())


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Run:
    """A recipe, by built-in name or file, with `a.b=c` settings on top."""
    path = Path(name)
    if name in recipes():
        path = Path(str(resources.files("manyheads") / "recipes" / f"{name}.toml"))
    elif not path.is_file():
        raise Mistake(f"there is no recipe '{name}': {nearest(name, recipes())}")
    table = read_toml(path)
    try:
        run = parse_run(table)
    except Mistake as error:
        raise Mistake(f"{path}: {error}") from None
    run = override_all(run, overrides)
    if run.data is None or run.tokens is None:
        raise Mistake("a run that is to be trained needs data and tokens: leave out data=none")
    # A model whose parts do not go together is refused before anything is read or written.
    with torch.device("meta"):
        dataclasses.replace(run.model, vocab_size=run.model.vocab_size or 1).build()
    return run


def parse_run(table: dict[str, Any]) -> Run:
    """A run from its TOML table; the task says which kind of model where the model does not."""
    model = table.get("model")
    if isinstance(model, dict) and "kind" not in model:
        task = table.get("task", "translation")
        kinds = {known: kind for kind, known in TASKS.items()}
        table = {**table, "model": {**model, "kind": kinds.get(task, "seq2seq")}}
    return parse(Run, table)


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):
        raise Mistake(f"device '{name}' is not here: use auto or cpu") from None
    return device


def check_folder(folder: Path) -> None:
    """A run may go into a new or empty folder, or one that holds a run already."""
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"{folder} is a file: choose another folder with --out")
    if not folder.is_dir():
        return
    exported = [name for pattern in EXPORTED for name in folder.glob(pattern)]
    if exported:
        raise Mistake(
            f"{folder} was exported or comes from elsewhere ({exported[0].name}): "
            "choose another folder with --out"
        )
    if (folder / SETTINGS).exists():
        return
    # What a run that was killed before its first step has left.
    own = {folder / TOKENIZER, folder / checkpoint.STATE, folder / checkpoint.STATE / "lock"}
    foreign = [path for path in folder.rglob("*") if path not in own and path.suffix != PARTIAL]
    if foreign:
        raise Mistake(
            f"{folder} holds something else ({min(foreign).relative_to(folder)}): "
            "choose another folder with --out"
        )


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"{folder} cannot be made ({error.strerror}): choose another --out") from None


def read_run(folder: Path) -> Run:
    """The settings of a run folder."""
    if not folder.is_dir():
        raise Mistake(
            f"there is no run folder {folder}: train one with `manyheads train`, or give the "
            "folder of a model (nothing is fetched)"
        )
    if not (folder / SETTINGS).is_file():
        raise BadData(f"{folder} is no run folder: it has no {SETTINGS}")
    table = read_toml(folder / SETTINGS)
    try:
        return parse_run(table)
    except Mistake as error:
        raise BadData(f"{folder / SETTINGS} does not describe a run: {error}") from None


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
            raise Mistake(f"{folder} is being trained by another process: wait for it") from None
        yield


def _differences(new: dict[str, Any], old: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(new.keys() | old.keys()):
        a, b, name = new.get(key), old.get(key), f"{prefix}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{name}.")
        elif a != b and name not in FREE and not name.startswith("decode."):
            found.append(f"{name} is {b} there and {a} here")
    return found


def prepare(run: Run, folder: Path, corpus: Corpus) -> tuple[Run, Tokenizer]:
    """Settle what the data decides (the tokenizer and its size) and write it down, once."""
    make_folder(folder)
    if (folder / SETTINGS).exists():
        old = read_run(folder)
        tokenizer = Tokenizer.load(folder / TOKENIZER)
        model = dataclasses.replace(run.model, vocab_size=tokenizer.vocab_size)
        run = dataclasses.replace(run, model=model)
        found = _differences(dump(run), dump(old))
        if found:
            raise Mistake(f"{folder} holds another run ({found[0]}): choose another --out")
    else:
        assert run.tokens is not None  # a recipe has them
        tokenizer = run.tokens.train([*corpus.sources, *corpus.targets])
        tokenizer.save(folder / TOKENIZER)
        model = dataclasses.replace(run.model, vocab_size=tokenizer.vocab_size)
        run = dataclasses.replace(run, model=model)
    write_text(folder / SETTINGS, to_toml(dump(run)))
    return run, tokenizer


def train(run: Run, folder: Path, device: torch.device) -> Trainer:
    """A trainer for the run, at the step where its folder stands."""
    if run.data is None or not isinstance(run.model, Seq2SeqConfig):
        raise Mistake(f"there is no training for task={run.task} yet: only for translation")
    drop_partials(folder)
    corpus, valid = run.data.read("train"), run.data.read("valid")
    run, tokenizer = prepare(run, folder, corpus)
    task = TranslationTask(
        corpus,
        valid,
        tokenizer,
        run.train,
        run.decode,
        max_length=run.model.max_length,
        seed=run.seed,
        device=device,
    )
    torch.manual_seed(run.seed)
    model = run.model.build().to(device)
    return Trainer(
        model,
        task,
        run.train,
        dim=run.model.dim,
        seed=run.seed,
        folder=folder,
        about={"model": model_digest(run.model)},
    )


def save_run(run: Run, tokenizer: Tokenizer | None, model: nn.Module, folder: Path) -> None:
    """A model that was not trained here as a run folder."""
    make_folder(folder)
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    about = {"model": model_digest(run.model)}
    checkpoint.write_tensors(folder / checkpoint.WEIGHTS, dict(model.state_dict()), about)
    write_text(folder / SETTINGS, to_toml(dump(run)))


def model_digest(model: ModelConfig) -> str:
    """Names the settings that decide what weights mean: all but how they are computed with.

    What a setting is unless told does not count, so that a setting to come changes no name.
    """
    table = _said(dataclasses.replace(model, core=Dense()))
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


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
