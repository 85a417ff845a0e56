"""Batches: each row once an epoch, within the budget, and any step from its number."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.helpers import refusal

from manyheads.data.batching import Batches, Ragged, Shuffled, batches_by_length, split
from manyheads.errors import UserError

BUDGET = 1024


def realistic() -> np.ndarray:
    """Lengths as sentences have them: most near 20 tokens, few near 100."""
    lengths = np.random.default_rng(0).lognormal(3.0, 0.5, 5000)
    return np.clip(lengths.astype(np.int64), 2, 120)


def epoch(batches: Batches | Shuffled, number: int) -> list[np.ndarray]:
    first = number * batches.per_epoch
    return [batches.rows(step) for step in range(first, first + batches.per_epoch)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=120),
    extra=st.integers(0, 300),
    seed=st.integers(0, 2**40),
)
def test_an_epoch_has_each_row_once_within_the_budget(
    lengths: list[int], extra: int, seed: int
) -> None:
    sizes, budget = np.array(lengths), max(lengths) + extra
    batches, shuffled = Batches(sizes, budget, seed), Shuffled(len(sizes), 1 + extra % 9, seed)
    for number in (0, 7):
        for order in (batches, shuffled):
            rows = np.concatenate(epoch(order, number))
            assert sorted(rows.tolist()) == list(range(len(lengths)))
        for step, rows in enumerate(epoch(batches, number), start=number * batches.per_epoch):
            assert 0 < len(rows) <= batches.most(step)
            assert len(rows) * sizes[rows].max() <= budget
        assert all(len(rows) <= 1 + extra % 9 for rows in epoch(shuffled, number))


def test_a_step_follows_from_its_number_only() -> None:
    lengths = realistic()
    in_order, backwards = Batches(lengths, BUDGET, seed=3), Batches(lengths, BUDGET, seed=3)
    expected = [in_order.rows(step) for step in range(3 * in_order.per_epoch)]
    for step in reversed(range(0, len(expected), 37)):
        assert np.array_equal(backwards.rows(step), expected[step])
    shuffled = [Shuffled(50, 8, seed=3).rows(step) for step in range(20)]
    fresh = Shuffled(50, 8, seed=3)
    assert all(np.array_equal(fresh.rows(step), shuffled[step]) for step in reversed(range(20)))


def test_epochs_and_seeds_differ_and_their_number_of_batches_does_not() -> None:
    batches, other = (Batches(realistic(), BUDGET, seed) for seed in (1, 2))
    epochs = [epoch(batches, 0), epoch(batches, 1), epoch(other, 0)]
    groups = [{frozenset(rows.tolist()) for rows in each} for each in epochs]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert len(groups[one] & groups[two]) < 0.1 * len(groups[one])
    lengths = [int(batches.lengths[rows].max()) for rows in epochs[0]]
    assert abs(np.corrcoef(lengths, np.arange(len(lengths)))[0, 1]) < 0.2  # not in order of length
    permuted = np.random.default_rng(1).permutation(realistic())
    assert batches.per_epoch == other.per_epoch == Batches(permuted, BUDGET, 0).per_epoch


def test_little_is_padding() -> None:
    """Below 8 % on sentence-like lengths; a shuffle without buckets wastes most of it."""
    lengths = realistic()
    batches = epoch(Batches(lengths, BUDGET, 0), 0)
    shuffled = np.array_split(np.random.default_rng(0).permutation(len(lengths)), len(batches))
    sizes = [sum(len(rows) * lengths[rows].max() for rows in each) for each in (batches, shuffled)]
    assert 1 - lengths.sum() / sizes[0] < 0.08
    assert 1 - lengths.sum() / sizes[1] > 0.5


def test_a_row_longer_than_a_batch_is_refused() -> None:
    lengths = np.array([5, 101, 7])
    assert Batches(lengths, 101, 0).per_epoch >= 1
    message = refusal(UserError, Batches, lengths, 100, 0)
    assert "train.batch_tokens=100" in message
    assert "101" in message


@given(rows=st.lists(st.integers(0, 10**6), max_size=40), parts=st.integers(1, 50))
def test_micro_batches_are_the_batch(rows: list[int], parts: int) -> None:
    micro = split(np.array(rows, dtype=np.int64), parts)
    assert [row for part in micro for row in part.tolist()] == rows
    sizes = [len(part) for part in micro]
    assert len(micro) == min(parts, len(rows))
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(lengths=st.lists(st.integers(0, 90), max_size=80), budget=st.integers(1, 300))
def test_a_single_pass_takes_each_row_once_longest_first(lengths: list[int], budget: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    batches = batches_by_length(sizes, budget)
    order = [row for rows in batches for row in rows.tolist()]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    for rows in batches:  # a row that exceeds the budget is a batch of one, never left out
        assert len(rows) == 1 or len(rows) * sizes[rows].max() <= budget


@settings(deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=9),
    data=st.data(),
)
def test_padding_equals_a_plain_loop(sequences: list[list[int]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(sequences) - 1), min_size=1, max_size=12))
    ragged = Ragged.of(sequences)
    tokens, mask = ragged.padded(np.array(rows), pad=100)
    width = max(len(sequences[row]) for row in rows)
    for row, ids, real in zip(rows, tokens.tolist(), mask.tolist(), strict=True):
        length = len(sequences[row])
        assert ids == sequences[row] + [100] * (width - length)
        assert real == [column < length for column in range(width)]
    assert ragged.rows() == sequences
    assert ragged.lengths.tolist() == [len(sequence) for sequence in sequences]
