"""What is kept of a run: weights and resume state, each in one atomically replaced file.

`model.safetensors` is the model to use. `state/last.safetensors` holds everything that going
on needs: weights, Adam's moments, and in its header the step and the best score so far. Random
numbers need no state: every step draws from a seed made of the run's seed and the step.

Of processes that have a part of every weight each, `state/shards-STEP/` holds the same in PyTorch's
distributed format, and `state/shards.json` says which of these folders is the last whole one. Any
number of processes can go on from either.
"""

import json
import shutil
import warnings
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyheads.errors import DataError
from manyheads.fileio import check_sum, check_sum_of, replace_file, write_text

WEIGHTS = "model.safetensors"
STATE = "state"
LAST = "state/last.safetensors"
SHARDS = "state/shards.json"
FORMAT = 1
HEADER = "manyheads"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """One safetensors file, whole or not at all; its header holds `about` and a check sum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {"format": FORMAT, "checksum": checksum(plain), "about": about}
    facts["told"] = _told(plain, about)
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


def _told(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    """A check sum over what a header says: the same bytes as numbers of another kind are others."""
    kinds = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    return check_sum(json.dumps([about, kinds], sort_keys=True).encode())


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file that `write_tensors` wrote; anything else is DataError."""
    if not path.is_file():
        raise DataError(f"{path} is missing: is {path.parent} a run folder?")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is damaged or no safetensors file ({error})") from None
    if header is None:
        raise DataError(f"{path} was not written by Manyheads: import foreign weights instead")
    try:
        facts = json.loads(header)
        known, sound = facts["format"] == FORMAT, facts["checksum"] == checksum(tensors)
        about = dict(facts["about"])
        told = facts.get("told") in (None, _told(tensors, about))  # older files have none
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged: its header cannot be read") from None
    if not known or not sound or not told:
        raise DataError(f"{path} is damaged: its bytes do not match their check sum")
    return tensors, about


