"""A stream of lines through a translator: nothing lost, nothing added, nothing out of order."""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO

import pytest
import torch

from manyheads.decode import translate as lines_module
from manyheads.decode.beam import Decode, Hypothesis
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Translator, translate_lines
from manyheads.errors import DataError
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.positions import Learned
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe

TEXT = [
    "The old dog sleeps.",
    "A cat sees the dog in the garden.",
    "Does the bird sing? Yes, it does!",
    "Die Katze schläft auf dem Dach.",
]
LONG = "The old dog sees a cat. The cat, however, sleeps in the garden! Does the bird sing? Yes."
PLENTY = 30


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Bpe(vocab_size=320).train(TEXT * 3)


@pytest.fixture(scope="module")
def translator(tokenizer: Tokenizer) -> Translator:
    """Untrained, in float64; with learned positions, so that what does not fit is an error."""
    torch.manual_seed(0)  # whatever was drawn before: this comes before the seed of each test
    config = Seq2SeqConfig(
        vocab_size=tokenizer.vocab_size,
        dim=16,
        layers=1,
        heads=2,
        max_length=PLENTY,
        position=Learned(),
        tie="none",
    )
    decode = Decode(beam=2, max_length_ratio=0.5, max_length_extra=3)
    return Translator(config.build().double().eval(), tokenizer, decode)


class Echo(Translator):
    """Gives back what it is asked to translate."""

    def translate(self, sentences: Sequence[str]) -> list[str]:
        return list(sentences)

    def search(self, sentences: Sequence[str], advance: object = None) -> list[list[Hypothesis]]:
        ids = [self.tokenizer.encode(sentence) for sentence in sentences]
        return [[Hypothesis(own, -1.0, -1.0 - rank) for rank in range(2)] for own in ids]


@pytest.fixture
def echo(translator: Translator) -> Echo:
    return Echo(translator.model, translator.tokenizer, translator.decode)


def through(translator: Translator, content: str | bytes, n_best: int = 1) -> list[str]:
    raw = content.encode() if isinstance(content, str) else content
    return list(translate_lines(translator, BytesIO(raw), n_best))


def letters(text: str) -> str:
    return "".join(text.split())


def test_each_line_gets_its_own_translation(translator: Translator) -> None:
    """Line n out is the translation of line n in, and the same in every run."""
    wanted = [translator.translate([line])[0].replace("\n", " ") for line in TEXT]
    assert through(translator, "\n".join(TEXT) + "\n") == wanted
    assert through(translator, "\n".join(TEXT) + "\n") == wanted
    assert len(set(wanted)) > 1


def test_order_is_kept(echo: Echo) -> None:
    """Lines of mixed length come out in the order they came in."""
    lines = [f"{'dog ' * (n * 7 % 5)}{n}" for n in range(40)]
    assert through(echo, "\n".join(lines)) == lines


