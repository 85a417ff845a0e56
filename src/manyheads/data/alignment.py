"""Word alignments of sentence pairs, from files, and as links between tokens."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.data.files import read_lines
from manyheads.errors import DataError
from manyheads.phrasebook import Pair
from manyheads.tokenizer.tokenizer import Tokenizer

Spans = Sequence[tuple[int, int]]  # (start, end) in characters


def word_spans(text: str) -> list[tuple[int, int]]:
    """The words between spaces, as start and end in characters."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def words_of_tokens(tokens: Spans, words: Spans) -> Float[Tensor, "words tokens"]:
    """1 where a token belongs to a word: the one that it overlaps most; spaces belong to none."""
    (starts, ends), (word_starts, word_ends) = (
        np.array(spans).reshape(-1, 2).T for spans in (tokens, words)
    )
    overlaps = np.minimum(ends, word_ends[:, None]) - np.maximum(starts, word_starts[:, None])
    is_largest = overlaps.argmax(0) == np.arange(len(words))[:, None]
    return torch.from_numpy((is_largest & (overlaps > 0)).astype(np.float32))


def read_alignment(
    path: Path, count: int, rows: Sequence[int], sources: Sequence[str], targets: Sequence[str]
) -> list[Pair]:
    """Pairs with the links of a Pharaoh file: a line `i-j ...` for each row, words from 0.

    `count` is the number of all rows, also of those that are left out.
    """
    lines = read_lines(path)
    if len(lines) != count:
        raise DataError(
            f"{path} has {len(lines)} lines for {count} pairs: write one line for each pair, empty "
            "if it has no links"
        )
    pairs = []
    for row, source, target in zip(rows, sources, targets, strict=True):
        words = tuple(word_spans(source)), tuple(word_spans(target))
        links = [link.split("-") for link in lines[row].split()]
        for link in links:
            if len(link) != 2 or not all(
                index.isdecimal() and int(index) < len(side)
                for index, side in zip(link, words, strict=True)
            ):
                raise DataError(
                    f"{path}:{row + 1}: {'-'.join(link)} is not a link i-j of source word i (of "
                    f"{len(words[0])}) and target word j (of {len(words[1])}), from 0: fix it"
                )
        pairs.append(Pair(source, target, *words, frozenset((int(i), int(j)) for i, j in links)))
    return pairs


def token_links(tokenizer: Tokenizer, pair: Pair) -> Float[Tensor, "t s"]:
    """1 where a target token and a source token are of linked words."""
    gold = torch.zeros(len(pair.target_words), len(pair.source_words))
    for source, target in pair.alignment:
        gold[target, source] = 1.0
    of_source = words_of_tokens(tokenizer.offsets(pair.source), pair.source_words)
    of_target = words_of_tokens(tokenizer.target.offsets(pair.target), pair.target_words)
    return of_target.T @ gold @ of_source
