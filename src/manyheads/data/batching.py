"""Batches of rows as a pure function of (seed, step), and sequences of different length.

An epoch is a seeded shuffle of the rows inside fixed length buckets, cut into batches, in a
seeded order. The number of batches depends only on the lengths, so the batch of step n follows
from (seed, n): resuming needs no state but the step.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from manyheads.errors import DataError, UserError

Rows = Int[np.ndarray, " _"]  # any number of rows: two lists of rows may differ in length

IGNORE_INDEX = -1  # label of positions without a prediction
T = TypeVar("T")
TooLong = Literal["refuse", "skip", "truncate"]
GROWTH = 1.15  # ratio of lengths within a bucket: little padding, few shapes


def bucket_edges(longest: int) -> list[int]:
    """The greatest length of each bucket: 4, then steps of GROWTH, at least one apart."""
    edges = [4]
    while edges[-1] < longest:
        edges.append(max(edges[-1] + 1, int(edges[-1] * GROWTH)))
    return edges


def _make_buckets(lengths: Rows, longest: int, batch_tokens: int) -> list[tuple[Rows, int]]:
    """Rows of similar length, with the number of batches that they are divided into.

    Too few rows for one batch join the next longer bucket.
    """
    edges = bucket_edges(longest)
    bucket_of_row = np.searchsorted(edges, lengths)
    buckets: list[tuple[Rows, int]] = []
    rows = np.empty(0, dtype=np.int64)
    for number, edge in enumerate(edges):
        rows = np.concatenate([rows, np.flatnonzero(bucket_of_row == number)])
        size = max(1, batch_tokens // min(edge, longest))
        if len(rows) >= size or (edge >= longest and len(rows)):
            buckets.append((rows, -(-len(rows) // size)))
            rows = rows[:0]
    return buckets


class Batches:
    """Batches of rows of similar length for every step.

    The length of a row is the longer of its sides; a batch holds at most `batch_tokens`
    positions, padding included.
    """

    def __init__(self, lengths: Rows, batch_tokens: int, seed: int) -> None:
        self.lengths, self.seed = lengths, seed
        longest = int(lengths.max(initial=1))
        if longest > batch_tokens:
            raise UserError(
                f"train.batch_tokens={batch_tokens} must be at least {longest}, the longest row"
            )
        self.buckets = _make_buckets(lengths, longest, batch_tokens)
        self.per_epoch = sum(count for _, count in self.buckets)
        self._epoch = lru_cache(maxsize=1)(self._shuffle)

    def rows(self, step: int) -> Rows:
        """The rows of the batch of this step (steps count from 0)."""
        epoch, index = divmod(step, self.per_epoch)
        return self._epoch(epoch)[index][0]

    def most(self, step: int) -> int:
        """The number of rows of the largest batch from the bucket of this step."""
        epoch, index = divmod(step, self.per_epoch)
        return self._epoch(epoch)[index][1]

    def _shuffle(self, epoch: int) -> list[tuple[Rows, int]]:
        random = np.random.default_rng([self.seed, epoch])
        batches = []
        for rows, count in self.buckets:
            parts = np.array_split(random.permutation(rows), count)
            batches += [(part, len(parts[0])) for part in parts]
        return [batches[i] for i in random.permutation(len(batches))]


class Shuffled:
    """Batches of `size` rows, regardless of length, in a new seeded order every epoch."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed
        self.per_epoch = -(-count // size)
        self._epoch = lru_cache(maxsize=1)(self._shuffle)

    def rows(self, step: int) -> Rows:
        """The rows of the batch of this step; the last of an epoch may be smaller."""
        epoch, index = divmod(step, self.per_epoch)
        return self._epoch(epoch)[index * self.size : (index + 1) * self.size]

    def _shuffle(self, epoch: int) -> Rows:
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)


def split(rows: Rows, parts: int) -> list[Rows]:
    """A batch as micro-batches for gradient accumulation, none of them empty."""
    return [part for part in np.array_split(rows, parts) if len(part)]


def batches_by_length(lengths: Rows, batch_tokens: int) -> list[Rows]:
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
        """The sequences as lists."""
        return [part.tolist() for part in np.split(self.flat, self.starts[1:-1])]

    def padded(self, rows: Rows, pad: int) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """These rows padded to one length, and the mask of tokens that are not padding."""
        lengths = self.lengths[rows]
        columns = np.arange(lengths.max(initial=0))
        mask = columns < lengths[:, None]
        where = np.where(mask, self.starts[rows][:, None] + columns, 0)
        tokens = np.where(mask, self.flat[where] if len(self.flat) else 0, pad)
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(mask)


def map_tensors(batch: T, function: Callable[[Tensor], Tensor]) -> T:
    """A dataclass with a function applied to each of its tensors."""
    tensors = {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)}
    changed: dict[str, Any] = {name: function(x) for name, x in tensors.items()}
    return replace(batch, **changed)  # type: ignore[type-var]


def to_device(batch: T, device: torch.device | str) -> T:
    """A dataclass with its tensors on a device."""
    return map_tensors(batch, lambda x: x.to(device, non_blocking=True))


def digest_of(*arrays: Shaped[np.ndarray, "..."], prefix: str = "") -> str:
    """A hash of arrays, which identifies the data of a run."""
    total = hashlib.sha256(prefix.encode())
    for array in arrays:
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()[:16]


def fit_length(
    name: str, lengths: Sequence[int], lines: Sequence[int], limit: int, too_long: TooLong
) -> tuple[list[int], list[str]]:
    """The rows to use, and a note on rows that are longer than the model: refused or left out.

    With "truncate" they are used, and the caller truncates them.
    """
    long = [row for row, length in enumerate(lengths) if length > limit]
    if long and too_long == "refuse":
        raise DataError(
            f"{name}: line {lines[long[0]]} has {lengths[long[0]]} tokens, more than "
            f"model.max_length={limit} ({len(long):,} such lines): raise it, or set "
            "train.too_long=skip or train.too_long=truncate"
        )
    rows = [row for row in range(len(lengths)) if too_long != "skip" or lengths[row] <= limit]
    if not rows:
        raise DataError(f"{name}: all lines exceed model.max_length={limit} tokens: raise it")
    action = "left out" if too_long == "skip" else "truncated"
    note = f"{name}: {len(long):,} lines of over {limit} tokens are {action}"
    return rows, [note] if long else []
