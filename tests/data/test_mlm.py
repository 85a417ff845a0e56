"""Masked rows: next-sentence pairs, special tokens, and which rows come when."""

from typing import Any

import numpy as np
import pytest
from tests.data.helpers import is_close, refusal
from tests.tasks.small_texts import write_texts

from manyheads.data.language import EncodedText, TextData, Texts
from manyheads.data.masking import (
    MASKING,
    TEXTS,
    Masked,
    ReplacedToken,
    Rng,
    SentencePairs,
)
from manyheads.errors import DataError
from manyheads.models.bert import BertConfig
from manyheads.tasks.pretraining import MaskedWindows
from manyheads.tasks.spec import RunSettings
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Characters, Words

ROWS = 100_000
LENGTH = 24
PAIRS = Masked(pairs="next-sentence", rate=0.5)


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return Characters().train(["abcdefghijklmnopqrstuvwxyz\n"])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = write_texts(tmp_path_factory.mktemp("texts"))
    return TextData(folder=str(folder), lines="sentences").read("train")


@pytest.fixture(scope="module")
def tokenizer(texts: Texts) -> Tokenizer:
    plain = Words().train(texts.strings())
    return plain.with_frame([plain.classify], [plain.separator])


def make_texts(sizes: list[list[int]]) -> Texts:
    """Documents whose sentences have so many letters."""
    documents = [["x" * size for size in row] for row in sizes]
    return Texts(documents, "sentences", name="f.txt")


