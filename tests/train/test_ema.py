"""EMA of the weights: its formula, its use, and exact resuming."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import assert_same_bits, trainer, write_recipe
from torch import nn

from manyheads.errors import UserError
from manyheads.train.optimizer import Ema, Train


def test_the_formula_and_the_swap() -> None:
    model = nn.Linear(3, 2)
    expected, ema = model.weight.detach().clone(), Ema(model, 0.5)
    for step in range(1, 9):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    trained = model.weight.detach().clone()
    with ema.swapped():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, trained)
    torch.testing.assert_close(ema.averages["weight"], expected)


def test_a_resumed_run_has_the_same_bits_and_leaves_the_average(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    settings = ("train.ema_decay=0.9", "train.optimizer=muon", "train.checkpoint=last")
    trainer(recipe, tmp_path / "once", *settings).run()
    trainer(recipe, tmp_path / "twice", *settings, "train.steps=12").run()
    trainer(recipe, tmp_path / "twice", *settings).run()
    assert_same_bits(tmp_path / "once", tmp_path / "twice")
    state = load_file(tmp_path / "once" / "state" / "last.safetensors")
    for name, weight in load_file(tmp_path / "once" / "model.safetensors").items():
        assert torch.equal(weight, state[f"ema.{name}"])
        assert not torch.equal(weight, state[f"model.{name}"])


def test_two_averages_are_refused() -> None:
    with pytest.raises(UserError, match=r"train\.average_checkpoints"):
        Train(ema_decay=0.9, average_checkpoints=2)
