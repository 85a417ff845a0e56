"""Metrics of labels and numbers, each with its signature: the scores of GLUE's tasks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manyheads.errors import UserError
from manyheads.evaluate.scores import Scores, diverged

Labels = Sequence[str] | Sequence[int] | np.ndarray
Numbers = Sequence[float] | np.ndarray


def label_scores(
    metrics: Sequence[str],
    predictions: Labels | Numbers,
    labels: Labels | Numbers,
    positive: str | int,
) -> Scores:
    """These metrics of labels or numbers; `positive` is the label of F1."""
    known: dict[str, tuple[Callable[[Any, Any], float], str]] = {
        "accuracy": (accuracy, "share of equal labels"),
        "f1": (
            lambda predictions, labels: f1(predictions, labels, positive),
            f"2 TP / (2 TP + FP + FN) of the label {positive}; 0 without any",
        ),
        "matthews": (matthews, "R_K, for two labels Matthews' phi; 0 where a side is constant"),
        "pearson": (pearson, "r; 0 where a side is constant"),
        "spearman": (spearman, "r of the ranks, ties at their mean; 0 where a side is constant"),
    }
    scores: Scores = {name: known[name][0](predictions, labels) for name in metrics}
    return scores | {"signature": {name: known[name][1] for name in metrics}}


def accuracy(predictions: Labels, labels: Labels) -> float:
    predicted, correct = _pair(predictions, labels)
    return float((predicted == correct).mean())


def f1(predictions: Labels, labels: Labels, positive: str | int) -> float:
    """F1 = 2 TP / (2 TP + FP + FN) of one label; 0 if neither side has it."""
    predicted, correct = (side == positive for side in _pair(predictions, labels))
    total = int(predicted.sum()) + int(correct.sum())  # 2 TP + FP + FN
    return 2 * int((predicted & correct).sum()) / total if total else 0.0


def class_report(predictions: Labels, labels: Labels, names: Sequence[str | int]) -> Scores:
    """Precision, recall and F1 of each label, and how many examples have it."""
    predicted, correct = _pair(predictions, labels)
    report: Scores = {}
    for name in names:
        hits = int(((predicted == name) & (correct == name)).sum())
        guesses, examples = int((predicted == name).sum()), int((correct == name).sum())
        report[str(name)] = {
            "precision": hits / guesses if guesses else 0.0,
            "recall": hits / examples if examples else 0.0,
            "f1": f1(predictions, labels, name),
            "examples": examples,
        }
    return report


def matthews(predictions: Labels, labels: Labels) -> float:
    """Matthews' correlation of labels, for more than two of them Gorodkin's R_K.

    R_K = (c·s − Σ pₖ·tₖ) / √((s² − Σ pₖ²)·(s² − Σ tₖ²)) of s examples, c of them correct, with
    label k predicted pₖ times and true tₖ times. 0 if one side is constant.
    """
    predicted, correct = _pair(predictions, labels)
    _, index = np.unique(np.concatenate([predicted, correct]), return_inverse=True)
    p, t = (np.bincount(side, minlength=index.max() + 1) for side in np.split(index, 2))
    s, c = len(predicted), int((predicted == correct).sum())
    # Python integers: the product may not fit into 64 bits.
    product = int(s * s - p @ p) * int(s * s - t @ t)
    return (c * s - int(p @ t)) / math.sqrt(product) if product else 0.0


def pearson(x: Numbers, y: Numbers) -> float:
    """Pearson's correlation r = Σ (x − x̄)(y − ȳ) / √(Σ (x − x̄)² · Σ (y − ȳ)²).

    0 if one side is constant, where r is not defined.
    """
    scaled = []
    for values in [_finite(side) for side in _pair(x, y)]:
        # A power of two is an exact factor; with it no difference overflows or vanishes.
        numbers = np.ldexp(values, -np.frexp(np.abs(values).max())[1])
        # The range, not the sum of squares: rounding can move the mean of equal numbers.
        if np.ptp(numbers) == 0:
            return 0.0
        numbers = numbers - numbers[0]  # exact for numbers that are almost equal; a mean is not
        scaled.append(numbers - numbers.mean())
    a, b = scaled
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def spearman(x: Numbers, y: Numbers) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of their ranks."""
    a, b = (_ranks(_finite(side)) for side in _pair(x, y))
    return pearson(a, b)


def _pair(predictions: Labels | Numbers, labels: Labels | Numbers) -> tuple[np.ndarray, np.ndarray]:
    if len(predictions) != len(labels) or not len(predictions):
        raise UserError(f"{len(predictions)} predictions do not match {len(labels)} labels")
    return np.asarray(predictions), np.asarray(labels)


def _finite(values: np.ndarray) -> np.ndarray:
    numbers = values.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise diverged()
    return numbers


def _ranks(values: np.ndarray) -> np.ndarray:
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    ranks: np.ndarray = mean_rank[index] - mean_rank[index].mean()
    return ranks
