"""A sentence of the lectures as an experiment with a criterion.

`measure` computes numbers, `judge` is a pure function of them: the same numbers always have the
same verdict, and numbers can be given for which it fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal

import torch

Verdict = Literal["holds", "fails", "depends"]
Points = Sequence[tuple[float | int, float]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an experiment is run: once for each seed, and at a size for a CPU or for a GPU."""

    seeds: tuple[int, ...] = (1, 2, 3)
    large: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Numbers by name, one value a seed, and lines to draw.

    `logarithmic` names the axes of the picture that are: "across", "up".
    """

    numbers: dict[str, list[float]]
    lines: Mapping[str, Points] = field(default_factory=dict)
    across: str = ""
    up: str = ""
    logarithmic: tuple[str, ...] = ()

    def mean(self, name: str) -> float:
        return fmean(self.numbers[name])

    def least(self, name: str) -> float:
        return min(self.numbers[name])

    def most(self, name: str) -> float:
        return max(self.numbers[name])

    def told(self, name: str) -> str:
        """The mean, and the standard deviation over the seeds where there are several."""
        values = self.numbers[name]
        spread = f" ± {stdev(values):.2g}" if len(values) > 1 and stdev(values) else ""
        return f"{fmean(values):.3g}{spread}"


@dataclass(frozen=True)
class Judged:
    """A verdict and the numbers that led to it, in a line."""

    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence in our words, the deck that says it, and what it takes to hold."""

    sentence: str
    deck: str
    criterion: str
    measure: Callable[[Setting], Measured]
    judge: Callable[[Measured], Judged]


def holds_if(condition: bool, why: str) -> Judged:
    """The plain case: one condition decides."""
    return Judged("holds" if condition else "fails", why)
