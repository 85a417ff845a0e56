"""Scores are sacreBLEU's own, or their definitions written out; each has its signature."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from manyheads.errors import UserError
from manyheads.evaluate.scores import (
    accuracy,
    f1,
    label_scores,
    language_scores,
    matthews,
    pearson,
    perplexity,
    spearman,
    translation_scores,
)

REFERENCES = [
    "Der alte Hund schläft im Garten.",
    "Eine Katze sieht den Vogel, aber sie jagt ihn nicht.",
    "Wohnen die drei Kinder in diesem Haus?",
    "L'arbre n'est pas vert.",
]
HYPOTHESES = [
    "Der alte Hund schlief in dem Garten.",
    "Eine Katze sieht den Vogel, aber sie jagt ihn nicht.",
    "Die drei Kinder wohnen in diesem Haus .",
    "",
]


def test_scores_are_those_of_the_library() -> None:
    """BLEU and chrF equal sacreBLEU's functions, on a corpus and not as means of sentences."""
    found = translation_scores(HYPOTHESES, REFERENCES)
    assert found["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert 0 < found["bleu"] < 100


def test_scores_are_those_of_the_command(tmp_path: Path) -> None:
    """The `sacrebleu` command on two files prints our numbers and our signatures."""
    (tmp_path / "hypotheses").write_text("\n".join(HYPOTHESES) + "\n")
    (tmp_path / "references").write_text("\n".join(REFERENCES) + "\n")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "hypotheses"]
    command += ["-m", "bleu", "chrf", "-w", "8", "--format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = translation_scores(HYPOTHESES, REFERENCES)
    for name, theirs in zip(("bleu", "chrf"), json.loads(done.stdout), strict=True):
        assert found[name] == pytest.approx(theirs["score"], abs=1e-6)
        said = dict(part.split(":") for part in found["signature"][name].split("|"))
        assert said == {key: theirs[key] for key in said}
        assert said["version"] == sacrebleu.__version__


def test_perfect_is_a_hundred() -> None:
    """References scored by themselves: 100, 100 and all exact."""
    found = translation_scores(REFERENCES, REFERENCES)
    assert found["bleu"] == pytest.approx(100)
    assert found["chrf"] == pytest.approx(100)
    assert found["exact_match"] == 1


def test_nothing_right_is_nothing() -> None:
    """No character in common: 0 in every score."""
    found = translation_scores(["xx yy zz ww"], ["aa bb cc dd"])
    assert (found["bleu"], found["chrf"], found["exact_match"]) == (0, 0, 0)


@pytest.mark.parametrize("exact", [0, 1, 3])
def test_exact_match_is_a_share(exact: int) -> None:
    """Only whole translations count, to the letter."""
    wrong = [reference.lower() for reference in REFERENCES]
    mixed = REFERENCES[:exact] + wrong[exact:]
    assert translation_scores(mixed, REFERENCES)["exact_match"] == exact / len(REFERENCES)


@pytest.mark.parametrize(("hypotheses", "references"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_what_cannot_be_scored_is_refused(hypotheses: list[str], references: list[str]) -> None:
    """No sentence, or a different number of translations and references, is a mistake."""
    with pytest.raises(UserError):
        translation_scores(hypotheses, references)


@pytest.mark.parametrize(("vocabulary", "tokens"), [(2, 1), (50, 7), (32_000, 1000)])
def test_perplexity_of_a_uniform_guess_is_the_vocabulary(vocabulary: int, tokens: int) -> None:
    """log P = −log V a token gives perplexity V, however many tokens."""
    assert perplexity(tokens * math.log(vocabulary), tokens) == pytest.approx(vocabulary)
    assert perplexity(0.0, tokens) == 1


def test_a_hopeless_perplexity_is_still_a_number() -> None:
    """A model that gives no chance at all to a token has a huge perplexity, not an error."""
    assert 1e300 < perplexity(1e9, 1) < math.inf


def test_rank_correlation_is_the_formula() -> None:
    """1 − 6 Σ d² / (n (n² − 1)) without ties; with ties the correlation of mean ranks."""
    one, other = [3.0, 1.0, 4.0, 1.5, 9.0], [2.0, 7.0, 1.0, 8.0, 2.8]
    ranks = [[sorted(x).index(value) + 1 for value in x] for x in (one, other)]
    apart = sum((a - b) ** 2 for a, b in zip(*ranks, strict=True))
    assert spearman(one, other) == pytest.approx(1 - 6 * apart / (5 * 24))
    assert spearman(one, [x**3 for x in one]) == pytest.approx(1.0)
    assert spearman([1.0, 2.0, 2.0, 3.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(
        4.5 / math.sqrt(4.5 * 5)
    )
    assert math.isnan(spearman([1.0, 1.0], [1.0, 2.0]))
    with pytest.raises(UserError, match="ranked"):
        spearman([1.0], [1.0, 2.0])


def random_labels(seed: int, labels: int) -> tuple[list[int], list[int]]:
    """Predictions that are right about half of the time, and what was wanted."""
    random = np.random.default_rng(seed)
    wanted = random.integers(labels, size=60)
    predicted = np.where(random.random(60) < 0.4, wanted, random.integers(labels, size=60))
    return predicted.tolist(), wanted.tolist()


@pytest.mark.parametrize("labels", [2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_label_scores_are_their_definitions(seed: int, labels: int) -> None:
    """Counted row by row; Matthews as the correlation of one-hot rows, whatever the labels are."""
    predicted, wanted = random_labels(seed, labels)
    rows = list(zip(predicted, wanted, strict=True))
    assert accuracy(predicted, wanted) == sum(p == w for p, w in rows) / 60
    for label in range(labels):
        right = sum(p == w == label for p, w in rows)
        precision, recall = right / predicted.count(label), right / wanted.count(label)
        harmonic = 2 * precision * recall / (precision + recall)
        assert f1(predicted, wanted, label) == pytest.approx(harmonic)
    one_hot = [np.eye(labels)[side] - np.eye(labels)[side].mean(0) for side in (predicted, wanted)]
    x, y = one_hot
    wished = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    assert matthews(predicted, wanted) == pytest.approx(wished)
    words = [[f"label {label}" for label in side] for side in (predicted, wanted)]
    assert matthews(*words) == matthews(predicted, wanted)
    assert f1(*words, "label 1") == f1(np.array(predicted), np.array(wanted), 1)


def test_matthews_of_two_labels_is_the_formula_of_a_table() -> None:
    """(TP·TN − FP·FN) / √((TP+FP)(TP+FN)(TN+FP)(TN+FN)), here of 6, 3, 1 and 2."""
    predicted = [1] * 6 + [0] * 3 + [1] * 1 + [0] * 2
    wanted = [1] * 6 + [0] * 3 + [0] * 1 + [1] * 2
    assert matthews(predicted, wanted) == pytest.approx((18 - 2) / math.sqrt(7 * 8 * 4 * 5))
    assert f1(predicted, wanted, 1) == pytest.approx(12 / 15)
    assert accuracy(predicted, wanted) == pytest.approx(9 / 12)
    assert matthews(wanted, wanted) == 1
    assert matthews([1 - label for label in wanted], wanted) == -1


def test_matthews_of_many_rows_does_not_overflow() -> None:
    """The spreads of 400,000 rows multiply to more than 64 bits hold."""
    labels = np.arange(400_000) % 2
    assert matthews(labels, labels) == 1


def test_what_has_no_value_is_zero() -> None:
    """No positive label, a constant prediction, one row: 0, as JSON has no NaN."""
    assert f1([0, 0], [0, 0], 1) == 0
    assert matthews([1, 1, 1], [0, 1, 1]) == 0
    assert matthews([0, 1, 1], [1, 1, 1]) == 0
    assert pearson([0.1] * 10, list(np.linspace(0, 1, 10))) == 0
    assert pearson([1.0], [1.0]) == 0
    found = label_scores(("pearson", "spearman"), [0.1, 0.1, 0.1], [1.0, 2.0, 3.0], "")
    assert (found["pearson"], found["spearman"]) == (0, 0)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200])
def test_correlation_is_the_definition(scale: float) -> None:
    """cov(x, y) / (σx·σy), whatever the units; ±1 on a line."""
    random = np.random.default_rng(0)
    x = random.normal(size=40)
    y = x + random.normal(size=40)
    wished = ((x - x.mean()) * (y - y.mean())).mean() / (x.std() * y.std())
    assert pearson(x * scale, 3 - 2 * y) == pytest.approx(-wished)
    assert pearson([1.0, 2.0, 3.0], [1.0, 2.0, 4.0]) == pytest.approx(3 / math.sqrt(2 * 14 / 3))
    assert pearson(x.astype(np.float32), 5 * x.astype(np.float32)) == pytest.approx(1)


def test_label_scores_give_what_is_asked_with_its_signature() -> None:
    predicted, wanted = ["yes", "no", "yes", "no"], ["yes", "no", "no", "no"]
    found = label_scores(("accuracy", "f1", "matthews"), predicted, wanted, "yes")
    signature = found.pop("signature")
    assert found == {
        "accuracy": 0.75,
        "f1": pytest.approx(2 / 3),
        "matthews": pytest.approx(2 / math.sqrt(2 * 1 * 3 * 2)),
    }
    assert signature.keys() == found.keys()
    assert "of the label yes" in signature["f1"]
    numbers = [3.0, 1.0, 4.0, 1.0], [2.0, 1.0, 9.0, 0.0]
    found = label_scores(("pearson", "spearman"), *numbers, "")
    assert found["pearson"] == pearson(*numbers)
    assert found["spearman"] == pytest.approx(spearman(*numbers))


def test_answers_that_cannot_be_scored_are_refused() -> None:
    for metric in ("accuracy", "f1", "matthews", "pearson", "spearman"):
        with pytest.raises(UserError, match="cannot be scored"):
            label_scores((metric,), [], [], 1)
        with pytest.raises(UserError, match="cannot be scored"):
            label_scores((metric,), np.ones(1), np.ones(2), 1)
    for metric in ("pearson", "spearman"):
        with pytest.raises(UserError, match="diverged"):
            label_scores((metric,), [1.0, math.nan], [1.0, 2.0], 1)
    with pytest.raises(UserError, match="did you mean 'pearson'"):
        label_scores(("pearsn",), [1.0], [1.0], 1)


def test_language_scores_are_per_token_character_byte_and_word() -> None:
    """A uniform guess among 4 at each of 10 tokens is 20 bits, however they are shared out."""
    found = language_scores(
        10 * math.log(4), 10, unit="bpe, 4 tokens", characters=16, bytes_=20, words=5
    )
    signature = found.pop("signature")
    assert found == {
        "loss": pytest.approx(math.log(4)),
        "perplexity": pytest.approx(4),
        "word_perplexity": pytest.approx(16),
        "bits_per_character": pytest.approx(20 / 16),
        "bits_per_byte": pytest.approx(1),
    }
    assert signature.keys() == found.keys()
    assert all("bpe, 4 tokens" in text for text in signature.values())
    without = language_scores(1.0, 1, unit="characters", characters=1, bytes_=1, words=None)
    assert "word_perplexity" not in without
    assert without["bits_per_character"] == pytest.approx(1 / math.log(2))


@pytest.mark.parametrize("nll", [math.nan, math.inf])
def test_a_text_without_perplexity_is_refused(nll: float) -> None:
    with pytest.raises(UserError, match="diverged"):
        language_scores(nll, 1, unit="characters", characters=1, bytes_=1, words=None)
    with pytest.raises(UserError, match="empty text"):
        language_scores(1.0, 0, unit="characters", characters=0, bytes_=0, words=None)
