"""Running text: what is read for which split, the stream, and which windows a step takes."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.helpers import refusal, write

from manyheads.data import language, shards
from manyheads.data.language import EncodedText, TextData, Texts, Windows, room_for_text
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe, Characters

STORY = "A dog.\n\n  It barked,\nand ran.\n"
SENTENCES = "\n  one two \nthree\n \n\nfour five six\nseven\näh\n"


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return Characters().train([STORY, SENTENCES])


def join(documents: list[list[str]]) -> str:
    return "".join(text for document in documents for text in document)


def test_the_name_of_a_file_decides_its_split(tmp_path: Path) -> None:
    names = {
        "train": ["brown.train.txt.gz", "contest.txt", "devil_s-own.txt"],
        "valid": ["my-dev.txt", "ptb.VALID.txt.gz", "x_val", "z.validation.raw"],
        "test": ["wiki.test.raw.gz"],
    }
    for name in [name for group in names.values() for name in group]:
        write(tmp_path / name, f"{name}\n")
    ignored = (".hidden.txt", "README.md", "about.json", "run.toml", "contest.txt.gz", "sub/x.txt")
    for name in ignored:
        write(tmp_path / name, "never read\n")
    data = TextData(folder=str(tmp_path))
    assert data.splits() == ["train", "valid", "test"]
    for split, group in names.items():
        documents = data.read(split).documents
        assert documents == [[f"{name}\n"] for name in group]
    assert data.read("test").name == str(tmp_path / "wiki.test.raw.gz")


@pytest.mark.parametrize(
    ("count", "fraction", "first"), [(1_115_394, 0.1, 1_003_854), (100, 0.9, 10), (3, 0.99, 1)]
)
def test_the_last_characters_are_held_out(
    count: int, fraction: float, first: int, tmp_path: Path
) -> None:
    text = ("To be, or not to be\n" * (count // 20 + 1))[: count - 1] + "\n"
    file = write(tmp_path / "input.txt", text)
    data = TextData(file=str(file), valid_fraction=fraction)
    assert data.splits() == ["train", "valid"]
    train, valid = data.read("train"), data.read("valid")
    assert join(train.documents) == text[:first]
    assert join(valid.documents) == text[first:]
    assert (train.characters, valid.characters) == (first, count - first)


@pytest.mark.parametrize(
    ("text", "fraction", "valid"),
    [
        ("A dog barked, and it ran.\n", 0.7, ", and it ran.\n"),  # not "rked, and it ran."
        ("A dog barked, and it ran.\n", 0.5, " and it ran.\n"),
        ("We don't know it.\n", 0.7, " know it.\n"),
        ("barked\nand ran\n", 0.7, "\nand ran\n"),
        ("unbroken\n", 0.5, "oken\n"),  # there is no other word
    ],
)
def test_held_out_text_does_not_begin_inside_a_word(
    text: str, fraction: float, valid: str, tmp_path: Path
) -> None:
    data = TextData(file=str(write(tmp_path / "x.txt", text)), valid_fraction=fraction)
    assert join(data.read("valid").documents) == valid
    # The training text ends where 0.1 ended it, so that old runs resume.
    first = int(len(text) * (1 - Fraction(str(fraction))))
    assert join(data.read("train").documents) == text[:first]


@settings(deadline=None, max_examples=50)
@given(
    files=st.lists(st.lists(st.text("ab ", max_size=3), min_size=1), min_size=1, max_size=4),
    fraction=st.floats(0.01, 0.99),
)
def test_both_parts_are_the_text_except_for_a_divided_word(
    files: list[list[str]], fraction: float
) -> None:
    documents = [["".join(f"{line}\n" for line in lines)] for lines in [*files, ["end"]]]
    texts = Texts(documents, "text")
    first, last = (texts.part(split, fraction).documents for split in ("train", "valid"))
    assert first
    assert last
    text, beginning, end = join(documents), join(first), join(last)
    assert text.startswith(beginning)
    assert text.endswith(end)
    size = int(len(text) * (1 - Fraction(str(fraction))))
    assert len(beginning) == min(max(size, 1), len(text) - 1)
    missing = text[len(beginning) : len(text) - len(end)]
    assert missing == "" or (missing.isalpha() and beginning[-1].isalpha())
    assert first[:-1] == documents[: len(first) - 1]
    assert last[1:] == documents[len(documents) - len(last) + 1 :]
    assert all(text for [text] in first)


def test_text_and_sentences_are_read(tmp_path: Path) -> None:
    write(tmp_path / "text" / "a.txt", STORY.removesuffix("\n"))
    write(tmp_path / "text" / "b.valid.txt", "ä b\n")
    data = TextData(folder=str(tmp_path / "text"))
    train, valid = data.read("train"), data.read("valid")
    assert train.documents == [[STORY]]
    assert "".join(train.strings()) == STORY
    assert (valid.characters, valid.bytes, valid.words) == (4, 5, 2)
    write(tmp_path / "sentences" / "a.txt", SENTENCES)
    write(tmp_path / "sentences" / "b.valid.txt", "ä b\nc\n")
    data = TextData(folder=str(tmp_path / "sentences"), lines="sentences")
    train, valid = data.read("train"), data.read("valid")
    assert train.documents == [["one two", "three"], ["four five six", "seven", "äh"]]
    assert train.strings() == ["one two", "three", "four five six", "seven", "äh"]
    # The end of each of the two sentences counts.
    assert (valid.characters, valid.bytes, valid.words) == (3 + 1 + 2, 4 + 1 + 2, 3 + 2)
    assert "2 documents" in train.notes[0]


def test_the_last_documents_or_sentences_are_held_out(tmp_path: Path) -> None:
    many = write(tmp_path / "many.txt", "".join(f"a{n}\nb{n}\n\n" for n in range(10)))
    data = TextData(file=str(many), lines="sentences", valid_fraction=0.2)
    assert data.read("train").documents == [[f"a{n}", f"b{n}"] for n in range(8)]
    assert data.read("valid").documents == [["a8", "b8"], ["a9", "b9"]]
    file = str(write(tmp_path / "one.txt", "a\nb\nc\n"))
    data = TextData(file=file, lines="sentences")
    assert data.read("train").strings() == ["a", "b"]
    assert data.read("valid").documents == [["c"]]


def test_unreadable_text_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert "data.folder or data.file" in refusal(UserError, TextData().read, "train")
    nowhere = TextData(folder=f"{folder}/no")
    assert "is not a folder" in refusal(UserError, nowhere.read, "train")
    data = TextData(folder=folder)
    assert "no text file" in refusal(UserError, data.read, "train")
    write(tmp_path / "x.valid.txt", "text\n")
    message = refusal(UserError, data.read, "train")
    assert "only x.valid.txt" in message
    assert "data.file=" in message
    assert "--split valid" in refusal(UserError, data.read, "test")
    assert "did you mean 'valid'" in refusal(UserError, data.read, "vaild")
    misspelled = TextData(folder=folder, file="x.valld.txt")
    assert "x.valid.txt" in refusal(UserError, misspelled.read, "train")
    blank = TextData(file=str(write(tmp_path / "blank.txt", "\n \n")))
    assert refusal(DataError, blank.read, "train").startswith(f"{tmp_path / 'blank.txt'}: ")
    single = TextData(file=str(write(tmp_path / "one.txt", "\nalone\n")), lines="sentences")
    assert refusal(DataError, single.read, "train").startswith(f"{tmp_path / 'one.txt'}: ")


def two_documents(lines: language.Lines) -> Texts:
    documents = [["A dog.", "It ran."], ["No", "end", "äh"]]
    if lines == "text":
        documents = [["\n".join([*sentences, ""])] for sentences in documents]
    return Texts(documents, lines)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("lines", ["text", "sentences"])
def test_the_stream_and_where_its_parts_begin(
    lines: language.Lines, ends: bool, letters: Tokenizer
) -> None:
    texts = two_documents(lines)
    text = EncodedText(texts, letters, ends=ends)
    end = [letters.end] if ends else []
    after_sentence, after_document = (end, []) if lines == "sentences" else ([], end)
    expected: list[int] = []
    sentences, documents = [], []
    for document in texts.documents:
        documents.append(len(expected))
        for sentence in document:
            sentences.append(len(expected))
            expected += letters.encode(sentence) + after_sentence
        expected += after_document
    assert text.flat.dtype == np.int32
    assert text.flat.tolist() == expected
    assert text.sentence_starts.tolist() == [*sentences, len(expected)]
    assert text.document_starts.tolist() == [*documents, len(expected)]
    numbers = [int(position >= documents[1]) for position in range(len(expected))]
    assert text.document_of(np.arange(len(expected))).tolist() == numbers
    assert text.digest() == EncodedText(texts, letters, ends=ends).digest()
    others = [
        EncodedText(texts, letters, ends=not ends),
        EncodedText(Texts(texts.documents[::-1], lines), letters, ends=ends),
    ]
    assert text.digest() not in {other.digest() for other in others}


def test_the_size_of_blocks_and_calls_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    some = "a dog.\n\nran\n\n = far = \n \n and \n wide\n\n \nx\ny\n\n  so\n  far\non\n"
    lines = (some * 5).splitlines(keepends=True)
    bpe = Bpe(vocab_size=400).train(["".join(lines)])
    texts = Texts([["".join(lines)], ["".join(lines[:3])]], "text")
    once = EncodedText(texts, bpe, ends=True)
    assert len(texts.strings()) == 2
    assert once.flat[: once.document_starts[1] - 1].tolist() == bpe.encode("".join(lines))
    monkeypatch.setattr(language, "BLOCK", 1)
    monkeypatch.setattr(language, "CALL", 50)
    monkeypatch.setattr(shards, "CALL", 50)
    assert len(texts.strings()) > 5
    often = EncodedText(texts, bpe, ends=True)
    assert often.flat.tolist() == once.flat.tolist()
    assert often.document_starts.tolist() == once.document_starts.tolist()
    # Without a certain boundary between words, only a block that is far too long is cut.
    assert len(Texts([["  x\n" * 12]], "text").strings()) == 1
    assert len(Texts([["  x\n" * 50]], "text").strings()) == 4


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 60),
    length=st.integers(1, 12),
    rows=st.integers(1, 9),
    moving=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_window_once_an_epoch(
    tokens: int, length: int, rows: int, moving: bool, seed: int
) -> None:
    if tokens < length:
        with pytest.raises(DataError):
            Windows(tokens, length, rows, seed, moving=moving)
        return
    windows = Windows(tokens, length, rows, seed, moving=moving)
    epochs = 3
    steps = -(-epochs * windows.per_epoch // rows)
    taken = [windows.rows(step) for step in range(steps)]
    assert all(len(starts) == rows for starts in taken)
    order = np.concatenate(taken)
    assert order.min() >= 0
    assert order.max() <= tokens - length
    for epoch in np.split(order[: epochs * windows.per_epoch], epochs):
        cuts = np.sort(epoch)
        assert (np.diff(cuts) == length).all()
        if not moving:
            assert cuts.tolist() == list(range(0, tokens - length + 1, length))
        # Only the two ends of the stream are left out.
        assert tokens - len(cuts) * length < 2 * length
    # A step does not depend on the steps before it.
    fresh = Windows(tokens, length, rows, seed, moving=moving)
    for step in reversed(range(steps)):
        assert fresh.rows(step).tolist() == taken[step].tolist()


def test_moving_cuts_leave_no_token_out() -> None:
    windows = Windows(23, 5, 1, seed=0)
    seen = Counter(
        token for step in range(400) for s in windows.rows(step) for token in range(s, s + 5)
    )
    assert set(seen) == set(range(23))


def test_too_few_tokens_are_refused(letters: Tokenizer) -> None:
    message = refusal(DataError, lambda: Windows(12, 128, 4, 0, name="my.txt"))
    assert message.startswith("my.txt: 12 tokens")
    assert "model.max_length" in message
    text = EncodedText(two_documents("text"), letters, ends=True)
    assert text.count_windows(10) == len(text.flat) // 10
    assert "model.max_length" in refusal(DataError, text.count_windows, 99)


def test_a_window_has_two_tokens_of_text_or_is_refused() -> None:
    assert room_for_text(5, special_tokens=3) == 2
    assert "model.max_length" in refusal(UserError, room_for_text, 4, 3)
