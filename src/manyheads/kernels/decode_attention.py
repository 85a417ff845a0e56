# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: a few queries over many keys, as every step of writing asks.

    o = softmax(q kᵀ · scale) v

Kernels for training fill a block with queries of one head. A step of writing has one query a
hypothesis, and its time is that of reading keys and values once. Here all queries of the heads
that share them (those of a group, of all hypotheses) meet them in one program. Where there are few
such groups, several programs read a part of the keys each, and a second kernel puts together what
they found, of which o is the sum and t that of its weights, both for a largest score m:

    o = Σ e^(mᵢ−m) oᵢ / Σ e^(mᵢ−m) tᵢ,    m = max mᵢ

A room for all that will be written is mostly empty. Where a program has many keys it looks first
how far they are seen at all, and reads no further.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.dispatch import device_guard
from manyheads.kernels.pdl import grid_wait, launch_dependents, pdl_options, supports_pdl
from manyheads.kernels.short_attention import LOG2_E, empty_heads_inner

QUERIES = 16  # the fewest that a product of matrices is computed for
KEYS, WARPS, STAGES = 64, 4, 3  # that are read at once
ENOUGH = 256  # programs that keep a device busy
MANY = 128  # keys of a program, beyond which it looks first how far they are seen


@triton.jit(do_not_specialize=["parts", "each_keys"])
def _look(
    Q, K, V, SEEN, OUT, LEVELS, heads, sharing, queries, keys, parts, each_keys, scale,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step,
    seen_row, seen_query,
    MASKED: tl.constexpr, SEEKS: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    groups = heads // sharing
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    each, channels = tl.arange(0, M), tl.arange(0, D)
    head, place = group * sharing + each // queries, each % queries
    there = (each < sharing * queries)[:, None]
    q_at = row * q_row + head[:, None] * q_head + place[:, None] * q_step + channels[None, :]
    q = tl.load(Q + q_at, mask=there, other=0.0)
    highest, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    k_first, v_first = K + row * k_row + group * k_head, V + row * v_row + group * v_head
    begin = tl.program_id(1) * each_keys
    end = tl.minimum(begin + each_keys, keys)
    if SEEKS:
        reach = tl.zeros([M, 4 * N], tl.int32)
        for first in range(begin, end, 4 * N):
            at = first + tl.arange(0, 4 * N)
            s_at = row * seen_row + place[:, None] * seen_query + at[None, :]
            seen = tl.load(SEEN + s_at, mask=there & (at < end)[None, :], other=0) != 0
            reach = tl.where(seen, at[None, :] + 1, reach)
        end = tl.max(tl.max(reach, 1), 0)
    for first in range(begin, end, N):
        at = first + tl.arange(0, N)
        known = at < end
        k = tl.load(
            k_first + at[:, None] * k_step + channels[None, :], mask=known[:, None], other=0.0
        )
        v = tl.load(  # on its way while the weights are computed
            v_first + at[:, None] * v_step + channels[None, :], mask=known[:, None], other=0.0
        )
        s = tl.dot(q, tl.trans(k)) * scale
        seen = there & known[None, :]
        if MASKED:
            s_at = row * seen_row + place[:, None] * seen_query + at[None, :]
            seen = seen & (tl.load(SEEN + s_at, mask=seen, other=0) != 0)
        s = tl.where(seen, s, -1e30)
        above = tl.maximum(highest, tl.max(s, 1))
        p = tl.where(seen, tl.exp2(s - above[:, None]), 0.0)
        shrunk = tl.exp2(highest - above)
        total = total * shrunk + tl.sum(p, 1)
        mixed = mixed * shrunk[:, None] + tl.dot(p.to(v.dtype), v)
        highest = above
    asked = (row * queries + place) * heads + head  # the row of [b t h] that this is
    if WHOLE:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # nothing seen: zeros
        out = OUT + asked[:, None] * D + channels[None, :]
        tl.store(out, mixed.to(OUT.dtype.element_ty), mask=there)
    else:
        at = asked * parts + tl.program_id(1)
        tl.store(OUT + at[:, None] * D + channels[None, :], mixed, mask=there)
        tl.store(LEVELS + 2 * at, highest, mask=each < sharing * queries)
        tl.store(LEVELS + 2 * at + 1, total, mask=each < sharing * queries)


@triton.jit(do_not_specialize=["parts"])
def _together(
    FOUND, LEVELS, OUT, parts, PDL: tl.constexpr, P: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    asked, each, channels = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, D)
    at, there = asked * parts + each, each < parts
    highest = tl.load(LEVELS + 2 * at, mask=there, other=-1e30)
    weight = tl.where(there, tl.exp2(highest - tl.max(highest, 0)), 0.0)
    total = tl.sum(weight * tl.load(LEVELS + 2 * at + 1, mask=there, other=0.0), 0)
    found = tl.load(FOUND + at[:, None] * D + channels[None, :], mask=there[:, None], other=0.0)
    mixed = tl.sum(found * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(OUT + asked * D + channels, mixed.to(OUT.dtype.element_ty))


def _parts(keys: int, programs: int) -> tuple[int, int]:
    """Into how many parts keys are cut, none of them empty, and how many each has."""
    blocks = triton.cdiv(keys, KEYS)
    each = triton.cdiv(blocks, max(1, min(blocks, ENOUGH // programs)))
    return triton.cdiv(blocks, each), each * KEYS


@torch.library.custom_op("manyheads::decode_attention", mutates_args=())
def decode_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """q [b h t c], k and v [b g s c], seen [b 1 t s] or with ones for b and t. No gradients."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    rows, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    apart, known = [0, 0], q
    if seen is not None:
        known = seen.expand(-1, -1, -1, keys).contiguous().view(torch.uint8)
        apart = [0 if known.shape[axis] == 1 else known.stride(axis) for axis in (0, 2)]
    sharing = heads // groups
    block = max(QUERIES, triton.next_power_of_2(sharing * queries))
    out = found = levels = empty_heads_inner(q)
    parts, each = _parts(keys, rows * groups)
    asked, pdl = rows * queries * heads, supports_pdl(q)
    if parts > 1:
        found, levels = (
            torch.empty(asked * parts, n, device=q.device, dtype=torch.float32) for n in (width, 2)
        )
    with device_guard(q):
        _look[(rows * groups, parts)](
            q, k, v, known, found, levels, heads, sharing, queries, keys, parts, each,
            scale * LOG2_E,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *apart,
            MASKED=seen is not None, SEEKS=seen is not None and each > MANY, WHOLE=parts == 1,
            PDL=pdl, D=width, M=block, N=KEYS, num_warps=WARPS, num_stages=STAGES,
            **pdl_options(pdl),
        )  # fmt: skip
        if parts > 1:
            padded = triton.next_power_of_2(parts)
            warps = max(1, padded * width // 2048)
            _together[(asked,)](
                found, levels, out, parts, PDL=pdl, P=padded, D=width, num_warps=warps,
                **pdl_options(pdl),
            )  # fmt: skip
    return out


@decode_attention.register_fake
def _(q, k, v, seen, scale):
    return empty_heads_inner(q)


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel gives for a few numbers, and what is right."""
    given = torch.Generator(device).manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, n, 32, generator=given, device=device, dtype=torch.bfloat16)
        for heads, n in ((4, 3), (2, 150), (2, 150))
    )
    seen = torch.rand(2, 1, 3, 150, generator=given, device=device) < 0.5
    wide = [x.double().repeat_interleave(4 // x.shape[1], 1) for x in (q, k, v)]
    pairs = []
    for mask in (None, seen):
        scores = wide[0] @ wide[1].mT * 0.25
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        pairs.append((decode_attention(q, k, v, mask, 0.25), scores.softmax(-1) @ wide[2]))
    few = [x[:, :, :40] for x in (k, v)]  # of which nothing is put together
    scores = wide[0] @ wide[1][:, :, :40].mT * 0.25
    return [
        *pairs,
        (decode_attention(q, *few, None, 0.25), scores.softmax(-1) @ wide[2][:, :, :40]),
    ]
