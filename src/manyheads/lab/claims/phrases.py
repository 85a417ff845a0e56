"""The phrasebook's English, word by word: a small text that deep, narrow stacks can learn."""

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
    """The word ids of concatenated sentences; `vocabulary` is the number of distinct words."""

    words: Tensor
    vocabulary: int

    @property
    def entropy(self) -> float:
        """−Σ p log p of single words: the loss of a unigram model."""
        p = torch.bincount(self.words).double() / len(self.words)
        return float(-(p * p.log()).sum())

    def loss_of(
        self, model: nn.Module, rows: int, length: int, seed: int
    ) -> Callable[[int], Tensor]:
        """−log P of the next word, on new random windows at each step."""
        random = torch.Generator().manual_seed(seed)

        def loss(step: int) -> Tensor:
            starts = torch.randint(len(self.words) - length, (rows, 1), generator=random)
            window = self.words[starts.to(self.words.device) + self._places(length + 1)]
            scores = model(window[:, :-1])
            return F.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())

        return loss

    def _places(self, count: int) -> Tensor:
        return torch.arange(count, device=self.words.device)


def phrases(count: int, device: torch.device) -> Phrases:
    """The first `count` sentences."""
    text = " \n ".join(pair.source for pair in sentences("en-de", "train", count))
    words = re.findall(r"\w+|[^\w ]", text)
    numbers = {word: number for number, word in enumerate(sorted(set(words)))}
    tokens = torch.tensor([numbers[word] for word in words], device=device)
    return Phrases(tokens, len(numbers))


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
    """A narrow, untrained language model."""
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
    """The mean loss of the last tenth of the steps; NaN counts as ∞."""
    last = fmean(losses[-max(1, len(losses) // 10) :])
    return last if last == last else float("inf")


def tuned(
    run: Callable[[float, int], Curve], rates: Sequence[float], seeds: Sequence[int]
) -> tuple[float, list[Curve]]:
    """The rate with the lowest final loss for the first seed, and each seed's losses at it."""
    first = {rate: run(rate, seeds[0]) for rate in rates}
    best = min(first, key=lambda rate: ended(first[rate]))
    return best, [first[best], *(run(best, seed) for seed in seeds[1:])]
