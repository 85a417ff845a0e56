"""Recipes: the TOML files next to this module, or a user's own, with `a.b=c` overrides."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.config import assign, change, dump, kinds_of, nearest, override_all
from manyheads.data.corpus import read_index
from manyheads.errors import UserError
from manyheads.nn.block import on_meta
from manyheads.presets import PRESETS, ModelConfig, preset
from manyheads.run import (
    Run,
    choose_device,
    differences,
    parse_run,
    read_settings,
    train_run,
)
from manyheads.sizing import SIZES
from manyheads.tasks.spec import kinds
from manyheads.train.metrics import Callback

if TYPE_CHECKING:
    from manyheads.loading import LoadedRun

SUFFIX = ".toml"
INIT = ("init", "start", "model")  # names of the setting; release 0.1 had the last two
# Settings of `train` of which the second wins, unless only the first is set.
ALTERNATIVES = (
    ("steps", "epochs"),
    ("warmup_steps", "warmup_ratio"),
    ("batch_tokens", "batch_rows"),
)


def recipes() -> list[str]:
    """The names of the built-in recipes."""
    files = (file.name for file in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX))


def train(
    recipe: str,
    overrides: Sequence[str] | Mapping[str, object] = (),
    out: str | Path | None = None,
    device: str = "auto",
    callback: Callback | None = None,
) -> "LoadedRun":
    """Train a recipe, or resume it, and load the result: `train("phrasebook", {"seed": 2})`.

    `recipe` is a built-in name or a TOML file, `overrides` are settings by name or as texts
    `a.b=c`, `out` is the run folder (by default runs/RECIPE). `callback(step, split, scores)` gets
    each line of metrics.jsonl while it trains. A folder that is trained already is only loaded.
    """
    from manyheads.loading import load

    if isinstance(overrides, Mapping):
        overrides = [f"{name}={value}" for name, value in overrides.items()]
    folder, run = Path(out or Path("runs") / Path(recipe).stem), read_recipe(recipe, overrides)
    train_run(run, folder, choose_device(device), callback=callback)
    return load(folder, device)


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Run:
    """A recipe, by built-in name or file, with `a.b=c` overrides.

    `init=FOLDER` starts from a trained model: its settings, its tokenizer, its weights.
    `model=PRESET` takes the settings of a published model, with new weights.
    """
    path = Path(name)
    if name in recipes():
        path = Path(str(resources.files(__name__) / f"{name}{SUFFIX}"))
    elif not path.is_file():
        raise UserError(f"there is no recipe '{name}': {nearest(name, recipes())}")
    elif path.suffix != SUFFIX:
        raise UserError(
            f"{name} is not a recipe (a built-in name or a TOML file): for a text of your own, "
            f"train language data.file={name}"
        )
    table = read_settings(path)
    try:
        recipe = parse_run(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    settings, init = _split_init(_replace_alternatives(overrides), recipe.init)
    of_model = [setting for setting in settings if setting.startswith("model.")]
    rest = [setting for setting in settings if setting not in of_model]
    words = [value for name, _, value in (text.partition("=") for text in rest) if name == "model"]
    # The settings of a run that has begun are complete, wherever it started from.
    if init and (init != recipe.init or not _is_complete(recipe.model)):
        run = _start_from(init, recipe, rest, of_model)
    elif words and words[-1] in PRESETS:
        run = assign(recipe, [setting for setting in rest if not setting.startswith("model=")])
        run = override_all(dataclasses.replace(run, model=_published(words[-1], run)), of_model)
    else:
        run = override_all(recipe, settings)
    run = _with_prepared(run, settings)
    run = _keep_given(run, recipe, settings)
    _check_settings(overrides, run)
    needs_tokens = not run.init and run.spec.reads_text
    if run.data is None or (run.tokens is None and needs_tokens):
        raise UserError("training needs data and tokens: leave out data=none and tokens=none")
    _check_sizes(run.model)
    return run


def _replace_alternatives(settings: Sequence[str]) -> list[str]:
    """The settings; train.steps also switches off the train.epochs of a recipe, and so on."""
    names = {setting.partition("=")[0] for setting in settings}
    off = [
        f"train.{other}=none"
        for name, other in ALTERNATIVES
        if f"train.{name}" in names and f"train.{other}" not in names
    ]
    return [*settings, *off]


def _split_init(overrides: Sequence[str], init: str) -> tuple[list[str], str]:
    """The overrides without `init=FOLDER`, and that folder. A kind of model wins over a folder."""
    words = [kind for option in ModelConfig.__args__ for kind in kinds_of(option)] + [*PRESETS]
    rest = []
    for setting in overrides:
        name, equals, value = setting.partition("=")
        if not equals or name not in INIT or (name == "model" and value in words):
            rest.append(setting)
            continue
        if value and not Path(value).is_dir():
            advice = "give a run or an imported model (to resume: train RUN/run.toml --out RUN)"
            if name == "model" and Path(value).name == value:
                advice = nearest(setting, [f"model={kind}" for kind in words])
            raise UserError(f"{setting} is not the folder of a trained model: {advice}")
        if name != "init":
            print(f"'{name}=FOLDER' is now 'init=FOLDER'", file=sys.stderr)
        init = value
    tokens = next((setting for setting in rest if setting.startswith("tokens")), None)
    if init and tokens:
        raise UserError(f"{init} comes with its own tokens: leave out {tokens}")
    return rest, init


def _start_from(init: str, run: Run, settings: Sequence[str], of_model: Sequence[str]) -> Run:
    """The run with the model of a folder. The task adapts that model; `model.*` comes on top."""
    from manyheads.finetune import finetune_config, refuse_changes
    from manyheads.loading import load_run

    start = load_run(Path(init)).run
    run = assign(run, settings)
    config = finetune_config(start.model, run, init)
    run = dataclasses.replace(run, init=init, tokens=None, model=config, decode=start.decode)
    of_decode = [setting for setting in settings if setting.startswith("decode.")]
    run = override_all(run, [*of_decode, *of_model])
    refuse_changes(run, config)
    return run


def _published(name: str, run: Run) -> ModelConfig:
    """A published model with the heads of the run's task; the data decides the vocabulary."""
    config: ModelConfig = dataclasses.replace(preset(name), vocab_size=None)
    if not isinstance(config, run.spec.models):
        fits = [other for other in PRESETS if isinstance(PRESETS[other], run.spec.models)]
        raise UserError(
            f"model={name} is a {config.kind} model, and task={run.task} trains "
            f"{' or '.join(kinds(run.spec.models))}: "
            + (f"choose {', '.join(fits)}" if fits else "no preset fits it, leave out model")
        )
    fitted: ModelConfig = run.spec.finetune(config, run)
    return fitted


