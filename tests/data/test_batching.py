"""Batches: each row once an epoch, inside the budget, and the batch of any step from its number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.batching import Batches, in_order_of_length, split
from manyheads.errors import UserError

BUDGET = 1024


def realistic(rows: int = 5000, seed: int = 0) -> np.ndarray:
    """Lengths as sentences have them: most near 20 tokens, few near 100."""
    lengths = np.random.default_rng(seed).lognormal(3.0, 0.5, rows)
    return np.clip(lengths.astype(np.int64), 2, 120)


def epoch(batches: Batches, number: int) -> list[np.ndarray]:
    first = number * batches.per_epoch
    return [batches.rows(step) for step in range(first, first + batches.per_epoch)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=120),
    extra=st.integers(0, 300),
    seed=st.integers(0, 2**40),
)
def test_an_epoch_holds_each_row_once_inside_the_budget(
    lengths: list[int], extra: int, seed: int
) -> None:
    sizes, budget = np.array(lengths), max(lengths) + extra
    batches = Batches(sizes, budget, seed)
    for number in (0, 1, 7):
        rows = epoch(batches, number)
        assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
        assert all(len(batch) and len(batch) * sizes[batch].max() <= budget for batch in rows)


def test_a_step_is_found_without_the_steps_before_it() -> None:
    lengths = realistic()
    asked_in_order = Batches(lengths, BUDGET, seed=3)
    expected = [asked_in_order.rows(step) for step in range(3 * asked_in_order.per_epoch)]
    for step in (0, 1, 2 * asked_in_order.per_epoch + 5, asked_in_order.per_epoch - 1):
        assert np.array_equal(Batches(lengths, BUDGET, seed=3).rows(step), expected[step])
    backwards = Batches(lengths, BUDGET, seed=3)
    for step in reversed(range(0, len(expected), 37)):
        assert np.array_equal(backwards.rows(step), expected[step])


def test_epochs_and_seeds_differ_in_order_and_in_company() -> None:
    batches, other = (Batches(realistic(), BUDGET, seed) for seed in (1, 2))
    first, second, foreign = epoch(batches, 0), epoch(batches, 1), epoch(other, 0)
    groups = [{frozenset(rows.tolist()) for rows in each} for each in (first, second, foreign)]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        shared = len(groups[one] & groups[two])
        assert shared < 0.1 * len(first)
    lengths = [[int(batches.lengths[rows].max()) for rows in each] for each in (first, second)]
    assert lengths[0] != lengths[1]
    assert lengths[0] != sorted(lengths[0])


def test_how_many_batches_there_are_hangs_on_the_lengths_alone() -> None:
    lengths = realistic()
    counts = {Batches(lengths, BUDGET, seed).per_epoch for seed in range(5)}
    counts.add(Batches(np.random.default_rng(1).permutation(lengths), BUDGET, 0).per_epoch)
    assert len(counts) == 1
    batches = Batches(lengths, BUDGET, 0)
    assert len(epoch(batches, 0)) == len(epoch(batches, 4)) == batches.per_epoch


def test_little_is_padding() -> None:
    """Below 8 % on sentence-like lengths, where a shuffle without buckets wastes most of it."""
    lengths = realistic()
    batches = epoch(Batches(lengths, BUDGET, 0), 0)
    padded = sum(len(rows) * lengths[rows].max() for rows in batches)
    assert 1 - lengths.sum() / padded < 0.08
    shuffled = np.array_split(np.random.default_rng(0).permutation(len(lengths)), len(batches))
    naive = sum(len(rows) * lengths[rows].max() for rows in shuffled)
    assert 1 - lengths.sum() / naive > 0.5


def test_a_sentence_longer_than_a_batch_is_refused() -> None:
    lengths = np.array([5, 101, 7])
    assert Batches(lengths, 101, 0).per_epoch >= 1
    with pytest.raises(UserError) as caught:
        Batches(lengths, 100, 0)
    assert "101" in str(caught.value)
    assert "train.batch_tokens=100" in str(caught.value)


@given(rows=st.lists(st.integers(0, 10**6), max_size=40), parts=st.integers(1, 50))
def test_micro_batches_are_the_batch(rows: list[int], parts: int) -> None:
    found = split(np.array(rows, dtype=np.int64), parts)
    assert [row for part in found for row in part.tolist()] == rows
    sizes = [len(part) for part in found]
    assert len(found) == min(parts, len(rows))
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(
    lengths=st.lists(st.integers(0, 90), max_size=80),
    budget=st.integers(1, 300),
)
def test_a_single_pass_takes_each_row_once_longest_first(lengths: list[int], budget: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    batches = in_order_of_length(sizes, budget)
    order = [row for rows in batches for row in rows.tolist()]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    for rows in batches:
        # A row that is too long by itself goes alone; it is never left out.
        assert len(rows) == 1 or len(rows) * sizes[rows].max() <= budget
