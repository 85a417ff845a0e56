"""Corruption: rates and lengths as configured, and the text can be restored."""

from collections import Counter
from math import comb, exp, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.helpers import is_close, is_uniform, refusal

from manyheads.config import parse
from manyheads.data.masking import (
    Bidirectional,
    Masked,
    Objective,
    ReplacedToken,
    SpanCorruption,
    corrupt_spans,
    delete,
    infill,
    infill_spans,
    mask_tokens,
    sample_spans,
)
from manyheads.errors import UserError

MASK, TEXT = 1, 7  # TEXT is not an ordinary id, so that each kind of replacement can be recognized
ORDINARY = np.arange(10, 110, 2)
SENTINELS = np.arange(2000, 1900, -1)
SEEDS = st.integers(0, 2**40)
LARGE = (1000, 1000)


def masked(
    tokens: np.ndarray, maskable: np.ndarray, seed: int, *, rate: float = 0.15
) -> tuple[np.ndarray, np.ndarray]:
    return mask_tokens(
        tokens,
        maskable,
        np.random.default_rng(seed),
        rate=rate,
        mask_fraction=0.8,
        random_fraction=0.1,
        mask=MASK,
        ordinary=ORDINARY,
    )


def bits(seed: int, shape: tuple[int, int], probability: float) -> np.ndarray:
    return np.random.default_rng([seed, 1]).random(shape) < probability


def test_a_million_tokens_are_chosen_and_replaced_as_configured() -> None:
    maskable = bits(0, LARGE, 0.9)
    inputs, chosen = masked(np.full(LARGE, TEXT), maskable, seed=1)
    count = int(chosen.sum())
    assert is_close(count, int(maskable.sum()), 0.15)
    masks, unchanged = (int((inputs[chosen] == token).sum()) for token in (MASK, TEXT))
    assert is_close(masks, count, 0.8)
    assert is_close(unchanged, count, 0.1)
    random = Counter(inputs[chosen & (inputs != MASK) & (inputs != TEXT)].tolist())
    assert set(random) == set(ORDINARY.tolist())
    assert is_uniform(list(random.values()))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5), length=st.integers(0, 12), seed=SEEDS, rate=st.floats(0.01, 0.99),
    kind=st.sampled_from([np.int32, np.int64])
)  # fmt: skip
def test_only_maskable_tokens_change_and_the_labels_restore_them(
    rows: int, length: int, seed: int, rate: float, kind: type
) -> None:
    shape = (rows, length)
    tokens = np.random.default_rng([seed, 2]).integers(200, 300, shape).astype(kind)
    before, maskable = tokens.copy(), bits(seed, shape, 0.7)
    inputs, chosen = masked(tokens, maskable, seed, rate=rate)
    assert not (chosen & ~maskable).any()
    assert np.array_equal(inputs[~chosen], before[~chosen])
    assert np.array_equal(tokens, before)
    assert inputs.dtype == kind


def test_corruption_depends_on_the_generator_only() -> None:
    tokens, maskable = np.full((8, 64), TEXT), np.ones((8, 64), dtype=bool)

    def corrupt(seed: int) -> list[bytes]:
        random = np.random.default_rng(seed)
        arrays = [
            *masked(tokens, maskable, seed),
            sample_spans(8, 64, random, rate=0.15, mean_length=3.0),
            infill(np.arange(64), random, rate=0.3, mean_length=3.0, mask=-1),
        ]
        return [array.tobytes() for array in arrays]

    assert corrupt(1) == corrupt(1)
    assert all(a != b for a, b in zip(corrupt(1), corrupt(2), strict=True))


def count_spans(mask: np.ndarray) -> np.ndarray:
    before = np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    return (mask & ~before).sum(axis=1)


