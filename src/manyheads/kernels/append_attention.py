# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: the newest position of each row, put into its slot, and what it sees.

    K[p] = k,  V[p] = v,  o = softmax(q Kᵀ · scale) V    over the slots 0 … p

One query a head, as every step of writing one text asks. There is no product of matrices in it, and
its time is that of waiting: for the kernel before it, for keys and values, for the next one. So it
is one kernel, and keys and values of earlier steps are read before the newest ones are there
(kernels/pdl.py). Each program has a few slots of a head. The one that comes last puts together what
all of them have found, by the formula of kernels/decode_attention.py; a number says how many have come, and the
last one makes it zero again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.dispatch import device_guard
from manyheads.kernels.pdl import grid_wait, launch_dependents, pdl_options, supports_pdl
from manyheads.kernels.short_attention import LOG2_E, empty_heads_inner

KEYS, WARPS = 16, 1  # slots of a program, whose threads then have nobody to wait for
PROGRAMS = 1024  # most of it: as many as an H200 has room for at once; up to 256 were measured


@triton.jit
def _newest(
    Q, NEW_K, NEW_V, PLACE, K, V, FOUND, LEVELS, COME, OUT, heads, sharing, room, parts, scale,
    q_row, q_head, k_row, k_group, v_row, v_group,
    PDL: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    asked, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = asked // heads, asked % heads
    group = head // sharing
    place = tl.load(PLACE).to(tl.int32)
    if part * N <= place:
        at, channels = part * N + tl.arange(0, N), tl.arange(0, D)
        first = (row * (heads // sharing) + group) * room
        held = (first + at)[:, None] * D + channels[None, :]
        k = tl.load(K + held, mask=(at < place)[:, None], other=0.0)
        v = tl.load(V + held, mask=(at < place)[:, None], other=0.0)
        grid_wait(PDL)
        q = tl.load(Q + row * q_row + head * q_head + channels).to(tl.float32)
        new_k = tl.load(NEW_K + row * k_row + group * k_group + channels)
        new_v = tl.load(NEW_V + row * v_row + group * v_group + channels)
        if (part == place // N) & (head % sharing == 0):
            tl.store(K + (first + place) * D + channels, new_k)
            tl.store(V + (first + place) * D + channels, new_v)
        k = tl.where((at == place)[:, None], new_k[None, :], k).to(tl.float32)
        v = tl.where((at == place)[:, None], new_v[None, :], v).to(tl.float32)
        s = tl.where(at <= place, tl.sum(k * q[None, :], 1) * scale, -1e30)
        highest = tl.max(s, 0)
        p = tl.where(at <= place, tl.exp2(s - highest), 0.0)
        total, mixed = tl.sum(p, 0), tl.sum(p[:, None] * v, 0)
        filled = place // N + 1
        out = OUT + asked * D + channels
        if filled == 1:
            tl.store(out, (mixed / total).to(OUT.dtype.element_ty))
        else:
            to = asked * parts + part
            tl.store(FOUND + to * D + channels, mixed)
            tl.store(LEVELS + 2 * to, highest)
            tl.store(LEVELS + 2 * to + 1, total)
            tl.debug_barrier()  # all of it, before it is said that it is there
            if tl.atomic_add(COME + asked, 1, sem="acq_rel") == filled - 1:
                top, total, mixed = highest, 0.0, tl.zeros([D], tl.float32)
                for start in range(0, filled, N):
                    of = start + tl.arange(0, N)
                    there, of = of < filled, asked * parts + of
                    level = tl.load(LEVELS + 2 * of, mask=there, other=-1e30, cache_modifier=".cg")
                    some = tl.load(LEVELS + 2 * of + 1, mask=there, other=0.0, cache_modifier=".cg")
                    every = tl.load(
                        FOUND + of[:, None] * D + channels[None, :], mask=there[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    above = tl.maximum(top, tl.max(level, 0))
                    weight = tl.where(there, tl.exp2(level - above), 0.0)
                    shrunk = tl.exp2(top - above)
                    total = total * shrunk + tl.sum(weight * some, 0)
                    mixed = mixed * shrunk + tl.sum(weight[:, None] * every, 0)
                    top = above
                mixed /= total
                tl.store(out, mixed.to(OUT.dtype.element_ty))
                tl.store(COME + asked, 0)


@torch.library.custom_op("manyheads::append_attention", mutates_args=("held_k", "held_v", "come"))
def append_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held_k: Tensor,
    held_v: Tensor,
    place: Tensor,
    come: Tensor,
    scale: float,
) -> Tensor:
    """q [b h 1 c], k and v [b g 1 c] at this place [1] of the held ones [b g slots c].

    `come` is a zero for each row and head, and is left so. No gradients. What is held, and the
    place, must be there before the kernel ahead of this one begins (kernels/pdl.py).
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    rows, heads, _, width = q.shape
    room, pdl = held_k.shape[2], supports_pdl(q)
    parts = triton.cdiv(room, KEYS)
    out, sharing = empty_heads_inner(q), heads // k.shape[1]
    found, levels = (
        torch.empty(rows * heads * parts, n, device=q.device, dtype=torch.float32)
        for n in (width, 2)
    )
    with device_guard(q):
        _newest[(rows * heads, parts)](
            q, k, v, place, held_k, held_v, found, levels, come, out,
            heads, sharing, room, parts, scale * LOG2_E,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            PDL=pdl, D=width, N=KEYS, num_warps=WARPS, **pdl_options(pdl),
        )  # fmt: skip
    return out


@append_attention.register_fake
def _(q, k, v, held_k, held_v, place, come, scale):
    return empty_heads_inner(q)


def fits(rows: int, heads: int, room: int) -> bool:
    """True if so many programs run at the same time."""
    return rows * heads * -(-room // KEYS) <= PROGRAMS  # compiled code asks, too


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel gives at some places, and what is right; what it has put there, too.

    It comes between products that begin pdl, as in a step.
    """
    from manyheads.kernels.gemv import gemv

    given = torch.Generator(device).manual_seed(1)
    pairs = []
    for rows, heads, groups, width, slots in ((1, 12, 12, 64, 320), (2, 4, 2, 128, 100)):
        channels = heads * width

        def drawn(*size: int) -> Tensor:
            return torch.randn(size, generator=given, device=device, dtype=torch.bfloat16)

        held = drawn(rows, groups, slots, width), drawn(rows, groups, slots, width)
        come = torch.zeros(rows * heads, device=device, dtype=torch.int32)
        into, out = drawn(channels, 64), drawn(64, channels)
        places = torch.arange(slots, device=device)
        for at in {0, 1, 15, 16, 40, slots - 60, slots - 1}:
            x, k, v = drawn(1, 64), drawn(rows, groups, 1, width), drawn(rows, groups, 1, width)
            wanted = [one.clone() for one in held]
            q = gemv(x / 8, into, None, -1, None).view(1, heads, 1, width)
            found = append_attention(
                q.expand(rows, -1, -1, -1), k, v, *held, places[at : at + 1], come, 0.1
            )
            after = gemv(found[:1].flatten(1) / 8, out, None, -1, None)
            for one, new in zip(wanted, (k, v), strict=True):
                one[:, :, at : at + 1] = new
            past = [x[:, :, : at + 1].double() for x in wanted]
            keys, values = (x.repeat_interleave(heads // groups, 1) for x in past)
            mixed = (q.double() @ keys.mT * 0.1).softmax(-1) @ values
            pairs += [(found, mixed), (after, mixed[:1].flatten(1) / 8 @ out.double().mT)]
            pairs += [(one.clone(), x.double()) for one, x in zip(held, wanted, strict=True)]
        pairs.append((come + 1, torch.ones_like(come).double()))
    return pairs
