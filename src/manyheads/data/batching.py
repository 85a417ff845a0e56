"""Batches of similar length under a token budget, in an order that any step can be found from.

An epoch is a seeded shuffle of the rows inside fixed length buckets, cut into batches, in a
seeded order. How many batches there are depends on the lengths alone, so that the batch of
step n is a pure function of (seed, n): resuming needs no state but the step.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.errors import UserError

Rows = Int[np.ndarray, " _"]  # any number of them: two lists of rows need not be equally long

IGNORE_INDEX = -1  # label of positions without a prediction
GROWTH = 1.15  # a bucket holds lengths up to this much apart: little padding, few shapes


def bucket_edges(longest: int) -> list[int]:
    """The greatest length of each bucket: 4, then steps of GROWTH, at least one apart."""
    edges = [4]
    while edges[-1] < longest:
        edges.append(max(edges[-1] + 1, int(edges[-1] * GROWTH)))
    return edges


@dataclass(frozen=True)
class Bucket:
    rows: Rows
    size: int

    @property
    def batches(self) -> int:
        return -(-len(self.rows) // self.size)


def _buckets(lengths: Rows, longest: int, batch_tokens: int) -> list[Bucket]:
    """Rows by length; those too few for one batch go with the next longer ones."""
    edges = bucket_edges(longest)
    homes = np.searchsorted(edges, lengths)
    buckets: list[Bucket] = []
    waiting = np.empty(0, dtype=np.int64)
    for number, edge in enumerate(edges):
        waiting = np.concatenate([waiting, np.flatnonzero(homes == number)])
        size = max(1, batch_tokens // min(edge, longest))
        if len(waiting) >= size or (edge >= longest and len(waiting)):
            buckets.append(Bucket(waiting, size))
            waiting = waiting[:0]
    return buckets


class Batches:
    """The batches of every step to come, over rows whose lengths are given.

    The length of a row is the longest of its sides; a batch holds at most `batch_tokens`
    positions of it, padding included.
    """

    def __init__(self, lengths: Rows, batch_tokens: int, seed: int) -> None:
        self.lengths = lengths
        self.seed = seed
        longest = int(self.lengths.max(initial=1))
        if longest > batch_tokens:
            raise UserError(
                f"train.batch_tokens={batch_tokens} must be at least {longest}, a sentence"
            )
        self.buckets = _buckets(self.lengths, longest, batch_tokens)
        self.per_epoch = sum(bucket.batches for bucket in self.buckets)
        self._epoch: tuple[int, list[tuple[Rows, int]]] | None = None

    def rows(self, step: int) -> Rows:
        """The rows of the batch of this step (steps count from 0)."""
        return self._at(step)[0]

    def most(self, step: int) -> int:
        """How many rows the largest batch has among those of lengths like this step's."""
        return self._at(step)[1]

    def _at(self, step: int) -> tuple[Rows, int]:
        epoch, index = divmod(step, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffle(epoch))
        return self._epoch[1][index]

    def _shuffle(self, epoch: int) -> list[tuple[Rows, int]]:
        random = np.random.default_rng([self.seed, epoch])
        batches = []
        for bucket in self.buckets:
            rows = random.permutation(bucket.rows)
            parts = np.array_split(rows, bucket.batches)
            batches += [(part, len(parts[0])) for part in parts]
        return [batches[i] for i in random.permutation(len(batches))]


def split(rows: Rows, parts: int) -> list[Rows]:
    """A batch as micro-batches for accumulation: together they are exactly the batch."""
    return [part for part in np.array_split(rows, parts) if len(part)]


def in_order_of_length(lengths: Rows, batch_tokens: int) -> list[Rows]:
    """Batches for a single pass (validation, decoding): longest first, each row once."""
    order = np.argsort(-lengths, kind="stable")
    batches: list[Rows] = []
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches


@dataclass(frozen=True)
class Ragged:
    """Token sequences of different length in one flat array."""

    flat: Int[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " rows_plus_one"]

    @staticmethod
    def of(sequences: list[list[int]]) -> "Ragged":
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        flat = np.fromiter((token for sequence in sequences for token in sequence), np.int32)
        return Ragged(flat, np.concatenate([[0], lengths.cumsum()]))

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        return np.diff(self.starts)

    def rows(self) -> list[list[int]]:
        """The sequences one by one."""
        return [part.tolist() for part in np.split(self.flat, self.starts[1:-1])]

    def padded(self, rows: Rows, pad: int) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """These rows as a rectangle, and which of it is real."""
        lengths = self.lengths[rows]
        columns = np.arange(lengths.max(initial=0))
        real = columns < lengths[:, None]
        where = np.where(real, self.starts[rows][:, None] + columns, 0)
        tokens = np.where(real, self.flat[where] if len(self.flat) else 0, pad)
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(real)


class Shuffled:
    """Batches of so many rows each, whatever their lengths, in a new seeded order every epoch."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed
        self.per_epoch = -(-count // size)
        self._epoch: tuple[int, Rows] | None = None

    def rows(self, step: int) -> Rows:
        """The rows of the batch of this step; the last of an epoch may be smaller."""
        epoch, index = divmod(step, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._epoch = (epoch, random.permutation(self.count))
        return self._epoch[1][index * self.size : (index + 1) * self.size]
