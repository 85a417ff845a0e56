"""Why scores are divided by √c: the gradient through the softmax as heads become wider."""

from statistics import fmean

import torch

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting, holds_if

KEYS, QUERIES = 64, 512
WIDTHS = (4, 16, 64, 256, 1024)


def slope(width: int, scale: float, seed: int) -> float:
    """Σ_j p_j (1 − p_j), the trace of the softmax's Jacobian, mean over queries.

    It is near 1 if the weights are spread, and near 0 if one key has all the weight.
    """
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(QUERIES, width, generator=random)
    k = torch.randn(QUERIES, KEYS, width, generator=random)
    p = (torch.einsum("nc,nkc->nk", q, k) * scale).softmax(-1)
    return float((p * (1 - p)).sum(-1).mean())


def measure(setting: Setting) -> Measured:
    numbers, lines = {}, {}
    for name, label, power in (("plain", "q · k", 0.0), ("scaled", "q · k / √c", -0.5)):
        slopes = {
            width: [slope(width, width**power, seed) for seed in setting.seeds] for width in WIDTHS
        }
        ends = zip(slopes[WIDTHS[0]], slopes[WIDTHS[-1]], strict=True)
        numbers[name] = [last / first for first, last in ends]
        lines[label] = [(width, fmean(each)) for width, each in slopes.items()]
    return Measured(
        numbers=numbers,
        lines=lines,
        across="channels of a head",
        up="trace of the softmax's Jacobian",
        logarithmic=("across",),
    )


def judge(measured: Measured) -> Judged:
    scaled_keeps = measured.least("scaled") > 0.9
    plain_loses = measured.most("plain") < 0.25
    return holds_if(
        scaled_keeps and plain_loses,
        f"from {WIDTHS[0]} to {WIDTHS[-1]} channels the softmax keeps "
        f"{measured.reported('scaled')} of "
        f"its gradient with the scale, and {measured.reported('plain')} without",
    )


CLAIM = Claim(
    sentence="Dividing scores by √c keeps the softmax from saturating as heads become wider; "
    "without it the gradient nearly vanishes.",
    lectures="000, 001, 002",
    criterion="with the scale at least 0.9 of the gradient remains at 1,024 channels, without it "
    "less than 0.25",
    measure=measure,
    judge=judge,
)
