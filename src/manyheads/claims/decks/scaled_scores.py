"""Why scores are divided by √c: what a softmax passes back as heads grow wider."""

import math

import torch

from manyheads.claims.claim import Claim, Judged, Measured, Setting, holds_if

KEYS, QUERIES = 64, 512
WIDTHS = (4, 16, 64, 256, 1024)


def slope(width: int, scale: float, seed: int) -> float:
    """Σ_j p_j (1 − p_j), the trace of the softmax's Jacobian, mean over queries.

    It is near 1 where weights are spread, and near 0 where one key has all.
    """
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(QUERIES, width, generator=random)
    k = torch.randn(QUERIES, KEYS, width, generator=random)
    p = (torch.einsum("nc,nkc->nk", q, k) * scale).softmax(-1)
    return float((p * (1 - p)).sum(-1).mean())


def measure(setting: Setting) -> Measured:
    lines: dict[str, list[tuple[float, float]]] = {"q · k": [], "q · k / √c": []}
    ends: dict[str, list[float]] = {"plain": [], "scaled": []}
    for width in WIDTHS:
        plain = [slope(width, 1.0, seed) for seed in setting.seeds]
        scaled = [slope(width, 1 / math.sqrt(width), seed) for seed in setting.seeds]
        lines["q · k"].append((width, sum(plain) / len(plain)))
        lines["q · k / √c"].append((width, sum(scaled) / len(scaled)))
        if width == WIDTHS[0]:
            first = plain, scaled
    ends["plain"] = [last / one for last, one in zip(plain, first[0], strict=True)]
    ends["scaled"] = [last / one for last, one in zip(scaled, first[1], strict=True)]
    return Measured(
        numbers=ends,
        lines=lines,
        across="channels of a head",
        up="trace of the softmax's Jacobian",
        logarithmic=("across",),
    )


def judge(measured: Measured) -> Judged:
    kept = measured.least("scaled") > 0.9
    lost = measured.most("plain") < 0.25
    return holds_if(
        kept and lost,
        f"from {WIDTHS[0]} to {WIDTHS[-1]} channels the softmax keeps {measured.told('scaled')} of "
        f"its slope with the scale, and {measured.told('plain')} without",
    )


CLAIM = Claim(
    sentence="Dividing scores by √c keeps the softmax from saturating as heads grow wider; without "
    "it hardly any gradient comes through.",
    deck="001, 004",
    criterion="with the scale at least 0.9 of the slope is left at 1,024 channels, without it less "
    "than 0.25",
    measure=measure,
    judge=judge,
)
