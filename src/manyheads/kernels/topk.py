# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""log-sum-exp and top-k of rows of logits.

    log Σ e^z,    z₁ ≥ z₂ ≥ … ≥ z_k  and their indices

PyTorch's logsumexp passes over the logits five times, and its topk is a radix sort made for any k.
Decoding needs about ten. Here each lane of a program keeps the largest of its own columns in one
pass. The largest over all lanes is the next result; its lane is then searched again for the next
largest. Ties go to the lowest index. If there are few rows, several programs each reduce a part of
a row, and a second pass reduces their results.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import contiguous_channels, device_guard
from manyheads.kernels.selftest import Comparison, Inputs

MAX_LANES = 1024
TARGET_PROGRAMS = 128  # enough to keep a device busy
MIN_COLUMNS_PER_PROGRAM = 1024
MAX_BLOCK, PER_THREAD = 8192, 16  # columns per block and per thread
LOW = tl.constexpr(-1e30)  # below every logit, and finite: LOW − LOW is a number
LOG2_E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x log₂ e): one multiply-add


@triton.jit
def online_logsumexp(z, maxima, sums, BLOCK: tl.constexpr, PER_THREAD: tl.constexpr):
    """Update each thread's maximum m and Σ e^(z − m) with PER_THREAD more logits."""
    z = z.reshape(BLOCK // PER_THREAD, PER_THREAD)
    top = tl.maximum(maxima, tl.max(z, 1))
    added = tl.sum(tl.exp2(z * LOG2_E - (top * LOG2_E)[:, None]), 1)
    return top, sums * tl.exp2((maxima - top) * LOG2_E) + added


@triton.jit
def _logsumexp(Z, TOTAL, width, stride, BLOCK: tl.constexpr, PER_THREAD: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK // PER_THREAD], LOW, tl.float32)
    sums = tl.zeros([BLOCK // PER_THREAD], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + columns
        z = tl.load(Z + row * stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
        maxima, sums = online_logsumexp(z, maxima, sums, BLOCK, PER_THREAD)
    top = tl.max(maxima, 0)
    tl.store(TOTAL + row, top + tl.log(tl.sum(sums * tl.exp2((maxima - top) * LOG2_E), 0)))


@triton.jit(do_not_specialize=["k", "split_width"])
def _topk(
    Z, IDS, VALUES, INDICES, width, stride, k, split_width,
    REMAPPED: tl.constexpr, G: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Top k of a split of a row, in descending order.

    Column c belongs to lane c % G at step c // G, with G lanes and at most J steps. If REMAPPED,
    the index of column c is IDS[c]: the second pass works on the results of the first.
    """
    row, lanes, steps = tl.program_id(0).to(tl.int64), tl.arange(0, G), tl.arange(0, J)
    begin = tl.program_id(1) * split_width
    z_row, width = Z + row * stride + begin, tl.minimum(split_width, width - begin)
    # For each lane, the largest of its remaining columns and the step where it is.
    largest, at_step = tl.full([G], float("-inf"), tl.float32), tl.zeros([G], tl.int32)
    for start in range(0, width, G):
        at = start + lanes
        z = tl.load(z_row + at, mask=at < width, other=float("-inf")).to(tl.float32)
        at_step = tl.where(z > largest, start // G, at_step)
        largest = tl.maximum(largest, z)
    remaining = lanes < width
    first = (row * tl.num_programs(1) + tl.program_id(1)) * k
    for rank in range(k):
        top = tl.max(tl.where(remaining, largest, float("-inf")), 0)
        column = tl.min(tl.where(remaining & (largest == top), lanes + G * at_step, G * J), 0)
        column = tl.minimum(column, width - 1)  # for NaN, any column
        index = begin + column
        if REMAPPED:
            index = tl.load(IDS + row * stride + column)
        tl.store(VALUES + first + rank, top)
        tl.store(INDICES + first + rank, index.to(tl.int64))
        lane, step = column % G, column // G
        at = lane + G * steps
        lane_z = tl.load(z_row + at, mask=at < width, other=float("-inf")).to(tl.float32)
        rest = (at < width) & ((lane_z < top) | ((lane_z == top) & (steps > step)))
        next_z, is_lane = tl.max(tl.where(rest, lane_z, float("-inf")), 0), lanes == lane
        next_step = tl.min(tl.where(rest & (lane_z == next_z), steps, J), 0)
        largest = tl.where(is_lane, next_z, largest)
        at_step = tl.where(is_lane, next_step, at_step)
        remaining = remaining & ((next_step < J) | (lanes != lane))


@torch.library.custom_op("manyheads::logsumexp", mutates_args=())
def logsumexp(z: Tensor) -> Tensor:
    """log Σ e^z of rows z [n v], as [n 1] in float32; a row has at least one finite logit."""
    z = contiguous_channels(z)
    total = torch.empty(len(z), 1, device=z.device, dtype=torch.float32)
    block = min(MAX_BLOCK, max(PER_THREAD, triton.next_power_of_2(z.shape[1])))
    with device_guard(z):
        _logsumexp[(len(z),)](
            z, total, z.shape[1], z.stride(0), BLOCK=block, PER_THREAD=PER_THREAD,
            num_warps=max(1, block // (32 * PER_THREAD)),
        )  # fmt: skip
    return total


@torch.library.custom_op("manyheads::topk", mutates_args=())
def topk(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of z [n v] in float32, in descending order, and their indices."""
    z = contiguous_channels(z)
    splits, split_width = _split(z.shape[0], z.shape[1], k)
    values, indices = _topk_of_splits(z, None, k, splits, split_width)
    if splits == 1:
        return values, indices
    return _topk_of_splits(values, indices, k, 1, splits * k)


def _split(rows: int, width: int, k: int) -> tuple[int, int]:
    """(number of splits of a row, none shorter than k; their width)."""
    splits = max(1, min(TARGET_PROGRAMS // rows, width // max(MIN_COLUMNS_PER_PROGRAM, k)))
    split_width = triton.cdiv(width, splits)
    splits = triton.cdiv(width, split_width)
    return (splits, split_width) if width - (splits - 1) * split_width >= k else (1, width)


def _topk_of_splits(
    z: Tensor, ids: Tensor | None, k: int, splits: int, split_width: int
) -> tuple[Tensor, Tensor]:
    """The top k of each split of each row, [n splits·k]; `ids` [n v] replaces column numbers."""
    values = torch.empty(len(z), splits * k, device=z.device, dtype=torch.float32)
    indices = torch.empty(values.shape, device=z.device, dtype=torch.int64)
    lanes = min(MAX_LANES, max(32, triton.next_power_of_2(split_width)))
    steps = triton.next_power_of_2(triton.cdiv(split_width, lanes))
    with device_guard(z):
        _topk[(len(z), splits)](
            z, z if ids is None else ids, values, indices, z.shape[1], z.stride(0), k,
            split_width, REMAPPED=ids is not None, G=lanes, J=steps, num_warps=max(1, lanes // 256),
        )  # fmt: skip
    return values, indices


@logsumexp.register_fake
def _(z):
    return z.new_empty(len(z), 1, dtype=torch.float32)


@topk.register_fake
def _(z, k):
    values = z.new_empty(len(z), k, dtype=torch.float32)
    return values, values.new_empty(len(z), k, dtype=torch.int64)


def case(new: Inputs, rows: int, width: int, k: int, ties: bool) -> Iterator[Comparison]:
    """A third of the logits is −∞; rows are not contiguous."""
    z = new.randn((rows, width + 3), dtype=torch.float32)[0][:, :width]
    z = z.round().clamp(max=1) if ties else z
    z[:, 1::3] = -torch.inf
    values, indices = topk(z, k)
    ordered, order = z.double().sort(dim=-1, descending=True, stable=True)
    yield values.exp(), ordered[:, :k].exp()
    yield indices + 1, order[:, :k] + 1  # + 1, so that index 0 counts too; ties by the lowest
    yield logsumexp(z), z.double().logsumexp(-1, keepdim=True)


SELFTEST = [(5, 3000, 9, False), (20, 70, 9, False)]
