"""Scores of translations and language models.

Each score has a signature, which says how it was computed, as sacreBLEU's does.
"""

import math
from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from manyheads.errors import UserError

Scores = dict[str, Any]


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
        raise UserError(f"{len(hypotheses)} translations do not match {len(references)} references")
    scores: Scores = {}
    signatures = {}
    for name, metric in (("bleu", make_bleu(tokenize)), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        signatures[name] = str(metric.get_signature())
    exact = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    return scores | {"exact_match": exact / len(references), "signature": signatures}


def diverged() -> UserError:
    """JSON has neither NaN nor infinity, so no score may be one."""
    return UserError(
        "the model's outputs are not finite numbers: it has diverged; train it again with a lower "
        "train.learning_rate"
    )


def perplexity(nll: float, tokens: int) -> float:
    """e^(−log P per token), at most e^700; it depends on what the tokenizer calls a token."""
    return math.exp(min(700.0, nll / tokens))


def loss_scores(nll: float, tokens: int) -> dict[str, float]:
    """The mean −log P of a token in nats, and the perplexity."""
    return {"loss": nll / tokens, "perplexity": perplexity(nll, tokens)}


def language_scores(
    nll: float, tokens: int, *, unit: str, characters: int, bytes_: int, words: int
) -> Scores:
    """−log P of a text, per token (nats), character and byte (bits), and word (perplexity).

    `unit` describes a token, e.g. "bpe, 8000 tokens".
    """
    if min(tokens, characters, bytes_, words) < 1:
        raise UserError("an empty text has no perplexity: use a text with words")
    if not math.isfinite(nll):
        raise diverged()
    bits = nll / math.log(2)
    scores: Scores = {
        **loss_scores(nll, tokens),
        "bits_per_character": bits / characters,
        "bits_per_byte": bits / bytes_,
        "word_perplexity": perplexity(nll, words),
    }
    signature = {
        "loss": f"nats per token ({unit}); {tokens} tokens",
        "perplexity": f"e^loss, per token ({unit}); {tokens} tokens",
        "bits_per_character": f"of {characters} Unicode characters ({unit})",
        "bits_per_byte": f"of {bytes_} UTF-8 bytes ({unit})",
        "word_perplexity": f"e^(nll / words), of {words} words ({unit})",
    }
    return scores | {"signature": signature}
