# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Exact attention over short sequences: one small program per sequence and head.

    P = softmax(q kᵀ · scale),  o = (P ∘ m) v,    dP = do vᵀ ∘ m,  dS = P ∘ (dP − Σ P ∘ dP) · scale,
    dq = dS k,  dk = dSᵀ q,  dv = (P ∘ m)ᵀ do,    m: 1, or with dropout 0 or 1 / (1 − p)

Kernels for long sequences loop over blocks of keys. A sentence of thirty words fills a quarter of
such a block, and a thousand sentences then wait for each other. Here all pairs of a head fit into
the registers of a few warps: nothing is recomputed block by block, only q, k and v are saved for
the backward pass, and the padding mask is applied inside.

`short_attention` takes heads of any strides; `short_projected` takes the projection [q k v] (or q
and [k v]) as it lies in memory. It writes the gradients in the same layout, which saves a pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import (
    LOG2_E,
    contiguous_channels,
    device_guard,
    dropout_scale,
    empty_contiguous,
    empty_heads_inner,
    merge_heads,
)

Qkv = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _load_rows(x, positions, step, n, D: tl.constexpr):
    """Rows of a matrix of n rows, zero past its end."""
    channels = tl.arange(0, D)
    return tl.load(
        x + positions[:, None] * step + channels[None, :], mask=positions[:, None] < n, other=0.0
    )


@triton.jit
def _store_rows(x, positions, step, n, values, D: tl.constexpr):
    channels = tl.arange(0, D)
    tl.store(
        x + positions[:, None] * step + channels[None, :],
        values.to(x.dtype.element_ty),
        mask=positions[:, None] < n,
    )


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
    q = _load_rows(Q + row * q_row + head * q_head, at_q, q_step, queries, D)
    k = _load_rows(K + row * k_row + head * k_head, at_k, k_step, keys, D)
    v = _load_rows(V + row * v_row + head * v_head, at_k, v_step, keys, D)
    p = _weights(q, k, MASK + row * mask_row, at_q, at_k, keys, scale, CAUSAL, PADDED)
    if DROPS:
        p = p * dropout_scale(SEED, tl.program_id(0) * M + at_q, dropout_p, N)
    o = tl.dot(p.to(v.dtype), v)
    out = OUT + row * queries * heads * D + head * D
    _store_rows(out, at_q, heads * D, queries, o, D)


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
    q = _load_rows(Q + row * q_row + head * q_head, at_q, q_step, queries, D)
    k = _load_rows(K + row * k_row + head * k_head, at_k, k_step, keys, D)
    v = _load_rows(V + row * v_row + head * v_head, at_k, v_step, keys, D)
    do = _load_rows(DO + row * o_row + head * o_head, at_q, o_step, queries, D)
    p = _weights(q, k, MASK + row * mask_row, at_q, at_k, keys, scale, CAUSAL, PADDED)
    dp = tl.dot(do, tl.trans(v))
    dropped = p
    if DROPS:
        mask = dropout_scale(SEED, tl.program_id(0) * M + at_q, dropout_p, N)
        dropped = p * mask
        dp = dp * mask
    dv = tl.dot(tl.trans(dropped.to(do.dtype)), do)
    _store_rows(DV + row * dk_row + head * D, at_k, dk_step, keys, dv, D)
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * grad_scale).to(q.dtype)
    _store_rows(DQ + row * dq_row + head * D, at_q, dq_step, queries, tl.dot(ds, k), D)
    dk = tl.dot(tl.trans(ds), q)
    _store_rows(DK + row * dk_row + head * D, at_k, dk_step, keys, dk, D)


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


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, causal: bool, scale: float,
    seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    mask, mask_stride = _mask_bytes(padding_mask, q)
    out, rows, heads, drops = empty_heads_inner(q), q.shape[0], q.shape[1], seed is not None
    with device_guard(q):
        _forward[(rows * heads,)](
            q, k, v, mask, q if seed is None else seed, out, heads, q.shape[2], k.shape[2],
            scale * LOG2_E, p,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask_stride,
            CAUSAL=causal, PADDED=padding_mask is not None, DROPS=drops, **_blocks(q, k, drops),
        )  # fmt: skip
    return out


def _run_backward(
    do: Tensor, qkv: Qkv, grads: Qkv, padding_mask: Tensor | None, causal: bool, scale: float,
    seed: Tensor | None, p: float,
) -> None:  # fmt: skip
    """Write the gradients; heads lie next to each other, and dk and dv have the same strides."""
    (q, k, v), (dq, dk, dv) = qkv, grads
    (mask, mask_stride), drops = _mask_bytes(padding_mask, q), seed is not None
    with device_guard(q):
        _backward[(q.shape[0] * q.shape[1],)](
            q, k, v, mask, q if seed is None else seed, do, dq, dk, dv,
            q.shape[1], q.shape[2], k.shape[2], scale * LOG2_E, scale, p,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask_stride, *do.stride()[:3],
            dq.stride(0), dq.stride(2), dk.stride(0), dk.stride(2),
            CAUSAL=causal, PADDED=padding_mask is not None, DROPS=drops, **_blocks(q, k, drops),
        )  # fmt: skip


