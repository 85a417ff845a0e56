"""Label smoothing: what a model gains and loses that is never asked to be certain.

Two are trained alike, but for the ε of q = (1 − ε) one-hot + ε / V, what they should predict.
No deck says it, but the paper does.
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
        f"BLEU {measured.told('smoothed BLEU')} with smoothing and "
        f"{measured.told('plain BLEU')} without, perplexity "
        f"{measured.told('smoothed perplexity')} and {measured.told('plain perplexity')}"
    )
    if worse and not better:
        return Judged("depends", f"holds only for perplexity, BLEU not with every seed: {why}")
    return Judged("holds" if better and worse else "fails", why)


CLAIM = Claim(
    sentence="Label smoothing makes a translator better by BLEU, although it makes the perplexity "
    "worse, says the paper.",
    deck="none",
    criterion="with ε = 0.1 both the BLEU of greedy translations and the perplexity, of the same "
    "test sentences, are higher than without, with every seed",
    measure=measure,
    judge=judge,
)
