# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of our own for rows of logits: the log of their whole mass, and their greatest numbers.

    log Σ e^z,    z₁ ≥ z₂ ≥ … ≥ z_k  and where they stand

PyTorch's logarithm passes over the logits five times, and its choice sorts them digit by digit, as
one of thousands of numbers must. A search wants ten. Here each lane of a program keeps the greatest
of its own columns on one pass. The greatest of all lanes is the next one wanted; its lane is then
asked again for what is behind it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.nn.trusted import launched_at

LANES, WARPS = 1024, 4
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


@triton.jit
def _choice(Z, BEST, PLACES, width, stride, most, G: tl.constexpr, J: tl.constexpr):
    row, lanes, steps = tl.program_id(0).to(tl.int64), tl.arange(0, G), tl.arange(0, J)
    z_row = Z + row * stride
    highest = tl.full([G], float("-inf"), tl.float32)
    for start in range(0, width, G):
        at = start + lanes
        z = tl.load(z_row + at, mask=at < width, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, z)
    # The step up to which a lane has given all that is as great as what it has left; a lane that
    # has nothing left is behind all others.
    given, left = tl.full([G], -1, tl.int32), lanes < width
    for number in range(most):
        top = tl.max(tl.where(left, highest, float("-inf")), 0)
        lane = tl.min(tl.where(left & (highest == top), lanes, G), 0)
        after = tl.max(tl.where(lanes == lane, given, -1), 0)
        at = lane + G * steps
        own = tl.load(z_row + at, mask=at < width, other=float("-inf")).to(tl.float32)
        step = tl.min(tl.where((at < width) & (own == top) & (steps > after), steps, J), 0)
        tl.store(BEST + row * most + number, top)
        place = tl.minimum(lane + G * step, width - 1)  # of what is no number, any place
        tl.store(PLACES + row * most + number, place.to(tl.int64))
        rest = (at < width) & ((own < top) | ((own == top) & (steps > step)))
        behind = tl.max(tl.where(rest, own, float("-inf")), 0)
        some = tl.max(rest.to(tl.int32), 0) > 0
        here = lanes == lane
        highest = tl.where(here, behind, highest)
        given = tl.where(here, tl.where(behind == top, step, -1), given)
        left = left & (some | (lanes != lane))


@torch.library.custom_op("manyheads::log_mass", mutates_args=())
def log_mass(z: Tensor) -> Tensor:
    """log Σ e^z of rows z [n v], as [n 1] in float32; one number at least is finite."""
    z = z if z.stride(-1) == 1 else z.contiguous()
    total = torch.empty(len(z), 1, device=z.device, dtype=torch.float32)
    block = min(COLUMNS, max(EACH, triton.next_power_of_2(z.shape[1])))
    with launched_at(z):
        _mass[(len(z),)](
            z, total, z.shape[1], z.stride(0), BLOCK=block, EACH=EACH,
            num_warps=max(1, block // (32 * EACH)),
        )  # fmt: skip
    return total


@torch.library.custom_op("manyheads::foremost", mutates_args=())
def foremost(z: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The greatest of each row of z [n v], in order, and where: of equal ones any."""
    z = z if z.stride(-1) == 1 else z.contiguous()
    best = torch.empty(len(z), most, device=z.device, dtype=torch.float32)
    places = torch.empty(len(z), most, device=z.device, dtype=torch.int64)
    steps = triton.next_power_of_2(triton.cdiv(z.shape[1], LANES))
    with launched_at(z):
        _choice[(len(z),)](
            z, best, places, z.shape[1], z.stride(0), most, G=LANES, J=steps, num_warps=WARPS
        )
    return best, places


@log_mass.register_fake
def _(z):
    return z.new_empty(len(z), 1, dtype=torch.float32)


@foremost.register_fake
def _(z, most):
    best = z.new_empty(len(z), most, dtype=torch.float32)
    return best, best.new_empty(len(z), most, dtype=torch.int64)


def trial(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """What the kernels give for some numbers, and what is right."""
    given = torch.Generator(device).manual_seed(1)
    z = torch.randn(5, 3000, generator=given, device=device)
    z[:, ::3] = -torch.inf
    best, places = foremost(z, 9)
    wanted = z.double().topk(9, dim=-1).values
    return [
        (log_mass(z), z.double().logsumexp(-1, keepdim=True)),
        (best, wanted),
        (z.gather(1, places), wanted),
    ]
