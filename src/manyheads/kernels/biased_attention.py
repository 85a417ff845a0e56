# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Exact attention with a bias that depends on the distance, computed inside the kernel.

    o_i = Σ_j softmax_j(q_i · k_j · scale + bias_h[j − i]) v_j

T5's buckets and ALiBi are such biases. PyTorch's fused kernels take a bias only as an n × n matrix;
here each block of pairs reads its distances from a table of 2n − 1 numbers per head, so memory
stays linear. The gradient of the table is the sum of dS along each diagonal. Blocks on one block
diagonal have the same distances, so one program sums dS over all of them, and only that sum is
split by distance. The rest is FlashAttention (nn/tiled.py has it in PyTorch).
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyheads.kernels.common import LOG2_E, device_guard, load_rows, store_rows
from manyheads.kernels.selftest import (
    SCALE,
    Comparison,
    Inputs,
    Lengths,
    attention_formula,
    compare,
)


@triton.jit
def _scores(
    q, k, table, key_mask, at_m, at_n, n, scale,
    DIAGONAL: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Scores of a block of queries and a block of keys in units of log 2, −∞ where masked.

    ALIGNED: no block goes past the end. DIAGONAL: the block is on a causal mask's diagonal.
    """
    index = at_n[None, :] - at_m[:, None] + (n - 1)
    if ALIGNED:
        s = tl.dot(q, tl.trans(k)) * scale + tl.load(table + index)
    else:
        inside = (at_m[:, None] < n) & (at_n[None, :] < n)
        s = tl.dot(q, tl.trans(k)) * scale + tl.load(table + index, mask=inside, other=0.0)
        s = tl.where(inside, s, float("-inf"))
    if DIAGONAL:
        s = tl.where(at_n[None, :] <= at_m[:, None], s, float("-inf"))
    if PADDED:
        is_real = tl.load(key_mask + at_n, mask=at_n < n, other=0)
        s = tl.where(is_real[None, :] != 0, s, float("-inf"))
    return s


@triton.jit
def _forward(
    Q, K, V, BIAS, KEY_MASK, OUT, LSE, n, heads, scale,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0) % tl.cdiv(n, M), tl.program_id(0) // tl.cdiv(n, M)
    offset = row.to(tl.int64) * n * D
    table = BIAS + (row % heads).to(tl.int64) * (2 * n - 1)
    key_mask = KEY_MASK + (row // heads).to(tl.int64) * n
    at_m = block * M + tl.arange(0, M)
    q = load_rows(Q + offset, at_m, D, n, D)
    row_max = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, D], tl.float32)
    middle = block * M // N * N if CAUSAL else n
    for part in tl.static_range(2 if CAUSAL else 1):  # blocks before the diagonal, then on it
        end = tl.minimum(n, (block + 1) * M) if part == 1 else middle
        for first in range(part * middle, end, N):
            at_n = first + tl.arange(0, N)
            k = load_rows(K + offset, at_n, D, n, D)
            s = _scores(q, k, table, key_mask, at_m, at_n, n, scale, part == 1, PADDED, ALIGNED)
            new_max = tl.maximum(row_max, tl.max(s, 1))
            safe = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(s - safe[:, None])
            rescale = tl.exp2(row_max - safe)
            total = total * rescale + tl.sum(p, 1)
            v = load_rows(V + offset, at_n, D, n, D)
            o = o * rescale[:, None] + tl.dot(p.to(v.dtype), v)
            row_max = new_max
    empty = total == 0.0
    o = o / tl.where(empty, 1.0, total)[:, None]
    store_rows(OUT + offset, at_m, D, n, o, D)
    lse = tl.where(empty, float("inf"), row_max + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(LSE + row.to(tl.int64) * n + at_m, lse, mask=at_m < n)


@triton.jit
def _weights_and_grad(
    q, k, v, do, table, key_mask, lse, delta, at_m, at_n, n, scale,
    DIAGONAL: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """P and dS = P ∘ (dO Vᵀ − D) of a block, from the saved log-sum-exp."""
    s = _scores(q, k, table, key_mask, at_m, at_n, n, scale, DIAGONAL, PADDED, ALIGNED)
    p = tl.exp2(s - lse[:, None])
    return p, p * (tl.dot(do, tl.trans(v)) - delta[:, None])


@triton.jit
def _backward_keys(
    Q, K, V, BIAS, KEY_MASK, DO, LSE, DELTA, DK, DV, n, heads, scale, grad_scale,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0) % tl.cdiv(n, N), tl.program_id(0) // tl.cdiv(n, N)
    offset, stats = row.to(tl.int64) * n * D, row.to(tl.int64) * n
    table = BIAS + (row % heads).to(tl.int64) * (2 * n - 1)
    key_mask = KEY_MASK + (row // heads).to(tl.int64) * n
    at_n = block * N + tl.arange(0, N)
    k, v = load_rows(K + offset, at_n, D, n, D), load_rows(V + offset, at_n, D, n, D)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    middle = tl.minimum(n, ((block + 1) * N + M - 1) // M * M) if CAUSAL else 0
    for part in tl.static_range(2 if CAUSAL else 1):  # blocks after the diagonal, then on it
        start = block * N // M * M if part == 1 else middle
        end = middle if part == 1 else n
        for first in range(start, end, M):
            at_m = first + tl.arange(0, M)
            q, do = load_rows(Q + offset, at_m, D, n, D), load_rows(DO + offset, at_m, D, n, D)
            lse = tl.load(LSE + stats + at_m, mask=at_m < n, other=float("inf"))
            delta = tl.load(DELTA + stats + at_m, mask=at_m < n, other=0.0)
            p, ds = _weights_and_grad(
                q, k, v, do, table, key_mask, lse, delta, at_m, at_n, n, scale,
                part == 1, PADDED, ALIGNED,
            )  # fmt: skip
            dv += tl.dot(tl.trans(p.to(do.dtype)), do)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q)
    store_rows(DK + offset, at_n, D, n, dk * grad_scale, D)
    store_rows(DV + offset, at_n, D, n, dv, D)


@triton.jit
def _backward_queries(
    Q, K, V, BIAS, KEY_MASK, DO, LSE, DELTA, DQ, n, heads, scale, grad_scale,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0) % tl.cdiv(n, M), tl.program_id(0) // tl.cdiv(n, M)
    offset, stats = row.to(tl.int64) * n * D, row.to(tl.int64) * n
    table = BIAS + (row % heads).to(tl.int64) * (2 * n - 1)
    key_mask = KEY_MASK + (row // heads).to(tl.int64) * n
    at_m = block * M + tl.arange(0, M)
    q, do = load_rows(Q + offset, at_m, D, n, D), load_rows(DO + offset, at_m, D, n, D)
    lse = tl.load(LSE + stats + at_m, mask=at_m < n, other=float("inf"))
    delta = tl.load(DELTA + stats + at_m, mask=at_m < n, other=0.0)
    dq = tl.zeros([M, D], tl.float32)
    middle = block * M // N * N if CAUSAL else n
    for part in tl.static_range(2 if CAUSAL else 1):
        end = tl.minimum(n, (block + 1) * M) if part == 1 else middle
        for first in range(part * middle, end, N):
            at_n = first + tl.arange(0, N)
            k, v = load_rows(K + offset, at_n, D, n, D), load_rows(V + offset, at_n, D, n, D)
            _, ds = _weights_and_grad(
                q, k, v, do, table, key_mask, lse, delta, at_m, at_n, n, scale,
                part == 1, PADDED, ALIGNED,
            )  # fmt: skip
            dq += tl.dot(ds.to(k.dtype), k)
    store_rows(DQ + offset, at_m, D, n, dq * grad_scale, D)


@triton.jit
def _backward_bias(
    Q, K, V, BIAS, KEY_MASK, DO, LSE, DELTA, SUMS, n, rows, heads, blocks, scale,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, ALIGNED: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """One program per head and block diagonal: the sum of dS over all its blocks and rows."""
    diagonal, head = tl.program_id(0), tl.program_id(1)
    shift = diagonal - (blocks - 1)
    table = BIAS + head.to(tl.int64) * (2 * n - 1)
    total = tl.zeros([M, M], tl.float32)
    for row in range(rows):
        stats = (row * heads + head).to(tl.int64) * n
        offset, key_mask = stats * D, KEY_MASK + row * n
        for block in range(tl.maximum(0, -shift), tl.minimum(blocks, blocks - shift)):
            at_m = block * M + tl.arange(0, M)
            at_n = (block + shift) * M + tl.arange(0, M)
            q, do = load_rows(Q + offset, at_m, D, n, D), load_rows(DO + offset, at_m, D, n, D)
            k, v = load_rows(K + offset, at_n, D, n, D), load_rows(V + offset, at_n, D, n, D)
            lse = tl.load(LSE + stats + at_m, mask=at_m < n, other=float("inf"))
            delta = tl.load(DELTA + stats + at_m, mask=at_m < n, other=0.0)
            _, ds = _weights_and_grad(
                q, k, v, do, table, key_mask, lse, delta, at_m, at_n, n, scale,
                CAUSAL, PADDED, ALIGNED,
            )  # fmt: skip
            total += ds
    offsets = tl.arange(0, M)
    sums = SUMS + (head * tl.num_programs(0) + diagonal).to(tl.int64) * M * M
    tl.store(sums + offsets[:, None] * M + offsets[None, :], total)


def _sum_by_distance(sums: Tensor, n: int, blocks: int) -> Tensor:
    """[h, block diagonals from the lowest on, M, M] summed along their diagonals: [h, 2n − 1].

    Rows of M written as rows of 2M − 1 begin one element later each, so that the diagonals of a
    block become columns.
    """
    size = sums.shape[-1]
    skewed = F.pad(sums.flip(-2), (0, size)).flatten(-2)[..., : size * (2 * size - 1)]
    by_distance = skewed.unflatten(-1, (size, 2 * size - 1)).sum(-2)
    # Neighbouring block diagonals share distances: the upper half of one, the lower of the next.
    lower, upper = by_distance[..., :size], F.pad(by_distance[..., size:], (0, 1))
    table_grad = (F.pad(lower, (0, 0, 0, 1)) + F.pad(upper, (0, 0, 1, 0))).flatten(-2)
    first = blocks * size - n  # `table_grad` begins at the distance 1 − blocks · M
    return F.pad(table_grad, (0, 2 * blocks * size))[:, first : first + 2 * n - 1]


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        padding_mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        table = (bias.float() * LOG2_E).contiguous()
        rows, heads, n, width = q.shape
        out, lse = torch.empty_like(q), q.new_empty(rows, heads, n, dtype=torch.float32)
        key_bytes = q if padding_mask is None else padding_mask.to(torch.int8).contiguous()
        flags = {
            "CAUSAL": causal,
            "PADDED": padding_mask is not None,
            "ALIGNED": n % 128 == 0,
            "D": width,
        }
        block = FORWARD[width > 64]
        _forward[(triton.cdiv(n, block["M"]) * rows * heads,)](
            q, k, v, table, key_bytes, out, lse, n, heads, scale * LOG2_E, **flags, **block
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, table, key_bytes, out, lse)
        ctx.flags, ctx.scale, ctx.dtype = flags, scale, bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, key_bytes, out, lse = ctx.saved_tensors
        do = grads[0].contiguous()
        rows, heads, n, width = q.shape
        delta = (do.float() * out.float()).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        inputs = (q, k, v, table, key_bytes, do, lse, delta)
        scale, batch_heads = ctx.scale * LOG2_E, rows * heads
        key_blocks, query_blocks = KEYS[width > 64], QUERIES[width > 64]
        _backward_keys[(triton.cdiv(n, key_blocks["N"]) * batch_heads,)](
            *inputs, dk, dv, n, heads, scale, ctx.scale, **ctx.flags, **key_blocks
        )
        _backward_queries[(triton.cdiv(n, query_blocks["M"]) * batch_heads,)](
            *inputs, dq, n, heads, scale, ctx.scale, **ctx.flags, **query_blocks
        )
        dbias = None
        if ctx.needs_input_grad[3]:
            blocks = triton.cdiv(n, BIAS["M"])
            # A causal mask leaves nothing above the main diagonal.
            diagonals = blocks if ctx.flags["CAUSAL"] else 2 * blocks - 1
            sums = table.new_empty(heads, diagonals, BIAS["M"], BIAS["M"])
            _backward_bias[(diagonals, heads)](
                *inputs, sums, n, rows, heads, blocks, scale, **ctx.flags, **BIAS
            )
            dbias = _sum_by_distance(sums, n, blocks).to(ctx.dtype)
        return dq, dk, dv, dbias, None, None, None


# Block sizes and launch options, for heads of up to 64 channels and for larger ones.
FORWARD = (
    {"M": 128, "N": 32, "num_warps": 4, "num_stages": 3},
    {"M": 128, "N": 64, "num_warps": 8, "num_stages": 3},
)
KEYS = (
    {"M": 128, "N": 128, "num_warps": 8, "num_stages": 2},
    {"M": 64, "N": 64, "num_warps": 4, "num_stages": 2},
)
QUERIES = (
    {"M": 128, "N": 32, "num_warps": 4, "num_stages": 2},
    {"M": 128, "N": 64, "num_warps": 8, "num_stages": 3},
)
BIAS = {"M": 64, "num_warps": 8, "num_stages": 2}


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    padding_mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """q, k, v [b h n c] in half precision, bias [h, 2n − 1] at the distances −(n−1) … n−1."""
    with device_guard(q):
        out: Tensor = _BiasedAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, bias, padding_mask, causal, scale
        )
    return out


def case(
    new: Inputs, length: int, width: int, causal: bool, lengths: Lengths
) -> Iterator[Comparison]:
    """With the gradient of the table of biases."""
    q, k, v = new.randn(*[(2, 2, length, width)] * 3)
    [table] = new.randn((2, 2 * length - 1), dtype=torch.float32)
    padding_mask, allowed = new.masks(length, length, causal, lengths)
    at = torch.arange(length, device=new.device)
    distances = at - at[:, None] + length - 1
    yield from compare(
        lambda q, k, v, table: biased_attention(q, k, v, table, padding_mask, causal, SCALE),
        lambda q, k, v, table: attention_formula(q, k, v, allowed, bias=table[:, distances]),
        (q, k, v, table),
    )


SELFTEST = [(70, 32, causal, (70, 41)) for causal in (False, True)]
