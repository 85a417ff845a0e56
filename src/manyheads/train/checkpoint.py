"""What is kept of a run: weights and resume state, each in one atomically replaced file.

`model.safetensors` is the model to use. `state/last.safetensors` holds everything that going
on needs: weights, Adam's moments, and in its header the step and the best score so far. Random
numbers need no state: every step draws from a seed made of the run's seed and the step.
"""

import json
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyheads.errors import BadData
from manyheads.files import replace_file

WEIGHTS = "model.safetensors"
STATE = "state"
LAST = "state/last.safetensors"
FORMAT = 1
HEADER = "manyheads"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """One safetensors file, whole or not at all; its header holds `about` and a check sum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {"format": FORMAT, "checksum": checksum(plain), "about": about}
    header = {HEADER: json.dumps(facts)}  # one key: several would be written in any order

    def write(beside: Path) -> None:
        try:
            save_file(plain, beside, header)
        except SafetensorError as error:  # its own word for a full disk
            raise OSError(str(error)) from None

    replace_file(path, write)


def checksum(tensors: dict[str, Tensor]) -> str:
    """A check sum over names and bytes: a flipped bit is noticed, not computed with."""
    total = 0
    for name in sorted(tensors):
        raw: Any = tensors[name].flatten().view(torch.uint8).numpy()
        total = zlib.crc32(raw, zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file that `write_tensors` wrote; anything else is BadData."""
    if not path.is_file():
        raise BadData(f"{path} is missing: is {path.parent} a run folder?")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadData(f"{path} is damaged or no safetensors file ({error})") from None
    if header is None:
        raise BadData(f"{path} was not written by Manyheads: import foreign weights instead")
    try:
        facts = json.loads(header)
        known, sound = facts["format"] == FORMAT, facts["checksum"] == checksum(tensors)
        about = dict(facts["about"])
    except (ValueError, KeyError, TypeError):
        raise BadData(f"{path} is damaged: its header cannot be read") from None
    if not known or not sound:
        raise BadData(f"{path} is damaged: its bytes do not match their check sum")
    return tensors, about


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
    data: str = ""


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
        moments = {key: tensors.get(f"adam.{key}.{name}") for key in MOMENTS}
        if all(moment is None for moment in moments.values()):
            continue  # no loss has ever reached it
        if any(moment is None for moment in moments.values()):
            raise BadData(f"{path} has no optimizer state for {name}: it cannot be gone on from")
        for key, moment in moments.items():
            assert moment is not None
            # The fused update wants all of them, the step too, where the parameter is.
            optimizer.state[parameter][key] = moment.to(parameter.device)
    try:
        return Progress(**about)
    except TypeError:
        raise BadData(f"{path} is damaged: its header does not say how far it is") from None


def snapshot(folder: Path, model: nn.Module, progress: Progress, keep: int) -> None:
    """Keep the weights of the last `keep` saves, for averaging; older ones are removed."""
    write_tensors(_snapshot(folder, progress.step), dict(model.state_dict()), {})
    progress.snapshots = [*progress.snapshots, progress.step][-keep:]


def drop_old_snapshots(folder: Path, progress: Progress) -> None:
    kept = {_snapshot(folder, step) for step in progress.snapshots}
    for path in (folder / STATE).glob("weights-*.safetensors"):
        if path not in kept:
            path.unlink(missing_ok=True)


def average(folder: Path, progress: Progress, drawn: Collection[str] = ()) -> dict[str, Tensor]:
    """The mean of the kept snapshots, summed in float64; of what is drawn, the newest."""
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for step in progress.snapshots:
        tensors, _ = read_tensors(_snapshot(folder, step))
        for name, tensor in tensors.items():
            dtypes[name] = tensor.dtype
            if name in drawn:
                total[name] = tensor
            else:
                total[name] = total.get(name, 0) + tensor.double() / len(progress.snapshots)
    return {name: tensor.to(dtypes[name]) for name, tensor in total.items()}


def _snapshot(folder: Path, step: int) -> Path:
    return folder / STATE / f"weights-{step:08d}.safetensors"
