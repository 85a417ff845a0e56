"""Mask rules over positions, and the masks that they make."""

import pytest
import torch
from textbook import DOCUMENTS, RULES

from manyheads.nn.masks import (
    AttentionMask,
    Both,
    Either,
    SameBlock,
    SameDocument,
    Window,
    causal,
    full,
    make_mask,
)

REAL = torch.tensor([[True] * 6, [True, True, False, True, True, False]])
rules = pytest.mark.parametrize("name", RULES)


@rules
def test_rule_is_its_predicate(name: str) -> None:
    """A query attends to exactly the keys of the rule's formula, and never to padding."""
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
        allowed = torch.ones(2, 1, 6, 6, dtype=torch.bool) if mask is None else mask
        assert allowed.expand(2, 1, 6, 6)[:, 0].tolist() == expected


@rules
def test_steps_chunks_and_blocks_are_parts_of_the_full_mask(name: str) -> None:
    rule = RULES[name][0]
    mask = make_mask(rule, 6, padding_mask=REAL)
    allowed = mask.as_bool()
    assert allowed is not None
    allowed = allowed.expand(2, 1, 6, 6)
    for start, length in ((0, 2), (3, 2), (5, 1), (2, 4)):
        end = start + length
        part = make_mask(rule, length, start=start, padding_mask=REAL[:, :end]).as_bool()
        assert part is not None
        assert torch.equal(part.expand(2, 1, length, end), allowed[:, :, start:end, :end])
    block = mask.block(slice(1, 4), slice(2, 6)).as_bool()
    assert block is not None
    assert torch.equal(block.expand(2, 1, 3, 4), allowed[:, :, 1:4, 2:6])


def test_rules_combine() -> None:
    queries, keys = torch.arange(6)[None, :, None], torch.arange(6)[None, None]
    first, second = causal(queries, keys), Window(1)(queries, keys)
    assert torch.equal(Both(causal, Window(1))(queries, keys), first & second)
    assert torch.equal(Either(causal, Window(1))(queries, keys), first | second)


def test_which_rules_are_causal() -> None:
    """`is_causal` exactly if no query attends to a later key, also for combined rules."""
    documents = SameDocument(torch.tensor(DOCUMENTS))
    simple = [full, causal, Window(1), SameBlock(2), documents]
    combined = [make(a, b) for make in (Both, Either) for a in simple for b in simple]
    nested = [Both(Either(causal, Window(1)), causal), Either(Both(causal, full), causal)]
    for rule in (*simple, *combined, *nested):
        allowed = make_mask(rule, 6).as_bool()
        later = True if allowed is None else bool(allowed.expand(2, 1, 6, 6).triu(1).any())
        assert rule.is_causal == (not later), rule


def test_masks_that_need_no_tensor() -> None:
    """A full mask, and a single causal step, which attends to everything."""
    assert make_mask(full, 6).as_bool() is None
    assert make_mask(full, 6).as_bias(torch.float32) is None
    padded = make_mask(full, 6, padding_mask=REAL).as_bool()
    assert padded is not None
    assert padded.shape == (2, 1, 1, 6)
    assert make_mask(causal, 1, start=4).as_bool() is None
    assert make_mask(causal, 2, start=4).as_bool() is not None
    assert make_mask(Window(1), 1, start=4).as_bool() is not None


def test_only_the_plain_triangle_is_causal() -> None:
    """Kernels may use their own triangle only for the causal rule on the same positions."""
    assert make_mask(causal, 5).is_causal()
    assert not make_mask(causal, 5, padding_mask=torch.ones(1, 5, dtype=torch.bool)).is_causal()
    assert not make_mask(causal, 5, start=2).is_causal()
    assert not make_mask(full, 5).is_causal()
    assert not make_mask(Both(causal, Window(3)), 5).is_causal()
    assert not AttentionMask(causal, torch.arange(3, 8)[None], torch.arange(8)[None]).is_causal()


def test_documents() -> None:
    """In a packed row the causal rule and positions start again with each document."""
    documents = SameDocument(torch.tensor(DOCUMENTS))
    mask = make_mask(Both(causal, documents), 6).as_bool()
    assert mask is not None
    for row, numbers in enumerate(DOCUMENTS):
        lengths = [numbers[: i + 1].count(numbers[i]) for i in range(6)]
        assert mask[row, 0].sum(-1).tolist() == lengths
        assert documents.positions()[row].tolist() == [length - 1 for length in lengths]


@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize("rule", [full, causal], ids=str)
def test_bias_is_the_mask(rule: type, length: int) -> None:
    """Zero where a query attends to a key, else −∞; computed once per dtype, in aligned rows."""
    real = torch.arange(length) < torch.tensor([[length], [3]])
    mask = make_mask(rule, length, padding_mask=real)  # type: ignore[arg-type]
    allowed = mask.as_bool()
    assert allowed is not None
    for dtype in (torch.float32, torch.bfloat16):
        bias = mask.as_bias(dtype)
        assert bias is not None
        assert bias.dtype == dtype
        assert torch.equal(bias == 0, allowed)
        assert torch.equal(bias == -torch.inf, ~allowed)
        assert bias is mask.as_bias(dtype)
        assert all(step % 8 == 0 for step in bias.stride()[:-1])


def test_cross_attention_shares_tensors() -> None:
    """Query positions change nothing under the full rule; elsewhere all queries are at 0."""
    mask = make_mask(full, 6, padding_mask=REAL)
    assert mask.for_cross_attention(3).as_bool() is mask.for_cross_attention(7).as_bool()
    assert mask.for_cross_attention(3).as_bool() is mask.as_bool()
    assert mask.for_cross_attention(3).query_positions.tolist() == [[0, 0, 0]]
    first = make_mask(causal, 6, padding_mask=REAL).for_cross_attention(2).as_bool()
    assert first is not None
    assert torch.equal(first[..., 0], REAL[:, None, :1].expand(-1, 1, 2))
    assert not first[..., 1:].any()
