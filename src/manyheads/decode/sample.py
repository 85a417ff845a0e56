"""Sampling: temperature, top-k, top-p, min-p; temperature 0 is greedy search."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.config import Between
from manyheads.decode.beam import DecoderSession, LogitsConstraints, check_every
from manyheads.ops import argmax

Rows = Int[Tensor, " rows"]
Uniforms = Float[Tensor, " rows"]
RANGES = {
    "temperature": Between(0),
    "top_k": Between(0),
    "top_p": Between(0, 1, open_low=True),
    "min_p": Between(0, 1),
}
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How to sample; top_k=0, top_p=1 and min_p=0 do not restrict the tokens.

    `top_k` tokens stay, then the smallest set of the likeliest ones with probability `top_p`, then
    those with at least `min_p` times the probability of the likeliest one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name, between in RANGES.items():
            between.check(getattr(self, name), name)


def filtered(logits: Float[Tensor, "rows v"], sample: Sample) -> Float[Tensor, "rows v"]:
    """Logits / temperature, −∞ outside the top k, the nucleus of probability top_p, and min_p."""
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
        # A token stays while the mass before it is below top_p; so the first one always stays.
        outside = mass.cumsum(-1) - mass >= sample.top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    if sample.min_p:
        least = logits.amax(-1, keepdim=True) + math.log(sample.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def pick(weights: Float[Tensor, "rows v"], uniform: Uniforms) -> Rows:
    """Inverse transform sampling: the first token with cumulative weight > uniform · total."""
    mass = weights.cumsum(-1)
    # Not uniform · 1: the rounded sum of probabilities may be a little under 1.
    threshold = uniform[:, None] * mass[:, -1:]
    return (mass <= threshold).sum(-1).clamp(max=weights.shape[-1] - 1)


def choose(logits: Float[Tensor, "rows v"], uniform: Uniforms, sample: Sample) -> Rows:
    """Sample one token a row, or take the likeliest at temperature 0."""
    if sample.temperature == 0:
        return argmax(logits)
    return pick(filtered(logits.float(), sample).softmax(-1), uniform)


class Sampler:
    """Settings and a random generator for each row, so that rows do not depend on the batch."""

    def __init__(self, sample: Sample, rows: int | Sequence[int], first: int = 0) -> None:
        """`rows` are the numbers of the rows, or how many there are; `first` is added to each."""
        self.sample = sample
        numbers = range(rows) if isinstance(rows, int) else rows
        self.random = [
            torch.Generator().manual_seed((sample.seed * 1_000_003 + first + number) % 2**63)
            for number in numbers
        ]

    def uniforms(self, steps: int) -> Float[Tensor, "rows steps"]:
        """The random numbers of the next steps, in [0, 1)."""
        if self.sample.temperature == 0:
            return torch.zeros(len(self.random), steps)  # not used
        return torch.stack([torch.rand(steps, generator=random) for random in self.random])


class Samples:
    """The state of sampling one text a row, in tensors of fixed shape."""

    def __init__(
        self,
        constraints: LogitsConstraints,
        sample: Sample,
        rows: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        self.constraints, self.sample = constraints, sample
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self.newest, self.limits = (self.length.new_zeros(rows) for _ in "nl")
        self.ends = torch.full_like(self.newest, constraints.end)
        self.tokens = self.length.new_zeros(rows, max_length)
        self.uniforms = torch.zeros(rows, max_length, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)

    def begin(self, newest: Rows, limits: Rows, sampler: Sampler) -> None:
        """Start a batch: the tokens to continue from, and the random numbers of all steps."""
        self.rows, self.longest = len(limits), int(limits.max())
        self.length.zero_()
        self.newest[: self.rows] = newest
        self.limits.zero_()
        self.limits[: self.rows] = limits
        uniforms = sampler.uniforms(self.longest)
        self.uniforms[: self.rows, : self.longest] = uniforms.to(self.uniforms.device)
        self.done.copy_(self.limits < 1)

    def step(self, session: DecoderSession) -> None:
        """One token a row, the end if it is done; never waits for a value of the device."""
        position = self.length.clone()
        self.length += 1
        logits = self.constraints.prepare(session.step(self.newest[:, None])[:, 0])
        self.constraints.apply(logits, self.length, self.limits == self.length)
        uniform = self.uniforms.index_select(1, position)[:, 0]
        torch.where(self.done, self.ends, choose(logits, uniform, self.sample), out=self.newest)
        self.tokens.index_copy_(1, position, self.newest[:, None])
        self.done |= (self.newest == self.constraints.end) | (self.limits <= self.length)

    def run(self, step: Step) -> list[list[int]]:
        """The texts of all rows, without their ends."""
        for _ in self.stream(step, check_every(self.length.device)):
            pass
        rows = self.tokens[: self.rows, : int(self.length)].tolist()
        return [[token for token in row if token != self.constraints.end] for row in rows]

    def stream(self, step: Step, every: int = 1) -> Iterator[Rows]:
        """The tokens of each step, valid until the next one; a row that is done has the end.

        Checks whether all rows are done after every `every` steps.
        """
        for length in range(1, self.longest + 1):
            with torch.no_grad():  # inside: the caller may want gradients
                step()
            yield self.newest[: self.rows]
            if length % every == 0 and bool(self.done.all()):
                return