def test_every_row_has_the_same_number_of_masked_tokens_and_spans() -> None:
    for length in (*range(2, 13), 100, 512):
        for rate in (0.01, 0.15, 0.5, 0.9, 0.99):
            for mean_length in (1.0, 3.0, 7.5):
                random = np.random.default_rng(length)
                mask = sample_spans(6, length, random, rate=rate, mean_length=mean_length)
                count = sorted((1, round(length * rate), length - 1))[1]
                spans = min(max(1, round(count / mean_length)), length - count)
                assert mask.sum(axis=1).tolist() == [count] * 6
                assert count_spans(mask).tolist() == [spans] * 6
                assert not mask[:, 0].any()


def test_spans_are_three_tokens_long_in_the_mean_and_of_every_length() -> None:
    """15 tokens in 5 spans: the distribution of one part of a composition is known exactly."""
    mask = sample_spans(20_000, 100, np.random.default_rng(0), rate=0.15, mean_length=3.0)
    assert mask.sum() == 0.15 * mask.size == 3 * count_spans(mask).sum()
    first = mask.argmax(axis=1)
    lengths = ((np.arange(100) >= first[:, None]) & ~mask).argmax(axis=1) - first
    for length in range(1, 12):
        probability = comb(15 - length - 1, 3) / comb(14, 4)
        assert is_close(int((lengths == length).sum()), 20_000, probability)
    # 4 masked of 8 in 2 spans: 3 pairs of unmasked spans times 3 pairs of masked ones.
    mask = sample_spans(9000, 8, np.random.default_rng(1), rate=0.5, mean_length=2.0)
    arrangements = Counter(tuple(row) for row in mask.tolist())
    assert len(arrangements) == 9
    assert is_uniform(list(arrangements.values()))


