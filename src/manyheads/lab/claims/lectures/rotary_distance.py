"""Rotary positions: a score depends on the distance of two words, not on their positions."""

import torch

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, holds_if
from manyheads.nn.positions import PositionSizes, Rotary, Sinusoidal

LENGTH, CHANNELS = 256, 64


def scores(scheme: str, seed: int) -> torch.Tensor:
    """q · k of one query and one key vector at every pair of positions."""
    torch.manual_seed(seed)
    sizes = PositionSizes(dim=CHANNELS, heads=1, head_dim=CHANNELS, max_length=LENGTH, causal=False)
    places = torch.arange(LENGTH)[None]
    q, k = (torch.randn(CHANNELS, dtype=torch.float64).expand(1, LENGTH, -1) for _ in range(2))
    if scheme == "rotary":
        position = Rotary().build(sizes)
        q, k = (position.rotate(x[:, None], places)[0, 0] for x in (q, k))
    else:
        position = Sinusoidal().build(sizes)
        q, k = (position.embed(x, places)[0] for x in (q, k))
    return q @ k.T


def spread(table: torch.Tensor) -> float:
    """The standard deviation of scores at equal distance, relative to that of all scores."""
    within = torch.stack([table.diagonal(d).std() for d in range(1, LENGTH // 2)])
    return float(within.mean() / table.std())


def measure(setting: Setting) -> Measured:
    names = ("rotary", "sinusoidal")
    numbers = {name: [spread(scores(name, seed)) for seed in setting.seeds] for name in names}
    table = {name: scores(name, setting.seeds[0]) for name in names}
    lines = {
        f"{name}, places {first} and {first} + distance": [
            (float(d), float(table[name][first, first + d])) for d in range(LENGTH // 2)
        ]
        for name in names
        for first in (0, 100)
    }
    return Measured(numbers=numbers, lines=lines, across="distance", up="score")


def judge(measured: Measured) -> Judged:
    return holds_if(
        measured.most("rotary") < 1e-9 and measured.least("sinusoidal") > 0.05,
        f"the standard deviation of scores at equal distance, relative to that of all scores, is "
        f"{measured.reported('rotary')} with rotary positions and "
        f"{measured.reported('sinusoidal')} with added sinusoids",
    )


CLAIM = Claim(
    sentence="With rotary positions the score of two words depends only on their distance; with "
    "positions that are added to the word vectors it does not.",
    lectures="002",
    criterion="below 1e-9 of the standard deviation (float64) for rotary, above 0.05 for added "
    "sinusoids",
    measure=measure,
    judge=judge,
)
