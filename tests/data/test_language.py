"""Running text: what is read for which split, the stream, and which stretches a step takes."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data import language
from manyheads.data.language import Document, EncodedText, TextData, Texts, Windows
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe, Characters

STORY = "A dog.\n\n  It barked,\nand ran.\n"
SENTENCES = "\n  one two \nthree\n \n\nfour five six\nseven\näh\n"


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return Characters().train([STORY, SENTENCES])


def one_line(caught: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder: Path, name: str, text: str) -> None:
    content = text.encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def whole(texts: Texts) -> str:
    return "".join(line for document in texts.documents for line in document.sentences)


def test_a_file_is_for_what_its_name_says(tmp_path: Path) -> None:
    names = {
        "train": ["brown.train.txt.gz", "contest.txt", "devil_s-own.txt"],
        "valid": ["my-dev.txt", "ptb.VALID.txt.gz", "x_val", "z.validation.raw"],
        "test": ["wiki.test.raw.gz"],
    }
    for group in names.values():
        for name in group:
            write(tmp_path, name, f"{name}\n")
    for name in (".hidden.txt", "README.md", "about.json", "run.toml", "contest.txt.gz"):
        write(tmp_path, name, "never read\n")
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper", "more.txt", "never read\n")
    data = TextData(folder=str(tmp_path))
    assert data.splits() == ["train", "valid", "test"]
    for split, group in names.items():
        texts = data.read(split)
        assert [document.sentences for document in texts.documents] == [[f"{n}\n"] for n in group]
        assert [document.file for document in texts.documents] == [str(tmp_path / n) for n in group]
    assert data.read("test").name == str(tmp_path / "wiki.test.raw.gz")
    assert data.read("train").name == f"{tmp_path} (3 files)"


@pytest.mark.parametrize(
    ("count", "held_out", "kept"), [(1_115_394, 0.1, 1_003_854), (100, 0.9, 10), (3, 0.99, 1)]
)
def test_the_last_characters_are_held_out(
    count: int, held_out: float, kept: int, tmp_path: Path
) -> None:
    text = ("To be, or not to be\n" * (count // 20 + 1))[: count - 1] + "\n"
    write(tmp_path, "input.txt", text)
    data = TextData(file=str(tmp_path / "input.txt"), held_out=held_out)
    assert data.splits() == ["train", "valid"]
    train, valid = data.read("train"), data.read("valid")
    assert whole(train) == text[:kept]
    assert whole(valid) == text[kept:]
    assert valid.documents[0].line == 1 + text[:kept].count("\n")
    assert (train.characters, valid.characters) == (kept, count - kept)


@settings(deadline=None, max_examples=50)
@given(
    files=st.lists(st.lists(st.text("ab", max_size=3), min_size=1), min_size=1, max_size=4),
    held_out=st.floats(0.01, 0.99),
)
def test_holding_out_characters_loses_and_doubles_none(
    files: list[list[str]], held_out: float
) -> None:
    documents = [
        Document([f"{line}\n" for line in lines], str(number), 1)
        for number, lines in enumerate([*files, ["end"]])
    ]
    first, last = language._cut_characters(documents, held_out)
    assert first
    assert last
    assert whole(Texts([*first, *last], "text")) == whole(Texts(documents, "text"))
    assert {document.file for document in first} & {document.file for document in last} <= {
        first[-1].file
    }
    assert all(line for document in (*first, *last) for line in document.sentences)


def test_text_is_read_as_it_stands(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", STORY.removesuffix("\n"))
    write(tmp_path, "b.valid.txt", "ä b\n")
    data = TextData(folder=str(tmp_path))
    train, valid = data.read("train"), data.read("valid")
    assert train.documents == [
        Document(["A dog.\n", "\n", "  It barked,\n", "and ran.\n"], str(tmp_path / "a.txt"), 1)
    ]
    assert "".join(train.strings()) == STORY
    assert (valid.characters, valid.bytes, valid.words) == (4, 5, 2)


def test_sentences_and_documents_are_read(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", SENTENCES)
    write(tmp_path, "b.valid.txt", "ä b\nc\n")
    data = TextData(folder=str(tmp_path), lines="sentences")
    train, valid = data.read("train"), data.read("valid")
    file = str(tmp_path / "a.txt")
    assert train.documents == [
        Document(["one two", "three"], file, 2),
        Document(["four five six", "seven", "äh"], file, 6),
    ]
    assert train.strings() == ["one two", "three", "four five six", "seven", "äh"]
    # The end of each of the two sentences counts.
    assert (valid.characters, valid.bytes, valid.words) == (3 + 1 + 2, 4 + 1 + 2, 3 + 2)
    assert "2 documents" in train.notes[0]


def test_the_last_documents_or_sentences_are_held_out(tmp_path: Path) -> None:
    write(tmp_path, "many.txt", "".join(f"a{n}\nb{n}\n\n" for n in range(10)))
    write(tmp_path, "one.txt", "a\nb\nc\n")
    many = TextData(folder=str(tmp_path), file="many.txt", lines="sentences", held_out=0.2)
    assert [d.sentences[0] for d in many.read("train").documents] == [f"a{n}" for n in range(8)]
    assert [d.line for d in many.read("valid").documents] == [25, 28]
    one = TextData(folder=str(tmp_path), file="one.txt", lines="sentences")
    assert one.read("train").strings() == ["a", "b"]
    assert one.read("valid").documents == [Document(["c"], str(tmp_path / "one.txt"), 3)]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    def refusal(kind: type[UserError], data: TextData, split: str = "train") -> str:
        with pytest.raises(kind) as caught:
            data.read(split)
        assert type(caught.value) is kind
        return one_line(caught)

    folder = str(tmp_path)
    assert "data.folder or data.file is needed" in refusal(UserError, TextData())
    assert "is not a folder" in refusal(UserError, TextData(folder=f"{folder}/no"))
    assert "holds no text file" in refusal(UserError, TextData(folder=folder))
    write(tmp_path, "x.valid.txt", "text\n")
    line = refusal(UserError, TextData(folder=folder))
    assert "only x.valid.txt" in line
    assert "data.file=" in line
    assert TextData(folder=folder).splits() == ["valid"]
    assert "--split valid" in refusal(UserError, TextData(folder=folder), "test")
    assert "did you mean 'valid'" in refusal(UserError, TextData(folder=folder), "vaild")
    assert "near names" in refusal(UserError, TextData(folder=folder, file="x.valld.txt"))
    write(tmp_path, "blank.txt", "\n \n")
    blank = refusal(DataError, TextData(folder=folder, file="blank.txt"))
    assert blank.startswith(f"{tmp_path / 'blank.txt'}: every line is empty")
    write(tmp_path, "one.txt", "\nalone\n")
    alone = refusal(DataError, TextData(folder=folder, file="one.txt", lines="sentences"))
    assert alone.startswith(f"{tmp_path / 'one.txt'}:2: this one sentence cannot be")
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(UserError, match=r"data\.held_out"):
            TextData(held_out=share)


def two_documents(lines: language.Lines) -> Texts:
    ends = "\n" if lines == "text" else ""
    first, second = ["A dog.", "It ran."], ["No", "end", "äh"]
    documents = [
        Document([sentence + ends for sentence in sentences], "f", 1)
        for sentences in (first, second)
    ]
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
        for sentence in document.sentences:
            sentences.append(len(expected))
            expected += letters.encode(sentence) + after_sentence
        expected += after_document
    assert text.flat.dtype == np.int32
    assert text.flat.tolist() == expected
    assert text.sentence_starts.tolist() == [*sentences, len(expected)]
    assert text.document_starts.tolist() == [*documents, len(expected)]
    assert text.word_starts is None
    numbers = [int(position >= documents[1]) for position in range(len(expected))]
    assert text.document_of(np.arange(len(expected))).tolist() == numbers
    assert text.digest() == EncodedText(texts, letters, ends=ends).digest()
    others = [
        EncodedText(texts, letters, ends=not ends),
        EncodedText(Texts(texts.documents[::-1], lines), letters, ends=ends),
    ]
    assert text.digest() not in {other.digest() for other in others}


def test_words_of_the_stream(letters: Tokenizer) -> None:
    text = EncodedText(two_documents("sentences"), letters, ends=True, words=True)
    assert text.word_starts is not None
    begins = [letters.encode_words([s])[0][1] for s in two_documents("sentences").strings()]
    assert text.word_starts.tolist() == [word for row in begins for word in (*row, True)]


def test_blocks_and_calls_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    some = "a dog.\n\nran\n\n = far = \n \n and \n wide\n\n \nx\ny\n\n  so\n  far\non\n"
    lines = (some * 5).splitlines(keepends=True)
    bpe = Bpe(vocab_size=400).train(["".join(lines)])
    texts = Texts([Document(lines, "f", 1), Document(lines[:3], "f", 99)], "text")
    once = EncodedText(texts, bpe, ends=True)
    assert len(texts.strings()) == 2
    assert once.flat[: once.document_starts[1] - 1].tolist() == bpe.encode("".join(lines))
    sentences = once.sentence_starts.tolist()
    monkeypatch.setattr(language, "BLOCK", 1)
    monkeypatch.setattr(language, "CALL", 50)
    assert len(texts.strings()) > 5
    often = EncodedText(texts, bpe, ends=True)
    assert often.flat.tolist() == once.flat.tolist()
    assert often.document_starts.tolist() == once.document_starts.tolist()
    assert often.sentence_starts.tolist() == sentences
    # Where words part nowhere for sure, only a block that is far too long is cut.
    assert len(Texts([Document(["  x\n"] * 12, "f", 1)], "text").strings()) == 1
    assert len(Texts([Document(["  x\n"] * 50, "f", 1)], "text").strings()) == 4


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 60),
    length=st.integers(1, 12),
    rows=st.integers(1, 9),
    moving=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_stretch_once_an_epoch(
    tokens: int, length: int, rows: int, moving: bool, seed: int
) -> None:
    if tokens < length:
        with pytest.raises(DataError):
            Windows(tokens, length, rows, seed, moving=moving)
        return
    windows = Windows(tokens, length, rows, seed, moving=moving)
    epochs = 3
    steps = -(-epochs * windows.per_epoch // rows)
    taken = [windows.starts(step) for step in range(steps)]
    assert all(len(starts) == rows for starts in taken)
    order = np.concatenate(taken)
    assert order.min() >= 0
    assert order.max() <= tokens - length
    for epoch in np.split(order[: epochs * windows.per_epoch], epochs):
        cuts = np.sort(epoch)
        assert (np.diff(cuts) == length).all()
        if not moving:
            assert cuts.tolist() == list(range(0, tokens - length + 1, length))
        # All but the two ends of the stream is in it.
        assert tokens - len(cuts) * length < 2 * length
    # Any step alone, from any state of the cache.
    fresh = Windows(tokens, length, rows, seed, moving=moving)
    for step in reversed(range(steps)):
        assert fresh.starts(step).tolist() == taken[step].tolist()


def test_moving_cuts_leave_no_token_out() -> None:
    windows = Windows(23, 5, 1, seed=0)
    seen = Counter(
        token for step in range(400) for s in windows.starts(step) for token in range(s, s + 5)
    )
    assert set(seen) == set(range(23))


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        Windows(12, 128, 4, 0, name="my.txt")
    assert one_line(caught) == (
        "my.txt: 12 tokens are too few to train on stretches of 128: give more text, or lower "
        "model.max_length"
    )
