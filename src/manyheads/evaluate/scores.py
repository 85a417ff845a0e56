"""BLEU, chrF, exact match, perplexity, rank correlation; how each was computed goes with it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from manyheads.errors import Mistake

Scores = dict[str, Any]


def translation_scores(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """sacreBLEU and chrF of a test set with their signatures, and the share of exact matches."""
    if len(hypotheses) != len(references) or not hypotheses:
        raise Mistake(f"{len(hypotheses)} translations cannot be scored by {len(references)}")
    bleu, chrf = BLEU(), CHRF()
    bleu_score = bleu.corpus_score(list(hypotheses), [list(references)]).score
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)]).score
    exact = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    return {
        "bleu": bleu_score,
        "chrf": chrf_score,
        "exact_match": exact / len(references),
        "signature": {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())},
    }


def perplexity(nll: float, tokens: int) -> float:
    """e^(−log P per token), of the tokens of this run's tokenizer."""
    return math.exp(min(700.0, nll / tokens))


def spearman(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of their ranks."""
    if len(one) != len(other) or len(one) < 2:
        raise Mistake(f"{len(one)} values cannot be ranked against {len(other)}")
    a, b = _ranks(np.asarray(one)), _ranks(np.asarray(other))
    spread = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / spread if spread else math.nan


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks around their mean."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    ranks: np.ndarray = mean_rank[place] - mean_rank[place].mean()
    return ranks
