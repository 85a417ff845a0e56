"""Mixture of experts: what a token becomes, who is refused, and what keeps the work even."""

import json
from pathlib import Path

import pytest
import torch
from tests.tasks.small_texts import trainer, write_texts
from torch import Tensor

from manyheads.errors import UserError
from manyheads.nn.experts import ExpertFeedForward, Experts, take_routing
from manyheads.nn.feedforward import Plain

DIM, HIDDEN = 6, 10


def built(config: Experts, seed: int = 1) -> ExpertFeedForward:
    torch.manual_seed(seed)
    module = config.build(DIM, HIDDEN, bias=True).double()
    assert isinstance(module, ExpertFeedForward)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def by_hand(module: ExpertFeedForward, x: Tensor) -> Tensor:
    """Token by token, as the formula says."""
    rows = []
    for token in x.flatten(0, 1):
        chances = (module.router.weight @ token).softmax(-1)
        gates, chosen = chances.topk(module.config.top)
        if module.config.top > 1:
            gates = gates / gates.sum()
        whole = torch.zeros_like(token)
        for gate, expert in zip(gates, chosen, strict=True):
            inner = (token @ module.inner.weight[expert] + module.inner.bias[expert, 0]).relu()  # type: ignore[index]
            outer = inner @ module.outer.weight[expert] + module.outer.bias[expert, 0]  # type: ignore[index]
            whole = whole + gate * outer
        rows.append(whole)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("experts", "top"), [(4, 1), (4, 2), (1, 1), (3, 2)])
def test_the_formula_token_by_token(experts: int, top: int, training: bool) -> None:
    """With room for all, in training as in use; gradients of everything too."""
    config = Experts(experts=experts, top=top, capacity=100.0)  # type: ignore[arg-type]
    module = built(config).train(training)
    x = torch.randn(3, 5, DIM, dtype=torch.float64, requires_grad=True)
    wanted = by_hand(module, x)
    found = module(x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    inputs = [x, *module.parameters()]
    weights = torch.randn_like(found)
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((wanted * weights).sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_one_expert_is_the_plain_feedforward(training: bool) -> None:
    module = built(Experts(experts=1, capacity=1.0)).train(training)
    plain = Plain().build(DIM, HIDDEN, bias=True).double()
    names = {"inner": module.inner, "outer": module.outer}
    state = {}
    for name, projections in names.items():
        assert projections.bias is not None
        state |= {f"{name}.weight": projections.weight[0].T, f"{name}.bias": projections.bias[0, 0]}
    plain.load_state_dict(state)
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    torch.testing.assert_close(module(x), plain(x), rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    """All tokens want one expert: the first that fit are served, the others become nothing."""
    module = built(Experts(experts=4, top=1, capacity=1.0)).train()
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[2] = 1.0
    x = torch.rand(2, 10, DIM, dtype=torch.float64)  # positive: expert 2 has the highest score
    found = module(x).flatten(0, 1)
    [routing] = take_routing(module)
    assert (int(routing.dropped), routing.places) == (15, 20)  # room for 20 / 4
    torch.testing.assert_close(found[:5], by_hand(module, x).flatten(0, 1)[:5])
    assert not found[5:].any()
    assert take_routing(module) == []  # told once


def test_first_choices_come_before_second_ones() -> None:
    module = built(Experts(experts=2, top=2, capacity=0.5)).train()
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[0] = 1.0
    x = torch.rand(1, 8, DIM, dtype=torch.float64)
    module(x)
    [routing] = take_routing(module)
    # Each expert has room for 4 of 8: of 16 places 8 are refused, four of either choice.
    assert (int(routing.dropped), routing.places) == (8, 16)


def test_the_balance_loss_is_least_where_the_work_is_even() -> None:
    config = Experts(experts=4, balance=1.0)
    module = built(config).train()
    even = torch.eye(4, DIM, dtype=torch.float64).repeat(5, 1)[None]
    with torch.no_grad():
        module.router.weight.copy_(20 * torch.eye(4, DIM))
    module(even)
    [routing] = take_routing(module)
    assert float(routing.loss.detach()) == pytest.approx(1.0, abs=1e-6)
    module(even[:, :1].expand(-1, 20, -1))  # all want the first expert
    [routing] = take_routing(module)
    assert float(routing.loss.detach()) == pytest.approx(4.0, abs=1e-4)
    module(torch.randn(1, 20, DIM, dtype=torch.float64))
    [routing] = take_routing(module)
    [gradient] = torch.autograd.grad(routing.loss, [module.router.weight])
    assert gradient.abs().sum() > 0


def test_in_use_a_token_hangs_on_no_other() -> None:
    module = built(Experts(experts=4, top=2, capacity=0.25)).eval()
    x = torch.randn(3, 6, DIM, dtype=torch.float64)
    alone = torch.cat([module(x[row : row + 1]) for row in range(3)])
    torch.testing.assert_close(module(x), alone, rtol=1e-12, atol=1e-12)
    assert take_routing(module) == []


def test_more_choices_than_experts() -> None:
    with pytest.raises(UserError, match=r"feedforward.top=2 of 1 experts"):
        Experts(experts=1, top=2)


def test_a_run_tells_what_its_experts_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts")
    settings = ("model.feedforward=experts", "model.feedforward.experts=4", "train.log_every=2")
    found = trainer("causal stream", texts, tmp_path / "run", *settings, "train.accumulate=2")
    found.run()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    trained = [line for line in lines if line["split"] == "train"]
    assert trained
    for line in trained:
        assert 0 <= line["dropped"] < 1
        layers = sum(isinstance(m, ExpertFeedForward) for m in found.model.modules())
        # Near its least, balance · 1 a layer, and part of what is minimised.
        assert 0.009 * layers < line["balance_loss"] < 0.02 * layers
        assert line["loss"] == pytest.approx(line["tokens_loss"] + line["balance_loss"])
    assert "dropped" not in lines[-1]
    share = f"{trained[-1]['dropped']:.1%}"
    assert f"loss {trained[-1]['loss']:.3f}  dropped {share}  " in capsys.readouterr().err
