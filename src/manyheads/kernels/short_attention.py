# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Exact attention over short sequences: one small program per sequence and head.

    P = softmax(q kᵀ · scale),  o = (P ∘ m) v,    dP = do vᵀ ∘ m,  dS = P ∘ (dP − Σ P ∘ dP) · scale,
    dq = dS k,  dk = dSᵀ q,  dv = (P ∘ m)ᵀ do,    m: 1, or with dropout 0 or 1 / (1 − p)

Kernels for long sequences loop over blocks of keys. A sentence of thirty words fills a quarter of
such a block, and a thousand sentences then wait for each other. Here all pairs of a head fit into
the registers of a few warps: nothing is recomputed block by block, only q, k and v are saved for
the backward pass, and the padding mask is applied inside.

`short_attention` takes heads of any strides; `short_projected` takes the projection [q k v] (or q
and [k v]) in its memory layout. It writes the gradients in the same layout, which saves a pass.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import (
    LOG2_E,
    contiguous_channels,
    device_guard,
    load_rows,
    store_rows,
)

PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass the tests of the authors of Philox 4×32

Parts = tuple[Tensor, Tensor | None, Tensor | None]


@triton.jit
def _weights(
    q, k, padding_mask, at_q, at_k, keys, scale, CAUSAL: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Softmax over the unmasked keys, zeros if all are masked; `scale` includes log₂ e."""
    s = tl.dot(q, tl.trans(k)) * scale
    allowed = at_k[None, :] < keys
    if CAUSAL:
        allowed = allowed & (at_k[None, :] <= at_q[:, None])
    if PADDED:
        is_real = tl.load(padding_mask + at_k, mask=at_k < keys, other=0)
        allowed = allowed & (is_real[None, :] != 0)
    s = tl.where(allowed, s, -1e30)
    p = tl.where(allowed, tl.exp2(s - tl.max(s, 1)[:, None]), 0.0)
    total = tl.sum(p, 1)
    return p / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _dropout_scale(SEED, rows, p, D: tl.constexpr):
    """1 / (1 − p) where an element is kept, 0 where it is dropped: D columns of these rows.

    The mask is a function of a seed and of the element's index (Philox). The forward and the
    backward pass compute the same mask, so none is stored.
    """
    quarter = tl.arange(0, D // 4)
    counters = rows[:, None] * (D // 4) + quarter[None, :]
    a, b, c, d = tl.randint4x(tl.load(SEED), counters, PHILOX_ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows.shape[0], D)
    # The upper 24 bits, which float32 holds exactly.
    uniform = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216)
    return tl.where(uniform >= p, 1.0 / (1.0 - p), 0.0)


# These sizes change from batch to batch and must not cause a recompilation.
@triton.jit(do_not_specialize=["queries", "keys", "mask_row"])
def _forward(
    Q, K, V, MASK, SEED, OUT, heads, queries, keys, scale, dropout_p,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, mask_row,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    at_q, at_k = tl.arange(0, M), tl.arange(0, N)
    q = load_rows(Q + row * q_row + head * q_head, at_q, q_step, queries, D)
    k = load_rows(K + row * k_row + head * k_head, at_k, k_step, keys, D)
    v = load_rows(V + row * v_row + head * v_head, at_k, v_step, keys, D)
    p = _weights(q, k, MASK + row * mask_row, at_q, at_k, keys, scale, CAUSAL, PADDED)
    if DROPS:
        p = p * _dropout_scale(SEED, tl.program_id(0) * M + at_q, dropout_p, N)
    o = tl.dot(p.to(v.dtype), v)
    out = OUT + row * queries * heads * D + head * D
    store_rows(out, at_q, heads * D, queries, o, D)


@triton.jit(do_not_specialize=["queries", "keys", "mask_row", "dq_row", "dk_row"])
def _backward(
    Q, K, V, MASK, SEED, DO, DQ, DK, DV, heads, queries, keys, scale, grad_scale, dropout_p,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, mask_row,
    o_row, o_head, o_step, dq_row, dq_step, dk_row, dk_step,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    at_q, at_k = tl.arange(0, M), tl.arange(0, N)
    q = load_rows(Q + row * q_row + head * q_head, at_q, q_step, queries, D)
    k = load_rows(K + row * k_row + head * k_head, at_k, k_step, keys, D)
    v = load_rows(V + row * v_row + head * v_head, at_k, v_step, keys, D)
    do = load_rows(DO + row * o_row + head * o_head, at_q, o_step, queries, D)
    p = _weights(q, k, MASK + row * mask_row, at_q, at_k, keys, scale, CAUSAL, PADDED)
    dp = tl.dot(do, tl.trans(v))
    dropped = p
    if DROPS:
        mask = _dropout_scale(SEED, tl.program_id(0) * M + at_q, dropout_p, N)
        dropped = p * mask
        dp = dp * mask
    dv = tl.dot(tl.trans(dropped.to(do.dtype)), do)
    store_rows(DV + row * dk_row + head * D, at_k, dk_step, keys, dv, D)
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * grad_scale).to(q.dtype)
    store_rows(DQ + row * dq_row + head * D, at_q, dq_step, queries, tl.dot(ds, k), D)
    dk = tl.dot(tl.trans(ds), q)
    store_rows(DK + row * dk_row + head * D, at_k, dk_step, keys, dk, D)


def _blocks(q: Tensor, k: Tensor, drops: bool) -> dict[str, int]:
    """Block sizes and warps.

    With dropout, products over 16 positions are computed wrongly (Triton 3.6, H200): use 32.
    """
    m, n = (max(32 if drops else 16, triton.next_power_of_2(x.shape[2])) for x in (q, k))
    warps = 2 if m * n <= 32 * 32 else 4 if m * n <= 64 * 64 else 8
    return {"M": m, "N": n, "D": q.shape[3], "num_warps": warps}


def _mask_bytes(padding_mask: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """The padding mask as bytes, and the stride of its rows."""
    if padding_mask is None:
        return like, 0
    mask = padding_mask.contiguous().view(torch.uint8)
    return mask, mask.stride(0) if len(mask) > 1 else 0


def _split(parts: Parts, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [b h n c] of tensors [b n m c] that hold them one after another."""
    tensors = [part for part in parts if part is not None]
    q, k, v = (x.transpose(1, 2) for part in tensors for x in part.split(heads, 2))
    return q, k, v


def _map(f: Callable[[Tensor], Tensor], parts: Parts) -> Parts:
    first, second, third = (None if part is None else f(part) for part in parts)
    assert first is not None
    return first, second, third


def _empty_contiguous(like: Tensor) -> Tensor:
    """An empty tensor of the same shape, contiguous whatever the strides of the other."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


@torch.library.custom_op("manyheads::short_attention", mutates_args=())
def attend_parts(
    a: Tensor, b: Tensor | None, c: Tensor | None, heads: int, padding_mask: Tensor | None,
    causal: bool, scale: float, seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """[b t h c] of [q k v], of q and [k v], or of q, k and v, each [b n m c]."""
    q, k, v = _split(_map(contiguous_channels, (a, b, c)), heads)
    rows, _, queries, width = q.shape
    out, drops = q.new_empty(rows, queries, heads, width), seed is not None
    mask, mask_stride = _mask_bytes(padding_mask, q)
    with device_guard(q):
        _forward[(rows * heads,)](
            q, k, v, mask, q if seed is None else seed, out, heads, queries, k.shape[2],
            scale * LOG2_E, p,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask_stride,
            CAUSAL=causal, PADDED=padding_mask is not None, DROPS=drops, **_blocks(q, k, drops),
        )  # fmt: skip
    return out


@torch.library.custom_op("manyheads::short_attention_backward", mutates_args=())
def attend_parts_backward(
    do: Tensor, a: Tensor, b: Tensor | None, c: Tensor | None, heads: int,
    padding_mask: Tensor | None, causal: bool, scale: float, seed: Tensor | None, p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of a, b and c, in their layout; empty for those that are None."""
    q, k, v = _split(_map(contiguous_channels, (a, b, c)), heads)
    grads, drops = _map(_empty_contiguous, (a, b, c)), seed is not None
    dq, dk, dv = _split(grads, heads)
    do = contiguous_channels(do.transpose(1, 2))
    mask, mask_stride = _mask_bytes(padding_mask, q)
    with device_guard(q):
        _backward[(q.shape[0] * heads,)](
            q, k, v, mask, q if seed is None else seed, do, dq, dk, dv,
            heads, q.shape[2], k.shape[2], scale * LOG2_E, scale, p,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask_stride, *do.stride()[:3],
            dq.stride(0), dq.stride(2), dk.stride(0), dk.stride(2),
            CAUSAL=causal, PADDED=padding_mask is not None, DROPS=drops, **_blocks(q, k, drops),
        )  # fmt: skip
    return _or_empty(grads)


def _or_empty(parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """Operators return no None."""
    a, b, c = (parts[0].new_empty(0) if part is None else part for part in parts)
    return a, b, c


@attend_parts.register_fake
def _(a, b, c, heads, padding_mask, causal, scale, seed, p):
    return a.new_empty(*a.shape[:2], heads, a.shape[3])


@attend_parts_backward.register_fake
def _(do, a, b, c, heads, padding_mask, causal, scale, seed, p):
    return _or_empty(_map(_empty_contiguous, (a, b, c)))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, c, ctx.heads, padding_mask, ctx.causal, ctx.scale, seed, ctx.p = inputs
    ctx.save_for_backward(a, b, c, padding_mask, seed)


def _autograd_backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    a, b, c, padding_mask, seed = ctx.saved_tensors
    grads = attend_parts_backward(
        do, a, b, c, ctx.heads, padding_mask, ctx.causal, ctx.scale, seed, ctx.p
    )
    given = [None if part is None else d for part, d in zip((a, b, c), grads, strict=True)]
    return *given, *[None] * 6


attend_parts.register_autograd(_autograd_backward, setup_context=_setup_context)


def short_attention(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
    """q [b h t c], k and v [b h s c] of at most SHORT_LENGTHS positions.

    Settings: padding_mask [b s] or [1 s], true at real keys; causal; scale; seed [1] on the device,
    or None for no dropout; dropout probability.
    """
    parts = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = attend_parts(*parts, q.shape[1], *settings)
    return out.transpose(1, 2)


def short_projected(x: Tensor, memory: Tensor | None, heads: int, *settings: Any) -> Tensor:
    """[b t hc] of the projections x [b t 3hc], or x [b t hc] and memory [b s 2hc]."""
    width = x.shape[-1] // (3 * heads if memory is None else heads)
    a, b, _ = _map(lambda part: part.unflatten(-1, (-1, width)), (x, memory, None))
    out: Tensor = attend_parts(a, b, None, heads, *settings)
    return out.flatten(2)
