# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: exact attention over short texts, each head of a text by one small program.

    p = softmax(q kᵀ · scale),  o = (p ∘ m) v,    dp = do vᵀ ∘ m,  ds = p ∘ (dp − Σ p ∘ dp) · scale,
    dq = ds k,  dk = dsᵀ q,  dv = (p ∘ m)ᵀ do,    m: 1, or with dropout 0 or 1 / (1 − share)

Kernels for long texts go over keys in blocks, with as much room as a block can use. A sentence of
thirty words fills a quarter of one, and a thousand sentences wait for each other. Here all pairs of
a head fit into the registers of a few threads at once: nothing is gone over twice, nothing but q,
k and v is kept for the backward pass, and padding is seen to inside.

`short_attention` is for heads of any kind; `short_projected` for queries, keys and values as they
lie beside each other after a projection. Their gradients are written side by side too, which saves
a pass over them.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.attention import SHORT_LENGTHS
from manyheads.kernels.dispatch import device_guard
from manyheads.kernels.philox import dropout_scale

LOG2_E = 1.4426950408889634
Three = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _rows_of(x, places, step, n, D: tl.constexpr):
    """Rows of n, zero past the end."""
    channels = tl.arange(0, D)
    return tl.load(
        x + places[:, None] * step + channels[None, :], mask=places[:, None] < n, other=0.0
    )


@triton.jit
def _write_rows(x, places, step, n, values, D: tl.constexpr):
    channels = tl.arange(0, D)
    tl.store(
        x + places[:, None] * step + channels[None, :],
        values.to(x.dtype.element_ty),
        mask=places[:, None] < n,
    )


@triton.jit
def _weights_of(
    q, k, real, at_q, at_k, keys, scale, PAST: tl.constexpr, REAL: tl.constexpr
):  # fmt: skip
    """softmax over the keys that are seen; zeros for a query that sees none. `scale` has log₂ e."""
    s = tl.dot(q, tl.trans(k)) * scale
    seen = at_k[None, :] < keys
    if PAST:
        seen = seen & (at_k[None, :] <= at_q[:, None])
    if REAL:
        known = tl.load(real + at_k, mask=at_k < keys, other=0)
        seen = seen & (known[None, :] != 0)
    s = tl.where(seen, s, -1e30)
    p = tl.where(seen, tl.exp2(s - tl.max(s, 1)[:, None]), 0.0)
    total = tl.sum(p, 1)
    return p / tl.where(total == 0.0, 1.0, total)[:, None]


