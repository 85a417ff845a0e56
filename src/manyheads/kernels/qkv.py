# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Pack the gradients of queries, keys and values into that of their projection.

    d = [dq, dk, dv] side by side,    db = Σ d over all positions

Attention returns them head by head, and the products that follow need them position by position.
The kernel that packs them also sums them, so the bias gradient of the projection costs no pass of
its own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import contiguous_channels, device_guard, sum_rows

ROWS, ROWS_PER_PROGRAM = 32, 256  # positions of a block, and of a program
MAX_COLUMNS = 128  # of a program


@triton.jit(do_not_specialize=["rows", "length"])
def _pack(
    DQ, DK, DV, D, SUMS, rows, length, q_width, kv_width, head_dim,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step,
    ROWS_PER_PROGRAM: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    first, width = tl.program_id(0) * C, q_width + 2 * kv_width
    begin, part, row, head, step = 0, DQ, q_row, q_head, q_step
    if first >= q_width:
        begin, part, row, head, step = q_width, DK, k_row, k_head, k_step
    if first >= q_width + kv_width:
        begin, part, row, head, step = q_width + kv_width, DV, v_row, v_head, v_step
    columns = first + tl.arange(0, C)
    inner = columns - begin
    channels = (inner // head_dim).to(tl.int64) * head + inner % head_dim
    total = tl.zeros([M, C], tl.float32)
    for start in range(0, ROWS_PER_PROGRAM, M):
        at = tl.program_id(1) * ROWS_PER_PROGRAM + start + tl.arange(0, M)
        mask = (at < rows)[:, None]
        source = (at // length).to(tl.int64) * row + (at % length).to(tl.int64) * step
        x = tl.load(part + source[:, None] + channels[None, :], mask=mask, other=0.0)
        tl.store(D + at[:, None].to(tl.int64) * width + columns[None, :], x, mask=mask)
        total += x.to(tl.float32)
    tl.store(SUMS + tl.program_id(1) * width + columns, tl.sum(total, 0))


def _columns(q_width: int, kv_width: int) -> int:
    """The largest power of two that divides both widths: no program crosses from q to k or v."""
    both = q_width | kv_width
    return min(MAX_COLUMNS, both & -both)


@torch.library.custom_op("manyheads::pack_qkv_grad", mutates_args=())
def pack_qkv_grad(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """dq [b h t c], dk and dv [b g t c] as [b t (h+2g)c], and its sum over b and t in float32."""
    dq, dk, dv = (contiguous_channels(x) for x in (dq, dk, dv))
    batch, heads, length, head_dim = dq.shape
    rows, q_width, kv_width = batch * length, heads * head_dim, dk.shape[1] * head_dim
    d = dq.new_empty(batch, length, q_width + 2 * kv_width)
    columns = _columns(q_width, kv_width)
    grid = ((q_width + 2 * kv_width) // columns, triton.cdiv(rows, ROWS_PER_PROGRAM))
    sums = dq.new_empty(grid[1], d.shape[-1], dtype=torch.float32)
    with device_guard(dq):
        _pack[grid](
            dq, dk, dv, d, sums, rows, length, q_width, kv_width, head_dim,
            *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
            ROWS_PER_PROGRAM=ROWS_PER_PROGRAM, M=ROWS, C=columns,
        )  # fmt: skip
    return d, sum_rows(sums)


@pack_qkv_grad.register_fake
def _(dq, dk, dv):
    batch, heads, length, head_dim = dq.shape
    width = (heads + 2 * dk.shape[1]) * head_dim
    return dq.new_empty(batch, length, width), dq.new_empty(width, dtype=torch.float32)


class _SplitQkv(torch.autograd.Function):
    @staticmethod
    def forward(qkv: Tensor, bias: Tensor, heads: int, kv_heads: int) -> Any:
        head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
        by_head = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        q, k, v = by_head.split([heads, kv_heads, kv_heads], 1)
        return q, k, v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d, sums = pack_qkv_grad(*grads)
        return d, sums.to(ctx.dtype), None, None


def split_qkv(
    qkv: Tensor, bias: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [b h t c], k and v [b g t c] of a projection [b t (h+2g)c] that includes a bias.

    The bias gets its gradient here, so the projection must have added it detached.
    """
    heads_of_qkv: tuple[Tensor, Tensor, Tensor] = _SplitQkv.apply(  # type: ignore[no-untyped-call]
        qkv, bias, heads, kv_heads
    )
    return heads_of_qkv
