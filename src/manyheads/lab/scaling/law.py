"""Power laws of the loss, fitted to runs, with bands; and the best size for a given compute.

L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, section 3.3), for N parameters and D tokens;
L(N) = E + A/N^α and L(D) = E + B/D^β are the same with one term.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float

from manyheads.errors import UserError

# Where deviations of the logarithm begin to count linearly. The paper has 1e-3, for hundreds of
# runs; with a dozen that would draw the law exactly through as many of them as it has numbers.
HUBER = 1e-2
ROUNDS = 60
FEW = 3
EXPONENTS = (0.01, 4.0)  # beyond them a power law is a constant, or a cliff
LOGARITHMS = (-30.0, 6.0)
DRAWS = 400
LEVEL = 0.9

Causes = Float[np.ndarray, "n k"]
Losses = Float[np.ndarray, "n"]
Tries = Float[np.ndarray, "m n"]
Numbers = Float[np.ndarray, "m p"]
Starts = Float[np.ndarray, "s p"]
Slopes = Float[np.ndarray, "m n p"]
Worths = Float[np.ndarray, "m"]
Logarithms = Float[np.ndarray, " _"]


@dataclass(frozen=True)
class Law:
    """floor + Σₖ scaleₖ / xₖ^exponentₖ: one term for each cause x of the loss."""

    floor: float
    scales: tuple[float, ...]
    exponents: tuple[float, ...]

    def loss(self, *causes: float | int) -> float:
        terms = zip(self.scales, causes, self.exponents, strict=True)
        return self.floor + sum(scale * cause**-power for scale, cause, power in terms)


@dataclass(frozen=True)
class Band:
    """A number and where it lies with a probability of LEVEL."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(value: float, drawn: Sequence[float]) -> "Band":
        edge = (1 - LEVEL) / 2
        low, high = np.quantile(np.array(drawn), [edge, 1 - edge])
        return Band(value, float(low), float(high))


@dataclass(frozen=True)
class Fit:
    """A law; the laws of the bootstrap; and deviations of a run from its law, in logarithms."""

    law: Law
    draws: tuple[Law, ...]
    deviations: tuple[float, ...]

    def curve(self, *causes: float | int) -> Band:
        """The law at a place, and how sure it is."""
        return Band.of(self.law.loss(*causes), [law.loss(*causes) for law in self.draws])

    def run(self, *causes: float | int) -> Band:
        """A run at a place: it deviates from the law as the runs of the fit do."""
        random = np.random.default_rng(1)
        off = random.choice(self.deviations, len(self.draws))
        drawn = [law.loss(*causes) * np.exp(d) for law, d in zip(self.draws, off, strict=True)]
        return Band.of(self.law.loss(*causes), drawn)


