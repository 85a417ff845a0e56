"""BPE-dropout (Provilkov et al. 2020): encode a text in several ways by skipping merges at random.

Each possible merge is skipped with probability `dropout`, and the best of the others is applied.
Rare words are then seen in smaller subwords, which they share with other words. The encoding of a
word depends on the seed, the copy of the corpus and its position there, so that a resumed run
trains on the same subwords.
"""

import random
from collections.abc import Sequence
from functools import cache

import numpy as np

from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.trace import merges

VARIANTS = 8  # encodings of a word; each occurrence gets one of them


class BpeDropout:
    """Encodes texts with a BPE tokenizer, with some of the merges left out."""

    def __init__(self, tokenizer: Tokenizer, dropout: float, seed: int) -> None:
        if tokenizer.kind != "bpe":
            raise UserError(
                f"train.bpe_dropout_copies needs tokens=bpe, not {tokenizer.kind}: remove it"
            )
        self.tokenizer, self.dropout, self.seed = tokenizer, dropout, seed
        self._words = cache(tokenizer.words)  # every copy needs them
        self._variants = cache(self._encode_word)

    def encode_batch(self, texts: Sequence[str], *copy: int) -> list[list[int]]:
        """The ids of each text; other numbers in `copy` give other encodings."""
        words = [self._words(text) for text in texts]
        generator = np.random.default_rng([self.seed, *copy])
        chosen = iter(generator.integers(0, VARIANTS, sum(map(len, words))).tolist())
        return [
            [id for word in text for id in self._variants(word)[next(chosen)]] for text in words
        ]

    def _encode_word(self, word: str) -> list[list[int]]:
        generator = random.Random(f"{self.seed} {word}")
        variants = []
        for _ in range(VARIANTS):
            state = self.tokenizer.symbols(word)
            for _ in merges(
                state, self.tokenizer.ranks, lambda: generator.random() >= self.dropout
            ):
                pass
            ids = [self.tokenizer.token_id(subword) for subword in state]
            variants.append([id for id in ids if id is not None])
        return variants
