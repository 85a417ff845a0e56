"""Checkpoints of a run: weights and resume state, each in one atomically replaced file.

`model.safetensors` is the model to use. `state/last.safetensors` holds all that a resumed run
needs: weights, the optimizer's moments and, in its header, the step and the best score so far.
Random numbers need no state: every step seeds its own from the run's seed and the step.

Under FSDP each process writes its own part with torch.distributed.checkpoint (DCP), as safetensors
in `state/step-N/`; `state/last.json` names the newest. DCP's default format has a pickle, this one
has none. Any number of processes can resume from either.
"""

import copy
import json
import os
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.errors import DataError
from manyheads.fileio import PARTIAL, check_sum, replace_file
from manyheads.train.optimizer import Ema
from manyheads.train.step import ONE_PROCESS, World

WEIGHTS = "model.safetensors"
STATE = "state"
LAST = "state/last.safetensors"
MANIFEST = "state/last.json"  # names the shards of a state
SHARDS = "state/shards.json"  # release 0.1, FSDP: PyTorch's format, which is a pickle
FORMAT = 1
HEADER = "manyheads"
MOMENTS = {"adam": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}

Tensors = dict[str, Tensor]

# --- safetensors files with a checked header ---


def write_tensors(path: Path, tensors: Tensors, about: dict[str, Any]) -> None:
    """One safetensors file, complete or not at all; its header holds `about` and checksums."""
    path.parent.mkdir(exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {"format": FORMAT, "checksum": checksum(plain), "about": about}
    facts["told"] = _header_checksum(plain, about)
    header = {HEADER: json.dumps(facts)}  # one key: several would be written in any order

    def write(partial: Path) -> None:
        # A folder, since save_file writes to a temporary file of its own, which a kill leaves.
        with TemporaryDirectory(PARTIAL, f".{path.name}.", path.parent) as folder:
            try:
                save_file(plain, Path(folder) / path.name, header)
            except SafetensorError as error:  # safetensors' own error for a full disk
                raise OSError(str(error)) from None
            os.replace(Path(folder) / path.name, partial)

    replace_file(path, write)


def checksum(tensors: Tensors) -> str:
    """CRC-32 over names and bytes, to detect damaged files."""
    return f"{_crc32(tensors):08x}"


def _crc32(tensors: Tensors, total: int = 0) -> int:
    """The checksum as a number, continued from `total`."""
    for name in sorted(tensors):
        raw: Any = tensors[name].flatten().view(torch.uint8).numpy()
        total = zlib.crc32(raw, zlib.crc32(name.encode(), total))
    return total


def _header_checksum(tensors: Tensors, about: dict[str, Any]) -> str:
    """Over the metadata, dtypes and shapes: the same bytes of another dtype are other numbers."""
    kinds = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    return check_sum(json.dumps([about, kinds], sort_keys=True).encode())


def read_tensors(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and metadata of a file that `write_tensors` wrote; anything else is DataError."""
    tensors: Tensors = {}
    return tensors, scan_tensors(path, tensors.__setitem__)


def scan_tensors(path: Path, use: Callable[[str, Tensor], None]) -> dict[str, Any]:
    """The same with one tensor at a time in memory: passes each on and returns the metadata."""
    if not path.is_file():
        raise DataError(f"{path} is missing: is {path.parent} a run folder?")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            if header is None:
                raise DataError(
                    f"{path} was not written by Manyheads: import foreign weights instead"
                )
            total, kinds = 0, {}
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                total = _crc32({name: tensor}, total)
                kinds[name] = tensor.to("meta")
                use(name, tensor)
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is damaged or no safetensors file ({error})") from None
    try:
        facts = json.loads(header)
        about = dict(facts["about"])
        is_intact = (
            facts["format"] == FORMAT
            and facts["checksum"] == f"{total:08x}"
            and facts.get("told") in (None, _header_checksum(kinds, about))  # None: older files
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged: its header cannot be read") from None
    if not is_intact:
        raise DataError(f"{path} is damaged: its bytes do not match their checksum")
    return about


def load_weights(model: nn.Module, tensors: Tensors, path: Path) -> None:
    """Load tensors into a model that must have exactly these."""
    _check_shapes(tensors, model.state_dict(), path)
    model.load_state_dict(tensors)


def _check_shapes(tensors: Tensors, model: Tensors, path: Path) -> None:
    saved, expected = ({n: list(t.shape) for n, t in side.items()} for side in (tensors, model))
    wrong = [name for name in {**expected, **saved} if saved.get(name) != expected.get(name)]
    if wrong:
        shapes = [str(sides.get(wrong[0], "missing")) for sides in (saved, expected)]
        raise DataError(
            f"{path} does not fit the model of run.toml: {len(wrong)} tensors differ, {wrong[0]} "
            f"is {shapes[0]} in the file and {shapes[1]} in the model"
        )


# --- the state to resume from ---


@dataclass
class Progress:
    """How far a run is, in the header of its state."""

    step: int = 0
    best: float | None = None
    best_step: int = 0
    snapshots: list[int] = field(default_factory=list)
    data: str = ""


def is_begun(folder: Path) -> bool:
    """True if a run has a state to resume from."""
    return any((folder / name).exists() for name in (LAST, MANIFEST, SHARDS))


def state_of(model: nn.Module, optimizer: Optimizer, ema: Ema | None = None) -> Tensors:
    """Weights, moments and averages by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            owner = next(owner for owner, keys in MOMENTS.items() if key in keys)
            tensors[f"{owner}.{key}.{names[id(parameter)]}"] = torch.as_tensor(value)
    averages = {} if ema is None else ema.averages
    return tensors | {f"ema.{name}": average for name, average in averages.items()}


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    ema: Ema | None = None,
    world: World = ONE_PROCESS,
) -> Progress:
    """Restore model, optimizer and averages to the last saved step."""
    from manyheads.train import sharded  # half a second

    path, about = _verified(folder, world)
    saved = sharded.sizes(path)
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    _check_shapes({n: t for n, t in saved.items() if n.startswith("model.")}, weights, path)
    targets = weights | {f"ema.{n}": t for n, t in (ema.averages if ema else {}).items()}
    for name, parameter in model.named_parameters():
        for owner, keys in MOMENTS.items():
            if f"{owner}.{keys[0]}.{name}" not in saved:  # another's, or no loss reached it
                continue
            for key in keys:
                # The fused update needs the step, too, on the parameter's device.
                step = torch.zeros((), device=parameter.device)
                moment = step if key == "step" else torch.zeros_like(parameter)
                optimizer.state[parameter][key] = targets[f"{owner}.{key}.{name}"] = moment
    lacking = [n for n, t in targets.items() if n not in saved or saved[n].shape != t.shape]
    if lacking:
        raise DataError(f"{path} is damaged: it lacks {lacking[0]}")
    sharded.load(path, targets, world)
    try:
        return Progress(**about)
    except TypeError as error:
        raise DataError(f"{path} is damaged: its header has {error}") from None


def _verified(folder: Path, world: World) -> tuple[Path, dict[str, Any]]:
    """The file or folder of the last state, and its metadata; damage is DataError."""
    if (folder / MANIFEST).exists():
        from manyheads.train.sharded import verified

        return verified(folder / MANIFEST, world)
    if not (folder / LAST).exists() and (folder / SHARDS).exists():
        raise DataError(
            f"{folder / SHARDS} is a pickle (FSDP, release 0.1), which is not read: train to the "
            "next checkpoint with release 0.1 in one process, or start over with --fresh"
        )
    return folder / LAST, scan_tensors(folder / LAST, lambda name, tensor: None)


# --- snapshots, for averaging ---


def drop_old_snapshots(folder: Path, progress: Progress) -> None:
    current = {_snapshot(folder, step) for step in progress.snapshots}
    for path in (folder / STATE).glob("weights-*.safetensors"):
        if path not in current:
            path.unlink(missing_ok=True)


def average(folder: Path, progress: Progress, buffers: Collection[str] = ()) -> Tensors:
    """The mean of the snapshots, summed in float64; of buffers, the newest."""
    means: Tensors = {}
    newest: Tensors = {}
    for step in progress.snapshots:
        newest, _ = read_tensors(_snapshot(folder, step))
        for name, tensor in newest.items():
            means[name] = means.get(name, 0) + tensor.double() / len(progress.snapshots)
    return {n: t if n in buffers else means[n].to(t.dtype) for n, t in newest.items()}


def _snapshot(folder: Path, step: int) -> Path:
    return folder / STATE / f"weights-{step:08d}.safetensors"


# --- who writes, and when ---


class Checkpointer:
    """Saves and restores a run. All processes call each method; the main one writes.

    `saved_model` is the part of the model that model.safetensors holds.

    From a GPU or of FSDP a state is copied at once and written in a thread during later steps: one
    at a time, in order. A run waits for the last before it ends.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer,
        saved_model: nn.Module,
        world: World,
        ema: Ema | None = None,
    ) -> None:
        self.folder, self.world = folder, world
        self.model, self.optimizer, self.ema, self.saved_model = model, optimizer, ema, saved_model
        self.is_asynchronous = next(model.parameters()).is_cuda and not world.is_distributed
        self.is_sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
        # Writing threads must not mix with the gradients of later steps.
        self.group = torch.distributed.new_group(backend="gloo") if self.is_sharded else None
        self.pending: Any = None
        self.saved = Progress()

    def load(self) -> Progress | None:
        """Restore the last state, if there is one."""
        if not is_begun(self.folder):
            return None
        self.saved = load_state(self.folder, self.model, self.optimizer, self.ema, self.world)
        return copy.deepcopy(self.saved)

    def save(self, progress: Progress, *, snapshot: bool = False) -> None:
        """Save a state to resume from and, for averaging, a snapshot of the weights."""
        state = state_of(self.model, self.optimizer, self.ema)
        weights = self.world.gather(self.saved_model.state_dict()) if snapshot else None
        self.close()
        if self.is_sharded:
            from manyheads.train.sharded import PendingSave

            if self.world.is_main and weights is not None:
                drop_old_snapshots(self.folder, self.saved)
                write_tensors(_snapshot(self.folder, progress.step), weights, {})
            self.saved = copy.deepcopy(progress)
            self.pending = PendingSave(
                self.folder / MANIFEST, state, progress, self.world, self.group
            )
        elif self.is_asynchronous:
            copies = _to_host(state), None if weights is None else _to_host(weights)
            pool = ThreadPoolExecutor(1)
            self.pending = pool.submit(self._write, *copies, copy.deepcopy(progress))
            pool.shutdown(wait=False)  # the thread ends when the state is written
        elif self.world.is_main:
            self._write(state, weights, progress)
        self.world.all_max(0)  # all wait for the main process

    def save_model(self, about: dict[str, Any]) -> None:
        """Save the current weights as the model to use."""
        weights = self.world.gather(self.saved_model.state_dict())
        if self.world.is_main:
            write_tensors(self.folder / WEIGHTS, weights, about)

    def save_average(self, progress: Progress, about: dict[str, Any]) -> None:
        """Save the mean of the snapshots as the model to use."""
        if self.world.is_main:
            drop_old_snapshots(self.folder, progress)  # left by a kill
            buffers = {name for name, _ in self.saved_model.named_buffers()}
            write_tensors(self.folder / WEIGHTS, average(self.folder, progress, buffers), about)

    def load_model(self) -> None:
        """Load the model to use, where one process holds it."""
        if not self.world.is_distributed:
            path = self.folder / WEIGHTS
            load_weights(self.saved_model, read_tensors(path)[0], path)

    def close(self) -> None:
        """Wait until all is written; raise the error of a write that failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _write(self, state: Tensors, weights: Tensors | None, progress: Progress) -> None:
        if weights is not None:
            write_tensors(_snapshot(self.folder, progress.step), weights, {})
        write_tensors(self.folder / LAST, state, vars(progress))
        if (self.folder / MANIFEST).exists():
            from manyheads.train.sharded import remove

            (self.folder / MANIFEST).unlink()
            remove(self.folder / MANIFEST)
        if weights is not None:
            drop_old_snapshots(self.folder, progress)


def _to_host(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
