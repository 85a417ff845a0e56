# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of few queries over many keys (a decoding step), split over the keys.

    o = softmax(q kᵀ · scale) v

Training kernels fill a block with queries of one head. A decoding step has one query per
hypothesis, and its time is that of reading keys and values once. Here all queries that share a
key/value head (of its heads and of all hypotheses) are in one program. If there are few such
programs, several read a part of the keys each, and a second kernel merges their results. With oᵢ
the weighted sum of values, tᵢ the sum of weights and mᵢ the largest score of part i:

    o = Σ e^(mᵢ−m) oᵢ / Σ e^(mᵢ−m) tᵢ,    m = max mᵢ

A static cache is mostly empty. A program with many keys first scans the mask for the last key that
any query attends to, and reads no further.

A growing cache has another number of keys at every step. Nothing that depends on it is a constant
in compiled code or specialised (Triton compiles an integer that is 1 or a multiple of 16 apart from
others): rows of the mask are padded to multiples of 16 bytes, and the merge is a loop.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.common import (
    LOG2_E,
    contiguous_channels,
    device_guard,
    empty_heads_inner,
    grid_wait,
    launch_dependents,
    pdl_options,
)
from manyheads.kernels.selftest import (
    SCALE,
    Comparison,
    Inputs,
    Lengths,
    attention_formula,
)

MIN_QUERIES = 16  # rows of the smallest matrix product
KEYS, WARPS, STAGES = 64, 4, 3  # keys of a block
TARGET_PROGRAMS = 256  # that keep a device busy
MAX_UNSCANNED_KEYS = 128  # with more keys, a program scans the mask first
MERGED_SPLITS, MASK_ALIGNMENT = 16, 16


@triton.jit(do_not_specialize=["keys", "splits", "split_keys", "scans"])
def _attend(
    Q, K, V, MASK, OUT, PARTIAL, STATS, heads, group_size, queries, keys, splits, split_keys,
    scans, scale, q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step,
    mask_row, mask_query,
    MASKED: tl.constexpr, PDL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    groups = heads // group_size
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    block, channels = tl.arange(0, M), tl.arange(0, D)
    head, query = group * group_size + block // queries, block % queries
    valid = (block < group_size * queries)[:, None]
    q_at = row * q_row + head[:, None] * q_head + query[:, None] * q_step + channels[None, :]
    q = tl.load(Q + q_at, mask=valid, other=0.0)
    row_max, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    o = tl.zeros([M, D], tl.float32)
    k_base, v_base = K + row * k_row + group * k_head, V + row * v_row + group * v_head
    begin = tl.program_id(1) * split_keys
    end = tl.minimum(begin + split_keys, keys)
    if scans != 0:
        last = tl.zeros([M, 4 * N], tl.int32)
        for first in range(begin, end, 4 * N):
            key = first + tl.arange(0, 4 * N)
            mask_at = row * mask_row + query[:, None] * mask_query + key[None, :]
            allowed = tl.load(MASK + mask_at, mask=valid & (key < end)[None, :], other=0) != 0
            last = tl.where(allowed, key[None, :] + 1, last)
        end = tl.max(tl.max(last, 1), 0)
    for first in range(begin, end, N):
        key = first + tl.arange(0, N)
        in_range = key < end
        k = tl.load(
            k_base + key[:, None] * k_step + channels[None, :], mask=in_range[:, None], other=0.0
        )
        v = tl.load(  # in flight while the weights are computed
            v_base + key[:, None] * v_step + channels[None, :], mask=in_range[:, None], other=0.0
        )
        s = tl.dot(q, tl.trans(k)) * scale
        allowed = valid & in_range[None, :]
        if MASKED:
            mask_at = row * mask_row + query[:, None] * mask_query + key[None, :]
            allowed = allowed & (tl.load(MASK + mask_at, mask=allowed, other=0) != 0)
        s = tl.where(allowed, s, -1e30)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.where(allowed, tl.exp2(s - new_max[:, None]), 0.0)
        rescale = tl.exp2(row_max - new_max)
        total = total * rescale + tl.sum(p, 1)
        o = o * rescale[:, None] + tl.dot(p.to(v.dtype), v)
        row_max = new_max
    to = (row * queries + query) * heads + head  # row of [b t h]
    if splits == 1:
        o = o / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros if all keys are masked
        out = OUT + to[:, None] * D + channels[None, :]
        tl.store(out, o.to(OUT.dtype.element_ty), mask=valid)
    else:
        at = to * splits + tl.program_id(1)
        tl.store(PARTIAL + at[:, None] * D + channels[None, :], o, mask=valid)
        tl.store(STATS + 2 * at, row_max, mask=block < group_size * queries)
        tl.store(STATS + 2 * at + 1, total, mask=block < group_size * queries)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    PARTIAL, STATS, OUT, splits, PDL: tl.constexpr, P: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    to, channels = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    top, total, o = -1e30, 0.0, tl.zeros([D], tl.float32)
    for start in range(0, splits, P):
        split = start + tl.arange(0, P)
        at, mask = to * splits + split, split < splits
        maxima = tl.load(STATS + 2 * at, mask=mask, other=-1e30)
        sums = tl.load(STATS + 2 * at + 1, mask=mask, other=0.0)
        partial = tl.load(
            PARTIAL + at[:, None] * D + channels[None, :], mask=mask[:, None], other=0.0
        )
        new_top = tl.maximum(top, tl.max(maxima, 0))
        weight = tl.where(mask, tl.exp2(maxima - new_top), 0.0)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight * sums, 0)
        o = o * rescale + tl.sum(partial * weight[:, None], 0)
        top = new_top
    o /= tl.where(total == 0.0, 1.0, total)
    tl.store(OUT + to * D + channels, o.to(OUT.dtype.element_ty))


