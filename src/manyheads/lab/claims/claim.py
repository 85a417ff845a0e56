"""A sentence of the lectures as an experiment with a criterion.

`measure` computes numbers, `judge` is a pure function of them: the same numbers always have the
same verdict, and numbers can be given for which it fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from statistics import fmean, stdev
from typing import Literal

import torch

Verdict = Literal["holds", "fails", "depends"]
Points = Sequence[tuple[float | int, float]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an experiment is run: once for each seed, and at a size for a CPU or for a GPU.

    `threads` is how many were asked for, if that was said.
    """

    seeds: tuple[int, ...] = (1, 2, 3)
    large: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: int | None = None


def mean(values: Sequence[float]) -> float:
    """Σ x / n, also of what is infinite; `fmean` would refuse ∞ − ∞, which is no number."""
    return fmean(values) if all(map(isfinite, values)) else sum(values) / len(values)


def spread(values: Sequence[float]) -> str:
    """The standard deviation, to stand after a mean; nothing where there is none to tell."""
    if len(values) < 2 or not all(map(isfinite, values)) or not stdev(values):
        return ""
    return f" ± {stdev(values):.2g}"


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
        return mean(self.numbers[name])

    def least(self, name: str) -> float:
        return self._end(name, min)

    def most(self, name: str) -> float:
        return self._end(name, max)

    def told(self, name: str) -> str:
        """The mean, and the standard deviation over the seeds where there are several."""
        return f"{self.mean(name):.3g}{spread(self.numbers[name])}"

    def _end(self, name: str, of: Callable[[Sequence[float]], float]) -> float:
        """NaN if one of them is: `min` and `max` would pass over it where it is not the first."""
        values = self.numbers[name]
        return nan if any(map(isnan, values)) else of(values)


@dataclass(frozen=True)
class Judged:
    """A verdict and the numbers that led to it, in a line."""

    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence in our words, the decks that say it, and what it takes to hold.

    `deck` is "none" where it is the paper that says it, and no deck.
    """

    sentence: str
    deck: str
    criterion: str
    measure: Callable[[Setting], Measured]
    judge: Callable[[Measured], Judged]


def holds_if(condition: bool, why: str) -> Judged:
    """The plain case: one condition decides."""
    return Judged("holds" if condition else "fails", why)


def in_parts(parts: Mapping[str, bool], why: str, needed: Sequence[str] = ()) -> Judged:
    """Holds if all parts do; fails if none does, or one that is `needed` does not.

    Between these it depends, and the parts that hold are named.
    """
    held = [part for part, found in parts.items() if found]
    if len(held) == len(parts):
        return Judged("holds", why)
    if not held or not all(parts[part] for part in needed):
        return Judged("fails", why)
    return Judged("depends", f"holds only in this, that {listed(held)}: {why}")


def listed(names: Sequence[str]) -> str:
    """One, two and three."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
