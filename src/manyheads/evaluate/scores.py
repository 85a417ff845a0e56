"""Scores of translations, labels, numbers and language models, each with how it was computed."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from manyheads.config import nearest
from manyheads.errors import UserError

Scores = dict[str, Any]
Labels = Sequence[str] | Sequence[int] | np.ndarray
Numbers = Sequence[float] | np.ndarray


def make_bleu(tokenize: str) -> BLEU:
    """sacreBLEU with one of its tokenizers."""
    try:
        return BLEU(tokenize=tokenize)
    except RuntimeError:  # MeCab is not installed
        language = tokenize.partition("-")[0]
        raise UserError(
            f"--tokenize {tokenize} needs MeCab: pip install 'sacrebleu[{language}]', or use char"
        ) from None


def bleu_tokenizer(language: str) -> str:
    """sacreBLEU's tokenizer for a target language: 13a unless words have no spaces between them.

    Without MeCab, Japanese and Korean are compared by characters.
    """
    tokenize = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}.get(language, "13a")
    try:
        make_bleu(tokenize)
    except UserError:
        return "char"
    return tokenize


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> Scores:
    """sacreBLEU and chrF of a test set with their signatures, and the share of exact matches."""
    if len(hypotheses) != len(references) or not hypotheses:
        raise UserError(f"{len(hypotheses)} translations cannot be scored by {len(references)}")
    bleu, chrf = make_bleu(tokenize), CHRF()
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


def language_scores(
    nll: float, tokens: int, *, unit: str, characters: int, bytes_: int, words: int | None
) -> Scores:
    """What −log P of a text comes to for each of its tokens, characters, bytes and words.

    The log is the natural one, and `unit` says what a token is, as "bpe, 8000 tokens".
    """
    if min(tokens, characters, bytes_, 1 if words is None else words) < 1:
        raise UserError("an empty text has no perplexity: give one with words in it")
    _finite([nll])
    bits = nll / math.log(2)
    scores: Scores = {
        "loss": nll / tokens,
        "perplexity": perplexity(nll, tokens),
        "bits_per_character": bits / characters,
        "bits_per_byte": bits / bytes_,
    }
    signature = {
        "loss": f"nats per token ({unit}); {tokens} tokens",
        "perplexity": f"e^loss, per token ({unit}); {tokens} tokens",
        "bits_per_character": f"of {characters} Unicode characters ({unit})",
        "bits_per_byte": f"of {bytes_} UTF-8 bytes ({unit})",
    }
    if words is not None:
        scores["word_perplexity"] = perplexity(nll, words)
        signature["word_perplexity"] = f"e^(nll / words), of {words} words ({unit})"
    return scores | {"signature": signature}


def label_scores(
    metrics: Sequence[str],
    predicted: Labels | Numbers,
    wanted: Labels | Numbers,
    positive: str | int,
) -> Scores:
    """These metrics of labels or numbers; `positive` is the label whose F1 is taken."""
    computed = {
        "accuracy": (accuracy, "share of equal labels"),
        "f1": (
            lambda p, w: f1(p, w, positive),
            f"2 TP / (2 TP + FP + FN) of the label {positive}; 0 without any",
        ),
        "matthews": (matthews, "R_K, for two labels Matthews' phi; 0 where a side is constant"),
        "pearson": (pearson, "r; 0 where a side is constant"),
        "spearman": (
            lambda p, w: pearson(_ranks(_finite(p)), _ranks(_finite(w))),  # JSON has no NaN
            "r of the ranks, ties at their mean; 0 where a side is constant",
        ),
    }
    predicted, wanted = _pair(predicted, wanted)
    for name in metrics:
        if name not in computed:
            raise UserError(f"there is no metric '{name}': {nearest(name, computed)}")
    scores: Scores = {name: computed[name][0](predicted, wanted) for name in metrics}
    return scores | {"signature": {name: computed[name][1] for name in metrics}}


def accuracy(predicted: Labels, wanted: Labels) -> float:
    given, right = _pair(predicted, wanted)
    return float((given == right).mean())


def f1(predicted: Labels, wanted: Labels, positive: str | int) -> float:
    """F1 = 2 TP / (2 TP + FP + FN) of one label; 0 where neither side has it."""
    given, right = (side == positive for side in _pair(predicted, wanted))
    either = int(given.sum()) + int(right.sum())  # 2 TP + FP + FN
    return 2 * int((given & right).sum()) / either if either else 0.0


def matthews(predicted: Labels, wanted: Labels) -> float:
    """Matthews' correlation of labels, for more than two of them Gorodkin's R_K.

    R_K = (c·s − Σ pₖ·tₖ) / √((s² − Σ pₖ²)·(s² − Σ tₖ²)), where s labels, c of them right, have
    label k pₖ times predicted and tₖ times wanted. 0 where one side is constant.
    """
    given, right = _pair(predicted, wanted)
    _, place = np.unique(np.concatenate([given, right]), return_inverse=True)
    p, t = (np.bincount(side, minlength=place.max() + 1) for side in np.split(place, 2))
    s, c = len(given), int((given == right).sum())
    # Python's whole numbers: the product of the two spreads may not fit 64 bits.
    spread = int(s * s - p @ p) * int(s * s - t @ t)
    return (c * s - int(p @ t)) / math.sqrt(spread) if spread else 0.0


def pearson(one: Numbers, other: Numbers) -> float:
    """Pearson's correlation r; 0 where one side is constant, where r has no value."""
    given, right = (_finite(side) for side in _pair(one, other))
    # Not by the sum of squares: the mean of equal numbers may be off by rounding.
    if min(np.ptp(given), np.ptp(right)) == 0:
        return 0.0
    # In units of the spread, so that squares of very small numbers are not 0.
    given, right = given / np.ptp(given), right / np.ptp(right)
    return _correlation(given - given.mean(), right - right.mean())


def spearman(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of their ranks."""
    if len(one) != len(other) or len(one) < 2:
        raise UserError(f"{len(one)} values cannot be ranked against {len(other)}")
    a, b = _ranks(np.asarray(one)), _ranks(np.asarray(other))
    return _correlation(a, b)


def _pair(one: Labels | Numbers, other: Labels | Numbers) -> tuple[np.ndarray, np.ndarray]:
    if len(one) != len(other) or not len(one):
        raise UserError(f"{len(one)} answers cannot be scored by {len(other)}")
    return np.asarray(one), np.asarray(other)


def _finite(values: Numbers) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise UserError(
            "the model's answers are no finite numbers: it has diverged; train it again, for "
            "example with a lower train.learning_rate"
        )
    return numbers


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    spread = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / spread if spread else math.nan


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    ranks: np.ndarray = mean_rank[place] - mean_rank[place].mean()
    return ranks