def _split(keys: int, programs: int) -> tuple[int, int]:
    """(number of splits, none of them empty; keys of each)."""
    blocks = triton.cdiv(keys, KEYS)
    split_blocks = triton.cdiv(blocks, max(1, min(blocks, TARGET_PROGRAMS // programs)))
    return triton.cdiv(blocks, split_blocks), split_blocks * KEYS


@torch.library.custom_op("manyheads::decode_attention", mutates_args=())
def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [b h t c], k and v [b g s c], mask [b 1 t s] or with ones for b and t. No gradients."""
    q, k, v = (contiguous_channels(x) for x in (q, k, v))
    rows, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    mask_strides, mask_bytes = [0, 0], q
    if mask is not None:
        mask = F.pad(mask.expand(-1, -1, -1, keys), (0, -keys % MASK_ALIGNMENT))
        mask_bytes = mask.contiguous().view(torch.uint8)
        mask_strides = [
            0 if mask_bytes.shape[axis] == 1 else mask_bytes.stride(axis) for axis in (0, 2)
        ]
    group_size = heads // groups
    block = max(MIN_QUERIES, triton.next_power_of_2(group_size * queries))
    out = empty_heads_inner(q)
    splits, split_keys = _split(keys, rows * groups)
    outputs, options = rows * queries * heads, pdl_options(q)
    partial, stats = (  # not used by one split
        torch.empty(outputs * splits if splits > 1 else 1, n, device=q.device, dtype=torch.float32)
        for n in (width, 2)
    )
    with device_guard(q):
        _attend[(rows * groups, splits)](
            q, k, v, mask_bytes, out, partial, stats, heads, group_size, queries, keys, splits,
            split_keys, int(mask is not None and split_keys > MAX_UNSCANNED_KEYS), scale * LOG2_E,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides,
            MASKED=mask is not None, D=width, M=block, N=KEYS,
            num_warps=WARPS, num_stages=STAGES, **options,
        )  # fmt: skip
        if splits > 1:
            _merge[(outputs,)](
                partial, stats, out, splits, P=MERGED_SPLITS, D=width, num_warps=1, **options
            )
    return out


@decode_attention.register_fake
def _(q, k, v, mask, scale):
    return empty_heads_inner(q)


@torch.no_grad()
def case(
    new: Inputs, rows: int, heads: int, groups: int, queries: int, keys: int, mask_sizes: Lengths
) -> Iterator[Comparison]:
    """Over a part of a larger cache, with a mask for (1 or all rows, 1 or all queries) or none."""
    q, k, v = new.randn((rows, queries, heads, 32), *[(rows, groups, keys + 7, 32)] * 2)
    q, k, v, mask = q.transpose(1, 2), k[:, :, :keys], v[:, :, :keys], None
    if mask_sizes is not None:
        mask = new.randn((mask_sizes[0], 1, mask_sizes[1], keys))[0] < 0.3
        mask[..., keys // 3 * 2 :] = False  # slots that are not filled
        mask[0, 0, 0] &= mask_sizes[0] == 1  # a query without keys
    expected = attention_formula(q.double(), k.double(), v.double(), mask)
    yield decode_attention(q, k, v, mask, SCALE), expected


SELFTEST = [(2, 4, 2, 3, 150, None), (2, 4, 2, 3, 150, (2, 3)), (2, 4, 2, 3, 40, None)]
