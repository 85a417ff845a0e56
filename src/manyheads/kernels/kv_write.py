# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Write the keys and values of new positions into their slots of a cache, both in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import contiguous_channels, device_guard
from manyheads.kernels.pdl import grid_wait, launch_dependents, pdl_options


@triton.jit
def _write_kv(
    K, V, SLOTS, K_CACHE, V_CACHE, kv_heads, positions, slots_per_row, k_dim, v_dim,
    k_row, k_head, k_step, v_row, v_head, v_step,
    PDL: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    grid_wait(PDL)
    row, head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    position, channels = tl.arange(0, M), tl.arange(0, D)
    mask = (position < positions)[:, None]
    slots = tl.load(SLOTS + position, mask=position < positions, other=0)
    to = (tl.program_id(0).to(tl.int64) * slots_per_row + slots)[:, None]
    offsets = row * k_row + head * k_head + position[:, None] * k_step + channels[None, :]
    k = tl.load(K + offsets, mask=mask & (channels < k_dim)[None, :], other=0.0)
    out = K_CACHE + to * k_dim + channels[None, :]
    tl.store(out, k.to(K_CACHE.dtype.element_ty), mask=mask & (channels < k_dim)[None, :])
    offsets = row * v_row + head * v_head + position[:, None] * v_step + channels[None, :]
    v = tl.load(V + offsets, mask=mask & (channels < v_dim)[None, :], other=0.0)
    out = V_CACHE + to * v_dim + channels[None, :]
    tl.store(out, v.to(V_CACHE.dtype.element_ty), mask=mask & (channels < v_dim)[None, :])


@torch.library.custom_op("manyheads::write_kv", mutates_args=("k_cache", "v_cache"))
def write_kv(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k [n g t e] and v [n g t c] into slots [t] of caches [n g slots e], [n g slots c]."""
    k, v = contiguous_channels(k), contiguous_channels(v)
    kv_heads, positions = k.shape[1:3]
    width = triton.next_power_of_2(max(k.shape[3], v.shape[3]))
    with device_guard(k):
        _write_kv[(k.shape[0] * kv_heads,)](
            k, v, slots, k_cache, v_cache, kv_heads, positions, k_cache.shape[2],
            k.shape[3], v.shape[3], *k.stride()[:3], *v.stride()[:3],
            M=triton.next_power_of_2(positions), D=width, num_warps=1, **pdl_options(k),
        )  # fmt: skip


@write_kv.register_fake
def _(k_cache, v_cache, slots, k, v):
    return None
