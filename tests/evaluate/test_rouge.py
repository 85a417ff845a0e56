"""ROUGE is rouge-score's, which is its definition; how it was computed is said."""

import sys
from collections import Counter
from importlib.metadata import version

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.errors import UserError
from manyheads.evaluate.rouge import PARTS, by_sentences, rouge_scores

# Short ones have no endings to take off.
words = st.lists(st.sampled_from(("the", "cat", "sat", "on", "mat")), min_size=1, max_size=7)


def balanced(common: int, summary: int, reference: int) -> float:
    """F1 from counts: 2 P R / (P + R)."""
    return 2 * common / (summary + reference) if common else 0.0


def of_runs(summary: list[str], reference: list[str], n: int) -> float:
    ours, theirs = (
        Counter(tuple(side[place : place + n]) for place in range(len(side) - n + 1))
        for side in (summary, reference)
    )
    return balanced((ours & theirs).total(), ours.total(), theirs.total())


def common(one: list[str], other: list[str]) -> int:
    """Length of the longest common subsequence."""
    if not one or not other:
        return 0
    if one[-1] == other[-1]:
        return 1 + common(one[:-1], other[:-1])
    return max(common(one[:-1], other), common(one, other[:-1]))


@settings(deadline=None, max_examples=60)
@given(summary=words, reference=words)
def test_the_definitions(summary: list[str], reference: list[str]) -> None:
    found = rouge_scores([" ".join(summary)], [[" ".join(reference)]])
    for n in (1, 2):
        assert found[f"rouge{n}"] == pytest.approx(of_runs(summary, reference, n))
    longest = balanced(common(summary, reference), len(summary), len(reference))
    assert found["rougeL"] == pytest.approx(longest)


def test_numbers_by_hand_and_their_mean() -> None:
    found = rouge_scores(["the cat sat", "none"], [["The cat sat on the mat."], ["dogs"]])
    assert found["rouge1"] == pytest.approx((2 / 3 + 0) / 2)  # P = 3/3, R = 3/6
    assert found["rouge2"] == pytest.approx((4 / 7 + 0) / 2)  # P = 2/2, R = 2/5
    assert found["rougeL"] == found["rougeLsum"] == found["rouge1"]


def test_endings_and_capitals_do_not_count() -> None:
    assert rouge_scores(["Running DOGS!"], [["run dog"]])["rouge2"] == 1


@settings(deadline=None, max_examples=30)
@given(summary=words, references=st.lists(words, min_size=1, max_size=4))
def test_the_best_reference_counts(summary: list[str], references: list[list[str]]) -> None:
    several = [" ".join(one) for one in references]
    found = rouge_scores([" ".join(summary)], [several])
    alone = [rouge_scores([" ".join(summary)], [[one]]) for one in several]
    for kind in PARTS:
        assert found[kind] == max(one[kind] for one in alone)


def test_sentences_in_another_order() -> None:
    one, other = "The cat sat. A dog ran!", "A dog ran! The cat sat."
    found = rouge_scores([one], [[other]])
    assert found["rougeLsum"] == 1
    assert found["rougeL"] == pytest.approx(1 / 2)
    assert by_sentences(one) == "The cat sat.\nA dog ran!"
    # Lines are sentences where there are any, whatever their full stops.
    assert by_sentences("A. b\nc. d") == "A. b\nc. d"
    assert rouge_scores([one.replace(". ", ".\n")], [[other]])["rougeLsum"] == 1


def test_an_empty_summary_is_worth_nothing() -> None:
    assert rouge_scores(["", "…"], [["a cat"], ["a cat"]])["rouge1"] == 0


def test_how_it_was_computed() -> None:
    signature = rouge_scores(["a", "b"], [["a", "c"], ["b"]])["signature"]
    assert signature.keys() == PARTS.keys()
    for one in signature.values():
        assert "F1|refs:1-2|of them:best" in one
        assert one.endswith(f"stemmer:porter|rouge-score:{version('rouge-score')}")
    assert "refs:1|" in rouge_scores(["a"], [["a"]], ["rougeL"])["signature"]["rougeL"]


@pytest.mark.parametrize(
    ("summaries", "references", "said"),
    [
        ([], [], "0 summaries cannot be scored by 0"),
        (["a"], [], "1 summaries cannot be scored by 0"),
        (["a"], [[]], "without a reference"),
        (["猫"], [["猫"]], "knows words of a–z"),
    ],
)
def test_what_cannot_be_scored(
    summaries: list[str], references: list[list[str]], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        rouge_scores(summaries, references)


def test_the_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(UserError, match=r"pip install 'manyheads\[summaries\]'"):
        rouge_scores(["a"], [["a"]])
