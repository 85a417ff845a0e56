"""Labelled texts as batches: what is too long, and what a person is told of the labels."""

import pytest

from manyheads.data.labelled import Labelled
from manyheads.errors import DataError
from manyheads.tasks.classification import EncodedLabels, label_counts
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Words

TEXTS = ["one two", "one two three four five", "two"]
PART = Labelled(texts=[*TEXTS], labels=["a", "b", "a"], numbers=[], lines=[2, 3, 4], name="t.tsv")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    plain = Words().train(TEXTS)
    return plain.with_frame([plain.classify], [plain.separator])


def encoded(tokenizer: Tokenizer, too_long: str) -> EncodedLabels:
    sizes = {"max_length": 5, "segments": 1}
    return EncodedLabels(PART, ("a", "b"), tokenizer, **sizes, too_long=too_long)  # type: ignore[arg-type]


def test_a_long_text_is_cut_at_its_end_and_said(tokenizer: Tokenizer) -> None:
    found = encoded(tokenizer, "truncate")
    assert found.tokens.lengths.tolist() == [4, 5, 3]
    row = found.tokens.flat[4:9].tolist()
    words = tokenizer.encode("one two three")
    assert row == [tokenizer.classify, *words, tokenizer.separator]
    assert found.notes == ["t.tsv: 1 rows of over 5 tokens are cut there"]
    assert found.wanted.tolist() == [0, 1, 0]


def test_a_long_text_is_left_out_with_its_label(tokenizer: Tokenizer) -> None:
    found = encoded(tokenizer, "skip")
    assert (found.tokens.lengths.tolist(), found.wanted.tolist()) == ([4, 3], [0, 0])
    assert found.lines == [2, 4]
    assert "left out" in found.notes[0]


def test_a_long_text_is_refused_with_its_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"t.tsv:3: 7 tokens, and the model reads 5"):
        encoded(tokenizer, "refuse")


def test_labels_are_counted_for_a_person() -> None:
    assert label_counts(PART) == ["2 labels: a 2, b 1"]
    many = Labelled(
        texts=["x"] * 12, labels=[*"abcdefghijkl"], numbers=[], lines=[*range(12)], name="t"
    )
    assert label_counts(many)[0].endswith("h 1 and 4 more")
