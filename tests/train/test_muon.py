"""Muon: its parameters, its update, and exact resuming of a run."""

from pathlib import Path

import pytest
import torch
from small_runs import assert_same_bits, trainer, write_recipe
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyheads.errors import UserError
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.positions import Learned
from manyheads.train.muon import MuonAdamW, orthogonalise, split_matrices
from manyheads.train.optimizer import Train, build_optimizer


def build() -> Gpt:
    torch.manual_seed(1)
    return GptConfig(vocab_size=50, dim=32, layers=2, heads=4, kv_heads=2, tie="none").build()


def test_linear_layers_of_blocks_are_muons_and_all_else_adams() -> None:
    model = Seq2SeqConfig(vocab_size=50, dim=32, layers=1, position=Learned()).build()
    optimizer = build_optimizer(model, Train(optimizer="muon"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    *adam, muon = optimizer.param_groups
    assert {names[p] for p in muon["params"]} == {
        f"{stack}.blocks.0.{layer}.weight"
        for stack, parts in (
            ("encoder", ("attention.project", "attention.output")),
            ("decoder", ("attention.project", "attention.output")),
            ("decoder", ("cross.query", "cross.project", "cross.output")),
            ("encoder", ("feedforward.inner", "feedforward.outer")),
            ("decoder", ("feedforward.inner", "feedforward.outer")),
        )
        for layer in parts
    }
    grouped = [p for group in (*adam, muon) for p in group["params"]]
    assert len(grouped) == len(names) == len({*grouped, *names})


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    with FlopCounterMode(display=False) as counter:
        result = orthogonalise(torch.randn(3, *shape) * 40)
    values = torch.linalg.svdvals(result.float())
    assert values.min() > 0.6
    assert values.max() < 1.3
    # Each iteration has X Xᵀ of the shorter side, its square, and a product with X.
    assert counter.get_total_flops() == 5 * 3 * 2 * (2 * 24**2 * 64 + 24**3)


def test_the_update_is_that_of_pytorchs_muon_with_q_k_and_v_apart() -> None:
    """PyTorch's gets q, k and v as parameters of their own."""
    model = build()
    optimizer = build_optimizer(
        model,
        Train(optimizer="muon", weight_decay=0.1, learning_rate=0.01, muon_learning_rate=0.02),
    )
    rows = split_matrices(model)
    assert rows[model.decoder.blocks[0].attention.project.weight] == [32, 16, 16]  # type: ignore[index, union-attr]
    parts = {p: [nn.Parameter(x.detach().clone()) for x in p.split(rows[p])] for p in rows}
    theirs = torch.optim.Muon(
        [x for group in parts.values() for x in group],
        lr=0.02,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group.get("lr_scale", 1.0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for p, group in parts.items():
            for x, gradient in zip(group, p.grad.split(rows[p]), strict=True):  # type: ignore[union-attr]
                x.grad = gradient.clone()
        optimizer.step()
        theirs.step()
    for p, group in parts.items():
        torch.testing.assert_close(p, torch.cat(group), atol=2e-3, rtol=0)  # bfloat16


def test_without_a_rate_of_its_own_muon_follows_the_schedule() -> None:
    settings = Train(optimizer="muon", learning_rate=0.01)
    groups = build_optimizer(build(), settings).param_groups
    assert [group.get("lr_scale", 1.0) for group in groups] == [1.0] * 3


def test_state_dict_restores_the_optimizer() -> None:
    model = build()
    first, second = (build_optimizer(model, Train(optimizer="muon")) for _ in range(2))
    assert isinstance(first, MuonAdamW)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    first.step()
    second.load_state_dict(first.state_dict())
    for parameter, state in first.state.items():
        assert state.keys() == second.state[parameter].keys()
        assert all(torch.equal(value, second.state[parameter][key]) for key, value in state.items())


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    recipe, muon = write_recipe(tmp_path), "train.optimizer=muon"
    trainer(recipe, tmp_path / "once", muon).run()
    trainer(recipe, tmp_path / "twice", muon, "train.steps=12").run()
    trainer(recipe, tmp_path / "twice", muon).run()
    assert_same_bits(tmp_path / "once", tmp_path / "twice")


def test_models_without_blocks_and_sharded_matrices_are_refused() -> None:
    with pytest.raises(UserError, match=r"train\.optimizer"):
        build_optimizer(nn.Linear(2, 2), Train(optimizer="muon"))
    with pytest.raises(UserError, match=r"train\.parallel"):
        Train(optimizer="muon", parallel="fsdp")
