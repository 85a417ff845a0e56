"""Scaling laws: the fit recovers the law that generated the points, with a confidence band."""

from itertools import product

import numpy as np
import pytest

from manyheads.lab.scaling.law import LEVEL, Frontier, Law, Losses, Price, fit

TRUTH = Law(1.2, (40.0, 300.0), (0.35, 0.45))
SIZES, TOKENS = (5e4, 1e5, 2e5, 4e5), (2.5e5, 5e5, 1e6, 2e6)
GRID = np.array(list(product(SIZES, TOKENS)))
LARGER = (8e5, 4e6)


def losses(noise: float, seed: int = 0) -> Losses:
    exact = np.array([TRUTH.loss(*place) for place in GRID])
    actual: Losses = exact * np.exp(noise * np.random.default_rng(seed).normal(size=len(GRID)))
    return actual


def test_exact_points_give_their_law_back() -> None:
    actual = fit(GRID, losses(0.0), draws=2).law
    assert actual.floor == pytest.approx(TRUTH.floor, rel=0.02)
    assert actual.exponents == pytest.approx(TRUTH.exponents, rel=0.02)
    assert actual.loss(*LARGER) == pytest.approx(TRUTH.loss(*LARGER), rel=1e-4)


def test_an_outlier_moves_the_law_little() -> None:
    """The Huber loss limits an outlier: least squares would follow it four times as far."""
    broken = losses(0.001)
    broken[5] *= 1.2
    actual = fit(GRID, broken, draws=2).law
    assert actual.loss(*LARGER) == pytest.approx(TRUTH.loss(*LARGER), rel=0.03)


def test_the_band_holds_the_truth_about_as_often_as_it_says() -> None:
    law, sizes = Law(1.0, (20.0,), (0.3,)), np.geomspace(1e4, 1e6, 8)[:, None]
    exact = np.array([law.loss(*size) for size in sizes])
    random = np.random.default_rng(3)
    inside = {"curve": 0, "run": 0}
    tries = 20
    for _ in range(tries):
        actual = fit(sizes, exact * np.exp(0.005 * random.normal(size=len(sizes))), draws=40)
        curve, run = actual.curve(4e6), actual.run(4e6)
        inside["curve"] += curve.low <= law.loss(4e6) <= curve.high
        inside["run"] += run.low <= law.loss(4e6) * np.exp(0.005 * random.normal()) <= run.high
    for count in inside.values():
        assert LEVEL - 0.15 <= count / tries <= 1.0
    assert inside["curve"] < tries  # a band of everything would be none


def test_nothing_of_the_same_compute_beats_the_frontier() -> None:
    frontier = Frontier(TRUTH, Price(9.0, 0.9))
    for flops in (1e11, 1e13):
        size, tokens = frontier.optimum(flops)
        assert 9.0 * size**0.9 * tokens == pytest.approx(flops)
        for factor in (0.8, 0.97, 1.03, 1.25):
            assert TRUTH.loss(size * factor, tokens / factor**0.9) > frontier.loss(flops)


def test_the_frontier_grows_by_its_exponents() -> None:
    frontier = Frontier(TRUTH, Price(6.0, 1.0))
    before, after = frontier.optimum(1e12), frontier.optimum(1e14)
    grown = [np.log(b / a) / np.log(100) for a, b in zip(before, after, strict=True)]
    assert grown == pytest.approx(frontier.exponents)
    assert sum(grown) == pytest.approx(1.0)
    fallen = (frontier.loss(1e12) - TRUTH.floor) / (frontier.loss(1e14) - TRUTH.floor)
    assert fallen == pytest.approx(100**frontier.loss_exponent)
