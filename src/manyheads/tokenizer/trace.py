"""How a text falls into pieces, one state after the other: merges going up, matches going down."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """One state of a text on its way into pieces, and what was done to reach it.

    `merged` is the piece made (empty at the first state), `rank` the rank of its merge (BPE) and
    `tried` the longer pieces that were looked up in vain before it (WordPiece).
    """

    pieces: tuple[str, ...]
    merged: str = ""
    rank: int | None = None
    tried: tuple[str, ...] = ()

    def shown(self, show: Callable[[str], str]) -> "Step":
        pieces, tried = tuple(map(show, self.pieces)), tuple(map(show, self.tried))
        return Step(pieces=pieces, merged=show(self.merged), rank=self.rank, tried=tried)


def merge_steps(
    words: list[str], vocabulary: dict[str, int], ranks: dict[tuple[str, str], int]
) -> Iterator[Step]:
    """BPE: always the pair of lowest rank, the leftmost of equals, until no pair has a rank."""
    states = [list(symbols(word, vocabulary)) for word in words]
    yield Step(pieces=tuple(chain(*states)))
    for state in states:
        while known := [(ranks[p], i) for i, p in enumerate(pairwise(state)) if p in ranks]:
            rank, position = min(known)
            merged = state[position] + state[position + 1]
            state[position : position + 2] = [merged]
            yield Step(pieces=tuple(chain(*states)), merged=merged, rank=rank)


def symbols(word: str, vocabulary: dict[str, int]) -> Iterator[str]:
    """What BPE begins with: characters, or their bytes where they are not known."""
    for character in word:
        if character in vocabulary:
            yield character
        else:
            yield from (f"<0x{byte:02X}>" for byte in character.encode())


def match_steps(words: list[str], model: dict[str, Any]) -> Iterator[Step]:
    """WordPiece: from the left, always the longest piece in the vocabulary."""
    prefix, vocabulary = model["continuing_subword_prefix"], model["vocab"]
    done: list[str] = []
    yield Step(pieces=tuple(words))
    for index, word in enumerate(words):
        taken: list[str] = []
        rest = word
        while rest:
            lead = prefix if taken else ""
            candidates = [lead + rest[:stop] for stop in range(len(rest), 0, -1)]
            tries = next((i for i, piece in enumerate(candidates) if piece in vocabulary), None)
            if tries is None:  # a word with an unknown end is unknown as a whole
                taken, merged, rest = [model["unk_token"]], model["unk_token"], ""
            else:
                merged = candidates[tries]
                taken.append(merged)
                rest = rest[len(rest) - tries :]
            left = [prefix + rest] if rest else []
            yield Step(
                pieces=(*done, *taken, *left, *words[index + 1 :]),
                merged=merged,
                tried=tuple(candidates[:tries]),
            )
        done += taken
