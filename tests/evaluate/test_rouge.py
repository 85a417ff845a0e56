"""ROUGE equals its definition, takes the best reference, and describes how it was computed."""

import sys
from collections import Counter
from importlib.metadata import version

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.errors import UserError
from manyheads.tasks.summaries import UNITS, by_sentences, rouge_scores

# Short words, which the stemmer leaves unchanged.
words = st.lists(st.sampled_from(("the", "cat", "sat", "on", "mat")), min_size=1, max_size=7)


def f1(common: int, summary: int, reference: int) -> float:
    return 2 * common / (summary + reference) if common else 0.0


def ngram_f1(summary: list[str], reference: list[str], n: int) -> float:
    ours, theirs = (
        Counter(tuple(side[start : start + n]) for start in range(len(side) - n + 1))
        for side in (summary, reference)
    )
    return f1((ours & theirs).total(), ours.total(), theirs.total())


def lcs(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence."""
    if not a or not b:
        return 0
    return 1 + lcs(a[:-1], b[:-1]) if a[-1] == b[-1] else max(lcs(a[:-1], b), lcs(a, b[:-1]))


@settings(deadline=None, max_examples=40)
@given(summary=words, references=st.lists(words, min_size=1, max_size=3))
def test_scores_are_their_definitions_with_the_best_reference(
    summary: list[str], references: list[list[str]]
) -> None:
    scores = rouge_scores([" ".join(summary)], [[" ".join(text) for text in references]])
    for n in (1, 2):
        best = max(ngram_f1(summary, text, n) for text in references)
        assert scores[f"rouge{n}"] == pytest.approx(best)
    best = max(f1(lcs(summary, text), len(summary), len(text)) for text in references)
    assert scores["rougeL"] == pytest.approx(best)


def test_scores_are_means_and_ignore_case_and_endings() -> None:
    scores = rouge_scores(["the cat sat", "none"], [["The cat sat on the mat."], ["dogs"]])
    assert scores["rouge1"] == pytest.approx((2 / 3 + 0) / 2)  # P = 3/3, R = 3/6
    assert rouge_scores(["Running DOGS!"], [["run dog"]])["rouge2"] == 1
    assert rouge_scores(["", "…"], [["a cat"], ["a cat"]])["rouge1"] == 0


def test_rouge_lsum_compares_sentences() -> None:
    summary, reference = "The cat sat. A dog ran!", "A dog ran! The cat sat."
    scores = rouge_scores([summary], [[reference]])
    assert scores["rougeLsum"] == 1
    assert scores["rougeL"] == pytest.approx(1 / 2)
    assert by_sentences("A. b\nc. d") == "A. b\nc. d"  # lines are sentences
    assert rouge_scores([summary.replace(". ", ".\n")], [[reference]])["rougeLsum"] == 1


def test_the_signature_names_all_settings() -> None:
    signature = rouge_scores(["a", "b"], [["a", "c"], ["b"]])["signature"]
    assert signature.keys() == UNITS.keys()
    for text in signature.values():
        assert "F1|refs:1-2|of them:best" in text
        assert text.endswith(f"stemmer:porter|rouge-score:{version('rouge-score')}")
    assert "refs:1|" in rouge_scores(["a"], [["a"]], ["rougeL"])["signature"]["rougeL"]


@pytest.mark.parametrize(
    ("summaries", "references"), [([], []), (["a"], []), (["a"], [[]]), (["猫"], [["猫"]])]
)
def test_what_cannot_be_scored_is_refused(
    summaries: list[str], references: list[list[str]]
) -> None:
    with pytest.raises(UserError, match="references"):
        rouge_scores(summaries, references)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(UserError, match=r"manyheads\[summaries\]"):
        rouge_scores(["a"], [["a"]])
