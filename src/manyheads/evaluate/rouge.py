"""ROUGE: overlap of summaries with the references that people wrote."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from manyheads.errors import UserError, import_optional
from manyheads.evaluate.scores import Scores

# The units whose overlap each kind counts, as its signature names them.
UNITS = {
    "rouge1": "words",
    "rouge2": "pairs of words",
    "rougeL": "longest common subsequence",
    "rougeLsum": "longest common subsequences by sentence: lines, or of one line after .!?",
}


def has_rouge() -> bool:
    """True if the package rouge-score is installed."""
    return find_spec("rouge_score") is not None


def rouge_scorer(kinds: Sequence[str] = tuple(UNITS)) -> Any:
    """The scorer of rouge-score; refused if the package is not installed."""
    module = import_optional("rouge_score.rouge_scorer", "summaries")
    return module.RougeScorer(list(kinds), use_stemmer=True)


def rouge_scores(
    summaries: Sequence[str],
    references: Sequence[Sequence[str]],
    kinds: Sequence[str] = tuple(UNITS),
) -> Scores:
    """The mean F1 of summaries, from 0 to 1; each may have several references.

    F1 = 2 P R / (P + R) with precision P and recall R of a summary's units. For each kind of ROUGE
    the reference with the best F1 counts.
    """
    if len(summaries) != len(references) or not summaries or not all(references):
        raise UserError(
            f"{len(summaries)} summaries need as many lists of references, none of them empty"
        )
    # rouge-score would give any other script a silent 0.
    if not any(re.search("[a-z0-9]", text.lower()) for texts in references for text in texts):
        raise UserError(
            "rouge-score recognises words of a–z and 0–9, and the references have none: use "
            "another score"
        )
    scorer = rouge_scorer(kinds)
    totals = dict.fromkeys(kinds, 0.0)
    for summary, texts in zip(summaries, references, strict=True):
        best = scorer.score_multi([by_sentences(text) for text in texts], by_sentences(summary))
        for kind in kinds:
            totals[kind] += float(best[kind].fmeasure)
    counts = {len(texts) for texts in references}
    count = "-".join(map(str, sorted({min(counts), max(counts)})))
    settings = (
        f"mean F1|refs:{count}|of them:best|"
        f"case:lower|words:a-z0-9|stemmer:porter|rouge-score:{version('rouge-score')}"
    )
    scores: Scores = {kind: totals[kind] / len(summaries) for kind in kinds}
    return scores | {"signature": {kind: f"{UNITS[kind]}|{settings}" for kind in kinds}}


def by_sentences(text: str) -> str:
    """One sentence a line, as ROUGE-Lsum needs it: a single line is split after `.`, `!`, `?`.

    rouge-score's own splitter is not used: it needs a model that is downloaded.
    """
    return text if "\n" in text.strip() else re.sub(r"(?<=[.!?])\s+", "\n", text.strip())
