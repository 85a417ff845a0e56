"""Random words and their word-for-word translation, with known alignments.

Nothing can be guessed: each target word depends on one source word, so the decoder needs all of
the source. With words of two kinds, those of the second kind move to the end of the target, as
verbs do in some languages; then a target position does not determine its source position.
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
        """The source position of each target word; END is aligned with END."""
        kinds = (source % self.kinds).masked_fill(source == END, self.kinds)
        return kinds.argsort(dim=1, stable=True)

    def sentences(
        self, rows: int, length: int, random: torch.Generator
    ) -> tuple[Sentences, Sentences, Sentences]:
        """Sources with END, targets that begin with START, and the label at each position."""
        words = torch.randint(MARKS, self.vocabulary, (rows, length), generator=random)
        source = F.pad(words, (0, 1), value=END).to(self.table.device)
        labels = self.table[source.gather(1, self.places(source))]
        return source, F.pad(labels[:, :-1], (1, 0), value=START), labels


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
    """Train on sentences of these lengths, one length per step; gives each step's loss.

    `watch` is called before each step.
    """
    random = torch.Generator().manual_seed(seed)

    def loss(step: int) -> Tensor:
        watch(step)
        drawn = lengths[int(torch.randint(len(lengths), (), generator=random))]
        source, target, labels = words.sentences(ROWS, drawn, random)
        return F.cross_entropy(model(source, target).flatten(0, 1), labels.flatten())

    return learn(model, loss, steps=steps, rate=rate, warmup=WARMUP)


@torch.no_grad()
def accuracy(model: nn.Module, words: Words, length: int, rows: int = 200) -> float:
    """The teacher-forced accuracy on new sentences of a length."""
    random = torch.Generator().manual_seed(length)
    source, target, labels = words.sentences(rows, length, random)
    right = model(source, target).argmax(-1) == labels
    return float(right[:, :-1].float().mean())
