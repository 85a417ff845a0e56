"""Random words and their translation, word for word: what a decoder has to find is known.

Nothing can be guessed: a target word hangs on one source word, so that all of a source has to
reach the decoder. With words of two kinds, those of the second go to the end of the target, as
the verbs of some languages do; then no place tells where a word comes from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.lab.claims.trial import learn

START, END = 0, 1
MARKS = 2  # the tokens before the words
ROWS, WARMUP = 32, 20

Sentences = Int[Tensor, "n t"]


@dataclass(frozen=True, eq=False)
class Words:
    """A dictionary, one target word for each source word, and sentences of it."""

    table: Int[Tensor, " v"]
    kinds: int = 1

    @staticmethod
    def of(count: int, seed: int, device: torch.device, kinds: int = 1) -> "Words":
        random = torch.Generator().manual_seed(seed)
        other = MARKS + torch.randperm(count, generator=random)
        return Words(torch.cat([torch.arange(MARKS), other]).to(device), kinds)

    @property
    def vocabulary(self) -> int:
        return len(self.table)

    def places(self, source: Sentences) -> Sentences:
        """Where in a source each target word comes from; the end from the end."""
        kinds = (source % self.kinds).masked_fill(source == END, self.kinds)
        return kinds.argsort(dim=1, stable=True)

    def sentences(
        self, rows: int, length: int, random: torch.Generator
    ) -> tuple[Sentences, Sentences, Sentences]:
        """Sources with their end, targets after the start, and what is wanted at each place."""
        words = torch.randint(MARKS, self.vocabulary, (rows, length), generator=random)
        source = F.pad(words, (0, 1), value=END).to(self.table.device)
        wanted = self.table[source.gather(1, self.places(source))]
        return source, F.pad(wanted[:, :-1], (1, 0), value=START), wanted


def teach(
    model: nn.Module,
    words: Words,
    lengths: Sequence[int],
    *,
    steps: int,
    rate: float,
    seed: int,
    watch: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train on sentences of these lengths, one length a step; gives each step's loss.

    `watch` is called before each step.
    """
    random = torch.Generator().manual_seed(seed)

    def loss(step: int) -> Tensor:
        watch(step)
        drawn = lengths[int(torch.randint(len(lengths), (), generator=random))]
        source, target, wanted = words.sentences(ROWS, drawn, random)
        return F.cross_entropy(model(source, target).flatten(0, 1), wanted.flatten())

    return learn(model, loss, steps=steps, rate=rate, warmup=WARMUP)


@torch.no_grad()
def accuracy(model: nn.Module, words: Words, length: int, rows: int = 200) -> float:
    """The share of words that are right, teacher-forced, in new sentences of a length."""
    random = torch.Generator().manual_seed(length)
    source, target, wanted = words.sentences(rows, length, random)
    right = model(source, target).argmax(-1) == wanted
    return float(right[:, :-1].float().mean())
