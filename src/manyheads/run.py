"""A run: its settings, its folder, and how it is trained.

A run folder holds run.toml (resolved), tokenizer.json, model.safetensors, state/, metrics.jsonl
and scores.json. It can be moved, and is all that is needed to rebuild the model.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import nn

from manyheads import plugins
from manyheads.config import Between, dump, kinds_of, parse, read_toml, to_toml
from manyheads.data.corpus import report_leaks
from manyheads.data.masking import Objective
from manyheads.data.translation import PhrasebookData
from manyheads.decode.beam import Decode
from manyheads.errors import DataError, UserError
from manyheads.exchange.folder import frame_for_model
from manyheads.fileio import (
    PARTIAL,
    check_sound,
    drop_partials,
    make_subfolder,
    with_sums,
    write_text,
)
from manyheads.nn.attention import Dense
from manyheads.nn.lora import Finetune, restrict
from manyheads.nn.positions import Sinusoidal
from manyheads.presets import ModelConfig
from manyheads.sizing import fit_to_data
from manyheads.tasks.spec import RunSettings, TaskSpec, kinds
from manyheads.tasks.table import TASKS, Data
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Tokens
from manyheads.train import checkpoint
from manyheads.train.loop import Trainer
from manyheads.train.metrics import Callback
from manyheads.train.optimizer import Train
from manyheads.train.step import ONE_PROCESS, World

SETTINGS = "run.toml"
TOKENIZER = "tokenizer.json"
SCORES = "scores.json"
SHORTLIST = "shortlist.txt"  # for CTranslate2; see `manyheads.distill`
MAX_LAYERS = 10_000  # they are built one by one
EXPORTED = ("config.json", "model.bin", "*.onnx")  # files of a folder for another program
# Settings that may change when a run is resumed.
FREE = {
    f"train.{name}"
    for name in (
        *("steps", "epochs", "validate_every", "save_every", "patience"),
        *("probes", "probe_weights", "log_every", "log_to"),
        *("parallel", "shard", "replicate", "compile", "activation_checkpointing"),
    )
}

# --- settings ---


@dataclass(frozen=True, kw_only=True)
class Run(RunSettings):
    """All settings of a run; an imported model comes without data and tokens."""

    task: Annotated[str, "Training task; a recipe sets it"] = "translation"
    init: Annotated[str, "Folder of a trained model to start from (fine-tuning)"] = ""
    data: Annotated[Data | None, "Training data"]
    tokens: Annotated[Tokens | None, "Tokenizer to train"]
    target_tokens: Annotated[
        Tokens | None, "Translation: tokenizer of the target; none: one for both sides"
    ] = None
    objective: Annotated[Objective | None, "Pretraining objective, where the task has several"] = (
        None
    )
    model: Annotated[ModelConfig, "Architecture"]
    train: Annotated[Train, "Optimization"] = field(default_factory=Train)
    finetune: Annotated[Finetune | None, "What is trained of a model from init=FOLDER"] = None
    decode: Annotated[Decode, "Search and sampling"] = field(default_factory=Decode)
    seed: Annotated[int, Between(0, 2**63 - 1), "Seed of weights, batches and dropout"] = 1
    by_data: Annotated[tuple[str, ...], "Settings that the amount of training data decides"] = ()

    RENAMED: ClassVar[dict[str, str]] = {"start": "init"}

    @property
    def spec(self) -> TaskSpec:
        """The row of the task table for this run."""
        return TASKS.find(self.task, self.data, self.objective)

    def __post_init__(self) -> None:
        rows = TASKS.rows(self.task)
        self._check_part("data", self.data, [kind for row in rows for kind in row.data])
        objectives = [kind for row in rows for kind in row.objectives]
        self._check_part("objective", self.objective, objectives)
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
            is_default = getattr(self.train, name) == getattr(Train(), name)
            if not is_default and name not in row.train_settings:
                fits = {other.task for other in TASKS.values() if name in other.train_settings}
                raise UserError(
                    f"train.{name} works only with task={' or '.join(sorted(fits))}: leave it out"
                )
        if not row.reads_text and self.tokens is not None:
            raise UserError(f"task={self.task} reads no text: leave out tokens")
        if self.target_tokens is not None and (self.task != "translation" or self.init):
            raise UserError("target_tokens needs task=translation without init: leave it out")
        row.check(self)
        if self.finetune is not None and not self.init:
            raise UserError("finetune.* needs a trained model: add init=FOLDER")
        for name, part in {"": self.model, **vars(self.model)}.items():
            layers = getattr(part, "layers", None)
            if isinstance(layers, int) and layers > MAX_LAYERS:
                path = ".".join(filter(None, ("model", name, "layers")))
                raise UserError(f"{path}={layers} must be at most {MAX_LAYERS}")

    def _check_part(self, name: str, part: Any, fits: list[type]) -> None:
        """Refuse data or an objective that no row of the task takes."""
        if part is not None and not isinstance(part, tuple(fits)):
            words = " or ".join(dict.fromkeys(kinds(tuple(fits)))) or "none"
            raise UserError(
                f"task={self.task} needs {name}={words} (not {part.kind}): leave it out, or take "
                "another recipe"
            )


def parse_run(table: dict[str, Any]) -> Run:
    """A run from its TOML table; task and objective decide the kind of model if it does not."""
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


def differences(new: dict[str, Any], old: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ and must not when a run is resumed; task and kinds come first."""
    changes = []
    for key in sorted(new.keys() | old.keys(), key=lambda key: (key not in ("task", "kind"), key)):
        here, there, name = new.get(key), old.get(key), f"{prefix}{key}"
        if isinstance(here, dict) and isinstance(there, dict):
            changes += differences(here, there, f"{name}.")
        elif here != there and name not in FREE and not name.startswith("decode."):
            changes.append(f"{name} is {there} there and {here} here")
    return changes


