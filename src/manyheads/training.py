"""From a recipe to a trainer: tokenizer, model settings, first weights and task."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from manyheads.config import dump
from manyheads.errors import UserError
from manyheads.exchange.folder import in_frame
from manyheads.fileio import drop_partials, write_text
from manyheads.finetune import load_pretrained, load_start, starts_from_encoder_decoder
from manyheads.nn.local import LocalAttention
from manyheads.nn.positions import Sinusoidal
from manyheads.run import (
    SETTINGS,
    TOKENIZER,
    Run,
    differences,
    make_folder,
    model_digest,
    read_run,
    read_tokenizer,
    settings_text,
)
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train import checkpoint
from manyheads.train.loop import Trainer
from manyheads.train.parallel import ALONE, World


def train(run: Run, folder: Path, device: torch.device, world: World = ALONE) -> Trainer:
    """A trainer for the run, at the step where its folder stands."""
    make_task = run.spec.prepare
    if run.data is None or make_task is None:
        raise UserError(f"there is no training for task={run.task}: choose another task")
    if world.is_main:
        drop_partials(folder)
    part, valid = run.data.read("train"), run.data.read("valid")
    with world.main_first():  # the others read what the first has written
        run, tokenizer = prepare(run, folder, part)
    task = make_task(run, part, valid, tokenizer, device)
    task.notes = [*task.notes, *_warn_embedding_scale(run), *_warn_window(run)]
    torch.manual_seed(run.seed)
    model = run.model.build()
    if run.start and not checkpoint.is_begun(folder):
        load_pretrained(model, load_start(run.start))
    trained = run.spec.wrap(model, run)
    trained.to(device)
    return Trainer(
        trained,
        task,
        run.train.settled(task.per_epoch),
        dim=run.model.dim,
        seed=run.seed,
        folder=folder,
        metadata={"model": model_digest(run.model)},
        saved_model=model,
        world=world,
    )


def prepare(run: Run, folder: Path, part: Any) -> tuple[Run, Tokenizer | None]:
    """Settle what the data decides (tokenizer, sizes, labels) and write it down, once."""
    make_folder(folder)
    tokenizer = _make_tokenizer(run, folder, part) if run.spec.reads_text else None
    if tokenizer is not None and not run.start:
        model = dataclasses.replace(run.model, vocab_size=tokenizer.vocab_size)
        run = dataclasses.replace(run, model=model)
    elif tokenizer is not None and tokenizer.vocab_size > (run.model.vocab_size or 0):
        raise UserError(
            f"{run.start} has room for {run.model.vocab_size} tokens, and this objective needs "
            f"{tokenizer.vocab_size}: begin with a model that was trained for it"
        )
    run = dataclasses.replace(run, model=run.spec.fit_model(run, part))
    _write_settings(run, folder)
    return run, tokenizer


def _make_tokenizer(run: Run, folder: Path, part: Any) -> Tokenizer:
    """The tokenizer of the folder; else that of the model to start from; else a new one."""
    if (folder / SETTINGS).exists():
        return read_tokenizer(folder)
    if run.start:
        tokenizer = _start_tokenizer(run)
    else:
        assert run.tokens is not None  # a recipe has them
        tokenizer = _fit_tokenizer(run.tokens.train(run.spec.strings(part)), run)
    tokenizer.save(folder / TOKENIZER)
    return tokenizer


def _start_tokenizer(run: Run) -> Tokenizer:
    start = load_start(run.start)
    tokenizer = start.tokenizer
    if starts_from_encoder_decoder(run.model, start.run.model):
        # An encoder keeps the special tokens around a text that it was trained with.
        tokenizer = in_frame(tokenizer, start.run.decode, start.run.model)
    try:
        return _fit_tokenizer(tokenizer, run)
    except UserError as error:
        raise UserError(f"{Path(run.start) / TOKENIZER}: {error}") from None


def _fit_tokenizer(tokenizer: Tokenizer, run: Run) -> Tokenizer:
    """With the special tokens that the task needs; one without them is refused."""
    for name in run.spec.special_tokens:
        getattr(tokenizer, name)
    return run.spec.fit_tokenizer(tokenizer, run)


def _write_settings(run: Run, folder: Path) -> None:
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


def _warn_embedding_scale(run: Run) -> list[str]:
    """Sinusoids have amplitude 1 and would drown unscaled token embeddings."""
    model: Any = run.model
    if not isinstance(getattr(model, "position", None), Sinusoidal):
        return []
    if run.start or model.embed.scale != "one" or model.vocab_size is None:
        return []
    return [
        "sinusoidal positions have amplitude 1, and token embeddings start far smaller, so that "
        "little is learned of the words: add model.embed.scale=sqrt-dim"
    ]


def _warn_window(run: Run) -> list[str]:
    """Windows and blocks that hide nothing of what the model reads."""
    model: Any = run.model
    length = getattr(model, "positions", model.max_length)
    sides = [name for name in ("encoder", "decoder") if hasattr(model, name)]
    cores = {f"model.{name}.attention": getattr(model, name).attention for name in sides}
    cores = {name: core for name, core in cores.items() if core is not None}
    if len(cores) < 2:  # a side without its own has the model's
        cores = {"model.attention": getattr(model, "attention", None), **cores}
    return [
        f"{name}={core.kind} hides nothing, as exact attention does: the model reads up to "
        f"{length} positions, and all of them are near; lower {name}.{core.measure}="
        f"{getattr(core, core.measure)}"
        for name, core in cores.items()
        if isinstance(core, LocalAttention) and core.reach >= length
    ]