def load_weights(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Put tensors into a model that must want exactly these."""
    wanted = model.state_dict()
    missing, extra = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
    if missing or extra:
        raise DataError(
            f"{path} does not fit the model of run.toml: "
            f"{len(missing)} tensors missing {sorted(missing)[:1]}, "
            f"{len(extra)} unknown {sorted(extra)[:1]}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise DataError(
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


def is_begun(folder: Path) -> bool:
    """Whether a run has a state to go on from."""
    return (folder / LAST).exists() or (folder / SHARDS).exists()


def write_state(folder: Path, state: dict[str, Tensor], progress: Progress) -> None:
    """Everything that going on needs, in one file."""
    write_tensors(folder / LAST, state, vars(progress))
    (folder / SHARDS).unlink(missing_ok=True)
    _drop_shards(folder, "")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"adam.{key}.{names[id(parameter)]}"] = torch.as_tensor(value)
    return tensors


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore model and optimizer to the last saved step."""
    shards = _read_shards(folder)
    path = folder / LAST
    if shards is not None and not path.exists():
        return load_shards(folder, *shards, model, optimizer)
    tensors, about = read_tensors(path)
    # Both are there if a run was killed right after it had saved one of them.
    if shards is not None and shards[2].step > about.get("step", 0):
        return load_shards(folder, *shards, model, optimizer)
    wanted = model.state_dict()
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    weights = {n: _spread_like(wanted[n], t) if n in wanted else t for n, t in weights.items()}
    load_weights(model, weights, path)
    for name, parameter in model.named_parameters():
        if not _has_moments(name, tensors, path):
            continue
        for key in MOMENTS:
            moment = tensors[f"adam.{key}.{name}"]
            # The fused update wants all of them, the step too, where the parameter is.
            moment = _spread_like(parameter, moment) if moment.ndim else moment
            optimizer.state[parameter][key] = moment.to(parameter.device)
    return _progress(about, path)


def _has_moments(name: str, known: Collection[str], path: Path) -> bool:
    """Whether a parameter has been updated: where no loss has ever reached it there is nothing."""
    found = [f"adam.{key}.{name}" in known for key in MOMENTS]
    if any(found) and not all(found):
        raise DataError(f"{path} has no optimizer state for {name}: it cannot be gone on from")
    return all(found)


def _progress(about: dict[str, Any], path: Path) -> Progress:
    try:
        return Progress(**about)
    except TypeError:
        raise DataError(f"{path} is damaged: its header does not say how far it is") from None


def _spread_like(wanted: Any, tensor: Tensor) -> Tensor:
    """A whole tensor as the other one is: whole too, or this process's part of it."""
    if not hasattr(wanted, "device_mesh") or tensor.shape != wanted.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Every process has read all of it: nothing need be sent.
    whole, mesh = tensor.to(wanted.device), wanted.device_mesh
    return distribute_tensor(whole, mesh, wanted.placements, src_data_rank=None)


def save_shards(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Everything that going on needs, of which each process writes its part."""
    from torch import distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    name = f"shards-{progress.step:08d}"
    path, first = folder / STATE / name, dist.get_rank() == 0
    if first:
        shutil.rmtree(path, ignore_errors=True)  # what a kill has left
    try:
        save(state_of(model, optimizer), checkpoint_id=path)
    except CheckpointException as error:
        raise DataError(
            f"{path} could not be saved ({_short(error)}): the one before it is untouched; make "
            "room and go on"
        ) from None
    if first:
        sums = {file.name: check_sum_of(file) for file in sorted(path.iterdir())}
        facts = {"format": FORMAT, "folder": name, "about": vars(progress), "files": sums}
        facts["told"] = check_sum(json.dumps(facts).encode())
        write_text(folder / SHARDS, json.dumps(facts) + "\n")
        (folder / LAST).unlink(missing_ok=True)
        _drop_shards(folder, name)


def _short(error: BaseException) -> str:
    """The first line of what went wrong, in whichever process it did."""
    failures = list(getattr(error, "failures", {}).values())
    return str(failures[0][0] if failures else error).partition("\n")[0]


def _drop_shards(folder: Path, kept: str) -> None:
    for path in (folder / STATE).glob("shards-*"):
        if path.name != kept:
            shutil.rmtree(path, ignore_errors=True)


def _read_shards(folder: Path) -> tuple[str, dict[str, str], Progress] | None:
    """The last whole folder of shards, the check sums of its files, and how far it is."""
    path = folder / SHARDS
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        told = facts.pop("told", None)  # older files have none
        sound = told in (None, check_sum(json.dumps(facts).encode()))
        if facts["format"] != FORMAT or not sound:
            raise ValueError
        sums = dict(facts.get("files", {}))
        return str(facts["folder"]), sums, _progress(dict(facts["about"]), path)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged: it does not say where the state is") from None


def load_shards(
    folder: Path,
    name: str,
    sums: dict[str, str],
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Restore model and optimizer from the parts of any number of processes."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = folder / STATE / name
    try:
        damaged = [file for file, known in sums.items() if check_sum_of(path / file) != known]
        if damaged:
            raise ValueError(f"the bytes of {damaged[0]} do not match their check sum")
        known = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # whatever a damaged file makes of it
        raise DataError(f"{path} is damaged or not there ({error})") from None
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    unknown = {name for name in known if name.startswith("model.")} ^ tensors.keys()
    if unknown:
        raise DataError(f"{path} does not fit the model of run.toml: {min(unknown)}")
    for name, parameter in model.named_parameters():
        if _has_moments(name, known, path):
            for key in MOMENTS:
                like = parameter.detach()
                room = torch.zeros((), device=like.device) if key == "step" else like.clone()
                tensors[f"adam.{key}.{name}"] = optimizer.state[parameter][key] = room
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process loads alone is meant
            load(tensors, checkpoint_id=path)
    except (CheckpointException, ValueError, RuntimeError, OSError) as error:
        raise DataError(f"{path} is damaged, or not of this model ({_short(error)})") from None
    return progress


def snapshot(folder: Path, weights: dict[str, Tensor], step: int) -> None:
    """Keep the weights of a save, for averaging."""
    write_tensors(_snapshot(folder, step), weights, {})


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
