"""Draws the phrasebook's sentence pairs and decides which split each belongs to."""

from zlib import crc32

from manyheads.phrasebook import english, french, german
from manyheads.phrasebook.grammar import Grammar
from manyheads.phrasebook.layout import Pair, align, write

PAIRS = ("en-de", "en-fr")
SPLITS = ("train", "valid", "test", "compositional")
_TARGETS = {"en-de": german.sentence, "en-fr": french.sentence}
# Out of this many sentences one is for validation and one for testing.
_PARTS = 50
_LONGEST = 26


def _split(source: str) -> str:
    """The split of a sentence without held-out combinations, by a hash of its text."""
    part = crc32(source.encode()) % _PARTS
    return "valid" if part == 0 else "test" if part == 1 else "train"


def sentences(pair: str, split: str, count: int, seed: int = 0) -> list[Pair]:
    """`count` pairs with different sources, the same for the same arguments everywhere.

    More pairs begin with the fewer ones. Both language pairs draw the same English sentences, and
    no sentence is in two splits, whatever the seeds. `compositional` has all sentences, and only
    those, in which an adjective meets a noun or a verb an object that it meets in no other split.
    """
    if pair not in PAIRS:
        raise ValueError(f"unknown pair {pair!r}, the phrasebook has {', '.join(PAIRS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, the phrasebook has {', '.join(SPLITS)}")
    realise = _TARGETS[pair]
    grammar = Grammar(f"phrasebook {split} {seed}")
    wants_held_out = split == "compositional"
    seen: set[str] = set()
    pairs: list[Pair] = []
    while len(pairs) < count:
        tree = grammar.sentence()
        if tree.held_out != wants_held_out:
            continue
        source_words = english.sentence(tree)
        if len(source_words) > _LONGEST:
            continue
        source, source_spans = write(source_words)
        if source in seen or not (wants_held_out or _split(source) == split):
            continue
        seen.add(source)
        target_words = realise(tree)
        target, target_spans = write(target_words, spaced_marks=pair == "en-fr")
        links = align(source_words, target_words)
        pairs.append(Pair(source, target, source_spans, target_spans, links))
    return pairs