def model_digest(model: ModelConfig) -> str:
    """A name for the settings that decide what weights mean.

    Left out are the choice among exact attentions, and settings at their default: so a setting
    that is added later changes no digest.
    """
    table = _non_defaults(_with_dense_core(model))
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def _with_dense_core(model: ModelConfig) -> ModelConfig:
    """The same model with one attention for all exact ones: they compute the same function."""
    attention: Any = getattr(model, "attention", None)
    if not hasattr(attention, "exact"):  # a baseline
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
    table: dict[str, Any] = {"kind": kinds_of(config)[-1]} if hasattr(config, "kind") else {}
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


# --- folders ---


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):
        raise UserError(f"device '{name}' is not available: use auto or cpu") from None
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
    # A run that was killed before its first step leaves these.
    state = folder / checkpoint.STATE
    ours = {folder / TOKENIZER, state, state / "lock"}
    foreign = [path for path in folder.rglob("*") if path not in ours and path.suffix != PARTIAL]
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


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a recipe or run.toml, with the plug-ins in use that they need."""
    table = read_toml(path)
    if "plugins" in table or entry_points(group=plugins.GROUP):
        return plugins.require(table, path)
    return table


def read_run(folder: Path) -> Run:
    """The settings of a run folder."""
    if not folder.is_dir():
        raise UserError(
            f"there is no run folder {folder}: train one with `manyheads train`, or give the "
            "folder of a model (nothing is downloaded)"
        )
    if not (folder / SETTINGS).is_file():
        raise DataError(f"{folder} is not a run folder: it has no {SETTINGS}")
    table = read_settings(folder / SETTINGS)
    check_sound(folder / SETTINGS, SETTINGS)
    try:
        return parse_run(table)
    except UserError as error:
        raise DataError(f"{folder / SETTINGS} does not describe a run: {error}") from None


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a run folder, checked against the checksum in its settings."""
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    check_sound(folder / SETTINGS, TOKENIZER)
    return tokenizer


def settings_text(run: Run, folder: Path | None) -> str:
    """The content of run.toml: settings, after checksums of the tokenizer and of themselves."""
    text = to_toml(dump(run) | (plugins.record(run) if plugins.LOADED else {}))
    return with_sums(text, SETTINGS, folder and folder / TOKENIZER)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process train in a folder; the lock of a killed one is released by the system."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    make_folder(folder)
    make_subfolder(folder / checkpoint.STATE)
    # A link in place of the file is not followed: its target is none of ours.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    lock = os.open(folder / checkpoint.STATE / "lock", flags, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is in use by another process: wait for it") from None
        yield
    finally:
        os.close(lock)


def save_run(run: Run, tokenizer: Tokenizer | None, model: nn.Module, folder: Path) -> None:
    """A model that was not trained here as a run folder."""
    make_folder(folder)
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    about = {"model": model_digest(run.model)}
    checkpoint.write_tensors(folder / checkpoint.WEIGHTS, dict(model.state_dict()), about)
    write_text(folder / SETTINGS, settings_text(run, folder))


def save_scores(folder: Path, scores: dict[str, Any]) -> None:
    write_text(folder / SCORES, json.dumps(scores, indent=2) + "\n")


