"""Streams of lines and long texts: every line has its translation, in order."""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from typing import Any

import pytest
import torch

from manyheads.decode import translate as translate_module
from manyheads.decode.beam import Decode, Hypothesis
from manyheads.decode.sample import Sample
from manyheads.decode.translate import Annotation, LineFormat, Translator, translate_lines
from manyheads.errors import DataError
from manyheads.fileio import decode_lines
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
MAX_LENGTH = 30


@pytest.fixture(scope="module")
def translator() -> Translator:
    """Untrained, in float64; with learned positions, so that a text that is too long fails."""
    tokenizer = Bpe(vocab_size=320).train(TEXT * 3)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "dim": 16, "layers": 1, "heads": 2}
    config = Seq2SeqConfig(**sizes, max_length=MAX_LENGTH, position=Learned(), tie="none")
    decode = Decode(beam=2, max_length_ratio=0.5, max_length_extra=3)
    return Translator(config.build().double().eval(), tokenizer, decode)


class Echo(Translator):
    """Translates every sentence into itself, or into `text`."""

    text: str | None = None

    def search(
        self, sentences: Sequence[str], advance: object = None, n_best: int | None = None
    ) -> list[list[Hypothesis]]:
        texts = [self.text or sentence for sentence in sentences]
        return [[Hypothesis(ids, -1.0, -1.0)] for ids in self.tokenizer.encode_batch(texts)]


@pytest.fixture
def echo(translator: Translator) -> Echo:
    return Echo(translator.model, translator.tokenizer, translator.decode)


def lines_of(
    translator: Translator, content: str | bytes, n_best: int = 1, **more: Any
) -> list[str]:
    raw = content.encode() if isinstance(content, str) else content
    return list(translate_lines(translator, decode_lines(BytesIO(raw)), LineFormat(n_best), **more))


def letters(text: str) -> str:
    return "".join(text.split())


def test_each_line_has_its_translation(translator: Translator) -> None:
    expected = [translator.translate([line])[0].replace("\n", " ") for line in TEXT]
    assert lines_of(translator, "\n".join(TEXT) + "\n") == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("size", [1, 3])
