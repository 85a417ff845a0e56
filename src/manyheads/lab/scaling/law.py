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

# Deviations of log L above this count linearly. The paper has 1e-3, for hundreds of runs; with a
# dozen runs, such a fit would pass exactly through as many of them as the law has parameters.
HUBER = 1e-2
EXPONENTS = (0.01, 4.0)  # beyond these a power law is a constant, or a cliff
LOGARITHMS = (-30.0, 6.0)  # bounds of log E and of the log of each term at the mean point
DRAWS = 400
LEVEL = 0.9

Causes = Float[np.ndarray, "n k"]
Losses = Float[np.ndarray, "n"]
Parameters = Float[np.ndarray, "p"]
Jacobian = Float[np.ndarray, "n p"]
Terms = Float[np.ndarray, "n t"]
Means = Float[np.ndarray, "k"]


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
    """The law nearest to the runs by a Huber loss on log L, and laws of the bootstrap.

    A bootstrap draw gives each run the residual of a randomly chosen run, and fits again.
    Residuals are enlarged for the degrees of freedom that the law uses up.
    """
    count, terms = causes.shape
    numbers = 1 + 2 * terms
    if count <= numbers:
        raise UserError(
            f"a law of {numbers} numbers needs more than {count} runs: add sizes or data"
        )
    if not (np.isfinite(losses).all() and (losses > 0).all()):
        raise UserError("a law needs losses that are finite and above 0: look at the runs")
    means = np.log(causes).mean(0)
    centred = np.log(causes) - means
    targets = np.log(losses)
    best = _nearest(centred, targets, _starts(terms, float(targets.mean())))
    fitted = _model(best, centred)
    residuals = (targets - fitted) * np.sqrt(count / (count - numbers))
    residuals -= residuals.mean()
    random = np.random.default_rng(seed)
    bootstrap = fitted + random.choice(residuals, (draws, count))
    laws = [_law(_nearest(centred, drawn, [best]), means) for drawn in bootstrap]
    return Fit(_law(best, means), tuple(laws), tuple(map(float, residuals)))


def _law(parameters: Parameters, means: Means) -> Law:
    powers = np.exp(parameters[2::2])
    scales = np.exp(parameters[1::2] + powers * means)
    return Law(float(np.exp(parameters[0])), tuple(map(float, scales)), tuple(map(float, powers)))


def _starts(terms: int, height: float) -> list[Parameters]:
    """Laws whose terms have different shares of the loss, and fall slowly or fast."""
    starts = []
    for shares in product((0.1, 0.5), repeat=terms):
        for powers in product((0.1, 0.4, 1.0), repeat=terms):
            start = np.empty(1 + 2 * terms)
            start[0] = height + np.log(max(0.05, 1 - sum(shares)))
            start[1::2] = height + np.log(shares)
            start[2::2] = np.log(powers)
            starts.append(start)
    return starts


def _nearest(centred: Causes, targets: Losses, starts: list[Parameters]) -> Parameters:
    """The best of the least-squares fits from these starts.

    Parameters are the logarithms of the floor, then of each term's scale, at the mean of the
    causes, and exponent.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise UserError("fitting needs scipy: pip install 'manyheads[lab]'") from None
    terms = centred.shape[1]
    low, high = (
        np.array([LOGARITHMS[i], *[LOGARITHMS[i], np.log(EXPONENTS[i])] * terms]) for i in (0, 1)
    )
    fits = [
        least_squares(
            lambda parameters: _model(parameters, centred) - targets,
            np.clip(start, low, high),
            jac=lambda parameters: _jacobian(parameters, centred),
            bounds=(low, high),
            loss="huber",
            f_scale=HUBER,
        )
        for start in starts
    ]
    best: Parameters = min(fits, key=lambda fit: fit.cost).x
    return best


def _terms(parameters: Parameters, centred: Causes) -> Terms:
    """Logarithms of the floor and of each term."""
    falling = parameters[1::2] - np.exp(parameters[2::2]) * centred
    return np.insert(falling, 0, parameters[0], axis=1)


def _model(parameters: Parameters, centred: Causes) -> Losses:
    """log L = log(e^floor + Σₖ e^(scaleₖ − exponentₖ · causeₖ))."""
    logarithms: Losses = np.logaddexp.reduce(_terms(parameters, centred), axis=1)
    return logarithms


def _jacobian(parameters: Parameters, centred: Causes) -> Jacobian:
    terms = _terms(parameters, centred)
    shares = np.exp(terms - np.logaddexp.reduce(terms, axis=1)[:, None])
    jacobian = np.empty((len(centred), len(parameters)))
    jacobian[:, 0] = shares[:, 0]
    jacobian[:, 1::2] = shares[:, 1:]
    jacobian[:, 2::2] = -shares[:, 1:] * np.exp(parameters[2::2]) * centred
    return jacobian


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
        """The exponents a and b of N* ∝ C^a and D* ∝ C^b."""
        alpha, beta = self.law.exponents
        total = alpha + self.price.exponent * beta
        return beta / total, alpha / total

    @property
    def loss_exponent(self) -> float:
        """The exponent p of L* − E ∝ C^−p."""
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
