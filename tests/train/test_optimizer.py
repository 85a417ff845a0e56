"""Learning rates by the papers' formulas, Adam by PyTorch's, and settings that are refused."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from manyheads.config import parse
from manyheads.errors import UserError
from manyheads.train.optimizer import Train, build_optimizer, learning_rate

DECAYING = pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])


def rates(train: Train, dim: int = 512) -> list[float]:
    return [learning_rate(train, dim, step) for step in range(1, train.steps + 1)]


def test_the_transformer_schedule() -> None:
    """lrate = d^−0.5 · min(step^−0.5, step · warmup^−1.5); a learning_rate is its peak."""
    train = Train(steps=12_000, warmup_steps=4000)
    ours = rates(train)
    expected = [512**-0.5 * min(s**-0.5, s * 4000**-1.5) for s in range(1, 12_001)]
    assert ours == pytest.approx(expected, rel=1e-12)
    assert max(range(len(ours)), key=ours.__getitem__) + 1 == 4000
    scaled = rates(Train(steps=12_000, warmup_steps=4000, learning_rate=2e-3))
    assert max(scaled) == pytest.approx(2e-3, rel=1e-12)
    assert len({round(a / b, 9) for a, b in zip(scaled, ours, strict=True)}) == 1


@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
@DECAYING
def test_the_other_schedules_from_end_to_end(schedule: Any, min_lr_ratio: float) -> None:
    train = Train(
        steps=1000,
        warmup_steps=100,
        schedule=schedule,
        learning_rate=3e-3,
        min_lr_ratio=min_lr_ratio,
    )
    ours = rates(train)
    assert ours[:100] == pytest.approx([3e-5 * step for step in range(1, 101)])
    assert max(ours) == ours[99]
    if schedule == "constant":
        assert set(ours[99:]) == {ours[99]}
    else:
        assert ours[99] == ours[100]  # the first update after the warm-up has the full rate
        assert all(a > b for a, b in pairwise(ours[100:]))
        assert ours[-1] > 3e-3 * min_lr_ratio  # no update has a rate of 0
        quarter = {"linear": 0.75, "cosine": 0.5 * (1 + math.cos(math.pi / 4))}[schedule]
        at_quarter = 3e-3 * (min_lr_ratio + (1 - min_lr_ratio) * quarter)
        assert ours[325] == pytest.approx(at_quarter, rel=1e-9)
    # Past the end the rate neither rises again nor becomes negative.
    end = 3e-3 * (1.0 if schedule == "constant" else min_lr_ratio)
    for step in (1001, 5000):
        assert learning_rate(train, 512, step) == pytest.approx(end, abs=1e-15)


@pytest.mark.parametrize("schedule", ["transformer", "cosine", "linear", "constant"])
def test_no_warm_up_starts_at_the_peak(schedule: Any) -> None:
    train = Train(steps=100, warmup_steps=0, schedule=schedule, learning_rate=1e-3)
    ours = rates(train)
    assert all(math.isfinite(rate) and rate >= 0 for rate in ours)
    assert max(ours) == ours[0] == pytest.approx(1e-3)
    one_step = Train(steps=1, warmup_steps=0, schedule=schedule, learning_rate=1e-3)
    assert learning_rate(one_step, 1, 1) == pytest.approx(1e-3)


def test_warmup_stable_decay() -> None:
    train = Train(
        steps=1000,
        warmup_steps=100,
        schedule="wsd",
        decay_ratio=0.25,
        learning_rate=1.0,
        min_lr_ratio=0.1,
    )
    ours = rates(train)
    assert ours[:100] == pytest.approx([step / 100 for step in range(1, 101)])
    assert set(ours[99:751]) == {1.0}  # the first decayed update is the second of the last quarter
    assert ours[750:] == pytest.approx([0.1 + 0.9 * (1 - n / 250) for n in range(250)])
    assert learning_rate(train, 512, 2000) == pytest.approx(0.1)


def test_epochs_decide_steps_and_how_often_is_saved() -> None:
    train = Train(epochs=2.5, warmup_ratio=0.1, validate_every=500, save_every=30)
    settled = train.settled(40)
    assert (settled.steps, settled.warmup_steps) == (100, 10)
    assert (settled.validate_every, settled.save_every) == (40, 30)
    assert Train(steps=7).settled(40) == Train(steps=7)


def small() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def train_some(model: nn.Module, optimizer: torch.optim.Optimizer, train: Train) -> None:
    torch.manual_seed(6)
    for step in range(1, 21):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, 4, step)
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("beta1", "beta2", "eps"), [(0.9, 0.98, 1e-9), (0.5, 0.9, 0.1)])
def test_without_decay_it_is_the_papers_adam(beta1: float, beta2: float, eps: float) -> None:
    train = Train(warmup_steps=10, beta1=beta1, beta2=beta2, eps=eps)
    ours, theirs = small(), small()
    adam = torch.optim.Adam(theirs.parameters(), lr=0.0, betas=(beta1, beta2), eps=eps)
    train_some(ours, build_optimizer(ours, train), train)
    train_some(theirs, adam, train)
    start = small().state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert (tensor - start[name]).abs().max() > 0.01  # it did learn


def test_decay_shrinks_matrices_only_and_frozen_parameters_are_left_out() -> None:
    model = small()
    frozen = model[2].weight.requires_grad_(False)  # type: ignore[index]
    start = {name: tensor.clone() for name, tensor in model.named_parameters()}
    optimizer = build_optimizer(model, Train(weight_decay=0.1, warmup_steps=1))
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, tensor in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if tensor.ndim == 2 and tensor is not frozen else 1.0
        torch.testing.assert_close(tensor, factor * start[name])


# −1, 0, NaN and infinity of every number are in tests/test_settings.py.
@pytest.mark.parametrize("name", ["label_smoothing", "beta1", "beta2", "warmup_ratio"])
def test_fractions_of_one_or_more_are_refused(name: str) -> None:
    for value in (1.0, 1.5):
        with pytest.raises(UserError, match=f"train.{name}={value}"):
            parse(Train, {name: value}, "train")
    with pytest.raises(UserError, match=r"train.min_lr_ratio=1.5"):
        parse(Train, {"min_lr_ratio": 1.5}, "train")


@DECAYING
def test_schedules_that_need_a_learning_rate_say_so(schedule: Any) -> None:
    with pytest.raises(UserError, match=r"train\.learning_rate"):
        Train(schedule=schedule)