def read_scores(folder: Path) -> dict[str, Any]:
    """The saved scores of a run; none if it was not evaluated."""
    path = folder / SCORES
    try:
        scores: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        if not all(isinstance(text, str) for text in scores.get("signature", {}).values()):
            raise ValueError("a signature is not a text")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({error}): delete it, or evaluate the run again"
        ) from None
    return scores


# --- training ---


def train_run(
    run: Run,
    folder: Path,
    device: torch.device,
    world: World = ONE_PROCESS,
    report: Callable[[str], None] = lambda line: None,
    *,
    fresh: bool = False,
    callback: Callback | None = None,
) -> None:
    """Train a run into a folder, to the end, from where the folder stands; `Stopped` by a signal.

    `report` gets remarks on the data and the model, `callback` the metrics; `fresh` deletes the run
    in the folder first.
    """
    if world.is_main:
        check_folder(folder)
        if fresh:
            delete_run(folder)
    is_new, is_begun = not folder.exists(), (folder / SETTINGS).exists()
    with locked(folder) if world.is_main else contextlib.nullcontext():
        try:
            trainer = make_trainer(run, folder, device, world, callback)
        except UserError:
            if not is_begun and world.is_main:  # leave nothing that refuses other settings
                for name in (SETTINGS, TOKENIZER):
                    (folder / name).unlink(missing_ok=True)
                shutil.rmtree(folder if is_new else folder / checkpoint.STATE, ignore_errors=True)
            raise
        for note in trainer.task.notes:
            report(note)
        sizes = {p: p.numel() for p in trainer.model.parameters()}
        size, trained = sum(sizes.values()), sum(n for p, n in sizes.items() if p.requires_grad)
        share = f", {trained:,} trained ({trained / size:.2%})" if trained < size else ""
        several = f"{world.size} × {device.type}, {run.train.parallel}"
        where = several if world.is_distributed else str(device)
        precision = str(trainer.dtype).removeprefix("torch.")
        report(f"{size:,} parameters{share} on {where}, {precision}, seed {run.seed}")
        if run.train.compile == "yes":
            report("the first steps are compiled, which takes up to a minute each")
        trainer.run()
        if trainer.train.average_checkpoints > 1:
            steps = ", ".join(map(str, trainer.progress.snapshots))
            report(f"the weights are the mean of those after steps {steps}")


