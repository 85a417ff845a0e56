"""Scores of translations and language models.

Each score has a signature, which says how it was computed, as sacreBLEU's does.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from manyheads.config import nearest
from manyheads.errors import UserError

Scores = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of a plug-in: score(predictions, references) of the examples of a split.

    A translator predicts texts, and each reference is a list of texts; a classifier, labels.
    """

    name: str
    score: Callable[[Sequence[Any], Sequence[Any]], float]
    tasks: tuple[str, ...] = ("translation",)
    signature: str = ""


METRICS: list[Metric] = []  # those of plug-ins


def add_plugin_metrics(
    scores: Scores, task: str, predictions: Sequence[Any], references: Sequence[Any]
) -> Scores:
    """The scores with the metrics that plug-ins have for a task."""
    signature = dict(scores["signature"])
    for metric in METRICS:
        if task in metric.tasks:
            scores = scores | {metric.name: float(metric.score(predictions, references))}
            signature[metric.name] = metric.signature or "metric of a plug-in"
    return scores | {"signature": signature}


RESAMPLES = 1000  # of bootstrap resampling, sacreBLEU's default
# BLEU's tokenizer for languages that 13a does not fit, by ISO 639 codes.
BY_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya"), "char"),
}
# Thai to Khmer, kana, Chinese characters: words have no spaces between them.
SPACELESS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
)


def make_bleu(tokenize: str) -> BLEU:
    """sacreBLEU with one of its tokenizers."""
    try:
        return BLEU(tokenize=tokenize)
    except RuntimeError:  # MeCab is not installed
        language = tokenize.partition("-")[0]
        raise UserError(
            f"--bleu-tokenize {tokenize} needs MeCab: pip install 'sacrebleu[{language}]', or use "
            "char"
        ) from None


def bleu_tokenizer(language: str, references: Sequence[str] = ()) -> str:
    """sacreBLEU's tokenizer for a target language: 13a unless words have no spaces between them.

    A language that the table lacks has 13a too, unless the references have no spaces: BLEU of
    characters then. Without MeCab, Japanese and Korean are compared by characters.
    """
    tokenize = BY_LANGUAGE.get(language) or ("char" if lacks_spaces(references) else "13a")
    try:
        make_bleu(tokenize)
    except UserError:
        return "char"
    return tokenize


def make_metrics(names: Sequence[str], tokenize: str) -> dict[str, Any]:
    """sacreBLEU's metrics by name; `tokenize` is the tokenizer of BLEU."""
    metrics: dict[str, Any] = {
        "bleu": make_bleu(tokenize),
        "chrf": CHRF(),
        "chrf++": CHRF(word_order=2),
        "ter": TER(),
    }
    known = [*metrics, *(metric.name for metric in METRICS)]
    for name in names:
        if name not in known:
            raise UserError(f"--metric {name}: {nearest(name, known)}")
    return {name: metrics[name] for name in names if name in metrics}


def lacks_spaces(texts: Sequence[str]) -> bool:
    """True if most letters belong to scripts that put no spaces between words."""
    letters = [char for text in texts for char in text if char.isalpha()]
    return 2 * sum(bool(SPACELESS.match(char)) for char in letters) > len(letters)


def missing_spaces(names: Sequence[str], tokenize: str, references: Sequence[str]) -> str:
    """A warning if metrics need spaces between words, and the references have none; or ""."""
    affected = [name for name in names if name == "ter" or (name, tokenize) == ("bleu", "13a")]
    if not affected or not lacks_spaces(references):
        return ""
    fix = "--bleu-tokenize zh, ja-mecab or char" if "bleu" in affected else "--metric chrf"
    return (
        f"the references have no spaces between words, which {' and '.join(affected)} needs "
        f"(tokenizer of BLEU: {tokenize}): evaluate with {fix}"
    )


def by_reference(references: Sequence[Sequence[str]]) -> Any:
    """The references of each text as sacreBLEU takes them: one list for each reference."""
    return [list(column) for column in zip_longest(*references)]


def translation_scores(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    tokenize: str = "13a",
    names: Sequence[str] = ("bleu", "chrf"),
    *,
    confidence: bool = False,
) -> Scores:
    """sacreBLEU's metrics of a test set with their signatures, and the share of exact matches.

    Each text has one reference, or a list of them. `confidence` adds the mean of bootstrap
    resamples and the half width of their 95 % interval.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise UserError(f"{len(hypotheses)} translations do not match {len(references)} references")
    lists = [[texts] if isinstance(texts, str) else list(texts) for texts in references]
    scores: Scores = {}
    signatures = {}
    samples = RESAMPLES if confidence else 1
    for name, metric in make_metrics(names, tokenize).items():
        if confidence:
            _return_zero_as_int(metric)
        result = metric.corpus_score(list(hypotheses), by_reference(lists), n_bootstrap=samples)
        scores[name] = result.score
        if confidence:
            scores |= {f"{name}_mean": float(result._mean), f"{name}_ci": float(result._ci)}
        signatures[name] = str(metric.get_signature())
    exact = sum(h in texts for h, texts in zip(hypotheses, lists, strict=True))
    return scores | {"exact_match": exact / len(references), "signature": signatures}


def _return_zero_as_int(metric: Any) -> None:
    """sacreBLEU cannot average float32 with the float 0.0 of resamples without a match."""
    compute = metric._compute_score_from_stats

    def with_zero(stats: Any) -> Any:
        result = compute(stats)
        result.score = result.score or 0
        return result

    metric._compute_score_from_stats = with_zero


def paired_scores(
    baseline: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenize: str,
    names: Sequence[str],
) -> Scores:
    """Paired bootstrap resampling (Koehn 2004): the baseline's scores, and p of each difference."""
    systems: Any = [("baseline", list(baseline)), ("system", list(hypotheses))]
    metrics = make_metrics(names, tokenize)
    test = PairedTest(systems, metrics, by_reference(references), "bs", n_samples=RESAMPLES)
    _, results = test()
    columns: list[Any] = list(results.values())[1:]  # the first has the names of the systems
    return {
        name: {"against": float(before.score), "p": float(after.p_value)}
        for name, (before, after) in zip(metrics, columns, strict=True)
    }


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
