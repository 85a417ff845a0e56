"""Corruption: the rates and lengths that were asked for, and nothing lost that the loss needs."""

from collections import Counter
from math import comb, exp, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.config import parse
from manyheads.data.masking import (
    Objective,
    corrupt_spans,
    delete,
    hide,
    infill,
    infill_spans,
    permute,
    restore_spans,
    span_places,
)
from manyheads.errors import UserError

MASK, TEXT = 1, 7  # TEXT is no ordinary id, so that each fate of a token can be told
ORDINARY = np.arange(10, 110, 2)
SENTINELS = np.arange(2000, 1900, -1)
SEEDS = st.integers(0, 2**40)
MANY = (1000, 1000)


def close(count: int, trials: int, share: float) -> bool:
    """Within 3 standard errors of what so many independent trials give."""
    return abs(count - trials * share) <= 3 * sqrt(trials * share * (1 - share))


def evenly(counts: list[int]) -> bool:
    """By chi-square: its mean is one less than the cells, its variance twice that."""
    expected, free = sum(counts) / len(counts), len(counts) - 1
    return sum((count - expected) ** 2 / expected for count in counts) <= free + 3 * sqrt(2 * free)


def hidden(
    tokens: np.ndarray,
    may: np.ndarray,
    seed: int,
    *,
    rate: float = 0.15,
    starts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    return hide(
        tokens,
        may,
        np.random.default_rng(seed),
        rate=rate,
        mask_share=0.8,
        random_share=0.1,
        mask=MASK,
        ordinary=ORDINARY,
        starts=starts,
    )


def bits(seed: int, shape: tuple[int, int], share: float) -> np.ndarray:
    return np.random.default_rng([seed, 1]).random(shape) < share


def test_a_million_tokens_are_chosen_and_split_as_asked() -> None:
    may = bits(0, MANY, 0.9)
    inputs, places = hidden(np.full(MANY, TEXT), may, seed=1)
    chosen = int(places.sum())
    assert close(chosen, int(may.sum()), 0.15)
    masked, kept = (int((inputs[places] == token).sum()) for token in (MASK, TEXT))
    assert close(masked, chosen, 0.8)
    assert close(kept, chosen, 0.1)
    assert close(chosen - masked - kept, chosen, 0.1)
    drawn = Counter(inputs[places & (inputs != MASK) & (inputs != TEXT)].tolist())
    assert set(drawn) == set(ORDINARY.tolist())
    assert evenly(list(drawn.values()))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5), length=st.integers(0, 12), seed=SEEDS, rate=st.floats(0.01, 0.99),
    words=st.booleans(), kind=st.sampled_from([np.int32, np.int64])
)  # fmt: skip
def test_only_what_may_be_hidden_is_and_the_places_bring_it_back(
    rows: int, length: int, seed: int, rate: float, words: bool, kind: type
) -> None:
    shape = (rows, length)
    tokens = np.random.default_rng([seed, 2]).integers(200, 300, shape).astype(kind)
    before, may = tokens.copy(), bits(seed, shape, 0.7)
    starts = bits(seed + 1, shape, 0.5) if words else None
    inputs, places = hidden(tokens, may, seed, rate=rate, starts=starts)
    assert not (places & ~may).any()
    assert np.array_equal(inputs[~places], before[~places])
    assert np.array_equal(np.where(places, before, inputs), before)
    assert np.array_equal(tokens, before)
    assert inputs.dtype == kind


def words_of(may: np.ndarray, starts: np.ndarray) -> list[list[tuple[int, int]]]:
    """The places of each word, counted out one token after the other."""
    words: list[list[tuple[int, int]]] = []
    for row in range(may.shape[0]):
        open_word = False
        for column in range(may.shape[1]):
            if may[row, column]:
                if starts[row, column] or not open_word:
                    words.append([])
                words[-1].append((row, column))
            open_word = bool(may[row, column])
    return words


