"""The same text in other pieces: BPE whose merges are passed over now and then (BPE-dropout).

Whenever two neighbours could become one, they are left apart with some probability, and what is
merged next is the best of the others (Provilkov et al. 2020). A rare word is then met in smaller
pieces too, which it shares with other words, and a small corpus says more. Which pieces a word gets
hangs on the seed, the copy of the corpus and its place there, so that a run that is resumed reads
the same.
"""

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from manyheads.errors import UserError
from manyheads.tokenizer.tokenizer import Tokenizer

WAYS = 8  # a word is cut, of which each place draws one


class Segmenter:
    """Cuts texts as a BPE tokenizer does, with a share of the merges left out."""

    def __init__(self, tokenizer: Tokenizer, share: float, seed: int) -> None:
        if tokenizer.kind != "bpe":
            raise UserError(
                f"train.bpe_dropout_copies are of merges, which {tokenizer.kind} has none of: set "
                "tokens=bpe, or leave it out"
            )
        self.tokenizer, self.share, self.seed = tokenizer, share, seed
        self._ways: dict[str, list[list[int]]] = {}
        self._words = cache(tokenizer.words)  # each copy asks for them

    def encode_batch(self, texts: Sequence[str], *copy: int) -> list[list[int]]:
        """The ids of each text; another copy (any numbers name one) draws other pieces."""
        words = [self._words(text) for text in texts]
        drawn = np.random.default_rng([self.seed, *copy])
        ways = iter(drawn.integers(0, WAYS, sum(map(len, words))).tolist())
        return [[id for word in text for id in self._cut(word)[next(ways)]] for text in words]

    def _cut(self, word: str) -> list[list[int]]:
        if word not in self._ways:
            chances = random.Random(f"{self.seed} {word}")
            self._ways[word] = [self._drawn(word, chances) for _ in range(WAYS)]
        return self._ways[word]

    def _drawn(self, word: str, chances: random.Random) -> list[int]:
        ranks, state = self.tokenizer.ranks, self.tokenizer.symbols(word)
        while known := [
            (ranks[pair], at)
            for at, pair in enumerate(pairwise(state))
            if pair in ranks and chances.random() >= self.share
        ]:
            _, at = min(known)
            state[at : at + 2] = [state[at] + state[at + 1]]
        ids = [self.tokenizer.token_id(piece) for piece in state]
        return [id for id in ids if id is not None]
