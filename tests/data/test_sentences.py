"""Next-sentence pairs: half of them follow, the others come from elsewhere, all have room."""

import numpy as np
import pytest

from manyheads.data.language import Document, EncodedText, Texts
from manyheads.data.mlm import Drawn, SentencePairs
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Characters

ROWS = 100_000


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return Characters().train(["abcdefghijklmnopqrstuvwxyz\n"])


def made(sizes: list[list[int]]) -> Texts:
    """Documents whose sentences have so many letters."""
    documents, line = [], 1
    for row in sizes:
        documents.append(Document(["x" * size for size in row], "f.txt", line))
        line += len(row) + 1
    return Texts(documents, "sentences", name="f.txt")


def random_texts(random: np.random.Generator, documents: int = 40) -> Texts:
    counts = random.integers(2, 12, documents)
    return made([random.integers(1, 30, count).tolist() for count in counts])


def draw(
    texts: Texts, letters: Tokenizer, room: int, rows: int = ROWS
) -> tuple[Drawn, EncodedText]:
    text = EncodedText(texts, letters, ends=False)
    pairs = SentencePairs(text, texts, room=room, short="refuse")
    return pairs.draw(rows, np.random.default_rng(7)), text


def within(hits: int, chance: float, trials: int) -> bool:
    return abs(hits / trials - chance) <= 3 * (chance * (1 - chance) / trials) ** 0.5


@pytest.mark.parametrize("room", [2, 25, 128])
def test_half_follow_and_the_others_are_from_another_document(
    room: int, letters: Tokenizer
) -> None:
    drawn, text = draw(random_texts(np.random.default_rng(1)), letters, room)
    assert within(int(drawn.follows.sum()), 0.5, ROWS)
    first_size = drawn.first_stop - drawn.first_start
    second_size = drawn.second_stop - drawn.second_start
    assert first_size.min() >= 1
    assert second_size.min() >= 1
    assert (first_size + second_size).max() <= room
    # Both begin with a sentence, and each lies in one document.
    assert np.isin(drawn.first_start, text.sentence_starts).all()
    assert np.isin(drawn.second_start, text.sentence_starts).all()
    first, second = text.document_of(drawn.first_start), text.document_of(drawn.second_start)
    assert (text.document_of(drawn.first_stop - 1) == first).all()
    assert (text.document_of(drawn.second_stop - 1) == second).all()
    assert ((first == second) == drawn.follows).all()
    # The second of a real pair begins where the first stops, unless the first had to be cut.
    gap = (drawn.second_start - drawn.first_stop)[drawn.follows]
    assert gap.min() >= 0
    cut = ~np.isin(drawn.first_stop, text.sentence_starts)[drawn.follows]
    assert (gap[~cut] == 0).all()
    assert (first_size + second_size)[drawn.follows][cut].tolist() == [room] * int(cut.sum())


def test_every_place_is_as_likely(letters: Tokenizer) -> None:
    sizes = [[3, 1, 2], [4, 2], [1, 1, 1, 2]]
    drawn, text = draw(made(sizes), letters, room=100)
    starts = text.sentence_starts
    # All but the last sentence of a document may be an anchor.
    anchors = np.searchsorted(starts, drawn.first_start)
    assert set(anchors) == {0, 1, 3, 5, 6, 7}
    assert all(within(int((anchors == a).sum()), 1 / 6, ROWS) for a in set(anchors))
    # From the first sentence of three, the cut is after one or after two.
    of_three = drawn.first_start == 0
    cuts = np.searchsorted(starts, drawn.first_stop[of_three])
    assert set(cuts) == {1, 2}
    assert within(int((cuts == 1).sum()), 0.5, len(cuts))
    # Elsewhere: each of the six sentences of the two other documents.
    others = np.searchsorted(starts, drawn.second_start[of_three & ~drawn.follows])
    assert set(others) == {3, 4, 5, 6, 7, 8}
    assert all(within(int((others == o).sum()), 1 / 6, len(others)) for o in set(others))
    # Where there is room, runs go to the end of their document.
    assert np.isin(drawn.second_stop, text.document_starts).all()


