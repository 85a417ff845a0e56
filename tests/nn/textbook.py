"""Attention as the papers write it: plain numbers, plain loops over head, query and key.

Nothing here calls the package's own computation. From its modules only the parameters are read.
"""

import cmath
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyheads.nn.masks import (
    Both,
    Either,
    Globals,
    Rule,
    SameBlock,
    SameDocument,
    Window,
    causal,
    full,
)
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    PositionConfig,
    Relative,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.scores import Additive, Bilinear, Dot, ReducedRank, ScaledDot, ScoreConfig

Vector = list[float]
PairScore = Callable[[int, Vector, Vector], float]
"""(head, query, key) → how well they meet."""
Sees = Callable[[int, int, int], bool]
"""(row of the batch, query position, key position) → may it look?"""


def inner(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def dot(module: Any) -> PairScore:
    return lambda head, q, k: inner(q, k)


def scaled_dot(module: Any) -> PairScore:
    return lambda head, q, k: inner(q, k) / math.sqrt(len(q))


def bilinear(module: Any) -> PairScore:
    w = module.weight.tolist()
    return lambda head, q, k: sum(
        q[a] * w[head][a][b] * k[b] for a in range(len(q)) for b in range(len(k))
    )


def reduced_rank(module: Any) -> PairScore:
    u, v = module.query.tolist(), module.key.tolist()
    return lambda head, q, k: sum(
        inner(row, q) * inner(other, k) for row, other in zip(u[head], v[head], strict=True)
    )


def additive(module: Any) -> PairScore:
    a, b, w = module.query.tolist(), module.key.tolist(), module.weight.tolist()
    return lambda head, q, k: sum(
        w[head][r] * math.tanh(inner(a[head][r], q) + inner(b[head][r], k))
        for r in range(len(w[head]))
    )


# Where a score can join different sizes, its keys have three channels and not four.
SCORES: dict[str, tuple[ScoreConfig, Callable[[Any], PairScore]]] = {
    "dot": (Dot(), dot),
    "scaled-dot": (ScaledDot(), scaled_dot),
    "bilinear": (Bilinear(key_size=3), bilinear),
    "reduced-rank": (ReducedRank(rank=2, key_size=3), reduced_rank),
    "additive": (Additive(width=5, key_size=3), additive),
}

DOCUMENTS = [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]]

RULES: dict[str, tuple[Rule, Sees]] = {
    "full": (full, lambda row, i, j: True),
    "causal": (causal, lambda row, i, j: j <= i),
    "window": (Window(1), lambda row, i, j: i - 1 <= j <= i + 1),
    "globals": (Globals(2), lambda row, i, j: i in (0, 1) or j in (0, 1)),
    "same-block": (SameBlock(2), lambda row, i, j: i in (j, j ^ 1)),
    "same-document": (
        SameDocument(torch.tensor(DOCUMENTS)),
        lambda row, i, j: DOCUMENTS[row][i] == DOCUMENTS[row][j],
    ),
    "both": (Both(causal, Window(2)), lambda row, i, j: i - 2 <= j <= i),
    "either": (Either(Window(1), Globals(1)), lambda row, i, j: abs(i - j) <= 1 or 0 in (i, j)),
}


