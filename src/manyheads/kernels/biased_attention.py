# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: exact attention with a bias that hangs on the distance, inside the kernel.

    o_i = Σ_j softmax_j(q_i · k_j · scale + bias_h[j − i]) v_j

T5's buckets and ALiBi are such biases. PyTorch's fused kernels take them as a matrix of n × n
alone; here each block of pairs reads its distances from a table of 2n − 1 numbers a head, so that
memory stays linear. The gradient of the table is the sum of dS along each diagonal: blocks on one
block diagonal have the same distances, so one program sums them all where they are, and only the
sum is taken apart. The rest is FlashAttention's algorithm (nn/tiled.py has it in words), in Triton.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOG2_E = 1.4426950408889634


@triton.jit
def _scores_of(
    q, k, table, real, at_m, at_n, n, scale,
    PAST: tl.constexpr, REAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Scores of a block of queries and a block of keys in units of log 2, −∞ where unseen.

    WHOLE says that no block goes past the end, PAST that the block stands on the diagonal.
    """
    index = at_n[None, :] - at_m[:, None] + (n - 1)
    if WHOLE:
        s = tl.dot(q, tl.trans(k)) * scale + tl.load(table + index)
    else:
        inside = (at_m[:, None] < n) & (at_n[None, :] < n)
        s = tl.dot(q, tl.trans(k)) * scale + tl.load(table + index, mask=inside, other=0.0)
        s = tl.where(inside, s, float("-inf"))
    if PAST:
        s = tl.where(at_n[None, :] <= at_m[:, None], s, float("-inf"))
    if REAL:
        known = tl.load(real + at_n, mask=at_n < n, other=0)
        s = tl.where(known[None, :] != 0, s, float("-inf"))
    return s


@triton.jit
def _rows_of(x, at, n, D: tl.constexpr):
    """Rows `at` of an [n, D] matrix, zero past its end."""
    channels = tl.arange(0, D)
    return tl.load(x + at[:, None] * D + channels[None, :], mask=at[:, None] < n, other=0.0)


@triton.jit
def _write_rows(x, at, values, n, D: tl.constexpr):
    channels = tl.arange(0, D)
    tl.store(
        x + at[:, None] * D + channels[None, :],
        values.to(x.dtype.element_ty),
        mask=at[:, None] < n,
    )


@triton.jit
def _forward(
    Q, K, V, BIAS, REAL_KEYS, OUT, LSE, n, heads, scale,
    CAUSAL: tl.constexpr, REAL: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0) % tl.cdiv(n, M), tl.program_id(0) // tl.cdiv(n, M)
    offset = row.to(tl.int64) * n * D
    table = BIAS + (row % heads).to(tl.int64) * (2 * n - 1)
    real = REAL_KEYS + (row // heads).to(tl.int64) * n
    at_m = block * M + tl.arange(0, M)
    q = _rows_of(Q + offset, at_m, n, D)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, D], tl.float32)
    middle = block * M // N * N if CAUSAL else n
    for part in tl.static_range(2 if CAUSAL else 1):  # what is all past, then the diagonal
        end = tl.minimum(n, (block + 1) * M) if part == 1 else middle
        for first in range(part * middle, end, N):
            at_n = first + tl.arange(0, N)
            k = _rows_of(K + offset, at_n, n, D)
            s = _scores_of(q, k, table, real, at_m, at_n, n, scale, part == 1, REAL, WHOLE)
            higher = tl.maximum(highest, tl.max(s, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - safe[:, None])
            shrink = tl.exp2(highest - safe)
            total = total * shrink + tl.sum(p, 1)
            v = _rows_of(V + offset, at_n, n, D)
            o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v)
            highest = higher
    blind = total == 0.0
    o = o / tl.where(blind, 1.0, total)[:, None]
    _write_rows(OUT + offset, at_m, o, n, D)
    lse = tl.where(blind, float("inf"), highest + tl.log2(tl.where(blind, 1.0, total)))
    tl.store(LSE + row.to(tl.int64) * n + at_m, lse, mask=at_m < n)


@triton.jit
def _slopes_of(
    q, k, v, do, table, real, lse, delta, at_m, at_n, n, scale,
    PAST: tl.constexpr, REAL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """P and dS = P ∘ (dO Vᵀ − D) of a block, from the saved log-sum-exp."""
    s = _scores_of(q, k, table, real, at_m, at_n, n, scale, PAST, REAL, WHOLE)
    p = tl.exp2(s - lse[:, None])
    return p, p * (tl.dot(do, tl.trans(v)) - delta[:, None])


@triton.jit
def _backward_keys(
    Q, K, V, BIAS, REAL_KEYS, DO, LSE, DELTA, DK, DV, n, heads, scale, inner,
    CAUSAL: tl.constexpr, REAL: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0) % tl.cdiv(n, N), tl.program_id(0) // tl.cdiv(n, N)
    offset, line = row.to(tl.int64) * n * D, row.to(tl.int64) * n
    table = BIAS + (row % heads).to(tl.int64) * (2 * n - 1)
    real = REAL_KEYS + (row // heads).to(tl.int64) * n
    at_n = block * N + tl.arange(0, N)
    k, v = _rows_of(K + offset, at_n, n, D), _rows_of(V + offset, at_n, n, D)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    middle = tl.minimum(n, ((block + 1) * N + M - 1) // M * M) if CAUSAL else 0
    for part in tl.static_range(2 if CAUSAL else 1):  # what is all later, then the diagonal
        start = block * N // M * M if part == 1 else middle
        end = middle if part == 1 else n
        for first in range(start, end, M):
            at_m = first + tl.arange(0, M)
            q, do = _rows_of(Q + offset, at_m, n, D), _rows_of(DO + offset, at_m, n, D)
            lse = tl.load(LSE + line + at_m, mask=at_m < n, other=float("inf"))
            delta = tl.load(DELTA + line + at_m, mask=at_m < n, other=0.0)
            p, ds = _slopes_of(
                q, k, v, do, table, real, lse, delta, at_m, at_n, n, scale, part == 1, REAL, WHOLE
            )
            dv += tl.dot(tl.trans(p.to(do.dtype)), do)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q)
    _write_rows(DK + offset, at_n, dk * inner, n, D)
    _write_rows(DV + offset, at_n, dv, n, D)


@triton.jit
def _backward_queries(
    Q, K, V, BIAS, REAL_KEYS, DO, LSE, DELTA, DQ, n, heads, scale, inner,
    CAUSAL: tl.constexpr, REAL: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0) % tl.cdiv(n, M), tl.program_id(0) // tl.cdiv(n, M)
    offset, line = row.to(tl.int64) * n * D, row.to(tl.int64) * n
    table = BIAS + (row % heads).to(tl.int64) * (2 * n - 1)
    real = REAL_KEYS + (row // heads).to(tl.int64) * n
    at_m = block * M + tl.arange(0, M)
    q, do = _rows_of(Q + offset, at_m, n, D), _rows_of(DO + offset, at_m, n, D)
    lse = tl.load(LSE + line + at_m, mask=at_m < n, other=float("inf"))
    delta = tl.load(DELTA + line + at_m, mask=at_m < n, other=0.0)
    dq = tl.zeros([M, D], tl.float32)
    middle = block * M // N * N if CAUSAL else n
    for part in tl.static_range(2 if CAUSAL else 1):
        end = tl.minimum(n, (block + 1) * M) if part == 1 else middle
        for first in range(part * middle, end, N):
            at_n = first + tl.arange(0, N)
            k, v = _rows_of(K + offset, at_n, n, D), _rows_of(V + offset, at_n, n, D)
            _, ds = _slopes_of(
                q, k, v, do, table, real, lse, delta, at_m, at_n, n, scale, part == 1, REAL, WHOLE
            )
            dq += tl.dot(ds.to(k.dtype), k)
    _write_rows(DQ + offset, at_m, dq * inner, n, D)


@triton.jit
def _backward_bias(
    Q, K, V, BIAS, REAL_KEYS, DO, LSE, DELTA, SUMS, n, rows, heads, blocks, scale,
    CAUSAL: tl.constexpr, REAL: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """One program a head and block diagonal: dS of all its blocks, of all rows, in one sum."""
    diagonal, head = tl.program_id(0), tl.program_id(1)
    apart = diagonal - (blocks - 1)
    table = BIAS + head.to(tl.int64) * (2 * n - 1)
    total = tl.zeros([M, M], tl.float32)
    for row in range(rows):
        line = (row * heads + head).to(tl.int64) * n
        offset, real = line * D, REAL_KEYS + row * n
        for block in range(tl.maximum(0, -apart), tl.minimum(blocks, blocks - apart)):
            at_m = block * M + tl.arange(0, M)
            at_n = (block + apart) * M + tl.arange(0, M)
            q, do = _rows_of(Q + offset, at_m, n, D), _rows_of(DO + offset, at_m, n, D)
            k, v = _rows_of(K + offset, at_n, n, D), _rows_of(V + offset, at_n, n, D)
            lse = tl.load(LSE + line + at_m, mask=at_m < n, other=float("inf"))
            delta = tl.load(DELTA + line + at_m, mask=at_m < n, other=0.0)
            _, ds = _slopes_of(
                q, k, v, do, table, real, lse, delta, at_m, at_n, n, scale, CAUSAL, REAL, WHOLE
            )
            total += ds
    place = tl.arange(0, M)
    sums = SUMS + (head * tl.num_programs(0) + diagonal).to(tl.int64) * M * M
    tl.store(sums + place[:, None] * M + place[None, :], total)


def _by_distance(sums: Tensor, n: int, blocks: int) -> Tensor:
    """[h, block diagonals from the lowest on, M, M] summed along their diagonals: [h, 2n − 1].

    Rows of M written as rows of 2M − 1 begin one place further each, so that the diagonals of a
    block become columns.
    """
    size = sums.shape[-1]
    skewed = F.pad(sums.flip(-2), (0, size)).flatten(-2)[..., : size * (2 * size - 1)]
    lines = skewed.unflatten(-1, (size, 2 * size - 1)).sum(-2)
    # Neighbouring block diagonals share distances: the second half of one is the next one's first.
    own, shared = lines[..., :size], F.pad(lines[..., size:], (0, 1))
    found = (F.pad(own, (0, 0, 0, 1)) + F.pad(shared, (0, 0, 1, 0))).flatten(-2)
    first = blocks * size - n  # `found` begins at the distance 1 − blocks · M
    return F.pad(found, (0, 2 * blocks * size))[:, first : first + 2 * n - 1]


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        real: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        table = (bias.float() * LOG2_E).contiguous()
        rows, heads, n, width = q.shape
        out, lse = torch.empty_like(q), q.new_empty(rows, heads, n, dtype=torch.float32)
        keys = q if real is None else real.to(torch.int8).contiguous()
        given = {"CAUSAL": causal, "REAL": real is not None, "WHOLE": n % 128 == 0, "D": width}
        shape = FORWARD[width > 64]
        _forward[(triton.cdiv(n, shape["M"]) * rows * heads,)](
            q, k, v, table, keys, out, lse, n, heads, scale * LOG2_E, **given, **shape
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, table, keys, out, lse)
        ctx.given, ctx.scale, ctx.dtype = given, scale, bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, keys, out, lse = ctx.saved_tensors
        do = grads[0].contiguous()
        rows, heads, n, width = q.shape
        delta = (do.float() * out.float()).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        read = (q, k, v, table, keys, do, lse, delta)
        scale, lines = ctx.scale * LOG2_E, rows * heads
        of_keys, of_queries, of_bias = (shape[width > 64] for shape in (KEYS, QUERIES, BIAS))
        _backward_keys[(triton.cdiv(n, of_keys["N"]) * lines,)](
            *read, dk, dv, n, heads, scale, ctx.scale, **ctx.given, **of_keys
        )
        _backward_queries[(triton.cdiv(n, of_queries["M"]) * lines,)](
            *read, dq, n, heads, scale, ctx.scale, **ctx.given, **of_queries
        )
        dbias = None
        if ctx.needs_input_grad[3]:
            blocks = triton.cdiv(n, of_bias["M"])
            # Of a causal rule, nothing stands above the middle one.
            diagonals = blocks if ctx.given["CAUSAL"] else 2 * blocks - 1
            sums = table.new_empty(heads, diagonals, of_bias["M"], of_bias["M"])
            _backward_bias[(diagonals, heads)](
                *read, sums, n, rows, heads, blocks, scale, **ctx.given, **of_bias
            )
            dbias = _by_distance(sums, n, blocks).to(ctx.dtype)
        return dq, dk, dv, dbias, None, None, None


# Sizes of the blocks and what computes one, for heads of up to 64 channels and of more.
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
BIAS = (
    {"M": 64, "num_warps": 8, "num_stages": 2},
    {"M": 64, "num_warps": 8, "num_stages": 2},
)


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, real: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """q, k, v [b h n c] in half precision, bias [h, 2n − 1] at the distances −(n−1) … n−1."""
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():  # launch on the device of q
        mixed: Tensor = _Biased.apply(q, k, v, bias, real, causal, scale)  # type: ignore[no-untyped-call]
    return mixed


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients against float64, full and causal, one sequence padded."""
    generator, comparisons = torch.Generator(device).manual_seed(1), []
    heads, length, width = 2, 70, 32
    shape = (4, 2, heads, length, width)
    q, k, v, grad = torch.randn(
        shape, generator=generator, device=device, dtype=torch.bfloat16
    ).unbind()
    bias = torch.randn(heads, 2 * length - 1, generator=generator, device=device)
    lengths = torch.tensor([[length], [41]], device=device)
    padding_mask = torch.arange(length, device=device) < lengths
    positions = torch.arange(length, device=device)
    distances = positions[None, :] - positions[:, None] + length - 1
    for causal in (False, True):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = biased_attention(*inputs, padding_mask, causal, 0.2)
        grads = torch.autograd.grad(out, inputs, grad)
        exact = [x.double().requires_grad_() for x in (q, k, v, bias)]
        allowed = padding_mask[:, None, None, :]
        if causal:
            allowed = allowed & (positions[None, :] <= positions[:, None])
        scores = exact[0] @ exact[1].mT * 0.2 + exact[3][:, distances]
        expected = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ exact[2]
        expected_grads = torch.autograd.grad(expected, exact, grad.double())
        comparisons += [(out, expected), *zip(grads, expected_grads, strict=True)]
    return comparisons
