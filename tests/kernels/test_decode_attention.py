"""Attention of few queries over many keys; writing to a cache, alone and with attention."""

from itertools import product

import pytest
import torch
from torch import Tensor

from manyheads import ops
from manyheads.kernels import append_attention as append
from manyheads.kernels import decode_attention as decode
from manyheads.kernels.kv_write import write_kv

MASKS = [None, "queries", "rows", "shared"]
SIZES = [
    (1, 1, 1, 1, 40), (2, 3, 3, 1, 64), (2, 4, 2, 1, 65), (3, 2, 2, 5, 130), (1, 8, 1, 3, 90),
    (1, 2, 2, 1, 700),
]  # fmt: skip


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize(("b", "h", "g", "t", "s"), SIZES)
def test_split_and_merged(
    b: int, h: int, g: int, t: int, s: int, masked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(b, t, h, 16).transpose(1, 2)
    k, v = torch.randn(2, b, g, s + 7, 16)[:, :, :, :s]  # a part of a larger cache
    mask = None
    if masked:
        shapes = {"queries": (b, 1, t, s), "rows": (b, 1, 1, s), "shared": (1, 1, 1, s)}
        mask = torch.rand(shapes[masked]) < 0.4
        if masked == "queries":
            mask[0, 0, 0] = False  # a query without keys
        else:
            mask[..., s // 3 :] = False  # slots that are not filled
    expected = formula(q, k, v, mask)
    for programs, unscanned in ((256, 128), (8, 0), (1, 128)):
        monkeypatch.setattr(decode, "TARGET_PROGRAMS", programs)
        monkeypatch.setattr(decode, "MAX_UNSCANNED_KEYS", unscanned)
        out = decode.decode_attention(q, k, v, mask, 0.3)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_splits_cover_the_keys() -> None:
    for keys, programs in product((1, 64, 65, 128, 700, 4000), (1, 12, 128, 256, 300)):
        splits, split_keys = decode._split(keys, programs)
        assert splits * split_keys >= keys > (splits - 1) * split_keys
        assert splits == 1 or splits * programs <= decode.TARGET_PROGRAMS


@pytest.mark.parametrize("widths", [(16, 16), (24, 8)])
@pytest.mark.parametrize(("rows", "groups", "positions"), [(1, 1, 1), (3, 2, 1), (1, 2, 5)])
def test_write_kv(rows: int, groups: int, positions: int, widths: tuple[int, int]) -> None:
    k, v = (torch.randn(rows, positions, groups, n).transpose(1, 2) for n in widths)
    caches = tuple(torch.randn(rows, groups, 12, n) for n in widths)
    slots = torch.randperm(12)[:positions]
    expected = [x.clone().index_copy_(2, slots, y) for x, y in zip(caches, (k, v), strict=True)]
    write_kv(*caches, slots, k, v)
    for cache, reference in zip(caches, expected, strict=True):
        assert torch.equal(cache, reference)


@pytest.mark.parametrize(
    ("b", "h", "g", "slots"), [(1, 1, 1, 300), (2, 4, 2, 9), (2, 4, 2, 70), (1, 3, 3, 70)]
)
def test_append_attention_is_write_then_attend(b: int, h: int, g: int, slots: int) -> None:
    caches = torch.full((2, b, g, slots, 16), torch.nan)  # unfilled slots are never read
    counter = torch.zeros(b * h, dtype=torch.int32)
    for position in sorted({0, 1, 15, 16, 31, 32, slots - 1} & {*range(slots)}):
        caches[:, :, :, :position] = torch.randn(2, b, g, position, 16)
        expected_caches = caches.clone()
        qkv = torch.randn(b, 1, (h + 2 * g) * 16).split([h * 16, g * 16, g * 16], -1)
        q, k, v = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in qkv)
        at = torch.tensor([position])
        out = append.append_attention(q, k, v, caches[0], caches[1], at, counter, 0.3)
        expected_caches[:, :, :, position] = torch.stack([k, v])[:, :, :, 0]
        assert torch.equal(caches.nan_to_num(9.0), expected_caches.nan_to_num(9.0))
        keys, values = expected_caches[:, :, :, : position + 1]
        torch.testing.assert_close(out, formula(q, keys, values, None), rtol=0, atol=1e-5)
        assert not counter.any()


@pytest.mark.usefixtures("on_cpu")
def test_append_attention_is_for_few_rows_of_one_position() -> None:
    def supported(rows: int = 1, positions: int = 1, slots: int = 256, width: int = 64) -> bool:
        q, k, v = torch.randn(3, rows, 12, positions, width)
        caches = torch.randn(2, rows, 12, slots, width)
        counter = torch.zeros(rows * 12, dtype=torch.int32)
        position = torch.tensor([0])
        return ops.append_attention(q, k, v, *caches, position, counter, 1.0) is not None

    assert not supported()  # with gradients
    with torch.no_grad():
        assert supported()
        assert supported(rows=4)
        for other in ({"rows": 64}, {"positions": 2}, {"slots": 4096}, {"width": 48}):
            assert not supported(**other)