class Place:
    """A position scheme inside attention: turns vectors, adds to scores, adds to values."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def turn(self, x: Vector, position: int) -> Vector:
        return x

    def bias(self, head: int, q: Vector, i: int, j: int) -> float:
        return 0.0

    def value(self, i: int, j: int, channels: int) -> Vector:
        return [0.0] * channels


class RotaryPlace(Place):
    """RoFormer: each pair of channels is a complex number, turned by e^(i·m·θ)."""

    def turn(self, x: Vector, position: int) -> Vector:
        half = len(x) // 2
        turned = [0.0] * len(x)
        for pair in range(half):
            a, b = (pair, pair + half) if self.halves else (2 * pair, 2 * pair + 1)
            theta = 10_000 ** (-2 * pair / len(x))
            z = complex(x[a], x[b]) * cmath.exp(1j * position * theta)
            turned[a], turned[b] = z.real, z.imag
        return turned

    halves = True


class InterleavedRotaryPlace(RotaryPlace):
    halves = False


class ShawPlace(Place):
    """Shaw et al. 2018, equations 3 to 5, clipped at two steps."""

    def row(self, i: int, j: int) -> int:
        return max(-2, min(2, j - i)) + 2

    def bias(self, head: int, q: Vector, i: int, j: int) -> float:
        return inner(q, self.module.keys.tolist()[self.row(i, j)]) / math.sqrt(len(q))

    def value(self, i: int, j: int, channels: int) -> Vector:
        return self.module.values.tolist()[self.row(i, j)]


class BucketPlace(Place):
    """T5: a learned number for each head and bucket."""

    def bias(self, head: int, q: Vector, i: int, j: int) -> float:
        buckets, max_distance, both_ways = self.shape
        return self.module.table.weight.tolist()[
            t5_bucket(j - i, buckets, max_distance, both_ways)
        ][head]

    @property
    def shape(self) -> tuple[int, int, bool]:
        return 6, 5, self.module.both_ways


class AlibiPlace(Place):
    """Press et al. 2022: two heads have the slopes 2⁻⁴ and 2⁻⁸."""

    def bias(self, head: int, q: Vector, i: int, j: int) -> float:
        return -(0.0625, 0.00390625)[head] * abs(i - j)


class RelativePlace(Place):
    """Huang et al. 2018, clipped at three."""

    def bias(self, head: int, q: Vector, i: int, j: int) -> float:
        vector = self.module.distances.table.tolist()[head][max(-3, min(3, j - i)) + 3]
        return inner(q, vector) / math.sqrt(len(q))


POSITIONS: dict[str, tuple[PositionConfig, type[Place]]] = {
    "none": (NoPosition(), Place),
    "sinusoidal": (Sinusoidal(), Place),
    "learned": (Learned(), Place),
    "rotary": (Rotary(), RotaryPlace),
    "rotary-interleaved": (Rotary(layout="interleaved"), InterleavedRotaryPlace),
    "shaw": (Shaw(max_distance=2), ShawPlace),
    "t5": (Buckets(buckets=6, max_distance=5), BucketPlace),
    "alibi": (Alibi(), AlibiPlace),
    "relative": (Relative(max_distance=3), RelativePlace),
}


def t5_bucket(distance: int, buckets: int, max_distance: int, both_ways: bool) -> int:
    """T5's bucket of key − query, in whole numbers: no logarithm, hence no rounding.

    ⌊n · log(d/e) / log(m/e)⌋ is the largest x with (d/e)^n ≥ (m/e)^x.
    """
    offset = 0
    if both_ways:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    steps = buckets - exact
    x = 0
    while x < steps - 1 and distance**steps * exact ** (x + 1) >= exact**steps * max_distance ** (
        x + 1
    ):
        x += 1
    return offset + exact + x


def refused(score: str, position: str, implementation: str) -> bool:
    """The combinations that must be refused when a model is built, and the only ones."""
    dot, rotary = score in ("dot", "scaled-dot"), position.startswith("rotary")
    absolute = position in ("none", "sinusoidal", "learned")
    if rotary and not dot:
        return True
    if implementation == "fused":
        return score == "additive" or position == "shaw"
    if implementation in ("linformer", "memory-compressed"):
        return not absolute
    return implementation == "performer" and not (dot and (absolute or rotary))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pair: PairScore,
    sees: Sees,
    place: Place,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(score) and softmax(score) · V, one pair after the other; keys may be shared."""
    rows, heads, queries, channels = q.shape
    length = k.shape[2]
    group = heads // k.shape[1]
    weights = torch.zeros(rows, heads, queries, length, dtype=torch.float64)
    mixed = torch.zeros(rows, heads, queries, channels, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            for t in range(queries):
                i = length - queries + t
                query = place.turn(q[row, head, t].tolist(), i)
                scores: dict[int, float] = {}
                for j in range(length):
                    if sees(row, i, j) and (real is None or bool(real[row, j])):
                        key = place.turn(k[row, head // group, j].tolist(), j)
                        scores[j] = pair(head, query, key) + place.bias(head, query, i, j)
                total = sum(math.exp(score) for score in scores.values())
                for j, score in scores.items():
                    weight = math.exp(score) / total
                    weights[row, head, t, j] = weight
                    added = torch.tensor(place.value(i, j, channels), dtype=torch.float64)
                    mixed[row, head, t] += weight * (v[row, head // group, j] + added)
    return weights, mixed
