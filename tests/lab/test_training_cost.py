"""The cost of a training follows from the model's FLOPs, and the papers' accounts from theirs."""

import json

import pytest
from tests.test_cli import mistake, result

from manyheads.lab.training_cost import ACCOUNTS, DEVICES, training_cost
from manyheads.presets import preset
from manyheads.summary import summarize


def test_the_cost_is_that_of_every_token() -> None:
    config = preset("transformer-base")
    cost = training_cost(config, 10, 1000, length=25, device_kind="a100", utilization=0.5)
    per_token = summarize(config, 25).training_flops
    assert cost.flops == 10 * 1000 * sum(per_token.values())
    assert cost.device_hours == pytest.approx(cost.flops / (312e12 * 0.5) / 3600)
    twice = training_cost(config, 20, 1000, length=25, device_kind="a100", utilization=0.5)
    assert twice.flops == 2 * cost.flops
    assert twice.memory == cost.memory
    longer = training_cost(config, 10, 2000, length=25)
    assert longer.memory["activations"] == 2 * cost.memory["activations"]
    assert longer.memory["weights"] == cost.memory["weights"]


def test_published_accounts_are_the_lectures_numbers() -> None:
    published = [account.published for account in ACCOUNTS]
    assert published == pytest.approx([3.3e18, 2.3e19, 9.95e20, 3.14e23], rel=0.01)
    shares = [account.counted / account.published for account in ACCOUNTS]
    assert all(0.2 < share < 0.5 for share in shares[:3])
    assert 1 < shares[3] < 1.05


def test_the_command_adds_the_cost() -> None:
    words = ("info", "bert-base", "--steps", 100, "--batch-tokens", 4096)
    cost = json.loads(result(*words, "--json"))["cost"]
    assert cost["tokens"] == {"token": 409_600}
    assert "3.3e18" in result(*words)
    assert "cost" not in json.loads(result("info", "bert-base", "--json"))
    assert "--batch-tokens" in mistake("info", "bert-base", "--steps", 5)
    assert "did you mean 'h200'" in mistake(*words, "--device-kind", "h20")
    assert "--utilization" in mistake(*words, "--utilization", 1.5)
    assert all(name in result("info", "--help") for name in DEVICES)