# Numbers that change from batch to batch, for which no kernel is compiled anew.
@triton.jit(do_not_specialize=["queries", "keys", "known_row"])
def _forward(
    Q, K, V, KNOWN, SEED, OUT, heads, queries, keys, scale, share,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, known_row,
    PAST: tl.constexpr, REAL: tl.constexpr, DROPS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    at_q, at_k = tl.arange(0, M), tl.arange(0, N)
    q = _rows_of(Q + row * q_row + head * q_head, at_q, q_step, queries, D)
    k = _rows_of(K + row * k_row + head * k_head, at_k, k_step, keys, D)
    v = _rows_of(V + row * v_row + head * v_head, at_k, v_step, keys, D)
    p = _weights_of(q, k, KNOWN + row * known_row, at_q, at_k, keys, scale, PAST, REAL)
    if DROPS:
        p = p * dropout_scale(SEED, tl.program_id(0) * M + at_q, share, N)
    o = tl.dot(p.to(v.dtype), v)
    out = OUT + row * queries * heads * D + head * D
    _write_rows(out, at_q, heads * D, queries, o, D)


@triton.jit(do_not_specialize=["queries", "keys", "known_row", "dq_row", "dk_row"])
def _backward(
    Q, K, V, KNOWN, SEED, DO, DQ, DK, DV, heads, queries, keys, scale, inner, share,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, known_row,
    o_row, o_head, o_step, dq_row, dq_step, dk_row, dk_step,
    PAST: tl.constexpr, REAL: tl.constexpr, DROPS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    at_q, at_k = tl.arange(0, M), tl.arange(0, N)
    q = _rows_of(Q + row * q_row + head * q_head, at_q, q_step, queries, D)
    k = _rows_of(K + row * k_row + head * k_head, at_k, k_step, keys, D)
    v = _rows_of(V + row * v_row + head * v_head, at_k, v_step, keys, D)
    do = _rows_of(DO + row * o_row + head * o_head, at_q, o_step, queries, D)
    p = _weights_of(q, k, KNOWN + row * known_row, at_q, at_k, keys, scale, PAST, REAL)
    dp = tl.dot(do, tl.trans(v))
    mixed = p
    if DROPS:
        mask = dropout_scale(SEED, tl.program_id(0) * M + at_q, share, N)
        mixed = p * mask
        dp = dp * mask
    dv = tl.dot(tl.trans(mixed.to(do.dtype)), do)
    _write_rows(DV + row * dk_row + head * D, at_k, dk_step, keys, dv, D)
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * inner).to(q.dtype)
    _write_rows(DQ + row * dq_row + head * D, at_q, dq_step, queries, tl.dot(ds, k), D)
    dk = tl.dot(tl.trans(ds), q)
    _write_rows(DK + row * dk_row + head * D, at_k, dk_step, keys, dk, D)


def _shape(q: Tensor, k: Tensor, drops: bool) -> dict[str, int]:
    """Sizes of the blocks, and how many threads hold one.

    Where weights are dropped, products over 16 places are computed wrongly (Triton 3.6, an H200).
    """
    m, n = (max(32 if drops else 16, triton.next_power_of_2(x.shape[2])) for x in (q, k))
    warps = 2 if m * n <= 32 * 32 else 4 if m * n <= 64 * 64 else 8
    return {"M": m, "N": n, "D": q.shape[3], "num_warps": warps}


def _read(x: Tensor) -> Tensor:
    """In any order but for the channels, which stand side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_heads_inner(like: Tensor) -> Tensor:
    """[b h n c] whose heads stand side by side, as the projections want them."""
    rows, heads, length, width = like.shape
    return like.new_empty(rows, length, heads, width).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[b h n c] as [b n hc]."""
    return x.transpose(1, 2).flatten(2)


def _known(real: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """What of the keys is real as bytes, and how far its rows are apart."""
    if real is None:
        return like, 0
    known = real.contiguous().view(torch.uint8)
    return known, known.stride(0) if len(known) > 1 else 0


def _mixed(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, past: bool, scale: float,
    seed: Tensor | None, share: float,
) -> Tensor:  # fmt: skip
    known, apart = _known(real, q)
    out, rows, heads, drops = empty_heads_inner(q), q.shape[0], q.shape[1], seed is not None
    with device_guard(q):
        _forward[(rows * heads,)](
            q, k, v, known, q if seed is None else seed, out, heads, q.shape[2], k.shape[2],
            scale * LOG2_E, share,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], apart,
            PAST=past, REAL=real is not None, DROPS=drops, **_shape(q, k, drops),
        )  # fmt: skip
    return out


def _write_slopes(
    do: Tensor, given: Three, slopes: Three, real: Tensor | None, past: bool, scale: float,
    seed: Tensor | None, share: float,
) -> None:  # fmt: skip
    """Into those of q, k and v, whose heads stand side by side, in rows alike for k and v."""
    (q, k, v), (dq, dk, dv) = given, slopes
    (known, apart), drops = _known(real, q), seed is not None
    with device_guard(q):
        _backward[(q.shape[0] * q.shape[1],)](
            q, k, v, known, q if seed is None else seed, do, dq, dk, dv,
            q.shape[1], q.shape[2], k.shape[2], scale * LOG2_E, scale, share,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], apart, *do.stride()[:3],
            dq.stride(0), dq.stride(2), dk.stride(0), dk.stride(2),
            PAST=past, REAL=real is not None, DROPS=drops, **_shape(q, k, drops),
        )  # fmt: skip


@torch.library.custom_op("manyheads::short_attention", mutates_args=())
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, past: bool, scale: float,
    seed: Tensor | None, share: float,
) -> Tensor:  # fmt: skip
    """q [b h t c], k and v [b h s c] of so few places that all pairs are held at once, real [b s]
    or [1 s]; with a seed [1], that share of the weights is dropped.
    """
    return _mixed(_read(q), _read(k), _read(v), real, past, scale, seed, share)


@torch.library.custom_op("manyheads::short_attention_backward", mutates_args=())
def short_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, past: bool, scale: float,
    seed: Tensor | None, share: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    given, slopes = (
        (_read(q), _read(k), _read(v)),
        (
            empty_heads_inner(q),
            empty_heads_inner(k),
            empty_heads_inner(v),
        ),
    )
    _write_slopes(_read(do), given, slopes, real, past, scale, seed, share)
    return slopes


def _heads_of(x: Tensor, memory: Tensor | None, heads: int) -> Three:
    """q, k and v: all of x [b t 3hc], or q of x [b t hc] and the others of memory [b s 2hc]."""
    whole = (x,) if memory is None else (x, memory)
    width = x.shape[-1] // (3 * heads if memory is None else heads)
    parts = [part for one in whole for part in one.unflatten(-1, (-1, heads, width)).unbind(2)]
    q, k, v = (part.transpose(1, 2) for part in parts)
    return q, k, v


@torch.library.custom_op("manyheads::short_projected", mutates_args=())
def short_projected(
    x: Tensor, memory: Tensor | None, heads: int, real: Tensor | None, past: bool, scale: float,
    seed: Tensor | None, share: float,
) -> Tensor:  # fmt: skip
    """[b t hc] of what was projected: x [b t 3hc], or x [b t hc] and memory [b s 2hc]."""
    x, memory = _read(x), None if memory is None else _read(memory)
    return merge_heads(_mixed(*_heads_of(x, memory, heads), real, past, scale, seed, share))


