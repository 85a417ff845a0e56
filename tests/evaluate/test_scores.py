"""Scores equal their definitions and sacreBLEU's, and are never NaN."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu

from manyheads.errors import UserError
from manyheads.evaluate.labels import (
    accuracy,
    class_report,
    f1,
    label_scores,
    matthews,
    pearson,
    spearman,
)
from manyheads.evaluate.scores import (
    bleu_tokenizer,
    lacks_spaces,
    language_scores,
    loss_scores,
    missing_spaces,
    paired_scores,
    perplexity,
    translation_scores,
)

REFERENCES = [
    "Der alte Hund schläft im Garten.",
    "Eine Katze sieht den Vogel, aber sie jagt ihn nicht.",
    "Die drei Kinder wohnen in diesem Haus.",
    "Ja.",
]
HYPOTHESES = [
    "Der alte Hund schlief in dem Garten.",
    "Eine Katze sieht den Vogel, aber sie jagt ihn nicht.",
    "Die drei Kinder wohnen in diesem Haus .",
    "",
]


def test_translation_scores_are_those_of_the_sacrebleu_command(tmp_path: Path) -> None:
    """Numbers and signatures, of the corpus and not as means of sentences."""
    (tmp_path / "hypotheses").write_text("\n".join(HYPOTHESES) + "\n")
    (tmp_path / "references").write_text("\n".join(REFERENCES) + "\n")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "hypotheses"]
    command += ["-m", "bleu", "chrf", "-w", "8", "--format", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    scores = translation_scores(HYPOTHESES, REFERENCES)
    for name, theirs in zip(("bleu", "chrf"), json.loads(done.stdout), strict=True):
        assert scores[name] == pytest.approx(theirs["score"], abs=1e-6)
        signature = dict(part.split(":") for part in scores["signature"][name].split("|"))
        assert signature == {key: theirs[key] for key in signature}
        assert signature["version"] == sacrebleu.__version__
    assert 0 < scores["bleu"] < 100
    assert scores["exact_match"] == 1 / 4


METRICS = ("bleu", "chrf", "chrf++", "ter")


def sacrebleu_command(folder: Path, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "sacrebleu", *words, "-w", "8", "--format", "json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    scores = json.loads(done.stdout)
    return scores if isinstance(scores, list) else [scores]  # one metric is no list


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n")


def test_resamples_without_a_match_have_a_confidence_interval() -> None:
    hypotheses = ["the dog sees the tree now", *["zz"] * 14]
    references = ["the dog sees the tree", *["qq ww ee rr"] * 14]
    scores = translation_scores(hypotheses, references, "13a", METRICS, confidence=True)
    assert all(scores[f"{name}_ci"] > 0 for name in METRICS)


def test_confidence_and_paired_test_are_those_of_the_sacrebleu_command(tmp_path: Path) -> None:
    """TER, chrF++, two references, bootstrap intervals, and p against a baseline."""
    hypotheses = [*HYPOTHESES[:3], "Nein."] * 5
    more = [text.replace("Garten", "Hof").replace("Ja", "Nein") for text in REFERENCES] * 5
    lists = [list(pair) for pair in zip(REFERENCES * 5, more, strict=True)]
    baseline = [text.replace("Kinder", "Kind").replace("Vogel", "Hund") for text in hypotheses]
    for name, lines in (("r1", REFERENCES * 5), ("r2", more), ("h", hypotheses), ("b", baseline)):
        write_lines(tmp_path / name, lines)
    scores = translation_scores(hypotheses, lists, "13a", METRICS, confidence=True)
    words = ("-m", "bleu", "chrf", "ter")
    theirs = sacrebleu_command(tmp_path, "r1", "r2", "-i", "h", *words, "--confidence")
    theirs += sacrebleu_command(
        *(tmp_path, "r1", "r2", "-i", "h", "-m", "chrf"), "--chrf-word-order", "2", "--confidence"
    )
    for name, their in zip(("bleu", "chrf", "ter", "chrf++"), theirs, strict=True):
        assert scores[name] == pytest.approx(float(their["score"]), abs=1e-6)
        assert scores[f"{name}_mean"] == pytest.approx(float(their["confidence_mean"]), abs=1e-6)
        assert scores[f"{name}_ci"] == pytest.approx(float(their["confidence_var"]), abs=1e-6)
    pairs = paired_scores(baseline, hypotheses, lists, "13a", ("bleu", "chrf", "ter"))
    command = [sys.executable, "-m", "sacrebleu", "r1", "r2", "-i", "b", "h", *words]
    command += ["--paired-bs", "-w", "8", "--format", "latex"]  # its JSON cannot write p
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    first, second = (line.split("&")[1:] for line in done.stdout.splitlines()[4:6])
    for pair, before, after in zip(pairs.values(), first, second, strict=True):
        assert pair["against"] == pytest.approx(float(before.split()[0]), abs=1e-6)
        assert pair["p"] == pytest.approx(float(after.split("p = ")[1][:6]), abs=1e-4)


@pytest.mark.parametrize(
    ("language", "tokenize", "hypotheses", "references"),
    [
        (
            "ja",
            "ja-mecab",
            ["犬は庭で寝ている。", "猫が鳥を見た。", "子供たちは家に住んでいます。"],
            [
                "犬は庭で寝ています。",
                "猫が鳥を見ました。",
                "三人の子供たちはこの家に住んでいます。",
            ],
        ),
        (
            "zh",
            "zh",
            ["狗在花园里睡觉。", "猫看见了鸟, OK?", "孩子们住在这房子里。"],
            ["那只狗在花园里睡觉。", "猫看到了鸟, OK?", "三个孩子住在这个房子里。"],
        ),
        (
            "ko",
            "ko-mecab",
            ["개는 정원에서 잔다.", "고양이가 새를 본다.", "아이들은 이 집에 산다."],
            ["그 개는 정원에서 잠을 잔다.", "고양이가 새를 보았다.", "세 아이들은 이 집에 산다."],
        ),
    ],
)
def test_asian_languages_score_as_the_sacrebleu_command_does(
    language: str, tokenize: str, hypotheses: list[str], references: list[str], tmp_path: Path
) -> None:
    """By its own choice for the language pair, and with intervals."""
    hypotheses, references = hypotheses * 4, references * 4
    write_lines(tmp_path / "h", hypotheses)
    write_lines(tmp_path / "r", references)
    assert bleu_tokenizer(language) == tokenize
    words = ("r", "-i", "h", "-m", "bleu", "--confidence")
    for name, choice in ((tokenize, ("-l", f"en-{language}")), ("char", ("-tok", "char"))):
        [theirs] = sacrebleu_command(tmp_path, *words, *choice)
        scores = translation_scores(hypotheses, references, name, ["bleu"], confidence=True)
        assert f"tok:{name}" in scores["signature"]["bleu"]
        assert theirs["tok"].startswith(name)
        assert scores["bleu"] == pytest.approx(theirs["score"], abs=1e-6)
        assert scores["bleu_ci"] == pytest.approx(theirs["confidence_var"], abs=1e-6)
        assert 10 < scores["bleu"] < 90


def test_tokenizers_follow_codes_of_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"de": "13a", "": "13a", "cmn": "zh", "jpn": "ja-mecab", "th": "char"}
    assert {code: bleu_tokenizer(code) for code in codes} == codes
    spaceless = {"": "char", "lzh": "char", "zh": "zh"}  # a language that is not in the table
    assert {code: bleu_tokenizer(code, ["犬は庭で寝ている。"]) for code in spaceless} == spaceless
    for name in ("MeCab", "mecab_ko"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("ja_mecab", "ko_mecab"):
        monkeypatch.delitem(sys.modules, f"sacrebleu.tokenizers.tokenizer_{name}", raising=False)
    assert [bleu_tokenizer(code) for code in ("ja", "ko")] == ["char", "char"]
    with pytest.raises(UserError, match=r"sacrebleu\[ja\]"):
        translation_scores(["a"], ["a"], "ja-mecab")


def test_metrics_of_words_warn_about_text_without_spaces() -> None:
    japanese = ["犬は庭で寝ている。"]
    assert "--bleu-tokenize" in missing_spaces(["bleu"], "13a", japanese)
    assert "ter" in missing_spaces(["ter"], "zh", japanese)
    for names, tokenize, texts in ((["bleu"], "zh", japanese), (["bleu"], "13a", REFERENCES)):
        assert not missing_spaces([*names, "chrf"], tokenize, texts)


def test_text_without_spaces_is_recognised() -> None:
    assert lacks_spaces(["犬は庭で寝ている。", "OK"])
    assert lacks_spaces(["สุนัขนอนหลับ"])
    assert not lacks_spaces([*REFERENCES, "그 개는 정원에서 잔다."])
    assert not lacks_spaces([""])


def test_class_report_counts_each_label() -> None:
    report = class_report(["a", "a", "b", "b"], ["a", "b", "b", "c"], ["a", "b", "c"])
    assert report["a"] == {
        "precision": 0.5,
        "recall": 1.0,
        "f1": pytest.approx(2 / 3),
        "examples": 1,
    }
    assert report["b"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "examples": 2}
    assert report["c"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "examples": 1}


def test_translation_scores_range_from_nothing_to_perfect() -> None:
    perfect = translation_scores(REFERENCES, REFERENCES)
    assert (perfect["bleu"], perfect["chrf"]) == pytest.approx((100, 100))
    assert perfect["exact_match"] == 1
    wrong = translation_scores(["xx yy zz ww"], ["aa bb cc dd"])
    assert (wrong["bleu"], wrong["chrf"], wrong["exact_match"]) == (0, 0, 0)
    lower = [text.lower() for text in REFERENCES]  # exact match is case-sensitive
    assert translation_scores(lower, REFERENCES)["exact_match"] == 0
    for hypotheses, references in (([], []), (["a"], []), (["a"], ["a", "b"])):
        with pytest.raises(UserError):
            translation_scores(hypotheses, references)


def test_perplexity_of_a_uniform_guess_is_the_vocabulary() -> None:
    for vocabulary, tokens in ((2, 1), (50, 7), (32_000, 1000)):
        nll = tokens * math.log(vocabulary)
        assert loss_scores(nll, tokens) == pytest.approx(
            {"loss": math.log(vocabulary), "perplexity": vocabulary}
        )
    assert 1e300 < perplexity(1e9, 1) < math.inf  # a large number, not an error


def test_language_scores_are_per_token_character_byte_and_word() -> None:
    """A uniform guess among 4 at each of 10 tokens is 20 bits in all."""
    unit = "bpe, 4 tokens"
    scores = language_scores(10 * math.log(4), 10, unit=unit, characters=16, bytes_=20, words=5)
    signature = scores.pop("signature")
    assert scores == pytest.approx(
        {
            "loss": math.log(4),
            "perplexity": 4,
            "word_perplexity": 16,
            "bits_per_character": 20 / 16,
            "bits_per_byte": 1,
        }
    )
    assert signature.keys() == scores.keys()
    assert all(unit in text for text in signature.values())
    for nll in (math.nan, math.inf):
        with pytest.raises(UserError, match="diverged"):
            language_scores(nll, 1, unit=unit, characters=1, bytes_=1, words=1)
    with pytest.raises(UserError, match="empty"):
        language_scores(1.0, 0, unit=unit, characters=0, bytes_=0, words=0)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_label_metrics_are_their_definitions(classes: int) -> None:
    """Counted row by row; Matthews as the correlation of one-hot rows."""
    random = np.random.default_rng(classes)
    labels = random.integers(classes, size=60)
    predictions = np.where(random.random(60) < 0.4, labels, random.integers(classes, size=60))
    assert accuracy(predictions, labels) == (predictions == labels).mean()
    for label in range(classes):
        hits = ((predictions == label) & (labels == label)).sum()
        precision, recall = hits / (predictions == label).sum(), hits / (labels == label).sum()
        harmonic = 2 * precision * recall / (precision + recall)
        assert f1(predictions, labels, label) == pytest.approx(harmonic)
    x, y = (np.eye(classes)[side] - np.eye(classes)[side].mean(0) for side in (predictions, labels))
    correlation = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    assert matthews(predictions, labels) == pytest.approx(correlation)
    names = [[f"label {label}" for label in side] for side in (predictions, labels)]
    assert matthews(*names) == matthews(predictions, labels)
    assert f1(*names, "label 1") == f1(predictions, labels, 1)


def test_matthews_of_a_table_and_of_many_rows() -> None:
    """(TP·TN − FP·FN) / √((TP+FP)(TP+FN)(TN+FP)(TN+FN)), here of 6, 3, 1 and 2."""
    predictions = [1] * 6 + [0] * 3 + [1] * 1 + [0] * 2
    labels = [1] * 6 + [0] * 3 + [0] * 1 + [1] * 2
    assert matthews(predictions, labels) == pytest.approx((18 - 2) / math.sqrt(7 * 8 * 4 * 5))
    assert matthews([1 - label for label in labels], labels) == -1
    many = np.arange(400_000) % 2  # products beyond 64 bits
    assert matthews(many, many) == 1


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e-310, 1e200, 4e307])
def test_correlations_are_their_definitions_at_any_scale(scale: float) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=40)
    y = x + random.normal(size=40)
    expected = ((x - x.mean()) * (y - y.mean())).mean() / (x.std() * y.std())
    assert pearson(x * scale, 3 - 2 * y) == pytest.approx(-expected)
    assert pearson([1e308, -1e308, 1e308], [1.0, -1.0, 1.0]) == pytest.approx(1)
    assert pearson(1 + np.arange(40) * 2.0**-50, y) == pytest.approx(pearson(np.arange(40), y))
    ranks = [np.argsort(np.argsort(side)) for side in (x, y)]
    distances = float(((ranks[0] - ranks[1]) ** 2).sum())
    assert spearman(x * scale, y) == pytest.approx(1 - 6 * distances / (40 * (40**2 - 1)))
    ties = spearman([1.0, 2.0, 2.0, 3.0], [1.0, 3.0, 2.0, 4.0])  # mean ranks
    assert ties == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_undefined_metrics_are_zero() -> None:
    """A constant side, no positive label, one row: JSON has no NaN."""
    assert f1([0, 0], [0, 0], 1) == 0
    assert matthews([1, 1, 1], [0, 1, 1]) == matthews([0, 1, 1], [1, 1, 1]) == 0
    for metric in (pearson, spearman):
        assert metric([0.1] * 10, np.linspace(0, 1, 10)) == 0
        assert metric([1.0], [1.0]) == 0


def test_label_scores_have_their_signatures() -> None:
    predictions, labels = ["yes", "no", "yes", "no"], ["yes", "no", "no", "no"]
    scores = label_scores(("accuracy", "f1", "matthews"), predictions, labels, "yes")
    signature = scores.pop("signature")
    assert scores == {
        "accuracy": 0.75,
        "f1": f1(predictions, labels, "yes"),
        "matthews": matthews(predictions, labels),
    }
    assert signature.keys() == scores.keys()
    assert "of the label yes" in signature["f1"]
    numbers = [3.0, 1.0, 4.0, 1.0], [2.0, 1.0, 9.0, 0.0]
    scores = label_scores(("pearson", "spearman"), *numbers, "")
    assert (scores["pearson"], scores["spearman"]) == (pearson(*numbers), spearman(*numbers))


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews", "pearson", "spearman"])
def test_metrics_refuse_what_they_cannot_score(metric: str) -> None:
    for predictions, labels in (([], []), (np.ones(1), np.ones(2))):
        with pytest.raises(UserError, match="do not match"):
            label_scores((metric,), predictions, labels, 1)


@pytest.mark.parametrize("metric", [pearson, spearman])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_correlations_refuse_numbers_that_are_not_finite(metric: object, bad: float) -> None:
    for sides in (([1.0, bad], [1.0, 2.0]), ([1.0, 1.0], [1.0, bad])):
        with pytest.raises(UserError, match="diverged"):
            metric(*sides)  # type: ignore[operator]
