"""ROUGE: how much of what people wrote stands in a summary, and how much of it they wrote."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from manyheads.errors import UserError, import_optional
from manyheads.evaluate.scores import Scores

# By which parts a summary is compared, and how the sentences of a text are told apart.
PARTS = {
    "rouge1": "words",
    "rouge2": "pairs of words",
    "rougeL": "longest common subsequence",
    "rougeLsum": "longest common subsequences by sentence: lines, or of one line after .!?",
}


def rouge_is_here() -> bool:
    return find_spec("rouge_score") is not None


def rouge_scorer(kinds: Sequence[str] = tuple(PARTS)) -> Any:
    """What compares two texts, or one line about what is missing."""
    module = import_optional("rouge_score.rouge_scorer", "summaries")
    return module.RougeScorer(list(kinds), use_stemmer=True)


def rouge_scores(
    summaries: Sequence[str],
    references: Sequence[Sequence[str]],
    kinds: Sequence[str] = tuple(PARTS),
) -> Scores:
    """The mean F1 of summaries, from 0 to 1; each may have several references.

    F1 = 2 P R / (P + R), where P is the share of a summary's parts that the reference has, and R
    the share of the reference's parts that the summary has. Of several references the one with
    the best F1 counts, for each kind of ROUGE by itself.
    """
    if len(summaries) != len(references) or not summaries:
        raise UserError(f"{len(summaries)} summaries cannot be scored by {len(references)}")
    if not all(references):
        raise UserError("a summary without a reference cannot be scored: give each at least one")
    # Any other script would be scored 0 without a word.
    if not any(re.search("[a-z0-9]", one.lower()) for several in references for one in several):
        raise UserError(
            "ROUGE by rouge-score knows words of a–z and 0–9, and the references have none: "
            "score them in another way"
        )
    scorer = rouge_scorer(kinds)
    totals = dict.fromkeys(kinds, 0.0)
    for summary, several in zip(summaries, references, strict=True):
        found = scorer.score_multi([by_sentences(one) for one in several], by_sentences(summary))
        for kind in kinds:
            totals[kind] += float(found[kind].fmeasure)
    counts = sorted({len(several) for several in references})
    how = (
        f"mean F1|refs:{'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}|of them:best|"
        f"case:lower|words:a-z0-9|stemmer:porter|rouge-score:{version('rouge-score')}"
    )
    scores: Scores = {kind: totals[kind] / len(summaries) for kind in kinds}
    return scores | {"signature": {kind: f"{PARTS[kind]}|{how}" for kind in kinds}}


def by_sentences(text: str) -> str:
    """A sentence a line, as ROUGE-Lsum wants it: a text of one line is parted after `.`, `!`, `?`.

    rouge-score's own splitter is not used: it needs a model that is fetched.
    """
    return text if "\n" in text.strip() else re.sub(r"(?<=[.!?])\s+", "\n", text.strip())
