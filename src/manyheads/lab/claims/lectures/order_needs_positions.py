"""Attention without positions is equivariant to permutations of the words."""

import torch

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, holds_if
from manyheads.models.bert import BertConfig
from manyheads.nn.attention import Dense
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    PositionConfig,
    Rotary,
    Shaw,
    Sinusoidal,
)

LENGTH, VOCABULARY = 24, 50
SCHEMES: tuple[PositionConfig, ...] = (
    *(NoPosition(), Sinusoidal(), Learned(), Rotary(), Shaw(), Buckets(), Alibi()),
)


def moved(position: PositionConfig, seed: int) -> float:
    """‖f(π x) − π f(x)‖ / ‖f(x)‖ for a random permutation π."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        layers=2,
        heads=4,
        max_length=LENGTH,
        position=position,
        attention=Dense(),
    )
    model = config.build().double().eval()
    tokens, order = torch.randint(VOCABULARY, (4, LENGTH)), torch.randperm(LENGTH)
    with torch.no_grad():
        plain, other = model.hidden(tokens)[:, order], model.hidden(tokens[:, order])
    return float((plain - other).norm() / plain.norm())


def measure(setting: Setting) -> Measured:
    names = {position.kind: position for position in SCHEMES}
    numbers = {
        name: [moved(position, seed) for seed in setting.seeds] for name, position in names.items()
    }
    return Measured(numbers=numbers)


def judge(measured: Measured) -> Judged:
    others = {name: measured.least(name) for name in measured.numbers if name != "none"}
    nearest = min(others, key=lambda name: others[name])
    return holds_if(
        measured.most("none") < 1e-12 and others[nearest] > 1e-2,
        f"shuffled words change an encoder without positions by {measured.reported('none')} of its "
        f"states; with positions by {others[nearest]:.2g} ({nearest}) or more",
    )


CLAIM = Claim(
    sentence="Without positions attention treats a text as an unordered set: shuffling the words "
    "shuffles the states and changes nothing else. Every position scheme changes that.",
    lectures="001, 002, 003",
    criterion="without positions the difference is rounding (below 1e-12 in float64), with any "
    "scheme above 1 % of the states",
    measure=measure,
    judge=judge,
)
