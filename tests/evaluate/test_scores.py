"""Scores are sacreBLEU's own, with their signatures; perplexity is what it says."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from manyheads.errors import Mistake
from manyheads.evaluate.scores import perplexity, spearman, translation_scores

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
    with pytest.raises(Mistake):
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
    with pytest.raises(Mistake, match="ranked"):
        spearman([1.0], [1.0, 2.0])
