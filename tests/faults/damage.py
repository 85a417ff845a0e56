"""Damage to a file of a run folder, and what becomes of it: noticed, harmless, or an error here."""

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch

from manyheads.config import dump
from manyheads.errors import UserError
from manyheads.lab.figures.plots import metric_curves
from manyheads.loading import load_torch_run
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.train import checkpoint
from manyheads.web.runs import all_records, summary

TEXT = "red dog, blue tree"
FILES = (
    "run.toml",
    "tokenizer.json",
    "model.safetensors",
    "scores.json",
    "metrics.jsonl",
    "state/last.safetensors",
    "state/weights-00000004.safetensors",
    "state/weights-00000006.safetensors",
    "state/lock",
)


class Damage(NamedTuple):
    """A description of the damage, and the damaged content."""

    what: str
    content: bytes


def damages(content: bytes, count: int, draw: Random) -> Iterator[Damage]:
    """At so many random places each: a bit flipped, a byte set, the file cut off there."""
    for _ in range(count if content else 0):
        at, value = draw.randrange(len(content)), draw.randrange(256)
        flipped = content[at] ^ 1 << draw.randrange(8)
        for what, byte in (("flip", flipped), ("set", value)):
            yield Damage(f"{what} {at}: {byte}", content[:at] + bytes([byte]) + content[at + 1 :])
        yield Damage(f"cut at {at}", content[:at])


def as_it_was(recipe: Path, folder: Path, room: Path) -> dict[str, Any]:
    """All that a folder is used for: the model, how it reads and writes, going on, averaging."""
    opened = load_torch_run(folder)
    model: Any = opened.model
    ids = torch.tensor([opened.tokenizer.encode(TEXT)])
    with torch.no_grad():
        logits = model(ids, ids)
    copy = shutil.copytree(folder, room / "copy")
    try:
        trainer = make_trainer(
            read_recipe(str(recipe), ["train.steps=8", "train.average_checkpoints=2"]),
            copy,
            torch.device("cpu"),
        )
        trainer.close()
        mean = checkpoint.average(copy, trainer.progress)
    finally:
        shutil.rmtree(copy)
    state = checkpoint.state_of(trainer.model, trainer.optimizer)
    tensors = {"logits": logits, **state, **{f"mean {name}": one for name, one in mean.items()}}
    settings = dump(opened.run)
    return {
        "settings": settings,
        "ids": ids.tolist(),
        "progress": vars(trainer.progress),
        "tensors": {name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
    }


def judged(
    recipe: Path, whole: Path, name: str, damage: Damage, before: dict[str, Any], room: Path
) -> Literal["noticed", "harmless"]:
    """Use a copy with this damage. Anything but one line or the very same is an error."""
    folder, where = shutil.copytree(whole, room / "hurt"), f"{name}: {damage.what}"
    (folder / name).write_bytes(damage.content)
    line, after = "", None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            after = as_it_was(recipe, folder, room)
            list(all_records(folder / "metrics.jsonl"))
            metric_curves(folder)
        assert "error" not in summary(folder.name, folder), where
    except UserError as mistake:
        line = str(mistake)
    finally:
        shutil.rmtree(folder)
    if line:
        assert len(line.splitlines()) == 1, f"{where}: {line}"
        assert str(folder) in line or str(room / "copy") in line, f"{where}: {line}"
        return "noticed"
    assert after == before, f"{where} is another model in silence"
    return "harmless"
