# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: rows of logits become the gradient of their loss, where they stand.

    −log p = log Σ e^z − z_y,    dL/dz = softmax(z) − q

PyTorch passes over the logits once for each of maximum, exponential, sum and difference, in
float32. Here a row is read twice and written once in the type that it has, and summed in float32;
it is asked to stay in the cache until it has been read again. Neighbouring threads keep the maximum
m and the sum of what they have seen themselves, sixteen numbers at a time, and all meet once, at
the end of the row:

    m′ = max(m, z₁ … z₁₆),    Σ ← Σ e^(m−m′) + e^(z₁−m′) + … + e^(z₁₆−m′)

Whole blocks of a row are spared the questions that its end has to ask, and what was wanted is
corrected when the row is done: arithmetic costs time here too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.topk import LOG2_E, LOW, joined

COLUMNS, EACH = 8192, 16  # of a row at once, and of a thread: two loads of 16 bytes


@triton.jit
def _row(
    LOGITS, WANTED, NLL, EVEN, width, padded, stride, smoothing,
    TRAINING: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, columns = LOGITS + row * stride, tl.arange(0, BLOCK)
    wanted = tl.load(WANTED + row)
    counts, place = wanted >= 0, tl.maximum(wanted, 0)
    # Before the threads meet: behind that, another may have written over it.
    own = tl.load(logits + place).to(tl.float32)
    whole = width // BLOCK * BLOCK
    highest = tl.full([BLOCK // EACH], LOW, tl.float32)
    powers, total = tl.zeros([BLOCK // EACH], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, whole, BLOCK):
        z = tl.load(logits + first + columns, eviction_policy="evict_last").to(tl.float32)
        highest, powers = joined(z, highest, powers, BLOCK, EACH)
        if SMOOTHS:
            total += z
    if whole < width:
        at = whole + columns
        # Up to an aligned end, or numbers would be loaded one by one.
        z = tl.load(logits + at, mask=at < padded, other=0.0, eviction_policy="evict_last")
        z = z.to(tl.float32)
        total += tl.where(at < width, z, 0.0)
        z = tl.where(at < width, z, float("-inf"))
        highest, powers = joined(z, highest, powers, BLOCK, EACH)
    top = tl.max(highest, 0)
    log_total = top + tl.log(tl.sum(powers * tl.exp2((highest - top) * LOG2_E), 0))
    nll = tl.where(counts, log_total - own, 0.0)
    tl.store(NLL + row, nll)
    even = tl.where(counts, log_total - tl.sum(total, 0) / width, 0.0) if SMOOTHS else nll
    tl.store(EVEN + row, even)
    if TRAINING:
        if counts:
            power, share = log_total * LOG2_E, smoothing / width
            for first in range(0, whole, BLOCK):
                z = tl.load(logits + first + columns, eviction_policy="evict_first")
                slope = tl.exp2(z.to(tl.float32) * LOG2_E - power)
                if SMOOTHS:
                    slope -= share
                slope = slope.to(LOGITS.dtype.element_ty)
                tl.store(logits + first + columns, slope, cache_modifier=".cs")
            for first in range(whole, padded, BLOCK):
                at = first + columns
                z = tl.load(logits + at, mask=at < padded, other=0.0, eviction_policy="evict_first")
                slope = tl.exp2(z.to(tl.float32) * LOG2_E - power) - share
                slope = tl.where(at < width, slope, 0.0).to(LOGITS.dtype.element_ty)
                tl.store(logits + at, slope, mask=at < padded, cache_modifier=".cs")
            tl.debug_barrier()  # what was wanted is written after all others, whoever wrote it
            slope = tl.exp2(own * LOG2_E - power) - share - (1.0 - smoothing)
            tl.store(logits + place, slope.to(LOGITS.dtype.element_ty))
        else:
            nothing = tl.zeros([BLOCK], LOGITS.dtype.element_ty)
            for first in range(0, padded, BLOCK):
                at = first + columns
                tl.store(logits + at, nothing, mask=at < padded, cache_modifier=".cs")


def cross_entropy_grad(
    logits: Tensor, wanted: Tensor, width: int, smoothing: float, training: bool
) -> tuple[Tensor, Tensor]:
    """(Σ −log p of what is wanted, Σ mean of −log p over the classes), of the first `width` alone.

    The second is the first where nothing is smoothed. In training the logits become the gradient of
    the objective, zero beyond the first `width`.
    Rows that want a negative number count for nothing.
    """
    rows, padded = logits.shape
    nll = torch.empty(rows, device=logits.device, dtype=torch.float32)
    even = torch.empty_like(nll)
    block = min(COLUMNS, max(EACH, triton.next_power_of_2(padded)))
    _row[(rows,)](
        logits, wanted, nll, even, width, padded, logits.stride(0), smoothing,
        TRAINING=training, SMOOTHS=smoothing > 0, BLOCK=block, EACH=EACH,
        num_warps=max(1, block // (32 * EACH)),
    )  # fmt: skip
    return nll.sum(), even.sum()
