"""Choosing the next token by chance: temperature, top-k, top-p, min-p."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.logits import likeliest
from manyheads.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How to draw; temperature 0 is greedy.

    `min_p` is the least share of the likeliest token's probability that another must have.
    top_k=0, top_p=1 and min_p=0 leave the whole distribution.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} must be a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} must be from 0 to 1; 0 turns it off")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must not be negative; 0 turns it off")


def filtered(logits: Float[Tensor, "rows v"], sample: Sample) -> Float[Tensor, "rows v"]:
    """Logits at the temperature, −∞ outside the top k, the nucleus of mass top_p, and min_p."""
    if sample.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0)
    logits = logits / sample.temperature
    if sample.top_k:
        least = logits.topk(min(sample.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sample.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = ordered.softmax(-1)
        # A token stays while the mass before it has not reached top_p; so the first one stays.
        outside = mass.cumsum(-1) - mass >= sample.top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    if sample.min_p:
        least = logits.amax(-1, keepdim=True) + math.log(sample.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def pick(weights: Float[Tensor, "rows v"], chance: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """One token a row: the first whose cumulative weight passes the random share of all of it."""
    mass = weights.cumsum(-1)
    # Of the total: rounding may leave that of probabilities a little under one.
    threshold = chance[:, None] * mass[:, -1:]
    return (mass <= threshold).sum(-1).clamp(max=weights.shape[-1] - 1)


def choose(
    logits: Float[Tensor, "rows v"], chance: Float[Tensor, " rows"], sample: Sample
) -> Int[Tensor, " rows"]:
    """One token a row, by chance as the settings say, or the likeliest."""
    if sample.temperature == 0:
        return likeliest(logits)
    return pick(filtered(logits.float(), sample).softmax(-1), chance)


class Sampler:
    """Draws for rows that each have random numbers of their own, whatever their neighbours."""

    def __init__(self, sample: Sample, rows: int | Sequence[int], first: int = 0) -> None:
        """`rows` are the numbers of the rows, or how many there are; `first` is added to each."""
        self.sample = sample
        numbers = range(rows) if isinstance(rows, int) else rows
        self.random = [
            torch.Generator().manual_seed((sample.seed * 1_000_003 + first + number) % 2**63)
            for number in numbers
        ]

    def draw(self, logits: Float[Tensor, "rows v"]) -> Int[Tensor, " rows"]:
        """One token a row."""
        return choose(logits, self.chances(1)[:, 0].to(logits.device), self.sample)

    def chances(self, steps: int) -> Float[Tensor, "rows steps"]:
        """The random numbers of the next steps: those that step by step would be drawn."""
        if self.sample.temperature == 0:
            return torch.zeros(len(self.random), steps)  # none is looked at
        return torch.stack([torch.rand(steps, generator=random) for random in self.random])
