"""The feed-forward part: its two formulas, each position by itself."""

import math

import pytest
import torch
from torch import Tensor

from manyheads.nn.feedforward import Gated, Plain


def by_hand(name: str, x: float) -> float:
    """The activations, one number at a time."""
    return {
        "relu": max(0.0, x),
        "gelu": x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
        "gelu-tanh": 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": x / (1 + math.exp(-x)),
    }[name]


def activate(name: str, x: Tensor) -> Tensor:
    numbers = [by_hand(name, number) for number in x.flatten().tolist()]
    return torch.tensor(numbers, dtype=x.dtype).view_as(x)


ACTIVATIONS = ["relu", "gelu", "gelu-tanh", "silu"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plain_is_its_formula(activation: str, bias: bool) -> None:
    """act(x W₁ + b₁) W₂ + b₂."""
    part = Plain(activation=activation).build(4, 7, bias).double()  # type: ignore[arg-type]
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    p = dict(part.named_parameters())
    inner = x @ p["inner.weight"].T + (p["inner.bias"] if bias else 0)
    expected = activate(activation, inner) @ p["outer.weight"].T + (p["outer.bias"] if bias else 0)
    torch.testing.assert_close(part(x), expected, rtol=0, atol=1e-10)
    assert sum(q.numel() for q in p.values()) == 2 * 4 * 7 + (4 + 7) * bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_is_its_formula(activation: str, bias: bool) -> None:
    """(act(x W) ∘ x V) W₂: with silu SwiGLU, with gelu GEGLU."""
    part = Gated(activation=activation).build(4, 7, bias).double()  # type: ignore[arg-type]
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    p = dict(part.named_parameters())
    gate = x @ p["gate.weight"].T + (p["gate.bias"] if bias else 0)
    inner = x @ p["inner.weight"].T + (p["inner.bias"] if bias else 0)
    mixed = activate(activation, gate) * inner
    expected = mixed @ p["outer.weight"].T + (p["outer.bias"] if bias else 0)
    torch.testing.assert_close(part(x), expected, rtol=0, atol=1e-10)
    assert sum(q.numel() for q in p.values()) == 3 * 4 * 7 + (4 + 2 * 7) * bias


@pytest.mark.parametrize("config", [Plain(), Gated()])
def test_positions_do_not_meet(config: Plain | Gated) -> None:
    """Each position goes through by itself: shuffled in, shuffled out."""
    part, x = config.build(4, 7, True).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    order = torch.tensor([4, 2, 0, 1, 3])
    torch.testing.assert_close(part(x[:, order]), part(x)[:, order])


@pytest.mark.parametrize("config", [Plain(dropout=0.999999), Gated(dropout=0.999999)])
def test_dropout_is_on_the_inner_activations(config: Plain | Gated) -> None:
    """With every inner activation gone, the outer bias is what is left, in training alone."""
    part, x = config.build(4, 7, True), torch.randn(2, 3, 4)
    gone = part(x)
    torch.testing.assert_close(gone, part.outer.bias.expand(2, 3, 4))  # type: ignore[union-attr]
    assert not torch.allclose(part.eval()(x), gone)
