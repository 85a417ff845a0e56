# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: gradients of queries, keys and values become that of their projection.

    d = [dq, dk, dv] side by side,    db = Σ d over all places

They come from attention head by head, and the products that follow want them place by place. What
lays them out sums them on the way, so that the bias of the projection costs no pass of its own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.dispatch import device_guard
from manyheads.kernels.reduce import sum_rows

ROWS, EACH = 32, 256  # places of a program, at once and in all
WIDEST = 128  # columns of a program


@triton.jit(do_not_specialize=["rows", "length"])
def _join(
    DQ, DK, DV, D, SUMS, rows, length, queries, keys, head,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step,
    EACH: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    first, width = tl.program_id(0) * C, queries + 2 * keys
    begin, part, row, beside, step = 0, DQ, q_row, q_head, q_step
    if first >= queries:
        begin, part, row, beside, step = queries, DK, k_row, k_head, k_step
    if first >= queries + keys:
        begin, part, row, beside, step = queries + keys, DV, v_row, v_head, v_step
    columns = first + tl.arange(0, C)
    inside = columns - begin
    channels = (inside // head).to(tl.int64) * beside + inside % head
    total = tl.zeros([M, C], tl.float32)
    for start in range(0, EACH, M):
        at = tl.program_id(1) * EACH + start + tl.arange(0, M)
        there = (at < rows)[:, None]
        place = (at // length).to(tl.int64) * row + (at % length).to(tl.int64) * step
        x = tl.load(part + place[:, None] + channels[None, :], mask=there, other=0.0)
        tl.store(D + at[:, None].to(tl.int64) * width + columns[None, :], x, mask=there)
        total += x.to(tl.float32)
    tl.store(SUMS + tl.program_id(1) * width + columns, tl.sum(total, 0))


def _columns(queries: int, keys: int) -> int:
    """The greatest power of two that divides both widths: no program has columns of two kinds."""
    both = queries | keys
    return min(WIDEST, both & -both)


@torch.library.custom_op("manyheads::pack_qkv_grad", mutates_args=())
def pack_qkv_grad(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """dq [b h t c], dk and dv [b g t c] as [b t (h+2g)c], and its sum over b and t in float32."""
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    batch, heads, length, head = dq.shape
    rows, queries, keys = batch * length, heads * head, dk.shape[1] * head
    d = dq.new_empty(batch, length, queries + 2 * keys)
    grid = ((queries + 2 * keys) // _columns(queries, keys), triton.cdiv(rows, EACH))
    sums = dq.new_empty(grid[1], d.shape[-1], dtype=torch.float32)
    with device_guard(dq):
        _join[grid](
            dq, dk, dv, d, sums, rows, length, queries, keys, head,
            *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
            EACH=EACH, M=ROWS, C=_columns(queries, keys),
        )  # fmt: skip
    return d, sum_rows(sums)


@pack_qkv_grad.register_fake
def _(dq, dk, dv):
    batch, heads, length, head = dq.shape
    width = (heads + 2 * dk.shape[1]) * head
    return dq.new_empty(batch, length, width), dq.new_empty(width, dtype=torch.float32)


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(projected: Tensor, bias: Tensor, heads: int, keys: int) -> Any:
        head = projected.shape[-1] // (heads + 2 * keys)
        parts = projected.unflatten(-1, (-1, head)).transpose(1, 2)
        q, k, v = parts.split([heads, keys, keys], 1)
        return q, k, v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        d, sums = pack_qkv_grad(*slopes)
        return d, sums.to(ctx.dtype), None, None


def split_qkv(
    projected: Tensor, bias: Tensor, heads: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [b h t c], k and v [b g t c] of a projection [b t (h+2g)c] to which a bias was added.

    The bias gets its gradient here, and must have been added as a constant.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Parted.apply(projected, bias, heads, keys)  # type: ignore[no-untyped-call]
    return found


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel gives for some numbers, and what is right."""
    given, pairs = torch.Generator(device).manual_seed(1), []
    for heads, keys, head in ((3, 3, 16), (4, 2, 64)):
        width = (heads + 2 * keys) * head
        x = torch.randn(2, 70, width, generator=given, device=device, dtype=torch.bfloat16)
        bias = torch.zeros(width, device=device, requires_grad=True)
        rough, exact = (one.detach().requires_grad_() for one in (x, x.double()))
        found = split_qkv(rough, bias, heads, keys)
        sizes = [heads * head, keys * head, keys * head]
        wanted = [
            one.unflatten(-1, (-1, head)).transpose(1, 2) for one in exact.split(sizes, dim=-1)
        ]
        directions = [torch.randn_like(one.contiguous()) for one in found]
        slopes = torch.autograd.grad(found, (rough, bias), directions)
        [d] = torch.autograd.grad(wanted, exact, [one.double() for one in directions])
        pairs += [*zip(found, wanted, strict=True), (slopes[0], d), (slopes[1], d.sum((0, 1)))]
    return pairs
