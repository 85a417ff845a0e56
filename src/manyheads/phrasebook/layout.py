"""From words with concepts to a pair of texts with word spans and their alignment."""

from dataclasses import dataclass

from manyheads.phrasebook.tree import Word

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence, its translation and which word goes with which.

    Spans are character ranges [start, end) of the words in order. Punctuation marks, the parts
    of a number and elided words ("l'") are words of their own.
    """

    source: str
    target: str
    source_words: Spans
    target_words: Spans
    alignment: frozenset[tuple[int, int]]


_NO_SPACE_BEFORE = frozenset((".", ",", "?", "!", "-", "'s"))


def write(words: list[Word], spaced_marks: bool = False) -> tuple[str, Spans]:
    """Joins the words into a text, capital first, and gives the span of each.

    French sets a space before `?` and `!`: `spaced_marks`.
    """
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    position = 0
    glued = True
    for text, _ in words:
        if not glued and (text not in _NO_SPACE_BEFORE or (spaced_marks and text in ("?", "!"))):
            pieces.append(" ")
            position += 1
        pieces.append(text)
        end = position + len(text)
        spans.append((position, end))
        position = end
        glued = text == "-" or text[-1] == "'"
    joined = "".join(pieces)
    return joined[0].upper() + joined[1:], tuple(spans)


def align(source: list[Word], target: list[Word]) -> frozenset[tuple[int, int]]:
    """All pairs of words that share a concept."""
    places: dict[int, list[int]] = {}
    for index, (_, concepts) in enumerate(target):
        for concept in concepts:
            places.setdefault(concept, []).append(index)
    return frozenset(
        (index, other)
        for index, (_, concepts) in enumerate(source)
        for concept in concepts
        for other in places.get(concept, ())
    )
