"""Pretraining and fine-tuning against training from scratch, with few labels and with many.

Aalborg *Web Intelligence, Lecture 9: Transformers* says to pretrain once and fine-tune often. No
lecture says that few labels suffice then; Howard and Ruder (2018) do.
"""

from copy import deepcopy
from statistics import fmean

import numpy as np
import torch

from manyheads.data.masking import Masked
from manyheads.lab.claims.claim import Claim, Judged, Measured, Setting
from manyheads.lab.claims.reading import (
    UNLABELLED,
    Labelled,
    Labeller,
    Labels,
    Rows,
    Size,
    Topics,
    encoder,
    pretrained,
)
from manyheads.models.bert import Bert

LABELS = (16, 64, 256, 1024)
TEXTS, TEST_TEXTS, TUNING_STEPS, BATCH = 8000, 500, 100, 32
# For each, the better of the two rates.
RATES = {"pretrained": 1e-3, "scratch": 3e-3}
SMALL = Size(dim=64, layers=2, longest=16, rows=64, steps=300, rate=5e-3)
LARGE = Size(dim=256, layers=4, longest=16, rows=256, steps=2000, rate=1e-3)


def at_first(rows: Rows, topics: Labels) -> Labelled:
    """Label the first position of each text with its topic."""
    labels = torch.full_like(rows, UNLABELLED)
    labels[:, 0] = topics
    return Labelled(rows, labels)


def accuracies(size: Size, seed: int, device: torch.device) -> dict[str, list[float]]:
    """The accuracy for each number of labels, pretrained and from scratch."""
    language, random = Topics(seed=seed), np.random.default_rng(seed)
    texts = at_first(*language.draw(TEXTS, random))
    test = at_first(*language.draw(TEST_TEXTS, random))

    def tuned(begin: Bert, count: int, rate: float) -> float:
        torch.manual_seed(seed)
        model = Labeller(deepcopy(begin), language.topics).to(device)
        model.fit(texts[:count], batch=BATCH, steps=TUNING_STEPS, rate=rate, seed=seed)
        return model.accuracy(test)

    begins = {
        "pretrained": pretrained(texts.rows, language.words, size, Masked(), seed, device),
        "scratch": encoder(language.words, size, seed).to(device),
    }
    return {
        name: [tuned(begin, count, RATES[name]) for count in LABELS]
        for name, begin in begins.items()
    }


def measure(setting: Setting) -> Measured:
    size = LARGE if setting.large else SMALL
    by_seed = [accuracies(size, seed, setting.device) for seed in setting.seeds]
    numbers = {
        f"{name} {when}": [result[name][index] for result in by_seed]
        for name in RATES
        for when, index in (("few", 0), ("many", -1))
    }
    lines = {
        name: [
            (count, fmean(result[name][index] for result in by_seed))
            for index, count in enumerate(LABELS)
        ]
        for name in RATES
    }
    return Measured(
        numbers=numbers,
        lines=lines,
        across="labelled texts",
        up="share of new texts with the right topic",
        logarithmic=("across",),
    )


def judge(measured: Measured) -> Judged:
    few, many = (
        [
            pretrained_accuracy - scratch_accuracy
            for pretrained_accuracy, scratch_accuracy in zip(
                measured.numbers[f"pretrained {when}"],
                measured.numbers[f"scratch {when}"],
                strict=True,
            )
        ]
        for when in ("few", "many")
    )
    why = (
        f"with {LABELS[0]} labels {measured.reported('pretrained few')} of the texts are right, "
        f"from scratch {measured.reported('scratch few')}; with {LABELS[-1]} labels "
        f"{measured.reported('pretrained many')} and {measured.reported('scratch many')}"
    )
    if min(few) < 0.1 or min(many) < -0.01:
        return Judged("fails", why)
    if fmean(many) > fmean(few) / 2:
        return Judged("depends", f"it is ahead, but the lead remains with many labels; {why}")
    return Judged("holds", why)


CLAIM = Claim(
    sentence="A model pretrained on unlabelled text learns a task from few labels; training from "
    "scratch needs many, and only with many is the lead gone, as Howard and Ruder found.",
    lectures="none",
    criterion="with 16 labelled texts at least 10 points of accuracy ahead in every seed, with "
    "1,024 no more than 1 point behind, and at most half of the lead left",
    measure=measure,
    judge=judge,
)
