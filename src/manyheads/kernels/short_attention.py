# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Exact attention over short sequences: one small program per sequence and head.

    P = softmax(q kᵀ · scale),  o = (P ∘ m) v,    dP = do vᵀ ∘ m,  dS = P ∘ (dP − Σ P ∘ dP) · scale,
    dq = dS k,  dk = dSᵀ q,  dv = (P ∘ m)ᵀ do,    m: 1, or with dropout 0 or 1 / (1 − p)

Kernels for long sequences loop over blocks of keys. A sentence of thirty words fills a quarter of
such a block, and a thousand sentences then wait for each other. Here all pairs of a head fit into
the registers of a few warps: nothing is recomputed block by block, only q, k and v are saved for
the backward pass, and the padding mask is applied inside.

q, k and v stay in the projection [q k v], or q and [k v], and their gradients are written in the
same layout. With separate tensors, autograd would need another pass to concatenate the gradients.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import (
    LOG2_E,
    device_guard,
    dropout_scale,
    empty_contiguous,
    load_rows,
    store_rows,
)
from manyheads.kernels.selftest import (
    SCALE,
    Comparison,
    Inputs,
    Lengths,
    attention_formula,
    check_dropped,
    compare,
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
    Q, K, V, MASK, SEED, OUT, heads, queries, keys, q_step, kv_step, mask_row, scale, dropout_p,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    at_q, at_k = tl.arange(0, M), tl.arange(0, N)
    first_q, first_k = row * queries * q_step + head * D, row * keys * kv_step + head * D
    q = load_rows(Q + first_q, at_q, q_step, queries, D)
    k = load_rows(K + first_k, at_k, kv_step, keys, D)
    v = load_rows(V + first_k, at_k, kv_step, keys, D)
    p = _weights(q, k, MASK + row * mask_row, at_q, at_k, keys, scale, CAUSAL, PADDED)
    if DROPS:
        p = p * dropout_scale(SEED, tl.program_id(0) * M + at_q, dropout_p, N)
    o = tl.dot(p.to(v.dtype), v)
    store_rows(OUT + row * queries * heads * D + head * D, at_q, heads * D, queries, o, D)


@triton.jit(do_not_specialize=["queries", "keys", "mask_row"])
def _backward(
    Q, K, V, MASK, SEED, DO, DQ, DK, DV,
    heads, queries, keys, q_step, kv_step, mask_row, scale, dropout_p, grad_scale,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, DROPS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    at_q, at_k = tl.arange(0, M), tl.arange(0, N)
    first_q, first_k = row * queries * q_step + head * D, row * keys * kv_step + head * D
    q = load_rows(Q + first_q, at_q, q_step, queries, D)
    k = load_rows(K + first_k, at_k, kv_step, keys, D)
    v = load_rows(V + first_k, at_k, kv_step, keys, D)
    do = load_rows(DO + row * queries * heads * D + head * D, at_q, heads * D, queries, D)
    p = _weights(q, k, MASK + row * mask_row, at_q, at_k, keys, scale, CAUSAL, PADDED)
    dp = tl.dot(do, tl.trans(v))
    dropped = p
    if DROPS:
        mask = dropout_scale(SEED, tl.program_id(0) * M + at_q, dropout_p, N)
        dropped = p * mask
        dp = dp * mask
    dv = tl.dot(tl.trans(dropped.to(do.dtype)), do)
    store_rows(DV + first_k, at_k, kv_step, keys, dv, D)
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * grad_scale).to(q.dtype)
    store_rows(DQ + first_q, at_q, q_step, queries, tl.dot(ds, k), D)
    store_rows(DK + first_k, at_k, kv_step, keys, tl.dot(tl.trans(ds), q), D)


def _split(x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of the projections."""
    q, k, v = x.chunk(3, -1) if memory is None else (x, *memory.chunk(2, -1))
    return q, k, v


def _arguments(
    x: Tensor, memory: Tensor | None, heads: int, padding_mask: Tensor | None, causal: bool,
    scale: float, seed: Tensor | None, p: float,
) -> tuple[list[Tensor], list[Any], dict[str, Any]]:  # fmt: skip
    """Inputs, numbers and constants of both kernels; x and memory are contiguous."""
    q, k, v = _split(x, memory)
    queries, keys, drops = q.shape[1], k.shape[1], seed is not None
    mask, mask_row = q, 0
    if padding_mask is not None:
        mask = padding_mask.contiguous().view(torch.uint8)
        mask_row = keys if len(mask) > 1 else 0
    # With dropout, products over 16 positions are computed wrongly (Triton 3.6, H200): use 32.
    m, n = (max(32 if drops else 16, triton.next_power_of_2(size)) for size in (queries, keys))
    steps = x.shape[-1], (x if memory is None else memory).shape[-1]
    numbers = [heads, queries, keys, *steps, mask_row, scale * LOG2_E, p]
    constants = {
        "CAUSAL": causal,
        "PADDED": padding_mask is not None,
        "DROPS": drops,
        "D": q.shape[-1] // heads,
        "M": m,
        "N": n,
        "num_warps": 2 if m * n <= 32 * 32 else 4 if m * n <= 64 * 64 else 8,
    }
    return [q, k, v, mask, q if seed is None else seed], numbers, constants


@torch.library.custom_op("manyheads::short_attention", mutates_args=())
def short_attention(
    x: Tensor, memory: Tensor | None, heads: int, padding_mask: Tensor | None, causal: bool,
    scale: float, seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """[b t hc] of the projections x [b t 3hc], or x [b t hc] and memory [b s 2hc].

    `padding_mask` [b s] or [1 s] is True at real keys; `seed` [1] is on the device; None turns off
    dropout with probability p.
    """
    x, memory = x.contiguous(), None if memory is None else memory.contiguous()
    inputs, numbers, constants = _arguments(x, memory, heads, padding_mask, causal, scale, seed, p)
    out = empty_contiguous(inputs[0])
    with device_guard(x):
        _forward[(len(x) * heads,)](*inputs, out, *numbers, **constants)
    return out


@torch.library.custom_op("manyheads::short_attention_backward", mutates_args=())
def short_attention_backward(
    do: Tensor, x: Tensor, memory: Tensor | None, heads: int, padding_mask: Tensor | None,
    causal: bool, scale: float, seed: Tensor | None, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and memory; the second is empty without memory."""
    x, memory = x.contiguous(), None if memory is None else memory.contiguous()
    inputs, numbers, constants = _arguments(x, memory, heads, padding_mask, causal, scale, seed, p)
    dx, dmemory = _empty_grads(x, memory)
    grads = _split(dx, None if memory is None else dmemory)
    with device_guard(x):
        _backward[(len(x) * heads,)](*inputs, do.contiguous(), *grads, *numbers, scale, **constants)
    return dx, dmemory


def _empty_grads(x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    """Uninitialised gradients; an empty tensor for no memory, as operators cannot return None."""
    return empty_contiguous(x), x.new_empty(0) if memory is None else empty_contiguous(memory)


@short_attention.register_fake
def _(x, memory, heads, padding_mask, causal, scale, seed, p):
    return x.new_empty(*x.shape[:2], x.shape[2] // (3 if memory is None else 1))


@short_attention_backward.register_fake
def _(do, x, memory, heads, padding_mask, causal, scale, seed, p):
    return _empty_grads(x, memory)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, memory, ctx.heads, padding_mask, ctx.causal, ctx.scale, seed, ctx.p = inputs
    ctx.save_for_backward(x, memory, padding_mask, seed)


def _differentiate(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    x, memory, padding_mask, seed = ctx.saved_tensors
    dx, dmemory = short_attention_backward(
        do, x, memory, ctx.heads, padding_mask, ctx.causal, ctx.scale, seed, ctx.p
    )
    return dx, None if memory is None else dmemory, *[None] * 6


short_attention.register_autograd(_differentiate, setup_context=_setup_context)


def dropout_mask(x: Tensor, keys: Tensor, seed: Tensor, p: float) -> Tensor:
    """The kernel's dropout mask [b 2 t s] for two heads.

    With scale 0 the weights are uniform, and with unit vectors as values the output is P ∘ m.
    """
    length, width = keys.shape[1], keys.shape[2] // 2
    units = torch.eye(length, -(-length // width) * width, device=x.device, dtype=x.dtype)
    weights = []
    for unit in units.split(width, -1):
        memory = torch.cat([keys, unit.repeat(1, 2).expand(len(keys), -1, -1)], -1)
        out = short_attention(x, memory, 2, None, False, 0.0, seed, p)
        weights.append(out.unflatten(-1, (2, -1)).transpose(1, 2))
    return (torch.cat(weights, -1)[..., :length] != 0).double() / (1 - p)


def case(
    new: Inputs, queries: int, keys: int, width: int, causal: bool, lengths: Lengths, p: float
) -> Iterator[Comparison]:
    """Self-test with two heads: on q and [k v], and on [q k v] if queries = keys."""
    x, memory = new.randn((2, queries, 2 * width), (2, keys, 4 * width))
    padding_mask, allowed = new.masks(queries, keys, causal, lengths)
    dropout, seed = torch.ones((), device=new.device), None
    if p:
        seed = torch.ones(1, dtype=torch.int64, device=new.device)
        dropout = dropout_mask(x, memory.chunk(2, -1)[0], seed, p)
        check_dropped(dropout, p)

    def kernel(x: Tensor, memory: Tensor | None = None) -> Any:
        return short_attention(x, memory, 2, padding_mask, causal, SCALE, seed, p)

    def formula(x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in _split(x, memory))
        out = attention_formula(q, k, v, allowed, dropout=dropout)
        return out.transpose(1, 2).flatten(2)

    yield from compare(kernel, formula, (x, memory))
    if queries == keys:
        yield from compare(kernel, formula, (torch.cat([x, memory], -1),))


SELFTEST = [
    (queries, queries, width, True, (queries, 13), p)
    for queries, width in ((14, 32), (20, 16), (128, 64), (64, 128))
    for p in (0.0, 0.25)
]
