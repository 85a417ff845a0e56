# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Write new positions into a static KV cache, and attend from the newest one to all so far.

    write_kv            K[p] = k,  V[p] = v                            for several positions p
    append_attention    the same, and o = softmax(q Kᵀ · scale) V      for one, over slots 0 … p

`append_attention` has one query per head, so there is no matrix product. Its time is the latency of
the previous kernel, the loads and the next kernel. Therefore it is one kernel, which loads the keys
and values of earlier steps before the new ones exist (kernels/common.py). A program holds
a few slots of a head. The program that finishes last merges the partial results by the formula of
kernels/decode_attention.py; an atomic counter tells which one it is, and is reset to zero.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import (
    LOG2_E,
    contiguous_channels,
    device_guard,
    empty_heads_inner,
    grid_wait,
    launch_dependents,
    pdl_options,
)
from manyheads.kernels.gemv import gemv
from manyheads.kernels.selftest import SCALE, Comparison, Inputs, attention_formula

SLOTS, WARPS = 16, 1  # slots per program; a single warp needs no barrier
MAX_PROGRAMS = 1024  # that an H200 runs at the same time; up to 256 were measured


@triton.jit
def _write_kv(
    K, V, SLOTS, K_CACHE, V_CACHE, kv_heads, positions, slots_per_row, k_dim, v_dim,
    k_row, k_head, k_step, v_row, v_head, v_step,
    PDL: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    row, head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    position, channels = tl.arange(0, M), tl.arange(0, D)
    mask = (position < positions)[:, None]
    slots = tl.load(SLOTS + position, mask=position < positions, other=0)
    to = (tl.program_id(0).to(tl.int64) * slots_per_row + slots)[:, None]
    offsets = row * k_row + head * k_head + position[:, None] * k_step + channels[None, :]
    k = tl.load(K + offsets, mask=mask & (channels < k_dim)[None, :], other=0.0)
    out = K_CACHE + to * k_dim + channels[None, :]
    tl.store(out, k.to(K_CACHE.dtype.element_ty), mask=mask & (channels < k_dim)[None, :])
    offsets = row * v_row + head * v_head + position[:, None] * v_step + channels[None, :]
    v = tl.load(V + offsets, mask=mask & (channels < v_dim)[None, :], other=0.0)
    out = V_CACHE + to * v_dim + channels[None, :]
    tl.store(out, v.to(V_CACHE.dtype.element_ty), mask=mask & (channels < v_dim)[None, :])


@torch.library.custom_op("manyheads::write_kv", mutates_args=("k_cache", "v_cache"))
def write_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k [n g t e] and v [n g t c] into slots [t] of caches [n g slots e], [n g slots c]."""
    k, v = contiguous_channels(k), contiguous_channels(v)
    kv_heads, positions = k.shape[1:3]
    width = triton.next_power_of_2(max(k.shape[3], v.shape[3]))
    with device_guard(k):
        _write_kv[(k.shape[0] * kv_heads,)](
            k, v, slots, k_cache, v_cache, kv_heads, positions, k_cache.shape[2],
            k.shape[3], v.shape[3], *k.stride()[:3], *v.stride()[:3],
            M=triton.next_power_of_2(positions), D=width, num_warps=1, **pdl_options(k),
        )  # fmt: skip


@write_kv.register_fake
def _(k_cache, v_cache, slots, k, v):
    return None


@triton.jit(do_not_specialize=["splits"])
def _append_attention(
    Q, NEW_K, NEW_V, POSITION, K, V, PARTIAL, STATS, COUNTER, OUT,
    heads, group_size, slots, splits, scale,
    q_row, q_head, k_row, k_group, v_row, v_group,
    PDL: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    query, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = query // heads, query % heads
    group = head // group_size
    position = tl.load(POSITION).to(tl.int32)
    if split * N <= position:
        slot, channels = split * N + tl.arange(0, N), tl.arange(0, D)
        first = (row * (heads // group_size) + group) * slots
        offsets = (first + slot)[:, None] * D + channels[None, :]
        k = tl.load(K + offsets, mask=(slot < position)[:, None], other=0.0)
        v = tl.load(V + offsets, mask=(slot < position)[:, None], other=0.0)
        grid_wait(PDL)
        q = tl.load(Q + row * q_row + head * q_head + channels).to(tl.float32)
        new_k = tl.load(NEW_K + row * k_row + group * k_group + channels)
        new_v = tl.load(NEW_V + row * v_row + group * v_group + channels)
        if (split == position // N) & (head % group_size == 0):
            tl.store(K + (first + position) * D + channels, new_k)
            tl.store(V + (first + position) * D + channels, new_v)
        k = tl.where((slot == position)[:, None], new_k[None, :], k).to(tl.float32)
        v = tl.where((slot == position)[:, None], new_v[None, :], v).to(tl.float32)
        s = tl.where(slot <= position, tl.sum(k * q[None, :], 1) * scale, -1e30)
        row_max = tl.max(s, 0)
        p = tl.where(slot <= position, tl.exp2(s - row_max), 0.0)
        total, o = tl.sum(p, 0), tl.sum(p[:, None] * v, 0)
        used_splits = position // N + 1
        out = OUT + query * D + channels
        if used_splits == 1:
            tl.store(out, (o / total).to(OUT.dtype.element_ty))
        else:
            to = query * splits + split
            tl.store(PARTIAL + to * D + channels, o)
            tl.store(STATS + 2 * to, row_max)
            tl.store(STATS + 2 * to + 1, total)
            tl.debug_barrier()  # all stores come before the counter
            if tl.atomic_add(COUNTER + query, 1, sem="acq_rel") == used_splits - 1:
                top, total, o = row_max, 0.0, tl.zeros([D], tl.float32)
                for start in range(0, used_splits, N):
                    at = start + tl.arange(0, N)
                    mask, at = at < used_splits, query * splits + at
                    maxima = tl.load(STATS + 2 * at, mask=mask, other=-1e30, cache_modifier=".cg")
                    sums = tl.load(STATS + 2 * at + 1, mask=mask, other=0.0, cache_modifier=".cg")
                    partial = tl.load(
                        PARTIAL + at[:, None] * D + channels[None, :],
                        mask=mask[:, None], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    new_top = tl.maximum(top, tl.max(maxima, 0))
                    weight = tl.where(mask, tl.exp2(maxima - new_top), 0.0)
                    rescale = tl.exp2(top - new_top)
                    total = total * rescale + tl.sum(weight * sums, 0)
                    o = o * rescale + tl.sum(weight[:, None] * partial, 0)
                    top = new_top
                o /= total
                tl.store(out, o.to(OUT.dtype.element_ty))
                tl.store(COUNTER + query, 0)


@torch.library.custom_op(
    "manyheads::append_attention", mutates_args=("k_cache", "v_cache", "counter")
)
def append_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: Tensor,
    counter: Tensor,
    scale: float,
) -> Tensor:
    """q [b h 1 c], k and v [b g 1 c] at position [1] of caches [b g slots c]; no gradients.

    `counter` holds a zero for each row and head and is left so. The caches and the position must be
    written before the preceding kernel starts (kernels/common.py).
    """
    q, k, v = (contiguous_channels(x) for x in (q, k, v))
    rows, heads, _, width = q.shape
    slots = k_cache.shape[2]
    splits = triton.cdiv(slots, SLOTS)
    out, group_size = empty_heads_inner(q), heads // k.shape[1]
    partial, stats = (
        torch.empty(rows * heads * splits, n, device=q.device, dtype=torch.float32)
        for n in (width, 2)
    )
    with device_guard(q):
        _append_attention[(rows * heads, splits)](
            q, k, v, position, k_cache, v_cache, partial, stats, counter, out,
            heads, group_size, slots, splits, scale * LOG2_E,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            D=width, N=SLOTS, num_warps=WARPS, **pdl_options(q),
        )  # fmt: skip
    return out


@append_attention.register_fake
def _(q, k, v, k_cache, v_cache, position, counter, scale):
    return empty_heads_inner(q)


def fits(rows: int, heads: int, slots: int) -> bool:
    """True if all programs run at the same time; also called in compiled code."""
    return rows * heads * -(-slots // SLOTS) <= MAX_PROGRAMS


@torch.no_grad()
def case(
    new: Inputs, rows: int, heads: int, groups: int, width: int, slots: int
) -> Iterator[Comparison]:
    """Output, caches and counter at several positions, between two dependent launches."""
    channels, cache = heads * width, (rows, groups, slots, width)
    before, after, *caches = new.randn((channels, 64), (64, channels), cache, cache)
    counter = torch.zeros(rows * heads, device=new.device, dtype=torch.int32)
    for at in sorted({0, 1, 15, 16, 31, 40, slots - 60, slots - 1} & {*range(slots)}):
        for x in caches:
            x[:, :, at:] = torch.nan  # slots that are not filled are never read
        x, k, v = new.randn((1, 64), *[(rows, groups, 1, width)] * 2)
        position = torch.tensor([at], device=new.device)
        past = [
            torch.cat([x[:, :, :at], last], 2).double()
            for x, last in zip(caches, (k, v), strict=True)
        ]
        q = gemv(x / 8, before).view(1, heads, 1, width).expand(rows, -1, -1, -1)
        out = append_attention(q, k, v, caches[0], caches[1], position, counter, SCALE)
        product = gemv(out[:1].flatten(1) / 8, after)
        expected = attention_formula(q.double(), past[0], past[1], None)
        yield out, expected
        yield product, expected[:1].flatten(1) / 8 @ after.double().mT
        yield from ((x[:, :, : at + 1], y) for x, y in zip(caches, past, strict=True))
        for x in caches:
            x[:, :, at + 1 :] = new.randn(x[:, :, at + 1 :].shape)[0]
    yield counter + 1, torch.ones_like(counter)
    yield from _write_case(new, rows, groups, width)


def _write_case(new: Inputs, rows: int, groups: int, width: int) -> Iterator[Comparison]:
    """Both caches after writes of one and of five positions; keys and values differ in width."""
    widths = width, width // 2 + 4
    for positions in (1, 5):
        caches = new.randn(*((rows, groups, 60, n) for n in widths))
        k, v = (
            x.transpose(1, 2) for x in new.randn(*((rows, positions, groups, n) for n in widths))
        )
        slots = (torch.arange(positions, device=new.device) * 37 + 20) % 60
        expected = [x.index_copy(2, slots, last) for x, last in zip(caches, (k, v), strict=True)]
        write_kv(caches[0], caches[1], slots, k, v)
        yield from zip(caches, expected, strict=True)


SELFTEST = [(1, 3, 3, 64, 320), (2, 4, 2, 128, 100)]
