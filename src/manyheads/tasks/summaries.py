"""Summaries by an encoder–decoder: translation from long to short, scored by ROUGE.

A document that is longer than the model is truncated: at a token in training, and after the last
sentence that fits (else word) when a summary is generated.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from manyheads.data.summaries import SummaryData, as_lines
from manyheads.data.translation import Corpus, FilesData
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import UserError, import_optional
from manyheads.evaluate.scores import Scores, add_plugin_metrics
from manyheads.tasks import translation
from manyheads.tasks.spec import LoadedModel, token_unit
from manyheads.tasks.translation import TranslationTask, target_likelihood
from manyheads.train.metrics import Bar

# The units whose overlap each kind counts, as its signature names them.
UNITS = {
    "rouge1": "words",
    "rouge2": "pairs of words",
    "rougeL": "longest common subsequence",
    "rougeLsum": "longest common subsequences by sentence: lines, or of one line after .!?",
}


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


class SummaryTask(TranslationTask):
    """Trained as translation is; validation has ROUGE-L instead of BLEU, if it is installed."""

    def text_scores(self, translator: BaseTranslator, rows: list[int]) -> dict[str, float]:
        if find_spec("rouge_score") is None:
            return {}
        summaries = summarize(translator, [self.valid_corpus.sources[row] for row in rows])
        all_references = references(self.valid_corpus)
        scores = rouge_scores(summaries, [all_references[row] for row in rows], ["rougeL"])
        return {"rougeL": scores["rougeL"]}


def references(corpus: Corpus) -> list[list[str]]:
    """The reference summaries of each document, with their line ends."""
    references = corpus.references or [[target] for target in corpus.targets]
    return [[as_lines(text) for text in texts] for texts in references]


def truncate(translator: BaseTranslator, document: str) -> str:
    """As much of a document as the model can encode at once."""
    return translator.split(document)[0]


def truncate_lines(
    translator: BaseTranslator, documents: Iterable[str], warn: Callable[[str], None]
) -> Iterator[str]:
    """Documents, one a line, each truncated to what the model can encode."""
    for number, line in enumerate(documents, start=1):
        start = truncate(translator, line)
        if len(start) < len(line):
            warn(
                f"line {number} is longer than the model's {translator.max_length} tokens: only "
                f"its first {len(start)} of {len(line)} characters are used"
            )
        yield start


def summarize(
    translator: BaseTranslator,
    documents: Sequence[str],
    advance: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The best summary of each document, with its line ends."""
    truncated = [truncate(translator, document) for document in documents]
    return [as_lines(text) for text in translator.translate_long(truncated, advance)]


def evaluate(loaded: LoadedModel, data: SummaryData | FilesData, split_name: str) -> Scores:
    """ROUGE-1, -2, -L and -Lsum of a split and, if the model gives them, loss and perplexity."""
    rouge_scorer()  # reports a missing package now, not after all summaries are generated
    translator, corpus = loaded.translator(), data.read(split_name)
    with Bar("evaluate", len(corpus.sources)) as bar:
        summaries = summarize(
            translator, corpus.sources, lambda done: bar.update(done, "documents")
        )
    scores = rouge_scores(summaries, references(corpus))
    scores = add_plugin_metrics(scores, "summaries", summaries, references(corpus))
    likelihood = target_likelihood(translator, corpus, "truncate")
    if likelihood:
        unit = token_unit(translator.tokenizer)
        scores |= likelihood
        scores["signature"] |= {
            "loss": "log-perplexity, which tables of summarisation often call perplexity|nats per "
            f"token ({unit})|first reference|cut:{translator.max_length} tokens",
            "perplexity": "e^loss",
        }
    return scores | {"split": split_name, "examples": len(corpus.sources)}


SPEC = replace(
    translation.SPEC,
    task="summaries",
    data=(SummaryData, FilesData),
    recipe="summaries",
    is_default=False,
    served_as="",
    prepare=SummaryTask,
    evaluate=evaluate,
    scoring=("beam", "int8"),
)
