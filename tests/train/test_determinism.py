"""`train.deterministic`: a resumed run has the same bits, on a GPU too."""

import os
from pathlib import Path

import pytest
import torch
from tests.tasks.small_texts import CASES, write_texts
from tests.train.small_runs import CPU, assert_same_bits, hurt, saved, trainer, write_recipe

from manyheads.errors import UserError
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.train.loop import Trainer

# cuBLAS reads it at the first product of the process, which may be in a test of another file.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ON = "train.deterministic=true"


def test_the_setting_changes_no_bit_on_a_cpu_and_ends_with_the_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    actual, seen = trainer(recipe, tmp_path / "on", ON), []
    hurt(actual, 3, lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
    actual.run()
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    trainer(recipe, tmp_path / "off").run()
    assert_same_bits(tmp_path / "on", tmp_path / "off")


def test_what_cannot_be_deterministic_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    with pytest.raises(UserError, match=r"train\.compile"):
        trainer(recipe, tmp_path / "run", ON, "train.compile=yes")
    actual = trainer(recipe, tmp_path / "run", ON)
    hurt(actual, 3, lambda: torch.zeros(3).put_(torch.tensor([1]), torch.ones(1)))
    with pytest.raises(UserError, match=r"train\.deterministic=true: put_") as refused:
        actual.run()
    actual.close()
    assert len(str(refused.value).splitlines()) == 1
    assert not torch.are_deterministic_algorithms_enabled()


class Killed(Exception):
    """Raised in the middle of a run."""


def kill() -> None:
    raise Killed


SIZES = ("model.dim=64", "model.heads=4", "model.layers=2", "model.dropout=0.1")


def build(name: str, folder: Path, out: Path, deterministic: bool, device: torch.device) -> Trainer:
    """A GPT whose sequences are too long for our kernels, or a translator."""
    setting = f"train.deterministic={str(deterministic).lower()}"
    if name == "gpt":
        texts = write_texts(folder / "texts", documents=400)
        case = CASES["causal stream"]
        run = read_recipe(case.recipe, [*case.all(texts), *SIZES, "model.max_length=192", setting])
    else:
        recipe = write_recipe(folder / "pairs")
        run = read_recipe(str(recipe), [*SIZES, "model.attention_dropout=0.1", setting])
    return make_trainer(run, out, device)


def resumed_and_complete(
    name: str, folder: Path, deterministic: bool, device: torch.device
) -> tuple[Path, Path]:
    """A run that is killed in step 10, between two saves, and resumed; and an uninterrupted one."""
    build(name, folder, folder / "complete", deterministic, device).run()
    killed = build(name, folder, folder / "killed", deterministic, device)
    hurt(killed, 10, kill)
    with pytest.raises(Killed):
        killed.run()
    killed.close()
    resumed = build(name, folder, folder / "killed", deterministic, device)
    assert 0 < resumed.progress.step < 10
    resumed.run()
    return folder / "killed", folder / "complete"


def test_a_resumed_run_has_the_same_bits_on_a_cpu(tmp_path: Path) -> None:
    assert_same_bits(*resumed_and_complete("gpt", tmp_path, True, CPU))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", ["gpt", "translator"])
def test_a_resumed_run_has_the_same_bits_on_a_gpu(
    name: str, deterministic: bool, tmp_path: Path
) -> None:
    """With the setting; without it the weights are near, and the differences are printed."""
    resumed, complete = resumed_and_complete(name, tmp_path, deterministic, torch.device("cuda"))
    if deterministic:
        assert_same_bits(resumed, complete)
        return
    ours, theirs = saved(resumed), saved(complete)
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    print(f"{name}: {len(different)} of {len(ours)} tensors differ without the setting")
    for key in different:
        if key.startswith("model.safetensors"):
            torch.testing.assert_close(ours[key], theirs[key], rtol=0.1, atol=1e-2)