def restore_spans(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The inverse of `corrupt_spans` for one row, if its text had no sentinel."""
    before, *parts = np.split(source, np.flatnonzero(np.isin(source, SENTINELS)))
    spans = np.split(target, np.flatnonzero(np.isin(target, SENTINELS)))[1:]
    by_sentinel = {int(span[0]): span[1:] for span in spans}
    restored = [array for part in parts for array in (by_sentinel[int(part[0])], part[1:])]
    return np.concatenate([before, *restored])


def test_spans_become_sentinels_as_in_the_paper() -> None:
    tokens = np.array([[1, 2, 3, 4, 5, 6]])
    mask = np.array([[False, False, True, False, True, True]])
    source, target = corrupt_spans(tokens, mask, np.array([99, 98, 97]))
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
    mask = sample_spans(rows, length, random, rate=rate, mean_length=mean_length)
    source, target = corrupt_spans(tokens, mask, SENTINELS)
    count, spans = int(mask[0].sum()), int(count_spans(mask)[0])
    assert source.shape == (rows, length - count + spans)
    assert target.shape == (rows, count + spans + 1)
    for row in range(rows):
        assert target[row][target[row] > 1900].tolist() == SENTINELS[: spans + 1].tolist()
        assert np.array_equal(source[row][source[row] < 1900], tokens[row][~mask[row]])
        assert np.array_equal(restore_spans(source[row], target[row]), tokens[row])


def test_impossible_spans_are_refused() -> None:
    mask = sample_spans(2, 100, np.random.default_rng(0), rate=0.15, mean_length=3.0)
    tokens = np.zeros(mask.shape, dtype=np.int64)
    corrupt_spans(tokens, mask, SENTINELS[:6])
    assert "5 spans need 6" in refusal(UserError, corrupt_spans, tokens, mask, SENTINELS[:5])
    with pytest.raises(UserError, match="1 tokens"):
        sample_spans(2, 1, np.random.default_rng(0), rate=0.15, mean_length=3.0)


def test_infilled_spans_have_the_lengths_of_a_poisson() -> None:
    """All but the last span of a text, which is shortened to cover exactly the rate.

    That drawing stops when enough is covered lowers the mean of the others by about one part in
    all covered tokens, far below the standard error of this long text.
    """
    starts, lengths = infill_spans(1_000_000, np.random.default_rng(0), rate=0.3, mean_length=3.0)
    assert lengths.sum() == 300_000
    drawn = lengths[:-1]
    assert abs(drawn.mean() - 3) <= 3 * sqrt(3 / len(drawn))
    # The fourth central moment of Poisson(3) is 30, so that a squared deviation varies by 30 - 9.
    assert abs(drawn.var() - 3) <= 3 * sqrt(21 / len(drawn))
    assert is_close(int((drawn == 0).sum()), len(drawn), exp(-3))
    assert lengths[-1] > 0
    assert abs(starts.mean() - 500_000) <= 3 * 1_000_000 / sqrt(12 * len(starts))


@settings(deadline=None, max_examples=100)
@given(
    length=st.integers(0, 60), rate=st.floats(0.0, 0.99), mean_length=st.floats(1.0, 6.0),
    seed=SEEDS
)  # fmt: skip
def test_a_mask_stands_for_each_span_and_the_rest_is_in_order(
    length: int, rate: float, mean_length: float, seed: int
) -> None:
    text, sizes = np.arange(100, 100 + length), {"rate": rate, "mean_length": mean_length}
    filled = infill(text, np.random.default_rng(seed), **sizes, mask=-1).tolist()
    starts, lengths = infill_spans(length, np.random.default_rng(seed), **sizes)
    assert lengths.sum() == round(rate * length)
    spans = iter(sorted(zip(starts.tolist(), lengths.tolist(), strict=True)))
    restored: list[int] = []
    for token in filled:
        if token == -1:
            start, size = next(spans)
            assert start == len(restored)
            restored += text[start : start + size].tolist()
        else:
            restored.append(token)
    assert next(spans, None) is None
    assert restored == text.tolist()


def test_tokens_are_deleted_uniformly() -> None:
    random = np.random.default_rng(0)
    left = delete(np.arange(1_000_000), random, rate=0.2)
    assert is_close(len(left), 1_000_000, 0.8)
    assert (np.diff(left) > 0).all()
    # At least one token stays, each as likely.
    survivors = Counter(delete(np.arange(4), random, rate=0.9999).tolist()[0] for _ in range(2000))
    assert len(survivors) == 4
    assert is_uniform(list(survivors.values()))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("masked", "rate", 1.5),
        ("masked", "rate", float("nan")),
        ("masked", "mask_fraction", -0.1),
        ("masked", "random_fraction", 1.2),
        ("masked", "random_fraction", 0.3),  # with mask_fraction=0.8
        ("replaced-token", "rate", 0.0),
        ("replaced-token", "generator_fraction", 0.0),
        ("replaced-token", "weight", 0.0),
        ("span-corruption", "rate", 1.0),
        ("span-corruption", "mean_length", 0.5),
        ("denoising", "infill_rate", 1.0),
        ("denoising", "delete_rate", -0.1),
        ("denoising", "mean_length", float("inf")),
    ],
)
def test_settings_out_of_range_are_refused(kind: str, name: str, value: object) -> None:
    message = refusal(UserError, parse, Objective, {"kind": kind, name: value}, "objective")
    assert f"objective.{name}={value}" in message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"kind": "masked", "mask_share": 0.5, "unit": "pieces"}, Masked(mask_fraction=0.5)),
        ({"kind": "masked", "random_share": 0.2}, Masked(random_fraction=0.2)),
        ({"kind": "replaced", "generator_share": 0.5}, ReplacedToken(generator_fraction=0.5)),
        ({"kind": "spans"}, SpanCorruption()),
        ({"kind": "both-ways"}, Bidirectional()),
    ],
)
def test_names_of_0_1_are_aliases(old: dict[str, object], new: object) -> None:
    assert parse(Objective, old, "objective") == new


def test_a_removed_setting_is_accepted_only_with_its_old_default() -> None:
    """Run folders of 0.1 name all settings; whole-word masking is no longer there."""
    assert parse(Objective, {"kind": "masked", "unit": "subwords"}, "objective") == Masked()
    old = {"kind": "masked", "unit": "words"}
    assert "objective.unit" in refusal(UserError, parse, Objective, old, "objective")