def test_whole_words_are_chosen_whole_at_the_same_rate_of_tokens() -> None:
    may, starts = bits(3, MANY, 0.9), bits(4, MANY, 0.6)
    inputs, places = hidden(np.full(MANY, TEXT), may, seed=5, starts=starts)
    # A word is one trial that counts as many tokens as it has.
    begins = may & (starts | ~np.pad(may, ((0, 0), (1, 0)))[:, :-1])
    sizes = np.bincount((begins.cumsum() - 1)[may.ravel()])
    error = sqrt(0.15 * 0.85 * float((sizes**2).sum()))
    assert abs(int(places.sum()) - 0.15 * int(may.sum())) <= 3 * error
    whole = np.bincount((begins.cumsum() - 1)[places.ravel()], minlength=len(sizes))
    assert np.array_equal(whole[whole > 0], sizes[whole > 0])
    assert close(int((whole > 0).sum()), len(sizes), 0.15)
    # Each piece of a chosen word has its own fate.
    both = places[:, :-1] & places[:, 1:] & ~starts[:, 1:]
    masked = inputs == MASK
    assert close(int((masked[:, :-1] & masked[:, 1:])[both].sum()), int(both.sum()), 0.8**2)


def test_a_word_ends_at_a_token_that_may_not_be_hidden_and_at_the_end_of_a_row() -> None:
    """As counted out by hand; and two words that the same bits would join agree by chance alone."""
    may, starts = bits(6, (40, 25), 0.8), bits(7, (40, 25), 0.3)
    _, places = hidden(np.full(may.shape, TEXT), may, seed=8, rate=0.5, starts=starts)
    words = words_of(may, starts)
    assert sum(len(word) for word in words) == may.sum()
    for word in words:
        assert len({bool(places[place]) for place in word}) == 1
    may = np.tile(np.array([True, False, True]), (10_000, 1))
    _, places = hidden(
        np.full(may.shape, TEXT), may, seed=9, rate=0.5, starts=np.zeros(may.shape, dtype=bool)
    )
    assert close(int(places[:, 0].sum()), 10_000, 0.5)
    assert close(int((places[:, 0] == places[:, 2]).sum()), 10_000, 0.5)
    assert close(int((places[:-1, 2] == places[1:, 0]).sum()), 9999, 0.5)