def fit(causes: Causes, losses: Losses, *, draws: int = DRAWS, seed: int = 1) -> Fit:
    """The law nearest to the runs, and laws of the bootstrap.

    Nearest by a Huber loss on log L, the best of many starts. A draw of the bootstrap gives each
    run, in its place, the deviation of a run drawn among all, and fits anew; deviations are
    enlarged for the numbers that a law has to fit them with.
    """
    count, terms = causes.shape
    numbers = 1 + 2 * terms
    if count <= numbers:
        raise UserError(
            f"a law of {numbers} numbers needs more than {count} runs: add sizes or data"
        )
    if not (np.isfinite(losses).all() and (losses > 0).all()):
        raise UserError("a law needs losses that are finite and above 0: look at the runs")
    middle = np.log(causes).mean(0)
    places = np.log(causes) - middle
    wanted = np.log(losses)
    starts = _starts(terms, float(wanted.mean()))
    [best] = _nearest(places, wanted[None], starts)
    fitted = _model(best[None], places)[0]
    off = (wanted - fitted[0]) * np.sqrt(count / (count - numbers))
    off -= off.mean()
    random = np.random.default_rng(seed)
    drawn = fitted + random.choice(off, (draws, count))
    # A draw is near the runs themselves: where their law is, and a few places beside, will do.
    near = np.stack([best, *starts[:: len(starts) // FEW]])
    laws = [_law(found, middle) for found in (best, *_nearest(places, drawn, near))]
    return Fit(laws[0], tuple(laws[1:]), tuple(map(float, off)))


def _law(found: Logarithms, middle: Logarithms) -> Law:
    powers = np.exp(found[2::2])
    scales = np.exp(found[1::2] + powers * middle)
    return Law(float(np.exp(found[0])), tuple(map(float, scales)), tuple(map(float, powers)))


def _starts(terms: int, height: float) -> Starts:
    """Laws of which each part has some share of the loss, rising slowly or fast."""
    shares, powers = (0.1, 0.5), (0.1, 0.4, 1.0)
    rows = [
        [np.log(max(0.05, 1 - sum(share))), *(x for s, p in zip(share, power, strict=True)
         for x in (np.log(s), np.log(p)))]
        for share in product(shares, repeat=terms)
        for power in product(powers, repeat=terms)
    ]  # fmt: skip
    starts = np.array(rows)
    starts[:, [0, *range(1, 2 * terms, 2)]] += height
    return starts


def _nearest(places: Causes, wanted: Tries, starts: Starts) -> Numbers:
    """For each row of logarithms of losses the nearest law: floor, then scale and exponent a term.

    All are logarithms; scales are those at the middle of the places. Levenberg's and Marquardt's
    steps, for all rows and all starts at once.
    """
    rows = len(wanted)
    numbers = np.tile(starts, (rows, 1))
    goal = np.repeat(wanted, len(starts), 0)
    damping = np.full(len(numbers), 1e-2)
    value, slopes = _model(numbers, places)
    worth = _huber(goal - value)
    for _ in range(ROUNDS):
        off = goal - value
        weight = np.minimum(1.0, HUBER / np.maximum(np.abs(off), 1e-12))
        curvature = np.einsum("mnp,mn,mnq->mpq", slopes, weight, slopes)
        downhill = np.einsum("mnp,mn,mn->mp", slopes, weight, off)
        ridge = damping[:, None] * (np.einsum("mpp->mp", curvature) + 1e-6)
        curvature = curvature + ridge[..., None] * np.eye(numbers.shape[1])
        tried = _kept(numbers + np.linalg.solve(curvature, downhill[..., None])[..., 0])
        tried_value, tried_slopes = _model(tried, places)
        tried_worth = _huber(goal - tried_value)
        better = tried_worth < worth
        damping = np.clip(damping * np.where(better, 0.3, 4.0), 1e-9, 1e9)
        numbers[better], value[better] = tried[better], tried_value[better]
        slopes[better], worth[better] = tried_slopes[better], tried_worth[better]
    chosen = worth.reshape(rows, -1).argmin(1)
    found: Numbers = numbers.reshape(rows, len(starts), -1)[np.arange(rows), chosen]
    return found


def _kept(numbers: Numbers) -> Numbers:
    """Inside of what a law may be."""
    numbers = numbers.copy()
    numbers[:, 2::2] = np.clip(numbers[:, 2::2], *np.log(EXPONENTS))
    numbers[:, 0] = np.clip(numbers[:, 0], *LOGARITHMS)
    numbers[:, 1::2] = np.clip(numbers[:, 1::2], *LOGARITHMS)
    return numbers


def _model(numbers: Numbers, places: Causes) -> tuple[Tries, Slopes]:
    """log L = log(e^floor + Σₖ e^(scaleₖ − exponentₖ · placeₖ)), and its slope in each number."""
    powers = np.exp(numbers[:, 2::2])
    falls = powers[:, None] * places
    parts = np.concatenate(
        [
            np.broadcast_to(numbers[:, None, :1], (*falls.shape[:2], 1)),
            numbers[:, None, 1::2] - falls,
        ],
        2,
    )
    top = parts.max(2, keepdims=True)
    value = top[..., 0] + np.log(np.exp(parts - top).sum(2))
    shares = np.exp(parts - value[..., None])
    slopes = np.empty((*value.shape, numbers.shape[1]))
    slopes[..., 0] = shares[..., 0]
    slopes[..., 1::2] = shares[..., 1:]
    slopes[..., 2::2] = -shares[..., 1:] * falls
    return value, slopes


def _huber(off: Tries) -> Worths:
    far = np.abs(off)
    found: Worths = np.where(far <= HUBER, 0.5 * off**2, HUBER * (far - 0.5 * HUBER)).sum(1)
    return found


@dataclass(frozen=True)
class Price:
    """FLOPs to train on one token, factor · N^exponent: 6 and 1 for models that are all blocks.

    Small ones spend a share on the output layer that falls as they grow.
    """

    factor: float
    exponent: float

    @staticmethod
    def of(parameters: Sequence[int], flops: Sequence[int]) -> "Price":
        """By least squares of logarithms."""
        power, start = np.polyfit(np.log(parameters), np.log(flops), 1)
        return Price(float(np.exp(start)), float(power))


@dataclass(frozen=True)
class Frontier:
    """The least loss that compute C can buy, and by which N and D: each a power of C.

    With C = κ N^γ D, A/N^α + B/D^β is least where α A/N^α = γ β B/D^β, so that
    N* = (α A / (γ β B))^(1/(α + γβ)) · (C/κ)^(β/(α + γβ)), and D* = C / (κ N*^γ).
    """

    law: Law
    price: Price

    @property
    def exponents(self) -> tuple[float, float]:
        """Of N* and of D*, as C grows."""
        alpha, beta = self.law.exponents
        whole = alpha + self.price.exponent * beta
        return beta / whole, alpha / whole

    @property
    def loss_exponent(self) -> float:
        """By which what lies above E falls as C grows."""
        return self.law.exponents[0] * self.exponents[0]

    def optimum(self, flops: float | int) -> tuple[float, float]:
        alpha, beta = self.law.exponents
        big, wide = self.law.scales
        gamma = self.price.exponent
        ratio = alpha * big / (gamma * beta * wide)
        bought = flops / self.price.factor
        size = ratio ** (1 / (alpha + gamma * beta)) * bought ** self.exponents[0]
        return size, bought / size**gamma

    def loss(self, flops: float | int) -> float:
        return self.law.loss(*self.optimum(flops))
