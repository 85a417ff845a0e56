# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: the newest keys and values are put into their slots, both at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.dispatch import device_guard
from manyheads.kernels.pdl import grid_wait, launch_dependents, pdl_options, supports_pdl


@triton.jit
def _place(
    K, V, SLOTS, HELD_K, HELD_V, groups, new, room, k_width, v_width,
    k_row, k_group, k_step, v_row, v_group, v_step,
    PDL: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    each, channels = tl.arange(0, M), tl.arange(0, D)
    there = (each < new)[:, None]
    slots = tl.load(SLOTS + each, mask=each < new, other=0)
    first = (tl.program_id(0).to(tl.int64) * room + slots)[:, None]
    at = row * k_row + group * k_group + each[:, None] * k_step + channels[None, :]
    k = tl.load(K + at, mask=there & (channels < k_width)[None, :], other=0.0)
    to = HELD_K + first * k_width + channels[None, :]
    tl.store(to, k.to(HELD_K.dtype.element_ty), mask=there & (channels < k_width)[None, :])
    at = row * v_row + group * v_group + each[:, None] * v_step + channels[None, :]
    v = tl.load(V + at, mask=there & (channels < v_width)[None, :], other=0.0)
    to = HELD_V + first * v_width + channels[None, :]
    tl.store(to, v.to(HELD_V.dtype.element_ty), mask=there & (channels < v_width)[None, :])


@torch.library.custom_op("manyheads::write_kv", mutates_args=("held_k", "held_v"))
def write_kv(held_k: Tensor, held_v: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """k [n g t e] and v [n g t c] into these slots [t] of the held ones [n g slots e] and … c]."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    groups, new, pdl = k.shape[1], k.shape[2], supports_pdl(k)
    width = triton.next_power_of_2(max(k.shape[3], v.shape[3]))
    with device_guard(k):
        _place[(k.shape[0] * groups,)](
            k, v, slots, held_k, held_v, groups, new, held_k.shape[2], k.shape[3], v.shape[3],
            *k.stride()[:3], *v.stride()[:3],
            PDL=pdl, M=triton.next_power_of_2(new), D=width, num_warps=1, **pdl_options(pdl),
        )  # fmt: skip


@write_kv.register_fake
def _(held_k, held_v, slots, k, v):
    return None


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernel puts there, and what belongs there."""
    given, pairs = torch.Generator(device).manual_seed(1), []
    k, v = (
        torch.randn(3, 5, 2, n, generator=given, device=device).transpose(1, 2) for n in (24, 40)
    )
    held, wanted = (
        tuple(torch.ones(3, 2, 60, x.shape[3], device=device) for x in (k, v)) for _ in range(2)
    )
    slots = torch.arange(5, device=device) * 7 + 20
    write_kv(held[0], held[1], slots, k, v)
    for one, other, x in zip(held, wanted, (k, v), strict=True):
        pairs.append((one, other.index_copy_(2, slots, x).double()))
    return pairs
