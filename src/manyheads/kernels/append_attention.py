# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One decoding step of attention: write the new position into the cache and attend to all so far.

    K[p] = k,  V[p] = v,  o = softmax(q Kᵀ · scale) V    over the slots 0 … p

There is one query per head, so there is no matrix product, and the time is latency: of the previous
kernel, of the loads, of the next kernel. Therefore it is one kernel, which loads the keys and
values of earlier steps before the new ones exist (kernels/pdl.py). A program holds a few slots of a
head. The program that finishes last merges the partial results by the formula of
kernels/decode_attention.py; an atomic counter tells which one it is, and is reset to zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import (
    LOG2_E,
    contiguous_channels,
    device_guard,
    empty_heads_inner,
)
from manyheads.kernels.pdl import grid_wait, launch_dependents, pdl_options

SLOTS, WARPS = 16, 1  # slots per program; a single warp needs no barrier
MAX_PROGRAMS = 1024  # that an H200 runs at the same time; up to 256 were measured


@triton.jit
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
    written before the preceding kernel starts (kernels/pdl.py).
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
