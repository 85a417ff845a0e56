"""Mixture of experts: the result of a token, dropped tokens, and the balance loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tasks.small_texts import trainer, write_texts
from torch import Tensor

from manyheads.errors import UserError
from manyheads.nn.experts import ExpertFeedForward, Experts, take_routing
from manyheads.nn.layers import Plain

DIM, FFN_DIM = 6, 10


def build(**settings: Any) -> ExpertFeedForward:
    module = Experts(**settings).build(DIM, FFN_DIM, bias=True).double()
    assert isinstance(module, ExpertFeedForward)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def route_to(module: ExpertFeedForward, expert: int) -> None:
    """Tokens with positive channels choose this expert first."""
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[expert] = 1.0


def by_hand(module: ExpertFeedForward, x: Tensor) -> Tensor:
    """Token by token, as in the formula."""
    rows = []
    for token in x.flatten(0, 1):
        gates, chosen = (module.router.weight @ token).softmax(-1).topk(module.config.top)
        if module.config.top > 1:
            gates = gates / gates.sum()
        y = torch.zeros_like(token)
        for gate, expert in zip(gates, chosen, strict=True):
            inner = (token @ module.inner.weight[expert] + module.inner.bias[expert, 0]).relu()  # type: ignore[index]
            y = y + gate * (inner @ module.outer.weight[expert] + module.outer.bias[expert, 0])  # type: ignore[index]
        rows.append(y)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("experts", "top"), [(4, 1), (4, 2), (1, 1), (3, 2)])
def test_the_formula_token_by_token(experts: int, top: int, training: bool) -> None:
    """With capacity for all, in training and in inference; gradients of everything too."""
    module = build(experts=experts, top=top, capacity=100.0).train(training)
    x = torch.randn(3, 5, DIM, dtype=torch.float64, requires_grad=True)
    expected, result = by_hand(module, x), module(x)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    tensors, cotangent = [x, *module.parameters()], torch.randn_like(result)
    ours, theirs = (torch.autograd.grad(y, tensors, cotangent) for y in (result, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_one_expert_is_the_plain_feedforward(training: bool) -> None:
    module = build(experts=1, capacity=1.0).train(training)
    plain: Any = Plain().build(DIM, FFN_DIM, bias=True).double()
    with torch.no_grad():
        for name in ("inner", "outer"):
            getattr(plain, name).weight.copy_(getattr(module, name).weight[0].T)
            getattr(plain, name).bias.copy_(getattr(module, name).bias[0, 0])
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    torch.testing.assert_close(module(x), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "capacity", "slots"), [(20, 1.0, 5), (10, 1.0, 3), (10, 0.5, 2), (3, 0.1, 1)]
)
def test_tokens_beyond_the_capacity_are_dropped(tokens: int, capacity: float, slots: int) -> None:
    """⌈capacity · tokens / experts⌉ slots: the first tokens get them, the others give zero."""
    module = build(experts=4, top=1, capacity=capacity).train()
    route_to(module, 2)
    x = torch.rand(1, tokens, DIM, dtype=torch.float64)
    y = module(x)[0]
    [routing] = take_routing(module)
    assert (int(routing.dropped), routing.places) == (tokens - slots, tokens)
    torch.testing.assert_close(y[:slots], by_hand(module, x)[0, :slots])
    assert not y[slots:].any()
    assert take_routing(module) == []  # returned once


def test_first_choices_come_before_second_ones() -> None:
    """Expert 0 is the first choice of half of the tokens and the second of the others."""
    module = build(experts=2, top=2, capacity=0.5).train()
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[0, 0], module.router.weight[1, 0] = 1.0, -1.0
    x = torch.rand(1, 8, DIM, dtype=torch.float64)
    x[:, :4, 0] *= -1  # the earlier tokens choose expert 1 first
    y = module(x)[0]
    [routing] = take_routing(module)
    assert (int(routing.dropped), routing.places) == (8, 16)  # four slots each, for first choices
    module.config = Experts(experts=2, top=2, capacity=100.0)
    first = module.router.weight @ x[0, 7]
    gate = first.softmax(-1)[0]
    inner = (x[0, 7] @ module.inner.weight[0] + module.inner.bias[0, 0]).relu()  # type: ignore[index]
    expected = gate * (inner @ module.outer.weight[0] + module.outer.bias[0, 0])  # type: ignore[index]
    torch.testing.assert_close(y[7], expected)


@pytest.mark.parametrize("top", [1, 2])
def test_the_balance_loss_is_its_formula(top: int) -> None:
    """balance · E · Σ_e f_e P_e with the shares f of first choices; it trains the router."""
    module = build(experts=4, top=top, balance=0.3).train()
    x = torch.randn(2, 10, DIM, dtype=torch.float64)
    module(x)
    [routing] = take_routing(module)
    probs = (x.flatten(0, 1) @ module.router.weight.T).softmax(-1)
    first = torch.bincount(probs.argmax(-1), minlength=4) / 20
    torch.testing.assert_close(routing.loss, 0.3 * 4 * (first * probs.mean(0)).sum())
    [grad] = torch.autograd.grad(routing.loss, [module.router.weight])
    assert grad.any()


def test_the_balance_loss_is_least_if_the_load_is_even() -> None:
    module = build(experts=4, balance=1.0).train()
    even = torch.eye(4, DIM, dtype=torch.float64).repeat(5, 1)[None]
    with torch.no_grad():
        module.router.weight.copy_(20 * torch.eye(4, DIM))
    for x, loss in ((even, 1.0), (even[:, :1].expand(-1, 20, -1), 4.0)):
        module(x)
        [routing] = take_routing(module)
        assert float(routing.loss.detach()) == pytest.approx(loss, abs=1e-4)


def test_in_inference_tokens_are_independent() -> None:
    module = build(experts=4, top=2, capacity=0.25).eval()
    x = torch.randn(3, 6, DIM, dtype=torch.float64)
    separate = torch.cat([module(x[row : row + 1]) for row in range(3)])
    torch.testing.assert_close(module(x), separate, rtol=1e-12, atol=1e-12)
    assert take_routing(module) == []


def test_more_choices_than_experts() -> None:
    with pytest.raises(UserError, match=r"feedforward.top=2 of 1 experts"):
        Experts(experts=1, top=2)


def test_a_run_reports_its_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_texts(tmp_path / "texts")
    settings = ("model.feedforward=experts", "model.feedforward.experts=4", "train.log_every=2")
    loop = trainer("causal stream", texts, tmp_path / "run", *settings, "train.accumulate=2")
    loop.run()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    logged = [line for line in lines if line["split"] == "train"]
    assert logged
    layers = sum(isinstance(module, ExpertFeedForward) for module in loop.model.modules())
    for line in logged:
        assert 0 <= line["dropped"] < 1
        # Near its least, balance · 1 for each layer, and part of the loss.
        assert 0.009 * layers < line["balance_loss"] < 0.02 * layers
        assert line["loss"] == pytest.approx(line["tokens_loss"] + line["balance_loss"])
    assert "dropped" not in lines[-1]
    share = f"{logged[-1]['dropped']:.1%}"
    assert f"loss {logged[-1]['loss']:.3f}  dropped {share}  " in capsys.readouterr().err
