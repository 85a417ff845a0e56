# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of our own for rows of logits: the log of their whole mass, and their greatest numbers.

    log Σ e^z,    z₁ ≥ z₂ ≥ … ≥ z_k  and where they stand

PyTorch's logarithm passes over the logits five times, and its choice sorts them digit by digit, as
one of thousands of numbers must. A search wants ten. Here each lane of a program keeps the greatest
of its own columns on one pass. The greatest of all lanes is the next one wanted; its lane is then
asked again for what is behind it. Of equal ones the first is taken first. Where there are few rows,
several programs choose from a part of each, and then one of them from what they found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.dispatch import device_guard

LANES = 1024
ENOUGH, PART = 128, 1024  # programs that keep a device busy, and the least that one is for
COLUMNS, EACH = 8192, 16  # of a row at once, and of a thread
LOW = tl.constexpr(-1e30)  # below every logit, and finite: what is compared with it is a number
LOG2_E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x log₂ e): one multiplication and addition


@triton.jit
def joined(z, highest, powers, BLOCK: tl.constexpr, EACH: tl.constexpr):
    """Maxima and sums of the threads, with some more numbers each."""
    z = z.reshape(BLOCK // EACH, EACH)
    top = tl.maximum(highest, tl.max(z, 1))
    fresh = tl.sum(tl.exp2(z * LOG2_E - (top * LOG2_E)[:, None]), 1)
    return top, powers * tl.exp2((highest - top) * LOG2_E) + fresh


@triton.jit
def _mass(Z, TOTAL, width, stride, BLOCK: tl.constexpr, EACH: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    highest = tl.full([BLOCK // EACH], LOW, tl.float32)
    powers = tl.zeros([BLOCK // EACH], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + columns
        z = tl.load(Z + row * stride + at, mask=at < width, other=float("-inf")).to(tl.float32)
        highest, powers = joined(z, highest, powers, BLOCK, EACH)
    top = tl.max(highest, 0)
    tl.store(TOTAL + row, top + tl.log(tl.sum(powers * tl.exp2((highest - top) * LOG2_E), 0)))


@triton.jit(do_not_specialize=["most", "each"])
def _choice(
    Z, NAMES, BEST, PLACES, width, stride, most, each,
    NAMED: tl.constexpr, G: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    row, lanes, steps = tl.program_id(0).to(tl.int64), tl.arange(0, G), tl.arange(0, J)
    begin = tl.program_id(1) * each
    z_row, width = Z + row * stride + begin, tl.minimum(each, width - begin)
    # Of what is left to each lane the greatest, and the step that it is found at.
    highest, found = tl.full([G], float("-inf"), tl.float32), tl.zeros([G], tl.int32)
    for start in range(0, width, G):
        at = start + lanes
        z = tl.load(z_row + at, mask=at < width, other=float("-inf")).to(tl.float32)
        found = tl.where(z > highest, start // G, found)
        highest = tl.maximum(highest, z)
    left = lanes < width
    first = (row * tl.num_programs(1) + tl.program_id(1)) * most
    for number in range(most):
        top = tl.max(tl.where(left, highest, float("-inf")), 0)
        place = tl.min(tl.where(left & (highest == top), lanes + G * found, G * J), 0)
        place = tl.minimum(place, width - 1)  # of what is no number, any place
        name = begin + place
        if NAMED:
            name = tl.load(NAMES + row * stride + place)
        tl.store(BEST + first + number, top)
        tl.store(PLACES + first + number, name.to(tl.int64))
        lane, step = place % G, place // G
        at = lane + G * steps
        own = tl.load(z_row + at, mask=at < width, other=float("-inf")).to(tl.float32)
        rest = (at < width) & ((own < top) | ((own == top) & (steps > step)))
        behind, here = tl.max(tl.where(rest, own, float("-inf")), 0), lanes == lane
        again = tl.min(tl.where(rest & (own == behind), steps, J), 0)
        highest, found = tl.where(here, behind, highest), tl.where(here, again, found)
        left = left & ((again < J) | (lanes != lane))


@torch.library.custom_op("manyheads::logsumexp", mutates_args=())
def logsumexp(z: Tensor) -> Tensor:
    """log Σ e^z of rows z [n v], as [n 1] in float32; one number at least is finite."""
    z = z if z.stride(-1) == 1 else z.contiguous()
    total = torch.empty(len(z), 1, device=z.device, dtype=torch.float32)
    block = min(COLUMNS, max(EACH, triton.next_power_of_2(z.shape[1])))
    with device_guard(z):
        _mass[(len(z),)](
            z, total, z.shape[1], z.stride(0), BLOCK=block, EACH=EACH,
            num_warps=max(1, block // (32 * EACH)),
        )  # fmt: skip
    return total


@torch.library.custom_op("manyheads::topk", mutates_args=())
def topk(z: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The greatest of each row of z [n v] in float32, in order, and where they are."""
    z = z if z.stride(-1) == 1 else z.contiguous()
    parts, each = _parts(z.shape[0], z.shape[1], most)
    best, places = _chosen(z, None, most, parts, each)
    return (best, places) if parts == 1 else _chosen(best, places, most, 1, parts * most)


def _parts(rows: int, width: int, most: int) -> tuple[int, int]:
    """Into how many parts a row is cut, none smaller than what is wanted, and how long each is."""
    wanted = max(1, min(ENOUGH // rows, width // max(PART, most)))
    each = triton.cdiv(width, wanted)
    parts = triton.cdiv(width, each)
    return (parts, each) if width - (parts - 1) * each >= most else (1, width)


def _chosen(
    z: Tensor, names: Tensor | None, most: int, parts: int, each: int
) -> tuple[Tensor, Tensor]:
    """Of each part of each row, beside each other."""
    best = torch.empty(len(z), parts * most, device=z.device, dtype=torch.float32)
    places = torch.empty(best.shape, device=z.device, dtype=torch.int64)
    lanes = min(LANES, max(32, triton.next_power_of_2(each)))
    steps = triton.next_power_of_2(triton.cdiv(each, lanes))
    with device_guard(z):
        _choice[(len(z), parts)](
            z, z if names is None else names, best, places, z.shape[1], z.stride(0), most, each,
            NAMED=names is not None, G=lanes, J=steps, num_warps=max(1, lanes // 256),
        )  # fmt: skip
    return best, places


@logsumexp.register_fake
def _(z):
    return z.new_empty(len(z), 1, dtype=torch.float32)


@topk.register_fake
def _(z, most):
    best = z.new_empty(len(z), most, dtype=torch.float32)
    return best, best.new_empty(len(z), most, dtype=torch.int64)


def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernels give for some numbers, and what is right: few rows, and many."""
    given, pairs = torch.Generator(device).manual_seed(1), []
    for rows, width in ((5, 3000), (200, 70)):
        z = torch.randn(rows, width, generator=given, device=device)
        z[:, ::3] = -torch.inf
        best, places = topk(z, 9)
        wanted = z.double().topk(9, dim=-1).values
        pairs += [(best, wanted), (z.gather(1, places), wanted)]
        pairs.append((logsumexp(z), z.double().logsumexp(-1, keepdim=True)))
    return pairs