@torch.library.custom_op("manyheads::short_projected_backward", mutates_args=())
def short_projected_backward(
    do: Tensor, x: Tensor, memory: Tensor | None, heads: int, real: Tensor | None, past: bool,
    scale: float, seed: Tensor | None, share: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and of memory (empty where there is none)."""
    x, memory = _read(x), None if memory is None else _read(memory)
    dx, dm = _like(x), None if memory is None else _like(memory)
    direction = _read(do.unflatten(-1, (heads, -1)).transpose(1, 2))
    given, slopes = _heads_of(x, memory, heads), _heads_of(dx, dm, heads)
    _write_slopes(direction, given, slopes, real, past, scale, seed, share)
    return dx, x.new_empty(0) if dm is None else dm


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@short_attention.register_fake
def _(q, k, v, real, past, scale, seed, share):
    return empty_heads_inner(q)


@short_attention_backward.register_fake
def _(do, q, k, v, real, past, scale, seed, share):
    return empty_heads_inner(q), empty_heads_inner(k), empty_heads_inner(v)


@short_projected.register_fake
def _(x, memory, heads, real, past, scale, seed, share):
    return x.new_empty(*x.shape[:2], x.shape[2] // 3 if memory is None else x.shape[2])


@short_projected_backward.register_fake
def _(do, x, memory, heads, real, past, scale, seed, share):
    return _like(x), x.new_empty(0) if memory is None else _like(memory)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """q, k and v, or what was projected, and how they were mixed: all that comes in."""
    ctx.given = tuple(None if isinstance(one, Tensor) else one for one in inputs)
    ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in inputs))


def _given(ctx: Any) -> list[Any]:
    pairs = zip(ctx.saved_tensors, ctx.given, strict=True)
    return [other if one is None else one for one, other in pairs]


def _slopes(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    return *short_attention_backward(do, *_given(ctx)), *[None] * 5


def _slopes_projected(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    given = _given(ctx)
    dx, dm = short_projected_backward(do, *given)
    return dx, None if given[1] is None else dm, *[None] * 6


short_attention.register_autograd(_slopes, setup_context=_keep)
short_projected.register_autograd(_slopes_projected, setup_context=_keep)


def dropped_by(q: Tensor, k: Tensor, seed: Tensor, share: float) -> Tensor:
    """m [b h t s]: mixed are rows of which each has a one of its own."""
    rows, heads, length, width = k.shape
    ones = torch.eye(length, -(-length // width) * width, device=k.device, dtype=k.dtype)
    found = [
        short_attention(q, k, one.expand(rows, heads, -1, -1), None, False, 0.0, seed, share)
        for one in ones.split(width, -1)
    ]
    return (torch.cat(found, -1)[..., :length] != 0).double() / (1 - share)


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel gives for some numbers, and what is right: in the smallest blocks, and where
    it needs most room.
    """
    return [pair for q, k, v, to in _drawn(device) for pair in _tried(q, k, v, to, None, 0.0)]


def selftest_dropout(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The same where weights are dropped, which takes more room."""
    seed, share, pairs = torch.ones(1, dtype=torch.int64, device=device), 0.25, []
    for q, k, v, direction in _drawn(device):
        kept_ones = (dropped_by(q, k, seed, share) > 0).double().mean()
        if not (kept_ones - 1 + share).abs() < 0.05:
            raise ValueError(f"{1 - kept_ones:.2f} is dropped instead of {share}")
        pairs += _tried(q, k, v, direction, seed, share)
    return pairs


def _drawn(device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """q, k, v and a direction, of each size."""
    given = torch.Generator(device).manual_seed(1)
    for length, width in (
        (14, 32),
        (20, 16),
        *((n, c) for c, n in SHORT_LENGTHS.items() if c >= 64),
    ):
        shape = (4, 2, 2, length, width)
        yield torch.randn(shape, generator=given, device=device, dtype=torch.bfloat16).unbind()


def _tried(
    q: Tensor, k: Tensor, v: Tensor, direction: Tensor, seed: Tensor | None, share: float
) -> list[tuple[Tensor, Tensor]]:
    """Both forms, of two texts, one of them padded."""
    length, width = q.shape[2:]
    scale, drawn = width**-0.5, (seed, share)
    real = torch.arange(length, device=q.device) < torch.tensor([[length], [13]], device=q.device)
    seen = real[:, None, None] & torch.ones_like(real[0]).expand(length, -1).tril()
    mask = torch.ones((), device=q.device) if seed is None else dropped_by(q, k, seed, share)
    rough = [x.clone().requires_grad_() for x in (q, k, v)]
    found = short_attention(*rough, real, True, scale, *drawn)
    slopes = torch.autograd.grad(found, rough, direction)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = (exact[0] @ exact[1].mT * scale).masked_fill(~seen, -torch.inf)
    wanted = (scores.softmax(-1) * mask) @ exact[2]
    expected = torch.autograd.grad(wanted, exact, direction.double())
    whole = torch.cat([merge_heads(x) for x in (q, k, v)], -1).requires_grad_()
    mixed = short_projected(whole, None, 2, real, True, scale, *drawn)
    [slope] = torch.autograd.grad(mixed, whole, merge_heads(direction))
    joined = torch.cat([merge_heads(x) for x in expected], -1)
    return [
        (found, wanted),
        *zip(slopes, expected, strict=True),
        (mixed, merge_heads(wanted)),
        (slope, joined),
    ]