@torch.library.custom_op("manyheads::short_attention", mutates_args=())
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, causal: bool, scale: float,
    seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """q [b h t c], k and v [b h s c] of at most SHORT_LENGTHS positions; no dropout without a seed.

    padding_mask [b s] or [1 s] is true at real keys; seed [1] is on the device.
    """
    q, k, v = contiguous_channels(q), contiguous_channels(k), contiguous_channels(v)
    return _run_forward(q, k, v, padding_mask, causal, scale, seed, p)


@torch.library.custom_op("manyheads::short_attention_backward", mutates_args=())
def short_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, causal: bool,
    scale: float, seed: Tensor | None, p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    qkv = contiguous_channels(q), contiguous_channels(k), contiguous_channels(v)
    grads = empty_heads_inner(q), empty_heads_inner(k), empty_heads_inner(v)
    _run_backward(contiguous_channels(do), qkv, grads, padding_mask, causal, scale, seed, p)
    return grads


def _split_heads(x: Tensor, memory: Tensor | None, heads: int) -> Qkv:
    """q, k and v: of x [b t 3hc], or q of x [b t hc] and k, v of memory [b s 2hc]."""
    projections = (x,) if memory is None else (x, memory)
    width = x.shape[-1] // (3 * heads if memory is None else heads)
    parts = [part for y in projections for part in y.unflatten(-1, (-1, heads, width)).unbind(2)]
    q, k, v = (part.transpose(1, 2) for part in parts)
    return q, k, v


@torch.library.custom_op("manyheads::short_projected", mutates_args=())
def short_projected(
    x: Tensor, memory: Tensor | None, heads: int, padding_mask: Tensor | None, causal: bool,
    scale: float, seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """[b t hc] of the projections x [b t 3hc], or x [b t hc] and memory [b s 2hc]."""
    x, memory = contiguous_channels(x), None if memory is None else contiguous_channels(memory)
    return merge_heads(
        _run_forward(*_split_heads(x, memory, heads), padding_mask, causal, scale, seed, p)
    )


@torch.library.custom_op("manyheads::short_projected_backward", mutates_args=())
def short_projected_backward(
    do: Tensor, x: Tensor, memory: Tensor | None, heads: int, padding_mask: Tensor | None,
    causal: bool, scale: float, seed: Tensor | None, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and of memory (empty if there is none)."""
    x, memory = contiguous_channels(x), None if memory is None else contiguous_channels(memory)
    dx, dm = empty_contiguous(x), None if memory is None else empty_contiguous(memory)
    do = contiguous_channels(do.unflatten(-1, (heads, -1)).transpose(1, 2))
    qkv, grads = _split_heads(x, memory, heads), _split_heads(dx, dm, heads)
    _run_backward(do, qkv, grads, padding_mask, causal, scale, seed, p)
    return dx, x.new_empty(0) if dm is None else dm


@short_attention.register_fake
def _(q, k, v, padding_mask, causal, scale, seed, p):
    return empty_heads_inner(q)


@short_attention_backward.register_fake
def _(do, q, k, v, padding_mask, causal, scale, seed, p):
    return empty_heads_inner(q), empty_heads_inner(k), empty_heads_inner(v)


@short_projected.register_fake
def _(x, memory, heads, padding_mask, causal, scale, seed, p):
    return x.new_empty(*x.shape[:2], x.shape[2] // 3 if memory is None else x.shape[2])


@short_projected_backward.register_fake
def _(do, x, memory, heads, padding_mask, causal, scale, seed, p):
    return empty_contiguous(x), x.new_empty(0) if memory is None else empty_contiguous(memory)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save all inputs and nothing else."""
    ctx.settings = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))


def _inputs(ctx: Any) -> list[Any]:
    pairs = zip(ctx.saved_tensors, ctx.settings, strict=True)
    return [setting if tensor is None else tensor for tensor, setting in pairs]


def _autograd_backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    return *short_attention_backward(do, *_inputs(ctx)), *[None] * 5


def _autograd_backward_projected(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    inputs = _inputs(ctx)
    dx, dm = short_projected_backward(do, *inputs)
    return dx, None if inputs[1] is None else dm, *[None] * 6


short_attention.register_autograd(_autograd_backward, setup_context=_setup_context)
short_projected.register_autograd(_autograd_backward_projected, setup_context=_setup_context)