def test_results_do_not_depend_on_lines_at_once(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Searched, as n-best lists and sampled; equal lines have their own random numbers."""
    content = "\n".join([*TEXT, "", *TEXT, LONG, TEXT[0]])

    def everything() -> list[list[str]]:
        sample = Sample(temperature=3.0, seed=1)
        searched, listed = lines_of(translator, content), lines_of(translator, content, 2)
        return [searched, listed, lines_of(translator, content, sample=sample)]

    expected = everything()
    assert expected[2][0] != expected[2][5]
    monkeypatch.setattr(translate_module, "LINES_AT_ONCE", size)
    assert everything() == expected


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("The dog.\n\n  \n\t\nA cat.", ["The dog.", "", "", "", "A cat."]),
        ("The dog.\nA cat.\n", ["The dog.", "A cat."]),
        ("The dog.\r\n\r\nA cat.\r\n", ["The dog.", "", "A cat."]),
        ("\ufeffThe dog.", ["The dog."]),
        *(
            (f"The{mark}dog.\nA cat.", [f"The{mark}dog.", "A cat."])
            for mark in "\u2028\x85\x0b\x1c"
        ),
    ],
)
def test_only_line_feeds_end_lines(echo: Echo, content: str, lines: list[str]) -> None:
    """Blank lines stay empty; carriage returns and a byte order mark are removed."""
    assert lines_of(echo, content) == lines
    numbers = [int(line.split(" ||| ")[0]) for line in lines_of(echo, content, 2)]
    assert sorted(set(numbers)) == list(range(len(lines)))


@pytest.mark.parametrize("n_best", [1, 2])
def test_a_line_break_in_a_translation_is_a_space(echo: Echo, n_best: int) -> None:
    object.__setattr__(echo, "text", "one\ntwo\rthree")
    assert all("one two three" in line for line in lines_of(echo, "The dog.", n_best))


@pytest.mark.parametrize("number", [1, 3])
def test_bytes_that_are_not_utf8_are_refused_with_their_line(echo: Echo, number: int) -> None:
    lines = [b"The dog."] * 4
    lines[number - 1] = b"Caf\xe9 noir"
    with pytest.raises(DataError, match=rf"input:{number}: .*byte 4"):
        lines_of(echo, b"\n".join(lines))


@pytest.mark.parametrize("size", [2, 512])
def test_a_long_line_is_translated_in_parts_with_a_warning(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(translate_module, "LINES_AT_ONCE", size)
    warnings: list[str] = []
    content = "\n".join([TEXT[0], "", LONG, TEXT[1]])
    results = lines_of(translator, content, warn=warnings.append)
    parts = translator.split(LONG)
    assert len(parts) > 1
    [warning] = warnings
    assert all(text in warning for text in ("line 3 ", str(MAX_LENGTH), f"{len(parts)} parts"))
    assert results[2] == " ".join(translator.translate(parts)).replace("\n", " ")
    assert len(results) == 4
    assert translator.translate_long([LONG]) == [" ".join(translator.translate(parts))]


def test_alignments_of_a_line_in_parts_count_the_words_of_the_line(echo: Echo) -> None:
    """Each part has one target word, to which all its source words are linked."""

    def annotate(texts: Sequence[str], best: Sequence[Hypothesis]) -> list[Annotation]:
        sizes = [len(text.split()) for text in texts]
        return [Annotation([(i, 0) for i in range(n)], [], n, 1, []) for n in sizes]

    form, text = LineFormat(alignment=True, annotate=annotate), f"{LONG} {LONG}"
    parts = echo.split(text)
    assert len(parts) > 2
    [line] = translate_lines(echo, [text], form)
    targets = [number for number, part in enumerate(parts) for _ in part.split()]
    assert line.split(" ||| ")[1].split() == [f"{i}-{j}" for i, j in enumerate(targets)]


@pytest.mark.parametrize(
    "text",
    [
        LONG.replace(" ", "  \t "),
        "no marks at all " * 12 + "dog",
        "x" * 500,
        "Short. " + "schläft" * 60 + " cat. " + LONG,
        "   " + "y" * 100 + "  z",
        "狗在花园里睡觉" * 20,
        "👩‍👩‍👧" * 30,
        "...!!! " * 60,
    ],
    ids=lambda text: text.strip()[:12],
)
def test_parts_fit_and_lose_nothing(translator: Translator, text: str) -> None:
    """Every part fits into the model; together they have every letter, in order."""
    parts = translator.split(text)
    assert len(parts) > 1
    assert all(len(translator.tokenizer.encode(part)) < MAX_LENGTH for part in parts)
    assert letters("".join(parts)) == letters(text)
    assert all(letters(part) for part in parts)
    # No part could take the first word of the next one.
    assert all(
        len(translator.tokenizer.encode(f"{part} {after}")) >= MAX_LENGTH
        for part, after in pairwise(parts)
    )


def test_words_and_sentences_are_split_only_if_needed(translator: Translator) -> None:
    words = "The old dog sees the old cat in the old garden near the old bird " * 3
    assert [word for part in translator.split(words) for word in part.split()] == words.split()
    sentences = ["The dog sleeps.", "A cat sees it!", "Does it sing?", "Yes.", "It sleeps."] * 2
    parts = translator.split(" ".join(sentences))
    assert 1 < len(parts) <= len(sentences)
    assert " ".join(parts) == " ".join(sentences)
    assert all(part.endswith((".", "!", "?")) for part in parts)


def test_the_longest_line_that_fits_is_not_split(translator: Translator) -> None:
    """Tokens and the end token together may fill every position."""
    line = "z" * (MAX_LENGTH - 1)
    assert len(translator.tokenizer.encode(line)) == MAX_LENGTH - 1
    assert translator.split(line) == [line]
    assert len(translator.translate([line])) == 1
    assert len(translator.split(line + "z")) == 2


@pytest.mark.parametrize("unit", ["dog ", "dog. ", "x"])
def test_splitting_encodes_each_character_few_times(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    """Linear in the text, and nearly independent of the length of the parts."""
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counting(tokenizer: Tokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    costs = []
    for size, max_length in ((2000, 100), (4000, 100), (4000, 800)):
        monkeypatch.setattr(Translator, "max_length", max_length)
        encoded.clear()
        text = unit * size
        assert len(translator.split(text)) > 1
        costs.append(sum(encoded) / len(text))
    assert costs[1] < 1.2 * costs[0]
    assert costs[2] < 2 * costs[0]
    assert max(costs) < 40


def test_n_best_lists(translator: Translator) -> None:
    """`number ||| text ||| score`: numbers from 0 in order, best first."""
    wide = replace(translator, decode=replace(translator.decode, beam=4))
    rows = [line.split(" ||| ") for line in lines_of(wide, "\n".join([TEXT[0], "", TEXT[1]]), 4)]
    assert [int(number) for number, _, _ in rows] == [0] * 4 + [1] + [2] * 4
    assert rows[4][1] == ""
    for number, line in ((0, TEXT[0]), (2, TEXT[1])):
        hypotheses = wide.search([line])[0]
        texts, scores = zip(*(row[1:] for row in rows if row[0] == str(number)), strict=True)
        expected = [h.score for h in hypotheses]
        assert [float(score) for score in scores] == pytest.approx(expected, abs=1e-4)
        decoded = [wide.tokenizer.decode(h.tokens) for h in hypotheses]
        assert [letters(text) for text in texts] == [letters(text) for text in decoded]