@pytest.mark.parametrize("size", [1, 3, 512])
def test_the_number_of_lines_at_once_does_not_matter(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A long stream is worked off in parts without a seam, searched, listed or drawn."""
    lines = "\n".join([*TEXT, "", *TEXT, LONG, TEXT[0]])
    sample = Sample(seed=1)

    def everything() -> list[list[str]]:
        stream = BytesIO(lines.encode())
        drawn = list(translate_lines(translator, stream, sample=sample))
        return [through(translator, lines), through(translator, lines, 2), drawn]

    whole = everything()
    monkeypatch.setattr(lines_module, "LINES_AT_ONCE", size)
    assert everything() == whole


@pytest.mark.parametrize("n_best", [1, 2])
def test_as_many_lines_out_as_in(translator: Translator, n_best: int) -> None:
    """Empty, blank, ordinary and long lines: each is one line, blank ones stay empty."""
    given = ["", "The dog.", "   ", "\t", LONG, "", "A cat.", " "]
    found = through(translator, "\n".join(given) + "\n", n_best)
    if n_best == 1:
        assert len(found) == len(given)
        assert [line for line, text in zip(found, given, strict=True) if not text.strip()] == [
            ""
        ] * 5
    numbers = [int(line.split(" ||| ")[0]) for line in found] if n_best > 1 else []
    assert n_best == 1 or sorted(set(numbers)) == list(range(len(given)))


def test_nothing_in_nothing_out(translator: Translator) -> None:
    """An empty stream gives no line, a single line break one empty line."""
    assert through(translator, "") == []
    assert through(translator, "\n") == [""]


def test_the_last_line_needs_no_break(echo: Echo) -> None:
    """With and without a line break at the end: the same lines."""
    assert through(echo, "The dog.\nA cat.") == through(echo, "The dog.\nA cat.\n")
    assert through(echo, "The dog.\nA cat.") == ["The dog.", "A cat."]


def test_windows_line_ends_leave_no_trace(echo: Echo) -> None:
    """CRLF ends a line like LF; a byte order mark before the first line is none of its text."""
    assert through(echo, "The dog.\r\n\r\nA cat.\r\n") == ["The dog.", "", "A cat."]
    assert through(echo, b"\xef\xbb\xbfThe dog.\r\nA cat.") == ["The dog.", "A cat."]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_line_feeds_split_lines(echo: Echo, mark: str) -> None:
    """Characters that Python's splitlines takes for line ends stay inside their line."""
    assert through(echo, f"The{mark}dog.\nA cat.") == [f"The{mark}dog.", "A cat."]


@pytest.mark.parametrize("n_best", [1, 2])
def test_a_line_break_in_a_translation_is_a_space(translator: Translator, n_best: int) -> None:
    """What a model writes, line breaks too, stays one line of output."""

    class Breaking(Echo):
        def translate(self, sentences: Sequence[str]) -> list[str]:
            return ["one\ntwo\rthree" for _ in sentences]

        def search(
            self, sentences: Sequence[str], advance: object = None, n_best: int | None = None
        ) -> list[list[Hypothesis]]:
            ids = self.tokenizer.encode("one\ntwo\rthree")
            return [[Hypothesis(ids, -1.0, -1.0)] for _ in sentences]

    breaking = Breaking(translator.model, translator.tokenizer, translator.decode)
    for line in through(breaking, "The dog.", n_best):
        assert "one two three" in line


@pytest.mark.parametrize("number", [1, 3])
def test_what_is_not_utf8_is_named(translator: Translator, number: int) -> None:
    """The line that cannot be read is named, and where in it."""
    lines = [b"The dog."] * 4
    lines[number - 1] = b"Caf\xe9 noir"
    with pytest.raises(DataError, match=rf"line {number} .*byte 4"):
        through(translator, b"\n".join(lines))


@pytest.mark.parametrize("size", [2, 512])
def test_a_long_line_goes_in_pieces_with_a_warning(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The warning names the line, and the translation is that of its pieces, one by one."""
    monkeypatch.setattr(lines_module, "LINES_AT_ONCE", size)
    warnings: list[str] = []
    content = "\n".join([TEXT[0], "", LONG, TEXT[1]]).encode()
    found = list(translate_lines(translator, BytesIO(content), warn=warnings.append))
    parts = translator.split(LONG)
    assert len(parts) > 1
    assert len(warnings) == 1
    assert "line 3 " in warnings[0]
    assert str(PLENTY) in warnings[0]
    assert f"{len(parts)} parts" in warnings[0]
    assert found[2] == " ".join(text.replace("\n", " ") for text in translator.translate(parts))
    assert len(found) == 4


@pytest.mark.parametrize(
    "line",
    [
        LONG,
        LONG.replace(" ", "  \t "),
        "dog " * 200,
        "no marks at all " * 12 + "dog",
        "x" * 500,
        "Short. " + "schläft" * 60 + " cat. " + LONG,
        "   " + "y" * 100 + "  z",
        "狗在花园里睡觉" * 20,
        "One. " * 40,
        "👩‍👩‍👧" * 30,
        "...!!! " * 60,
    ],
    ids=lambda line: line.strip()[:12],
)
def test_pieces_fit_and_lose_nothing(translator: Translator, line: str) -> None:
    """Every piece fits into the model; together they have every letter, in order."""
    found = translator.split(line)
    assert len(found) > 1
    assert all(len(translator.tokenizer.encode(part)) + 1 <= PLENTY for part in found)
    assert letters("".join(found)) == letters(line)
    assert [letters(part) for part in found if not letters(part)] == []
    assert len(translator.translate(found)) == len(found)


def test_words_and_sentences_are_cut_only_where_they_must(translator: Translator) -> None:
    """Where every word fits, words stay whole; where every sentence fits, sentences do."""
    words = "The old dog sees the old cat in the old garden near the old bird " * 3
    parts = translator.split(words)
    assert [word for part in parts for word in part.split()] == words.split()
    sentences = ["The dog sleeps.", "A cat sees it!", "Does it sing?", "Yes.", "It sleeps."] * 2
    parts = translator.split(" ".join(sentences))
    assert 1 < len(parts) <= len(sentences)
    assert " ".join(parts) == " ".join(sentences)
    assert all(part.endswith((".", "!", "?")) for part in parts)


def test_the_longest_line_that_fits_stays_whole(translator: Translator) -> None:
    """Tokens and the end token together may fill every position; one more, and it is cut."""
    line = "z" * (PLENTY - 1)
    assert len(translator.tokenizer.encode(line)) == PLENTY - 1
    assert translator.split(line) == [line]
    assert len(translator.translate([line])) == 1
    assert len(translator.split(line + "z")) == 2


def test_n_best_lists(translator: Translator) -> None:
    """`number ||| text ||| score`: numbers from 0 in order, best first, as the search found."""
    wide = replace(translator, decode=replace(translator.decode, beam=4))
    found = through(wide, "\n".join([TEXT[0], "", TEXT[1]]), 4)
    rows = [line.split(" ||| ") for line in found]
    assert all(len(row) == 3 for row in rows)
    assert [int(number) for number, _, _ in rows] == [0] * 4 + [1] + [2] * 4
    for number, line in ((0, TEXT[0]), (2, TEXT[1])):
        hypotheses = wide.search([line])[0]
        own = [row for row in rows if row[0] == str(number)]
        assert [float(score) for _, _, score in own] == pytest.approx(
            [h.score for h in hypotheses], abs=1e-4
        )
        texts = [wide.tokenizer.decode(h.tokens) for h in hypotheses]
        assert [letters(text) for _, text, _ in own] == [letters(text) for text in texts]
    assert rows[4][1] == ""


def test_equal_lines_are_drawn_anew(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence on many lines gives many samples, also in later parts of the stream."""
    monkeypatch.setattr(lines_module, "LINES_AT_ONCE", 4)
    stream = BytesIO(f"{TEXT[0]}\n".encode() * 12)
    drawn = list(translate_lines(translator, stream, sample=Sample(temperature=3.0)))
    assert len(set(drawn)) == 12
