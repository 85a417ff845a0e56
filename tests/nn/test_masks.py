"""Rules over positions, and the sight that they make."""

import pytest
import torch
from textbook import DOCUMENTS, RULES

from manyheads.nn.masks import (
    AttentionMask,
    Full,
    both,
    causal,
    either,
    full,
    make_mask,
    prefix,
    window,
)

REAL = torch.tensor([[True] * 6, [True, True, False, True, True, False]])


@pytest.mark.parametrize("name", RULES)
def test_rule_is_its_predicate(name: str) -> None:
    """A query sees exactly the keys that the rule's sentence lets it see, padding never."""
    rule, sees = RULES[name]
    for real in (None, REAL):
        mask = make_mask(rule, 6, padding_mask=real).as_bool()
        expected = [
            [
                [sees(row, i, j) and (real is None or bool(real[row, j])) for j in range(6)]
                for i in range(6)
            ]
            for row in range(2)
        ]
        found = torch.ones(2, 1, 6, 6, dtype=torch.bool) if mask is None else mask
        assert found.expand(2, 1, 6, 6)[:, 0].tolist() == expected


@pytest.mark.parametrize("name", RULES)
def test_a_later_step_is_a_row_of_the_whole(name: str) -> None:
    """Cached and chunked passes see what the same rows of a full pass see."""
    rule = RULES[name][0]
    whole = make_mask(rule, 6, padding_mask=REAL).as_bool()
    assert whole is not None
    whole = whole.expand(2, 1, 6, 6)
    for start, length in ((0, 2), (3, 2), (5, 1), (2, 4)):
        end = start + length
        part = make_mask(rule, length, start=start, padding_mask=REAL[:, :end]).as_bool()
        assert part is not None
        seen = part.expand(2, 1, length, end)
        assert torch.equal(seen, whole[:, :, start:end, :end])


def test_one_step_needs_no_triangle() -> None:
    """The newest position sees all there is, so a single causal step asks for no mask."""
    assert make_mask(causal, 1, start=4).as_bool() is None
    assert make_mask(causal, 2, start=4).as_bool() is not None
    assert make_mask(window(1), 1, start=4).as_bool() is not None


@pytest.mark.parametrize("name", RULES)
def test_a_block_is_a_piece_of_the_whole(name: str) -> None:
    """The sight of some rows and columns has that piece of the mask."""
    sight = make_mask(RULES[name][0], 6, padding_mask=REAL)
    whole = sight.as_bool()
    part = sight.block(slice(1, 4), slice(2, 6)).as_bool()
    assert whole is not None
    assert part is not None
    expected = whole.expand(2, 1, 6, 6)[:, :, 1:4, 2:6]
    assert torch.equal(part.expand(2, 1, 3, 4), expected)


def test_rules_combine() -> None:
    """`both` sees where two rules agree, `either` where one says so."""
    queries, keys = torch.arange(6)[None, :, None], torch.arange(6)[None, None]
    one, other = causal(queries, keys), window(1)(queries, keys)
    assert torch.equal(both(causal, window(1))(queries, keys), one & other)
    assert torch.equal(either(causal, window(1))(queries, keys), one | other)
    assert not torch.equal(one & other, one | other)
    nested = both(either(prefix(2), window(0)), window(3))
    assert nested(queries, keys).sum() < window(3)(queries, keys).sum()


def test_full_needs_no_mask() -> None:
    """Where everyone sees everyone there is nothing to hold; padding needs one row a sentence."""
    assert make_mask(full, 6).as_bool() is None
    mask = make_mask(Full(), 6, padding_mask=REAL).as_bool()
    assert mask is not None
    assert mask.shape == (2, 1, 1, 6)


def test_only_the_plain_triangle_is_one() -> None:
    """A kernel may use its own triangle only for the causal rule on the same whole positions."""
    assert make_mask(causal, 5).is_causal()
    assert not make_mask(causal, 5, padding_mask=torch.ones(1, 5, dtype=torch.bool)).is_causal()
    assert not make_mask(causal, 5, start=2).is_causal()
    assert not make_mask(full, 5).is_causal()
    assert not make_mask(both(causal, window(3)), 5).is_causal()
    shifted = torch.arange(3, 8)[None]
    assert not AttentionMask(causal, shifted, torch.arange(8)[None]).is_causal()


def test_documents_do_not_mix() -> None:
    """In a packed row the causal rule starts anew with each document."""
    mask = make_mask(both(causal, RULES["same-document"][0]), 6).as_bool()
    assert mask is not None
    for row, documents in enumerate(DOCUMENTS):
        lengths = mask[row, 0].sum(-1).tolist()
        assert lengths == [documents[: i + 1].count(documents[i]) for i in range(6)]


@pytest.mark.parametrize("length", [5, 8])
def test_what_is_added_to_scores_is_the_mask(length: int) -> None:
    """Zero where a query sees a key, else −∞; made once a type, in rows that are aligned."""
    real = torch.arange(length) < torch.tensor([[length], [3]])
    for sight in (
        make_mask(causal, length, padding_mask=real),
        make_mask(full, length, padding_mask=real),
    ):
        mask = sight.as_bool()
        assert mask is not None
        for dtype in (torch.float32, torch.bfloat16):
            added = sight.as_bias(dtype)
            assert added is not None
            assert added.dtype == dtype
            assert torch.equal(added == 0, mask)
            assert torch.equal(added == -torch.inf, ~mask)
            assert added is sight.as_bias(dtype)
            assert all(step % 8 == 0 for step in added.stride()[:-1])
    assert make_mask(full, length).as_bias(torch.float32) is None


def test_queries_from_elsewhere_share_what_their_place_does_not_change() -> None:
    sight = make_mask(full, 6, padding_mask=REAL)
    assert (
        sight.for_cross_attention(3).as_bool()
        is sight.for_cross_attention(7).as_bool()
        is sight.as_bool()
    )
    assert sight.for_cross_attention(3).query_positions.shape == (1, 3)
    past = make_mask(causal, 6, padding_mask=REAL)
    first = past.for_cross_attention(2).as_bool()
    assert first is not None
    assert torch.equal(first[..., 0], REAL[:, None, :1].expand(-1, 1, 2))
    assert not first[..., 1:].any()