def _with_prepared(run: Run, settings: Sequence[str]) -> Run:
    """The run with the settings that data in `data.folder` were prepared with."""
    folder = getattr(run.data, "folder", "")
    index = read_index(folder) if folder else None
    if index is None:
        return run
    if index.task != run.task:
        raise UserError(f"{index.folder} was prepared for task={index.task}: choose its recipe")
    table: dict[str, object] = {"data": {**index.data, "folder": str(index.folder)}}
    if not run.init and index.tokens is not None:
        table |= {"tokens": index.tokens, "target_tokens": index.target_tokens or "none"}
    by_data = [name for name in run.by_data if not name.startswith("tokens.")]
    prepared = change(dataclasses.replace(run, by_data=tuple(by_data)), table)
    decided = [text for text in settings if text.startswith(("data.", "tokens", "target_tokens"))]
    changes = differences(dump(override_all(prepared, decided)), dump(prepared))
    if changes:
        raise UserError(f"{index.folder} is prepared, and {changes[0]}: leave it out")
    return prepared


def _keep_given(run: Run, recipe: Run, settings: Sequence[str]) -> Run:
    """The amount of data decides no setting that the user gives, and no trained or other model."""
    names = {setting.partition("=")[0] for setting in settings}
    if run.init or "model" in names:
        names.update(name for name in run.by_data if name.startswith(("model.", "tokens.")))
    else:
        values = ((name, attrgetter(name)) for name in run.by_data)
        names.update(name for name, value in values if value(run) != value(recipe))
    if names & {*SIZES}:
        names.update(SIZES)
    if "train.epochs" in names:
        names.add("train.steps")
    left = tuple(name for name in run.by_data if name not in names)
    return dataclasses.replace(run, by_data=left)


def _is_complete(model: ModelConfig) -> bool:
    """True once the data has decided what it decides of a model."""
    if hasattr(model, "pixel_mean"):
        return bool(model.pixel_mean)
    return model.vocab_size is not None


def _check_sizes(model: ModelConfig) -> None:
    """Refuse a model whose parts do not go together before anything is read or written."""
    try:
        with on_meta():
            dataclasses.replace(model, vocab_size=model.vocab_size or 1).build()
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"no model has such sizes ({reason}): lower them") from None


def _check_settings(settings: Sequence[str], run: Run) -> None:
    """Refuse settings without any effect."""
    names = {setting.partition("=")[0] for setting in settings}
    if "train.bpe_dropout" in names and run.train.bpe_dropout_copies == 1:
        raise UserError("train.bpe_dropout needs train.bpe_dropout_copies > 1: try 8")
    if "train.batch_rows" in names and "translate" in run.spec.offers:
        raise UserError("train.batch_rows has no effect on pairs of texts: set train.batch_tokens")
    for name, other in ALTERNATIVES:
        value = getattr(run.train, other)
        if f"train.{name}" in names and value is not None:
            raise UserError(
                f"train.{name} has no effect next to train.{other}={value}: leave one of them out"
            )
