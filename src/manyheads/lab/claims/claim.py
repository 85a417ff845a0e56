"""A statement of the lectures as an experiment with a criterion.

`measure` computes numbers; `judge` is a pure function of them. The same numbers always give the
same verdict, and a test can pass numbers for which the claim fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from statistics import fmean, stdev
from typing import Literal

import torch

from manyheads.errors import UserError

Verdict = Literal["holds", "fails", "depends"]
Points = Sequence[tuple[float | int, float]]

LECTURES = {
    "000": "Aalborg Web Intelligence, Lecture 9: Transformers",
    "001": "Princeton COS 484, L13: Self-attention and Transformers",
    "002": "Sydney COMP 4446/5046, Lecture 7: Models – Transformer",
    "003": "Princeton COS 484, L9: Transformers (cont'd)",
    "004": "UMass CS 685, Transformers (II)",
}

WORDS = {"holds": "holds", "depends": "it depends", "fails": "fails"}  # verdicts


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an experiment is run: once for each seed, and at a size for a CPU or for a GPU.

    `threads` is the value of `--threads`, None if it is not set.
    """

    seeds: tuple[int, ...] = (1, 2, 3)
    large: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: int | None = None


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds as an option has them: `1,2,3`."""
    try:
        seeds = tuple(int(number) for number in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
        raise UserError(
            f"--seeds {text} must be different integers from 0 to below 2^63, e.g. 1,2,3"
        )
    return seeds


def mean(values: Sequence[float]) -> float:
    """Σ x / n, also of infinite values: `fmean` raises an error for ∞ − ∞, this gives NaN."""
    return fmean(values) if all(map(isfinite, values)) else sum(values) / len(values)


def spread(values: Sequence[float]) -> str:
    """The standard deviation as " ± s", to append to a mean; empty if it is 0 or undefined."""
    if len(values) < 2 or not all(map(isfinite, values)) or not stdev(values):
        return ""
    return f" ± {stdev(values):.2g}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Numbers by name, one value per seed, and lines to plot.

    `logarithmic` names the logarithmic axes of the plot: "across", "up".
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

    def reported(self, name: str) -> str:
        """The mean, and the standard deviation over the seeds where there are several."""
        return f"{self.mean(name):.3g}{spread(self.numbers[name])}"

    def _end(self, name: str, of: Callable[[Sequence[float]], float]) -> float:
        """NaN if any value is NaN: `min` and `max` ignore a NaN that is not the first value."""
        values = self.numbers[name]
        return nan if any(map(isnan, values)) else of(values)


@dataclass(frozen=True)
class Judged:
    """A verdict and a one-line explanation with the numbers that led to it."""

    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement in our words, the lectures that make it, and the criterion for it to hold.

    `lectures` lists keys of `LECTURES`; it is "none" if only a paper makes the statement.
    """

    sentence: str
    lectures: str
    criterion: str
    measure: Callable[[Setting], Measured]
    judge: Callable[[Measured], Judged]

    @property
    def deck(self) -> str:
        """The lectures under their JSON key."""
        return self.lectures


def holds_if(condition: bool, why: str) -> Judged:
    """The verdict of a single condition."""
    return Judged("holds" if condition else "fails", why)


def in_parts(parts: Mapping[str, bool], why: str, needed: Sequence[str] = ()) -> Judged:
    """Holds if all parts hold; fails if none holds or a `needed` part does not.

    Otherwise it depends, and the explanation names the parts that hold.
    """
    held = [part for part, holds in parts.items() if holds]
    if len(held) == len(parts):
        return Judged("holds", why)
    if not held or not all(parts[part] for part in needed):
        return Judged("fails", why)
    return Judged("depends", f"only part of it holds: {listed(held)}; {why}")


def listed(names: Sequence[str]) -> str:
    """Join names as in "one, two and three"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