def delete_run(folder: Path) -> None:
    """Delete the files of a run; other files in its folder stay."""
    if not (folder / SETTINGS).exists():
        return
    with locked(folder):  # refuses a folder that another process trains into
        pass
    shutil.rmtree(folder / checkpoint.STATE, ignore_errors=True)
    for name in (SETTINGS, TOKENIZER, checkpoint.WEIGHTS, SCORES, SHORTLIST, "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)
    for name in ("tensorboard", "probes"):
        shutil.rmtree(folder / name, ignore_errors=True)


def make_trainer(
    run: Run,
    folder: Path,
    device: torch.device,
    world: World = ONE_PROCESS,
    callback: Callback | None = None,
) -> Trainer:
    """A trainer for the run, at the step where its folder stands."""
    make_task = run.spec.prepare
    if run.data is None or make_task is None:
        raise UserError(f"there is no training for task={run.task}: choose another task")
    if world.is_main:
        drop_partials(folder)
    part, valid = run.data.read("train"), run.data.read("valid")
    run, chosen = fit_to_data(run, part) if run.by_data else (run, [])
    with world.main_first():  # the others read what the first has written
        run, tokenizer = settle(run, folder, part)
    task = make_task(run, part, valid, tokenizer, device)
    # No sentence of the phrasebook is in two splits, and its test split takes seconds to generate.
    checked = world.is_main and not isinstance(run.data, PhrasebookData)
    leaks = report_leaks(run.data, part, valid) if checked else []
    task.notes = [*chosen, *task.notes, *_warn_embedding_scale(run), *leaks]
    shards = None
    if world.is_distributed and run.train.parallel == "fsdp" and not run.init:
        from manyheads.train.parallel import ShardedBuild

        shards = ShardedBuild(run.train, world, device)
    torch.manual_seed(run.seed)
    with shards or contextlib.nullcontext():
        model = run.model.build()
        if run.init and not checkpoint.is_begun(folder):
            from manyheads.finetune import load_pretrained
            from manyheads.loading import load_run

            load_pretrained(model, load_run(Path(run.init)))
        saved = model if run.finetune is None else restrict(model, run.finetune)
        trained = run.spec.wrap(model, run)
    if shards is None:
        trained.to(device)
    train = run.train.settled(task.per_epoch)
    task.notes = [*task.notes, *_warn_warmup(train)]
    # A sharded model would have to be gathered, one with LoRA merged; short runs have no probes.
    is_watched = not world.is_distributed and saved is model and 0 < train.probes <= train.steps
    return Trainer(
        trained,
        task,
        train,
        dim=run.model.dim,
        seed=run.seed,
        folder=folder,
        metadata={"model": model_digest(run.model)},
        saved_model=saved,
        world=world,
        probe=run.spec.probe(task, model, folder) if is_watched else None,
        settings=dump(run),
        callback=callback,
        shards=shards,
    )


def settle(run: Run, folder: Path, part: Any) -> tuple[Run, Tokenizer | None]:
    """Settle what the data decides (tokenizer, sizes, labels) and write it down, once."""
    make_folder(folder)
    tokenizer = make_tokenizer(run, folder, part) if run.spec.reads_text else None
    if tokenizer is not None and not run.init:
        model: Any = dataclasses.replace(run.model, vocab_size=tokenizer.vocab_size)
        if run.target_tokens is not None:
            size = tokenizer.target.vocab_size
            model = dataclasses.replace(model, target_vocab_size=size)
        run = dataclasses.replace(run, model=model)
    elif tokenizer is not None and tokenizer.vocab_size > (run.model.vocab_size or 0):
        raise UserError(
            f"{run.init} has room for {run.model.vocab_size} tokens, and this objective needs "
            f"{tokenizer.vocab_size}: begin with a model that was trained for it"
        )
    run = dataclasses.replace(run, model=run.spec.fit_model(run, part))
    write_settings(run, folder)
    return run, tokenizer


def make_tokenizer(run: Run, folder: Path, part: Any) -> Tokenizer:
    """The tokenizer of the folder; that of prepared data or of `init`; else a new one."""
    if (folder / SETTINGS).exists():
        return read_tokenizer(folder)
    if hasattr(part, "shards") and not run.init:
        tokenizer = part.shards.tokenizer()
    elif run.init:
        tokenizer = _start_tokenizer(run)
    else:
        assert run.tokens is not None  # a recipe has them
        if run.target_tokens is None:
            tokenizer = run.tokens.train(run.spec.strings(part))
        else:
            target = run.target_tokens.train(part.targets)
            tokenizer = run.tokens.train(part.sources).with_target(target)
        tokenizer = _fit_tokenizer(tokenizer, run)
    tokenizer.save(folder / TOKENIZER)
    return tokenizer


def _start_tokenizer(run: Run) -> Tokenizer:
    from manyheads.finetune import starts_from_encoder_decoder
    from manyheads.loading import load_run

    start = load_run(Path(run.init))
    tokenizer = start.tokenizer
    if starts_from_encoder_decoder(run.model, start.run.model):
        # An encoder keeps the special tokens around a text that it was trained with.
        tokenizer = frame_for_model(tokenizer, start.run.decode, start.run.model)
    try:
        return _fit_tokenizer(tokenizer, run)
    except UserError as error:
        raise UserError(f"{Path(run.init) / TOKENIZER}: {error}") from None


def _fit_tokenizer(tokenizer: Tokenizer, run: Run) -> Tokenizer:
    """With the special tokens that the task needs; one without them is refused."""
    for name in run.spec.special_tokens:
        getattr(tokenizer, name)
    return run.spec.fit_tokenizer(tokenizer, run)


def write_settings(run: Run, folder: Path) -> None:
    """Write run.toml; refuse a folder that holds another run."""
    path = folder / SETTINGS
    if path.exists():
        changes = differences(dump(run), dump(read_run(folder)))
        if changes:
            raise UserError(
                f"{folder} holds another run ({changes[0]}): choose another --out, or add --fresh"
            )
    text = settings_text(run, folder)
    if not path.exists() or path.read_text("utf-8") != text:
        write_text(path, text)


def _warn_warmup(train: Train) -> list[str]:
    if train.warmup_steps <= train.steps:
        return []
    share = train.steps / train.warmup_steps
    return [
        f"train.warmup_steps={train.warmup_steps} exceeds train.steps={train.steps}: the learning "
        f"rate reaches only {share:.0%} of its peak; set train.warmup_ratio=0.1"
    ]


def _warn_embedding_scale(run: Run) -> list[str]:
    """Sinusoids have amplitude 1 and would drown unscaled token embeddings."""
    model: Any = run.model
    is_sinusoidal = isinstance(getattr(model, "position", None), Sinusoidal)
    if not is_sinusoidal or run.init or model.embed.scale != "one" or model.vocab_size is None:
        return []
    return [
        "sinusoidal positions have amplitude 1, and token embeddings start far smaller, so that "
        "little is learned of the words: add model.embed.scale=sqrt-dim"
    ]
