"""BLEU, chrF, exact match and perplexity; each number carries how it was computed."""

import math
from collections.abc import Sequence
from typing import Any

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
