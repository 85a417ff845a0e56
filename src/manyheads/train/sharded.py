"""A state to resume from in shards: each process writes and reads its own rows.

torch.distributed.checkpoint (DCP) plans, writes and reads, in the format of safetensors with
offsets in their headers. Its default format has a pickle, which could run code; this one has none.

    state/last.json                      the newest step, its shards, the progress of the run
    state/step-00000100/shard-00001-model-00001-of-00001.safetensors, and its checksum in .check
"""

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import async_save

from manyheads.errors import DataError
from manyheads.fileio import check_sum_of, read_json, write_json, write_text
from manyheads.train.step import World

Tensors = dict[str, torch.Tensor]


def sizes(path: Path) -> Tensors:
    """The names and shapes of a state, as meta tensors."""
    try:
        saved: Any = StateReader(path).read_metadata().state_dict_metadata
    except (SafetensorError, LookupError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}): restore it, or start over with --fresh"
        ) from None
    return {name: torch.empty(about.size, device="meta") for name, about in saved.items()}


@torch.no_grad()
def load(path: Path, targets: Tensors, world: World) -> None:
    """Fill tensors from a file or a folder of shards; DTensors get their local part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
        load_dcp(targets, storage_reader=StateReader(path), no_dist=not world.is_distributed)


class PendingSave:
    """A state that is copied now and written during later steps."""

    def __init__(
        self, manifest: Path, state: Tensors, progress: Any, world: World, group: Any
    ) -> None:
        self.manifest = manifest
        if world.is_main:  # parts of a step that was killed while it was saved
            current = json.loads(manifest.read_text("utf-8"))["about"] if manifest.exists() else {}
            remove(manifest, but=manifest.with_name(step_name(current.get("step", -1))))
        world.all_max(0)
        writer = StateWriter(manifest, vars(copy.deepcopy(progress)))
        self.future: Any = async_save(state, storage_writer=writer, process_group=group)

    def result(self) -> None:
        """Wait until all is written; an error of any process is DataError."""
        try:
            self.future.result()
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise DataError(
                f"{self.manifest.parent} could not be saved ({reason}): free disk space and try "
                "again"
            ) from None


def verified(manifest: Path, world: World) -> tuple[Path, dict[str, Any]]:
    """The folder of a state in shards; every process reads some of them for their checksums."""
    facts = read_json(manifest, "start over with --fresh")
    try:
        about, shards = dict(facts["about"]), set(facts["shards"])
        folder = manifest.with_name(step_name(about["step"]))
    except (LookupError, ValueError, TypeError) as error:
        raise DataError(f"{manifest} is damaged ({error}): start over with --fresh") from None
    names = sorted({*shards, *(path.name for path in folder.glob("*.safetensors"))})
    broken = 0
    for number in range(world.rank, len(names), world.size):
        path = folder / names[number]
        sums = path.with_suffix(".check")
        is_known = path.name in shards and path.exists() and sums.exists()
        if not is_known or sums.read_text("utf-8") != check_sum_of(path):
            broken = number + 1
    if number := world.all_max(broken):
        raise DataError(
            f"{folder / names[number - 1]} is damaged, missing or foreign: restore it, or start "
            "over with --fresh"
        )
    return folder, about


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class StateReader(HuggingFaceStorageReader):
    """DCP's reader of safetensors, for all files in a folder or for one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        self.fs.ls = lambda folder: list(map(str, files))  # type: ignore[method-assign,assignment]


class StateWriter(HuggingFaceStorageWriter):
    """DCP's writer of safetensors, with a checksum of each file and, at the end, the manifest."""

    def __init__(self, manifest: Path, about: dict[str, Any]) -> None:
        self.about, self.manifest = about, manifest
        folder = manifest.with_name(step_name(about["step"]))
        super().__init__(str(folder), save_distributed=True)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Each process writes its part."""
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            path = Path(self.path) / name
            write_text(path.with_suffix(".check"), check_sum_of(path))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """The main process, once all have written."""
        current = Path(self.path)
        shards = sorted(path.name for path in current.glob("*.safetensors"))
        write_json(self.manifest, {"about": self.about, "shards": shards})
        self.manifest.with_suffix(".safetensors").unlink(missing_ok=True)  # of one process
        remove(self.manifest, but=current)


def remove(manifest: Path, but: Path | None = None) -> None:
    """Delete the shards of all steps but one."""
    for folder in manifest.parent.glob("step-*"):
        if folder.is_symlink():  # shards would be written through it
            folder.unlink()
        elif folder != but:
            shutil.rmtree(folder, ignore_errors=True)
