"""Label smoothing: its effect on BLEU and on perplexity.

Two models are trained alike except for the ε of the target distribution
q = (1 − ε) one-hot + ε / V. No lecture makes this claim; the paper does.
"""

import math

from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.translators import greedy_bleu, reference_loss, translator
from manyheads.lab.claims.trial import stretches

NAMES = ("plain", "smoothed")
SMOOTHING = "train.label_smoothing=0.1"


def measure(setting: Setting) -> Measured:
    numbers: dict[str, list[float]] = {
        f"{name} {what}": [] for what in ("BLEU", "perplexity") for name in NAMES
    }
    lines = {}
    for seed in setting.seeds:
        trials = (translator(setting, seed), translator(setting, seed, SMOOTHING))
        for name, trial in zip(NAMES, trials, strict=True):
            numbers[f"{name} BLEU"].append(greedy_bleu(trial))
            numbers[f"{name} perplexity"].append(math.exp(reference_loss(trial)))
            if seed == setting.seeds[0]:
                lines[f"{name}, −log P in training"] = stretches(trial.losses)
    return Measured(numbers=numbers, lines=lines, across="steps", up="nats a token")


def judge(measured: Measured) -> Judged:
    def gains(what: str) -> list[float]:
        pairs = zip(*(measured.numbers[f"{name} {what}"] for name in NAMES), strict=True)
        return [after - before for before, after in pairs]

    better, worse = min(gains("BLEU")) > 0, min(gains("perplexity")) > 0
    why = (
        f"BLEU {measured.reported('smoothed BLEU')} with smoothing and "
        f"{measured.reported('plain BLEU')} without, perplexity "
        f"{measured.reported('smoothed perplexity')} and {measured.reported('plain perplexity')}"
    )
    if worse and not better:
        return Judged(
            "depends", f"holds for perplexity, but BLEU does not improve with every seed: {why}"
        )
    return Judged("holds" if better and worse else "fails", why)


CLAIM = Claim(
    sentence="Label smoothing improves the BLEU of a translator although it makes the perplexity "
    "worse, as the paper says.",
    lectures="none",
    criterion="with ε = 0.1 both the BLEU of greedy translations and the perplexity, of the same "
    "test sentences, are higher than without, with every seed",
    measure=measure,
    judge=judge,
)
