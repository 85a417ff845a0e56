"""What is kept of a run: weights and resume state, each in one atomically replaced file.

`model.safetensors` is the model to use. `state/last.safetensors` holds everything that going
on needs: weights, Adam's moments, and in its header the step and the best score so far. Random
numbers need no state: every step draws from a seed made of the run's seed and the step.
"""

import contextlib
import json
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyheads.errors import BadData

WEIGHTS = "model.safetensors"
STATE = "state"
LAST = "state/last.safetensors"
FORMAT = "manyheads-1"


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write beside, flush to the disk, then replace: a reader sees the old file or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    header = {"format": FORMAT, "about": json.dumps(about)}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, beside, header)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        kept = "the one before it is untouched" if path.exists() else "nothing was written"
        raise BadData(f"{path} could not be saved ({error}): {kept}; make room and go on") from None


def write_text(path: Path, text: str) -> None:
    """The same promise for small text files."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise BadData(f"{path} could not be saved ({error}): make room and try again") from None


def drop_partials(folder: Path) -> None:
    """Remove what killed processes left half-written; the caller holds the folder's lock."""
    for path in (*folder.glob(".*.partial"), *(folder / STATE).glob(".*.partial")):
        path.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file that `write_tensors` wrote; anything else is BadData."""
    if not path.is_file():
        raise BadData(f"{path} is missing: is {path.parent} a run folder?")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        tensors = load_file(path)
    except (SafetensorError, OSError, struct.error, ValueError) as error:
        raise BadData(f"{path} is damaged or no safetensors file ({error})") from None
    if header.get("format") != FORMAT:
        raise BadData(f"{path} was not written by Manyheads: import foreign weights instead")
    return tensors, json.loads(header["about"])


def load_weights(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Put tensors into a model that must want exactly these."""
    wanted = model.state_dict()
    missing, extra = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
    if missing or extra:
        raise BadData(
            f"{path} does not fit the model of run.toml: "
            f"{len(missing)} tensors missing {sorted(missing)[:1]}, "
            f"{len(extra)} unknown {sorted(extra)[:1]}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise BadData(
                f"{path} does not fit the model of run.toml: {name} is "
                f"{list(tensor.shape)}, not {list(wanted[name].shape)}"
            )
    model.load_state_dict(tensors)


@dataclass
class Progress:
    """How far a run is, kept in the header of its state."""

    step: int = 0
    best: float | None = None
    best_step: int = 0
    snapshots: list[int] = field(default_factory=list)


def save_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Everything that going on needs, in one file."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"adam.{key}.{names[id(parameter)]}"] = torch.as_tensor(value)
    write_tensors(folder / LAST, tensors, vars(progress))


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore model and optimizer to the last saved step."""
    path = folder / LAST
    tensors, about = read_tensors(path)
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    load_weights(model, weights, path)
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            moment = tensors.get(f"adam.{key}.{name}")
            if moment is not None:
                device = None if key == "step" else parameter.device
                optimizer.state[parameter][key] = moment.to(device)
    return Progress(**about)


def snapshot(folder: Path, model: nn.Module, progress: Progress, keep: int) -> None:
    """Keep the weights of the last `keep` saves, for averaging; older ones are removed."""
    write_tensors(_snapshot(folder, progress.step), dict(model.state_dict()), {})
    progress.snapshots = [*progress.snapshots, progress.step][-keep:]


def drop_old_snapshots(folder: Path, progress: Progress) -> None:
    kept = {_snapshot(folder, step) for step in progress.snapshots}
    for path in (folder / STATE).glob("weights-*.safetensors"):
        if path not in kept:
            path.unlink(missing_ok=True)


def average(folder: Path, progress: Progress) -> dict[str, Tensor]:
    """The mean of the kept snapshots, summed in float64."""
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for step in progress.snapshots:
        tensors, _ = read_tensors(_snapshot(folder, step))
        for name, tensor in tensors.items():
            dtypes[name] = tensor.dtype
            total[name] = total.get(name, 0) + tensor.double() / len(progress.snapshots)
    return {name: tensor.to(dtypes[name]) for name, tensor in total.items()}


def _snapshot(folder: Path, step: int) -> Path:
    return folder / STATE / f"weights-{step:08d}.safetensors"
