"""How a word is split into subwords, state by state: BPE merges upwards, WordPiece downwards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

Ranks = dict[tuple[str, str], int]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One state of a text, and how it was reached.

    `merged` is the new subword (empty in the first state), `rank` the rank of its merge (BPE) and
    `tried` the longer subwords that are not in the vocabulary (WordPiece).
    """

    subwords: tuple[str, ...]
    merged: str = ""
    rank: int | None = None
    tried: tuple[str, ...] = ()

    def map(self, show: Callable[[str], str]) -> "Step":
        subwords, tried = tuple(map(show, self.subwords)), tuple(map(show, self.tried))
        return Step(subwords=subwords, merged=show(self.merged), rank=self.rank, tried=tried)


def merges(
    state: list[str], ranks: Ranks, allows: Callable[[], bool] = lambda: True
) -> Iterator[tuple[int, str]]:
    """BPE in place: merge the pair of lowest rank, the leftmost of equals, until none has a rank.

    `allows` is called for every pair that could be merged (BPE-dropout). Yields ranks and subwords.
    """
    while known := [
        (ranks[pair], index)
        for index, pair in enumerate(pairwise(state))
        if pair in ranks and allows()
    ]:
        rank, index = min(known)
        state[index : index + 2] = [state[index] + state[index + 1]]
        yield rank, state[index]


def merge_steps(words: list[str], vocabulary: dict[str, int], ranks: Ranks) -> Iterator[Step]:
    """The states of BPE, words from left to right."""
    states = [symbols(word, vocabulary) for word in words]
    yield Step(subwords=tuple(chain(*states)))
    for state in states:
        for rank, merged in merges(state, ranks):
            yield Step(subwords=tuple(chain(*states)), merged=merged, rank=rank)


def symbols(word: str, vocabulary: dict[str, int]) -> list[str]:
    """The first state of BPE: characters, or the bytes of those not in the vocabulary."""
    state: list[str] = []
    for character in word:
        known = character in vocabulary
        state += [character] if known else [f"<0x{byte:02X}>" for byte in character.encode()]
    return state


def match_steps(words: list[str], model: dict[str, Any]) -> Iterator[Step]:
    """The states of WordPiece: from the left, always the longest subword in the vocabulary."""
    prefix, vocabulary = model["continuing_subword_prefix"], model["vocab"]
    done: list[str] = []
    yield Step(subwords=tuple(words))
    for index, word in enumerate(words):
        matched: list[str] = []
        rest = word
        while rest:
            lead = prefix if matched else ""
            candidates = [lead + rest[:stop] for stop in range(len(rest), 0, -1)]
            tries = next((i for i, part in enumerate(candidates) if part in vocabulary), None)
            if tries is None:  # one unknown part makes the word unknown
                matched, rest = [model["unk_token"]], ""
            else:
                matched.append(candidates[tries])
                rest = rest[len(rest) - tries :]
            left = [prefix + rest] if rest else []
            yield Step(
                subwords=(*done, *matched, *left, *words[index + 1 :]),
                merged=matched[-1],
                tried=tuple(candidates[:tries]),
            )
        done += matched