def test_the_seed_says_what_is_hidden() -> None:
    tokens, may = np.full((8, 64), TEXT), np.ones((8, 64), dtype=bool)
    first, again, other = (hidden(tokens, may, seed) for seed in (1, 1, 2))
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])
    spans = [
        span_places(8, 64, np.random.default_rng(seed), rate=0.15, mean_length=3.0)
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(spans[0], spans[1])
    assert not np.array_equal(spans[0], spans[2])
    filled = [
        infill(np.arange(64), np.random.default_rng(seed), rate=0.3, mean_length=3.0, mask=-1)
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(filled[0], filled[1])
    assert not np.array_equal(filled[0], filled[2])


def spans_in(places: np.ndarray) -> np.ndarray:
    """How many spans each row has."""
    before = np.pad(places, ((0, 0), (1, 0)))[:, :-1]
    return (places & ~before).sum(axis=1)


@pytest.mark.parametrize("length", [*range(2, 13), 100, 512])
def test_every_row_hides_the_same_number_of_tokens_in_the_same_number_of_spans(length: int) -> None:
    for rate in (0.01, 0.15, 0.5, 0.9, 0.99):
        for mean_length in (1.0, 3.0, 7.5):
            random = np.random.default_rng(length)
            places = span_places(6, length, random, rate=rate, mean_length=mean_length)
            count = sorted((1, round(length * rate), length - 1))[1]
            assert places.sum(axis=1).tolist() == [count] * 6
            spans = min(max(1, round(count / mean_length)), length - count)
            assert spans_in(places).tolist() == [spans] * 6
            assert not places[:, 0].any()


def test_spans_are_three_tokens_long_in_the_mean_and_of_every_length() -> None:
    """15 tokens in 5 spans: of a composition, the lengths of one part are known exactly."""
    places = span_places(20_000, 100, np.random.default_rng(0), rate=0.15, mean_length=3.0)
    assert places.sum() == 0.15 * places.size
    assert places.sum() == 3 * spans_in(places).sum()
    first = places.argmax(axis=1)
    after = np.arange(100) >= first[:, None]
    lengths = (after & ~places).argmax(axis=1) - first
    for length in range(1, 12):
        share = comb(15 - length - 1, 3) / comb(14, 4)
        assert close(int((lengths == length).sum()), 20_000, share)
    assert close(int((lengths == 1).sum()), 20_000, 4 / 14)


def test_all_arrangements_of_spans_are_equally_likely() -> None:
    """4 hidden of 8 in 2 spans: 3 pairs of kept stretches times 3 pairs of spans."""
    places = span_places(9000, 8, np.random.default_rng(1), rate=0.5, mean_length=2.0)
    seen = Counter(tuple(row) for row in places.tolist())
    assert len(seen) == 9
    assert evenly(list(seen.values()))


def test_spans_become_sentinels_as_in_the_picture() -> None:
    tokens = np.array([[1, 2, 3, 4, 5, 6]])
    places = np.array([[False, False, True, False, True, True]])
    source, target = corrupt_spans(tokens, places, np.array([99, 98, 97]))
    assert source.tolist() == [[1, 2, 99, 4, 98]]
    assert target.tolist() == [[99, 3, 98, 5, 6, 97]]


@settings(deadline=None, max_examples=100)
@given(
    rows=st.integers(1, 5),
    length=st.integers(2, 12) | st.integers(13, 90),
    rate=st.floats(0.01, 0.99),
    mean_length=st.floats(1.0, 8.0),
    seed=SEEDS,
)
def test_source_and_target_together_are_the_text(
    rows: int, length: int, rate: float, mean_length: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1900, (rows, length))
    places = span_places(rows, length, random, rate=rate, mean_length=mean_length)
    source, target = corrupt_spans(tokens, places, SENTINELS)
    count, spans = int(places[0].sum()), int(spans_in(places)[0])
    assert source.shape == (rows, length - count + spans)
    assert target.shape == (rows, count + spans + 1)
    for row in range(rows):
        assert source[row][source[row] > 1900].tolist() == SENTINELS[:spans].tolist()
        assert target[row][target[row] > 1900].tolist() == SENTINELS[: spans + 1].tolist()
        assert np.array_equal(source[row][source[row] < 1900], tokens[row][~places[row]])
        assert np.array_equal(restore_spans(source[row], target[row], SENTINELS), tokens[row])


def test_spans_that_cannot_be_made_are_refused() -> None:
    places = span_places(2, 100, np.random.default_rng(0), rate=0.15, mean_length=3.0)
    tokens = np.zeros(places.shape, dtype=np.int64)
    corrupt_spans(tokens, places, SENTINELS[:6])
    with pytest.raises(UserError, match="5 spans need 6 sentinels, but there are 5"):
        corrupt_spans(tokens, places, SENTINELS[:5])
    places[1, 0] = True
    with pytest.raises(ValueError, match="rows differ"):
        corrupt_spans(tokens, places, SENTINELS)
    with pytest.raises(UserError, match="a text of 1 tokens has no span"):
        span_places(2, 1, np.random.default_rng(0), rate=0.15, mean_length=3.0)
    with pytest.raises(UserError, match="sentinel 1999 of the source has no span"):
        restore_spans(np.array([3, 2000, 4, 1999]), np.array([2000, 8]), SENTINELS)


def test_infilled_spans_have_the_lengths_of_a_poisson() -> None:
    """All but the last span of a text, which is cut so as to cover no more than was asked for.

    That it ends where enough is covered pulls the mean of the others down by about one part in
    all covered tokens, far below the standard error of this one long text.
    """
    starts, lengths = infill_spans(
        1_000_000, np.random.default_rng(0), rate=0.3, mean_length=3.0
    )  # fmt: skip
    assert lengths.sum() == 300_000
    whole = lengths[:-1]
    assert abs(whole.mean() - 3) <= 3 * sqrt(3 / len(whole))
    # The fourth central moment of Poisson(3) is 30, so that a squared deviation varies by 30 - 9.
    assert abs(whole.var() - 3) <= 3 * sqrt(21 / len(whole))
    assert close(int((whole == 0).sum()), len(whole), exp(-3))
    assert lengths[-1] > 0
    assert abs(starts.mean() - 500_000) <= 3 * 1_000_000 / sqrt(12 * len(starts))


@settings(deadline=None, max_examples=100)
@given(
    length=st.integers(0, 60), rate=st.floats(0.0, 0.99), mean_length=st.floats(1.0, 6.0),
    seed=SEEDS
)  # fmt: skip
def test_a_mask_stands_for_each_span_and_all_else_is_there_in_order(
    length: int, rate: float, mean_length: float, seed: int
) -> None:
    text = np.arange(100, 100 + length)
    filled = infill(
        text, np.random.default_rng(seed), rate=rate, mean_length=mean_length, mask=-1
    ).tolist()
    starts, lengths = infill_spans(
        length, np.random.default_rng(seed), rate=rate, mean_length=mean_length
    )
    assert lengths.sum() == round(rate * length)
    spans = sorted(zip(starts.tolist(), lengths.tolist(), strict=True))
    covered = [place for start, size in spans for place in range(start, start + size)]
    assert len(covered) == len(set(covered))
    assert [t for t in filled if t != -1] == [t for i, t in enumerate(text) if i not in covered]
    waiting = iter(spans)
    restored: list[int] = []
    for token in filled:
        if token == -1:
            start, size = next(waiting)
            assert start == len(restored)
            restored += text[start : start + size].tolist()
        else:
            restored.append(token)
    assert next(waiting, None) is None
    assert restored == text.tolist()


def test_sentences_come_in_any_order_equally_often() -> None:
    random = np.random.default_rng(0)
    pieces = [np.arange(3), np.arange(10, 11), np.arange(20, 25)]
    orders = Counter(tuple(np.concatenate(permute(pieces, random)).tolist()) for _ in range(3000))
    assert len(orders) == 6
    assert evenly(list(orders.values()))
    assert all(sorted(order) == [0, 1, 2, 10, 20, 21, 22, 23, 24] for order in orders)
    assert permute([], random) == []


def test_deleted_tokens_vanish_at_their_rate_and_one_stays() -> None:
    random = np.random.default_rng(0)
    left = delete(np.arange(1_000_000), random, rate=0.2)
    assert close(len(left), 1_000_000, 0.8)
    assert (np.diff(left) > 0).all()
    survivors = Counter(delete(np.arange(4), random, rate=0.9999).tolist()[0] for _ in range(2000))
    assert len(survivors) == 4
    assert evenly(list(survivors.values()))
    assert np.array_equal(delete(np.arange(9), random, rate=0.0), np.arange(9))
    assert len(delete(np.arange(0), random, rate=0.5)) == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "masked", "rate": 1.5}, "objective.rate=1.5 must be above 0, below 1"),
        ({"kind": "masked", "rate": float("nan")}, "objective.rate=nan must be above 0"),
        ({"kind": "masked", "mask_share": -0.1}, "objective.mask_share=-0.1 must be from 0 to 1"),
        ({"kind": "masked", "random_share": 1.2}, "random_share=1.2 must be from 0 to 1"),
        ({"kind": "masked", "random_share": 0.3}, "must be at most 1 together"),
        ({"kind": "masked", "unit": "word"}, "did you mean 'words'"),
        ({"kind": "replaced", "rate": 0.0}, "objective.rate=0.0 must be above 0, below 1"),
        ({"kind": "replaced", "generator_share": 0.0}, "objective.generator_share"),
        ({"kind": "replaced", "weight": 0.0}, "objective.weight=0.0 must be above 0"),
        ({"kind": "spans", "rate": 1.0}, "objective.rate=1.0 must be above 0, below 1"),
        ({"kind": "spans", "mean_length": 0.5}, "objective.mean_length=0.5 must be at least 1"),
        ({"kind": "denoising", "infill_rate": 1.0}, "infill_rate=1.0 must be at least 0, below 1"),
        ({"kind": "denoising", "delete_rate": -0.1}, "delete_rate=-0.1 must be at least 0"),
        ({"kind": "denoising", "mean_length": float("inf")}, "must be at least 1 and finite"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(Objective, table, "objective")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
