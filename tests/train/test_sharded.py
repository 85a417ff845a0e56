"""A state in shards: safetensors only, and every damage is one clear line."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.helpers import refusal
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from manyheads.errors import DataError
from manyheads.fileio import check_sum_of, write_json, write_text
from manyheads.train import checkpoint
from manyheads.train.checkpoint import Progress, load_state, state_of
from manyheads.train.sharded import PendingSave, StateWriter
from manyheads.train.step import ONE_PROCESS


def trained(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(5, 3)).pow(3).sum().backward()
    optimizer.step()
    return model, optimizer


def save_step(folder: Path, step: int, seed: int = 1) -> dict[str, Any]:
    """A state in one shard, as a process of FSDP writes it."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    state = state_of(*trained(seed))
    writer = StateWriter(folder / checkpoint.MANIFEST, vars(Progress(step=step, best=0.5)))
    save(state, storage_writer=writer, no_dist=True)
    return state


def test_a_state_in_shards_is_restored_bit_by_bit(tmp_path: Path) -> None:
    save_step(tmp_path, 3, seed=2)
    state = save_step(tmp_path, 4)
    assert [path.name for path in tmp_path.glob("state/step-*")] == ["step-00000004"]
    assert checkpoint.is_begun(tmp_path)
    model, optimizer = trained(7)
    assert load_state(tmp_path, model, optimizer) == Progress(step=4, best=0.5)
    restored = state_of(model, optimizer)
    assert restored.keys() == state.keys()
    assert any(name.startswith("adam.step") for name in state)
    for name, tensor in state.items():
        assert torch.equal(restored[name], tensor), name


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, ("raise SystemExit('a pickle was run')",)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 8
    path.write_bytes(content)


HARMS: dict[str, Callable[[Path, Path], object]] = {
    "a byte": lambda shard, manifest: flip(shard),
    "missing": lambda shard, manifest: shard.unlink(),
    "truncated": lambda shard, manifest: shard.write_bytes(shard.read_bytes()[:-9]),
    "a pickle": lambda shard, manifest: shard.write_bytes(pickle.dumps(Bomb())),
    "foreign": lambda shard, manifest: shard.with_stem("shard-2").write_bytes(shard.read_bytes()),
    "no checksum": lambda shard, manifest: shard.with_suffix(".check").unlink(),
    "manifest": lambda shard, manifest: manifest.write_text(
        manifest.read_text().replace("0.5", "0.4")
    ),
    "pickled manifest": lambda shard, manifest: manifest.write_bytes(pickle.dumps(Bomb())),
    "empty manifest": lambda shard, manifest: manifest.write_text("{}"),
}


def forge_header(shard: Path, manifest: Path) -> None:
    shard.write_bytes(bytes([255]) * 8 + shard.read_bytes()[8:])
    write_text(shard.with_suffix(".check"), check_sum_of(shard))


def forge_manifest(shard: Path, manifest: Path) -> None:
    write_json(manifest, {"about": {}, "shards": [shard.name]})


HARMS |= {"forged header": forge_header, "forged manifest": forge_manifest}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_or_foreign_shard_is_one_line(tmp_path: Path, harm: str) -> None:
    save_step(tmp_path, 4)
    [shard] = tmp_path.glob("state/step-*/*.safetensors")
    HARMS[harm](shard, tmp_path / checkpoint.MANIFEST)
    message = refusal(DataError, load_state, tmp_path, *trained(1))
    assert "manifest" in harm or "forged" in harm or "shard-" in message, message


def test_a_pickle_next_to_the_shards_is_never_read(tmp_path: Path) -> None:
    """PyTorch's default format keeps its index in `.metadata`."""
    save_step(tmp_path, 4)
    [step] = tmp_path.glob("state/step-*")
    (step / ".metadata").write_bytes(pickle.dumps(Bomb()))
    assert load_state(tmp_path, *trained(1)).step == 4


def test_another_model_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path, 4)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    message = refusal(DataError, load_state, tmp_path, model, torch.optim.AdamW(model.parameters()))
    assert "does not fit the model" in message


def test_a_link_in_place_of_a_step_is_not_written_through(tmp_path: Path) -> None:
    save_step(tmp_path, 4)
    (tmp_path / "victim").mkdir()
    (tmp_path / "state" / "step-00000005").symlink_to(tmp_path / "victim")
    manifest = tmp_path / checkpoint.MANIFEST
    PendingSave(manifest, {"x": torch.zeros(1)}, Progress(step=5), ONE_PROCESS, None).result()
    assert load_state_step(manifest) == 5
    assert not list((tmp_path / "victim").iterdir())


def load_state_step(manifest: Path) -> int:
    return int(json.loads(manifest.read_text())["about"]["step"])


def test_what_was_written_of_a_killed_save_is_not_the_state(tmp_path: Path) -> None:
    save_step(tmp_path, 4)
    partial = tmp_path / "state" / "step-00000006"
    partial.mkdir()
    (partial / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"part")
    assert load_state(tmp_path, *trained(1)).step == 4
    assert json.loads((tmp_path / checkpoint.MANIFEST).read_text())["about"]["step"] == 4
