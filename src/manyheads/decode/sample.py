"""Sampling: temperature, top-k, top-p, min-p; temperature 0 is greedy search."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.decode.beam import DecoderSession, check_every
from manyheads.decode.constraints import LogitsConstraints
from manyheads.errors import UserError
from manyheads.ops import argmax

Rows = Int[Tensor, " rows"]
Uniforms = Float[Tensor, " rows"]
Step = Callable[[bool], object]  # told whether some row is forced to one token


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How to sample; temperature 0 is greedy.

    `min_p` is the least share of the likeliest token's probability that another must have.
    top_k=0, top_p=1 and min_p=0 leave the distribution as it is.
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


def pick(weights: Float[Tensor, "rows v"], uniform: Uniforms) -> Rows:
    """One token a row: the first whose cumulative weight passes the uniform share of the total."""
    mass = weights.cumsum(-1)
    # Of the total: rounding may leave that of probabilities a little under one.
    threshold = uniform[:, None] * mass[:, -1:]
    return (mass <= threshold).sum(-1).clamp(max=weights.shape[-1] - 1)


def choose(logits: Float[Tensor, "rows v"], uniform: Uniforms, sample: Sample) -> Rows:
    """One token a row, sampled as the settings say, or the likeliest."""
    if sample.temperature == 0:
        return argmax(logits)
    return pick(filtered(logits.float(), sample).softmax(-1), uniform)


class Sampler:
    """Settings, and for each row random numbers of its own, whatever the rest of the batch."""

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
        """A new batch: the tokens to continue from, and the random numbers to come."""
        most = limits.tolist()
        self.rows, self.longest = len(most), max(most)
        self.forced = self.constraints.forced_lengths(most)
        self.length.zero_()
        self.newest[: self.rows] = newest
        self.limits.zero_()
        self.limits[: self.rows] = limits
        uniforms = sampler.uniforms(self.longest)
        self.uniforms[: self.rows, : self.longest] = uniforms.to(self.uniforms.device)
        self.done.copy_(self.limits < 1)

    def step(self, session: DecoderSession, forces: bool = True) -> None:
        """One token a row, the end if it is done; no value of the device is read."""
        position = self.length.clone()
        self.length += 1
        logits = self.constraints.prepare(session.step(self.newest[:, None])[:, 0])
        last = self.limits == self.length if self.constraints.forces_end else None
        self.constraints.apply(logits, self.length, last, forces=forces)
        drawn = self.sample.temperature > 0
        uniform = self.uniforms.index_select(1, position)[:, 0] if drawn else self.uniforms[:, 0]
        torch.where(self.done, self.ends, choose(logits, uniform, self.sample), out=self.newest)
        self.tokens.index_copy_(1, position, self.newest[:, None])
        self.done |= (self.newest == self.constraints.end) | (self.limits <= self.length)

    @torch.no_grad()
    def run(self, step: Step) -> list[list[int]]:
        """The texts of all rows, without their ends."""
        every = check_every(self.length.device)
        for length in range(1, self.longest + 1):
            step(length in self.forced)
            if length % every == 0 and bool(self.done.all()):
                break
        rows = self.tokens[: self.rows, :length].tolist()
        return [[token for token in row if token != self.constraints.end] for row in rows]

    def stream(self, step: Step) -> Iterator[Rows]:
        """The tokens of each step as soon as they are there; a row that is done has the end."""
        for length in range(1, self.longest + 1):
            with torch.no_grad():  # inside: the caller may want gradients
                step(length in self.forced)
            yield self.newest[: self.rows].clone()
            if bool(self.done.all()):
                return