class Drawn:
    """Pairs of sentences drawn from texts."""

    def __init__(self, texts: Texts, letters: Tokenizer, room: int, rows: int = ROWS) -> None:
        self.text = EncodedText(texts, letters, ends=False)
        pairs = SentencePairs(self.text, texts, room=room)
        self.first, self.second, self.is_next = pairs.draw(rows, np.random.default_rng(7))

    def sizes(self) -> set[tuple[bool, int, int, int]]:
        columns = (self.is_next, self.first.start, self.first.size, self.second.size)
        return set(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("room", [2, 25, 128])
def test_half_follow_and_the_others_are_from_another_document(
    room: int, letters: Tokenizer
) -> None:
    random = np.random.default_rng(1)
    counts = random.integers(2, 12, 40)
    sizes = [random.integers(1, 30, count).tolist() for count in counts]
    drawn = Drawn(make_texts(sizes), letters, room)
    text, first, second, is_next = drawn.text, drawn.first, drawn.second, drawn.is_next
    assert is_close(int(is_next.sum()), ROWS, 0.5)
    assert (first.size + second.size).max() <= room
    documents = []
    for run in (first, second):
        assert run.size.min() >= 1
        assert np.isin(run.start, text.sentence_starts).all()
        documents.append(text.document_of(run.start))
        assert (text.document_of(run.stop - 1) == documents[-1]).all()
    assert ((documents[0] == documents[1]) == is_next).all()
    # The second of a real pair begins where the first stops, unless the first was truncated.
    gap = (second.start - first.stop)[is_next]
    assert gap.min() >= 0
    truncated = ~np.isin(first.stop, text.sentence_starts)[is_next]
    assert (gap[~truncated] == 0).all()
    assert ((first.size + second.size)[is_next][truncated] == room).all()


def test_all_sentences_are_equally_likely(letters: Tokenizer) -> None:
    drawn = Drawn(make_texts([[3, 1, 2], [4, 2], [1, 1, 1, 2]]), letters, room=100)
    starts = drawn.text.sentence_starts

    def check(positions: np.ndarray, expected: set[int]) -> None:
        numbers = np.searchsorted(starts, positions)
        assert set(numbers) == expected
        for number in expected:
            assert is_close(int((numbers == number).sum()), len(numbers), 1 / len(expected))

    check(drawn.first.start, {0, 1, 3, 5, 6, 7})  # all but the last sentence of a document
    from_first = drawn.first.start == 0
    check(drawn.first.stop[from_first], {1, 2})  # where a run of three sentences is divided
    check(drawn.second.start[from_first & ~drawn.is_next], {3, 4, 5, 6, 7, 8})  # other documents
    # If there is room, runs extend to the end of their document.
    assert np.isin(drawn.second.stop, drawn.text.document_starts).all()


def test_runs_fill_the_room_and_the_longer_one_is_truncated_first(letters: Tokenizer) -> None:
    assert Drawn(make_texts([[50, 3], [4, 60]]), letters, room=20, rows=200).sizes() == {
        (True, 0, 17, 3),
        (True, 53, 4, 16),
        (False, 0, 16, 4),
        (False, 0, 10, 10),
        (False, 53, 4, 16),
        (False, 53, 4, 3),
    }
    sizes = Drawn(make_texts([[3, 3], [2, 2, 2]]), letters, room=8, rows=500).sizes()
    assert {row[2:] for row in sizes if row[0]} == {(3, 3), (2, 4), (4, 2), (2, 2)}
    assert {row[2:] for row in sizes if not row[0]} == {(3, 4), (3, 2), (2, 6), (2, 3), (4, 3)}


def test_documents_of_one_sentence_are_left_out(letters: Tokenizer) -> None:
    drawn = Drawn(make_texts([[2, 3], [9], [4, 5]]), letters, 20, 500)
    text = drawn.text
    assert {*text.document_of(drawn.first.start), *text.document_of(drawn.second.start)} == {0, 2}
    for sizes, usable in (([[2, 3]], 1), ([[7]], 0), ([[2, 3], [4]], 1)):
        message = refusal(DataError, Drawn, make_texts(sizes), letters, 20, 5)
        assert f"there are {usable} ({sum(map(len, sizes))} sentences" in message
        assert "data.lines=sentences" in message


def windows_of(texts: Texts, tokenizer: Tokenizer, objective: Any) -> MaskedWindows:
    run = RunSettings()
    run.objective, run.model = objective, BertConfig(max_length=LENGTH)
    return MaskedWindows(texts, tokenizer, run)


def seeded(*seeds: int) -> Rng:
    """A generator for pairing and one for masking."""
    return dict(zip((TEXTS, MASKING), map(np.random.default_rng, seeds), strict=True)).__getitem__


def test_a_pair_in_its_frame_token_by_token(texts: Texts, tokenizer: Tokenizer) -> None:
    """<cls> first <sep> second <sep>; segment 1 begins after the first <sep>."""
    data = windows_of(texts, tokenizer, PAIRS)
    assert data.pairs is not None
    rows = data.rows(np.arange(40), seeded(3, 4))
    first, second, is_next = data.pairs.draw(40, np.random.default_rng(3))
    for number, row in enumerate(rows):
        parts = [data.text.flat[run.start[number] : run.stop[number]] for run in (first, second)]
        sep = [tokenizer.separator]
        tokens = [tokenizer.classify, *parts[0], *sep, *parts[1], *sep]
        assert row.tokens.tolist() == tokens
        assert len(tokens) <= LENGTH
        assert row.segments.tolist() == [0] * (len(parts[0]) + 2) + [1] * (len(parts[1]) + 1)
        assert row.is_next == is_next[number]
    some = [rows[number] for number in (5, 2, 17)]
    batch = data.batch(some)
    assert batch.other is not None
    assert batch.segments is not None
    assert batch.real is not None
    assert batch.other.tolist() == [int(not row.is_next) for row in some]
    labels = batch.tokens.flatten().scatter(0, batch.positions, batch.labels)
    labels = labels.view_as(batch.tokens)
    for number, row in enumerate(some):
        length = len(row.tokens)
        assert batch.real[number].tolist() == [n < length for n in range(batch.tokens.shape[1])]
        assert batch.tokens[number, :length].tolist() == row.inputs.tolist()
        assert labels[number, :length].tolist() == row.tokens.tolist()
        assert batch.segments[number, :length].tolist() == row.segments.tolist()
        assert set(batch.tokens[number, length:].tolist()) <= {tokenizer.pad}
    assert batch.size == sum(len(row.tokens) for row in some)


@pytest.mark.parametrize("objective", [PAIRS, Masked(rate=0.5), ReplacedToken(rate=0.5)])
def test_no_special_token_is_masked(
    objective: Masked | ReplacedToken, texts: Texts, tokenizer: Tokenizer
) -> None:
    data = windows_of(texts, tokenizer, objective)
    for row in data.rows(np.arange(100), seeded(1, 2)):
        special = np.isin(row.tokens, [tokenizer.classify, tokenizer.separator])
        assert special.any()
        assert not (row.chosen & special).any()
        assert (row.inputs == row.tokens)[special].all()
        if isinstance(objective, ReplacedToken):  # its generator fills in masks only
            assert (row.inputs[row.chosen] == tokenizer.mask).all()
