"""Recipes: the TOML files next to this module, or a user's own, with `a.b=c` settings on top."""

import dataclasses
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from manyheads.config import assign, kinds_of, nearest, override_all, read_toml
from manyheads.errors import UserError
from manyheads.finetune import finetune_config, load_start, refuse_changes
from manyheads.nn.block import on_meta
from manyheads.presets import ModelConfig
from manyheads.run import Run, parse_run

SUFFIX = ".toml"


def recipes() -> list[str]:
    """The names of the built-in recipes."""
    files = (file.name for file in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX))


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Run:
    """A recipe, by built-in name or file, with `a.b=c` settings on top.

    `model=FOLDER` starts from a trained model: its settings, its tokenizer, its weights.
    """
    path = Path(name)
    if name in recipes():
        path = Path(str(resources.files(__name__) / f"{name}{SUFFIX}"))
    elif not path.is_file():
        raise UserError(f"there is no recipe '{name}': {nearest(name, recipes())}")
    table = read_toml(path)
    try:
        run = parse_run(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    settings, start = _split_start(overrides, run.start)
    # The settings of a run that has begun are complete, wherever it started from.
    if start and (start != run.start or not _is_complete(run.model)):
        run = _start_from(start, run, settings)
    else:
        run = override_all(run, settings)
    _check_settings(settings, run)
    needs_tokens = not run.start and run.spec.reads_text
    if run.data is None or (run.tokens is None and needs_tokens):
        raise UserError("a run that is to be trained needs data and tokens: leave out data=none")
    _check_sizes(run.model)
    return run


def _start_from(start: str, run: Run, settings: Sequence[str]) -> Run:
    """The run with the model of a folder. The task adapts that model; `model.*` comes on top."""
    loaded = load_start(start)
    of_model = [setting for setting in settings if setting.startswith("model.")]
    of_decode = [setting for setting in settings if setting.startswith("decode.")]
    run = assign(run, [setting for setting in settings if setting not in of_model])
    config = finetune_config(loaded.run.model, run, start)
    run = dataclasses.replace(run, start=start, tokens=None, model=config, decode=loaded.run.decode)
    run = override_all(run, [*of_decode, *of_model])
    refuse_changes(run, config)
    return run


def _check_sizes(model: ModelConfig) -> None:
    """Refuse a model whose parts do not go together before anything is read or written."""
    try:
        with on_meta():
            dataclasses.replace(model, vocab_size=model.vocab_size or 1).build()
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"no model has such sizes ({reason}): lower them") from None


def _is_complete(model: ModelConfig) -> bool:
    """True once the data has decided what it decides of a model."""
    if hasattr(model, "pixel_mean"):
        return bool(model.pixel_mean)
    return model.vocab_size is not None


def _check_settings(settings: Sequence[str], run: Run) -> None:
    """Refuse settings without any effect."""
    names = {setting.partition("=")[0] for setting in settings}
    if "train.bpe_dropout" in names and run.train.bpe_dropout_copies == 1:
        raise UserError("train.bpe_dropout needs train.bpe_dropout_copies > 1: try 8")
    for name, other in (("steps", "epochs"), ("warmup_steps", "warmup_ratio")):
        decides = getattr(run.train, other)
        if f"train.{name}" in names and decides is not None:
            raise UserError(
                f"train.{name} has no effect next to train.{other}={decides}: add "
                f"train.{other}=none"
            )


def _split_start(overrides: Sequence[str], start: str) -> tuple[list[str], str]:
    """The settings without `model=FOLDER` (or `start=FOLDER`), and that folder."""
    kinds = [kind for option in ModelConfig.__args__ for kind in kinds_of(option)]
    rest = []
    for setting in overrides:
        path, equals, value = setting.partition("=")
        is_kind = path == "model" and value in kinds and not Path(value).is_dir()
        if path not in ("model", "start", "init") or not equals or is_kind:
            rest.append(setting)
        elif Path(value).is_dir():
            start = value
        else:
            raise UserError(f"{setting} is no folder{_advice(path, value, kinds)}")
    tokens = next((setting for setting in rest if setting.startswith("tokens")), None)
    if start and tokens:
        raise UserError(f"{start} comes with its own tokens: leave out {tokens}")
    return rest, start


def _advice(path: str, value: str, kinds: Sequence[str]) -> str:
    close = get_close_matches(value, kinds, n=1)
    if path == "model" and Path(value).name == value and close:
        return f", and no kind of model: did you mean model={close[0]}?"
    return (
        ": give a run, or an imported model, to begin with (a run that has begun goes on without "
        "it: train RUN/run.toml --out RUN)"
    )
