"""Learning rates by the lectures' formula, Adam by PyTorch's own, and settings that are refused."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from manyheads.config import parse
from manyheads.errors import UserError
from manyheads.train.optimizer import Train, build_optimizer, learning_rate

TRANSFORMER = Train(steps=100_000, warmup_steps=4000)


def rates(train: Train, dim: int = 512) -> list[float]:
    return [learning_rate(train, dim, step) for step in range(1, train.steps + 1)]


def test_the_lectures_formula() -> None:
    """lrate = d^−0.5 · min(step^−0.5, step · warmup^−1.5)"""
    for step in [*range(1, 12_000, 7), 3999, 4000, 4001, 50_000, 100_000]:
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert math.isclose(learning_rate(TRANSFORMER, 512, step), expected, rel_tol=1e-12)


def test_the_transformer_curve_rises_to_its_peak_at_the_warm_up_and_falls() -> None:
    found = rates(Train(steps=12_000, warmup_steps=4000))
    assert max(range(len(found)), key=found.__getitem__) + 1 == 4000
    assert all(a < b for a, b in pairwise(found[:4000]))
    assert all(a > b for a, b in pairwise(found[3999:]))
    assert math.isclose(found[3999], 1 / math.sqrt(512 * 4000), rel_tol=1e-12)
    # The same at four times the step is half as much: it falls as step^−½.
    assert math.isclose(
        learning_rate(TRANSFORMER, 512, 64_000) / learning_rate(TRANSFORMER, 512, 16_000), 0.5
    )


def test_a_given_learning_rate_is_the_peak_of_the_same_curve() -> None:
    given = Train(steps=10_000, warmup_steps=400, learning_rate=2e-3)
    plain = Train(steps=10_000, warmup_steps=400)
    assert math.isclose(max(rates(given)), 2e-3, rel_tol=1e-12)
    ratios = {round(a / b, 9) for a, b in zip(rates(given), rates(plain), strict=True)}
    assert len(ratios) == 1


@pytest.mark.parametrize("final_share", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_other_schedules_from_end_to_end(schedule: Any, final_share: float) -> None:
    train = Train(
        steps=1000,
        warmup_steps=100,
        schedule=schedule,
        learning_rate=3e-3,
        min_lr_ratio=final_share,
    )
    found = rates(train)
    assert math.isclose(found[0], 3e-5)  # step 1 of 100
    assert math.isclose(found[49], 1.5e-3)
    assert math.isclose(found[99], 3e-3)
    assert max(found) == found[99]
    assert all(a < b for a, b in pairwise(found[:100]))
    if schedule == "constant":
        assert set(found[99:]) == {found[99]}
    else:
        assert found[99] == found[100]  # the first update after the warm-up has the whole rate
        assert all(a > b for a, b in pairwise(found[100:]))
        assert found[-1] > 3e-3 * final_share  # no update is without a rate
        middle = 3e-3 * (1 + final_share) / 2
        assert math.isclose(found[550], middle, rel_tol=1e-9)
    # Past the end the rate stays where it is: it neither rises again nor turns negative.
    end = 3e-3 * (1.0 if schedule == "constant" else final_share)
    for step in (1001, 5000):
        assert math.isclose(learning_rate(train, 512, step), end, abs_tol=1e-15)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_run_of_one_step_learns(schedule: Any) -> None:
    train = Train(steps=1, warmup_steps=0, schedule=schedule, learning_rate=1e-3)
    assert learning_rate(train, 1, 1) == 1e-3


def test_epochs_decide_steps_and_how_often_is_saved() -> None:
    train = Train(epochs=2.5, warmup_ratio=0.1, validate_every=500, save_every=30)
    settled = train.settled(40)
    assert (settled.steps, settled.warmup_steps) == (100, 10)
    assert (settled.validate_every, settled.save_every) == (40, 30)
    assert Train(steps=7).settled(40) == Train(steps=7)


def test_cosine_and_linear_differ_between_their_ends() -> None:
    both = [
        Train(steps=1000, warmup_steps=0, schedule=schedule, learning_rate=1.0)  # type: ignore[arg-type]
        for schedule in ("cosine", "linear")
    ]
    assert math.isclose(learning_rate(both[0], 1, 251), 0.5 * (1 + math.cos(math.pi / 4)))
    assert math.isclose(learning_rate(both[1], 1, 251), 0.75)


@pytest.mark.parametrize("schedule", ["transformer", "cosine", "linear", "constant"])
def test_no_warm_up_starts_at_the_peak(schedule: Any) -> None:
    train = Train(steps=100, warmup_steps=0, schedule=schedule, learning_rate=1e-3)
    found = rates(train)
    assert all(math.isfinite(rate) and rate >= 0 for rate in found)
    assert max(found) == found[0] <= 1e-3
    assert found[0] > 0.98e-3


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


def test_without_decay_it_is_the_papers_adam() -> None:
    train = Train(warmup_steps=10)
    ours, theirs = small(), small()
    adam = torch.optim.Adam(theirs.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9)
    train_some(ours, build_optimizer(ours, train), train)
    train_some(theirs, adam, train)
    start = small().state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert (tensor - start[name]).abs().max() > 0.01  # it did learn


def test_decay_shrinks_matrices_and_leaves_vectors() -> None:
    model = small()
    start = {name: tensor.clone() for name, tensor in model.named_parameters()}
    train = Train(weight_decay=0.1, warmup_steps=1)
    optimizer = build_optimizer(model, train)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, tensor in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if tensor.ndim == 2 else 1.0
        torch.testing.assert_close(tensor, factor * start[name])


def test_a_frozen_parameter_is_left_alone() -> None:
    model = small()
    frozen = next(model.parameters()).requires_grad_(False)
    kept = [p for group in build_optimizer(model, Train()).param_groups for p in group["params"]]
    assert len(kept) == len(list(model.parameters())) - 1
    assert all(p is not frozen for p in kept)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_tokens", 0),
        ("accumulate", 0),
        ("validate_every", 0),
        ("save_every", -1),
        ("average_checkpoints", 0),
        ("log_every", 0),
        ("warmup_steps", -1),
        ("learning_rate", 0.0),
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("clip", 0.0),
        ("clip", -1.0),
        ("label_smoothing", 1.0),
        ("label_smoothing", -0.1),
        ("beta1", 1.0),
        ("beta2", -0.5),
        ("eps", -1e-9),
        ("weight_decay", -0.1),
        ("min_lr_ratio", 1.5),
        ("min_lr_ratio", -0.1),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UserError) as caught:
        parse(Train, {name: value}, "train")
    assert f"train.{name}={value}" in str(caught.value)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_that_need_a_learning_rate_say_so(schedule: Any) -> None:
    with pytest.raises(UserError, match=r"needs a train\.learning_rate"):
        Train(schedule=schedule)
