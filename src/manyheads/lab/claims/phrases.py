"""The phrasebook's English, word by word: a little text that deep and thin stacks can learn."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.layers import EmbeddingConfig, Norm
from manyheads.phrasebook.corpus import sentences

Curve = list[float]
Initial = Literal["xavier", "normal-scaled"]
PRE = Norm()


@dataclass(frozen=True)
class Phrases:
    """Sentences one after another as numbers of words; `vocabulary` is how many words there are."""

    words: Tensor
    vocabulary: int

    @property
    def entropy(self) -> float:
        """−Σ p log p of single words: the loss of knowing nothing but how often each is."""
        p = torch.bincount(self.words).double() / len(self.words)
        return float(-(p * p.log()).sum())

    def loss_of(
        self, model: nn.Module, rows: int, length: int, seed: int
    ) -> Callable[[int], Tensor]:
        """−log P of the next word, on stretches drawn anew at each step."""
        random = torch.Generator().manual_seed(seed)

        def loss(step: int) -> Tensor:
            starts = torch.randint(len(self.words) - length, (rows, 1), generator=random)
            stretch = self.words[starts.to(self.words.device) + self._places(length + 1)]
            scores = model(stretch[:, :-1])
            return F.cross_entropy(scores.flatten(0, 1), stretch[:, 1:].flatten())

        return loss

    def _places(self, count: int) -> Tensor:
        return torch.arange(count, device=self.words.device)


def phrases(count: int, device: torch.device) -> Phrases:
    """The first `count` sentences."""
    text = " \n ".join(pair.source for pair in sentences("en-de", "train", count))
    found = re.findall(r"\w+|[^\w ]", text)
    numbers = {word: number for number, word in enumerate(sorted(set(found)))}
    words = torch.tensor([numbers[word] for word in found], device=device)
    return Phrases(words, len(numbers))


def writer(
    text: Phrases,
    *,
    layers: int,
    dim: int,
    length: int,
    seed: int,
    norm: Norm = PRE,
    initial: Initial = "xavier",
) -> Gpt:
    """A thin model of the next word, weights as they begin."""
    torch.manual_seed(seed)
    config = GptConfig(
        vocab_size=text.vocabulary,
        dim=dim,
        layers=layers,
        heads=4,
        max_length=length,
        dropout=0.0,
        norm=norm,
        init=initial,
        embed=EmbeddingConfig(scale="sqrt-dim"),
    )
    return config.build().to(text.words.device)


def ended(losses: Curve) -> float:
    """The mean of the last tenth; a loss that is no number any more is as bad as any."""
    last = fmean(losses[-max(1, len(losses) // 10) :])
    return last if last == last else float("inf")


def tuned(
    run: Callable[[float, int], Curve], rates: Sequence[float], seeds: Sequence[int]
) -> tuple[float, list[Curve]]:
    """The rate at which the first seed ends lowest, and the losses of every seed at that rate."""
    first = {rate: run(rate, seeds[0]) for rate in rates}
    best = min(first, key=lambda rate: ended(first[rate]))
    return best, [first[best], *(run(best, seed) for seed in seeds[1:])]