def test_the_longer_is_cut_first(letters: Tokenizer) -> None:
    drawn, _ = draw(made([[50, 3], [4, 60]]), letters, room=20, rows=200)
    first_size = drawn.first_stop - drawn.first_start
    second_size = drawn.second_stop - drawn.second_start
    found = {
        (bool(follows), int(start), int(first), int(second))
        for follows, start, first, second in zip(
            drawn.follows, drawn.first_start, first_size, second_size, strict=True
        )
    }
    assert found == {
        (True, 0, 17, 3),
        (True, 53, 4, 16),
        (False, 0, 16, 4),
        (False, 0, 10, 10),
        (False, 53, 4, 16),
        (False, 53, 4, 3),
    }


def test_a_run_is_as_many_sentences_as_there_is_room_for(letters: Tokenizer) -> None:
    drawn, _ = draw(made([[3, 3], [2, 2, 2]]), letters, room=8, rows=500)
    first_size = drawn.first_stop - drawn.first_start
    second_size = drawn.second_stop - drawn.second_start
    sizes = list(zip(first_size.tolist(), second_size.tolist(), strict=True))
    followed = {size for size, follows in zip(sizes, drawn.follows, strict=True) if follows}
    others = {size for size, follows in zip(sizes, drawn.follows, strict=True) if not follows}
    assert followed == {(3, 3), (2, 4), (4, 2), (2, 2)}
    assert others == {(3, 4), (3, 2), (2, 6), (2, 3), (4, 3)}


def test_lines_of_a_running_text_are_sentences(letters: Tokenizer) -> None:
    """An empty line is none: it goes with the sentence before it."""
    documents = [Document(["\n", "ab\n", "\n", "c\n", "\n"], name, 1) for name in ("f", "g")]
    drawn, text = draw(Texts(documents, "text"), letters, room=50, rows=50)
    start = int(text.document_starts[1])
    assert set(drawn.first_start) == {1, start + 1}
    assert (drawn.first_stop - drawn.first_start == len("ab\n\n")).all()
    assert (drawn.second_start[drawn.follows] == drawn.first_stop[drawn.follows]).all()


def test_documents_that_are_too_short(letters: Tokenizer) -> None:
    texts = made([[2, 3], [9], [4, 5]])
    text = EncodedText(texts, letters, ends=False)
    with pytest.raises(DataError) as caught:
        SentencePairs(text, texts, room=20, short="refuse")
    assert str(caught.value) == (
        "f.txt:4: the document that begins here has one sentence, and next-sentence prediction "
        "needs two; join it to another, or leave such out with data.short=skip"
    )
    drawn = SentencePairs(text, texts, room=20, short="skip").draw(500, np.random.default_rng(0))
    used = {*text.document_of(drawn.first_start), *text.document_of(drawn.second_start)}
    assert used == {0, 2}
    assert set(drawn.second_stop[drawn.follows]) == {5, 23}


@pytest.mark.parametrize(("sizes", "good"), [([[2, 3]], 1), ([[7]], 0), ([[2, 3], [4]], 1)])
def test_another_document_is_needed(sizes: list[list[int]], good: int, letters: Tokenizer) -> None:
    texts = made(sizes)
    text = EncodedText(texts, letters, ends=False)
    with pytest.raises(DataError) as caught:
        SentencePairs(text, texts, room=20, short="skip")
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("f.txt: next-sentence prediction needs two documents of two sentences")
    assert f"there are {good} ({sum(map(len, sizes))} sentences in all)" in line
    assert "data.lines=sentences" in line


def test_no_room_for_a_pair(letters: Tokenizer) -> None:
    texts = made([[1, 1], [1, 1]])
    with pytest.raises(UserError, match=r"into 1 tokens: raise model\.max_length"):
        SentencePairs(EncodedText(texts, letters, ends=False), texts, room=1, short="refuse")
