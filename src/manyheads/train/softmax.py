# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: rows of logits become the gradient of their loss, where they stand.

    −log p = log Σ e^z − z_y,    dL/dz = softmax(z) − q

PyTorch passes over the logits once for each of maximum, exponential, sum and difference, in
float32. Here a row is read twice and written once in the type that it has, and summed in float32;
it is asked to stay in the cache until it has been read again.
Each thread keeps the maximum and the sum of what it has seen itself, and they meet once, at the
end of the row; of z and the maximum m so far, only the greater keeps its place:

    Σ ← Σ e^(m−z) + 1 where z > m, else Σ + e^(z−m)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 2048, 8  # of a row at once: 8 numbers a thread, one load of 16 bytes
LOW = tl.constexpr(-1e30)  # below every logit, and finite: what is compared with it is a number


@triton.jit
def _row(
    LOGITS, WANTED, NLL, EVEN, width, padded, stride, smoothing,
    TRAINING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, columns = LOGITS + row * stride, tl.arange(0, BLOCK)
    wanted = tl.load(WANTED + row)
    counts = wanted >= 0
    # Before the threads meet: behind that, another may have written over it.
    own = tl.load(logits + tl.maximum(wanted, 0)).to(tl.float32)
    highest, powers = tl.full([BLOCK], LOW, tl.float32), tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, padded, BLOCK):
        at = first + columns
        # Up to an aligned end, or numbers would be loaded one by one.
        z = tl.load(logits + at, mask=at < padded, other=0.0, eviction_policy="evict_last")
        z = z.to(tl.float32)
        total += tl.where(at < width, z, 0.0)
        z = tl.where(at < width, z, float("-inf"))
        share = tl.exp(-tl.abs(z - highest))
        powers = tl.where(z > highest, powers * share + 1.0, powers + share)
        highest = tl.maximum(highest, z)
    top = tl.max(highest, 0)
    log_total = top + tl.log(tl.sum(powers * tl.exp(highest - top), 0))
    tl.store(NLL + row, tl.where(counts, log_total - own, 0.0))
    tl.store(EVEN + row, tl.where(counts, log_total - tl.sum(total, 0) / width, 0.0))
    if TRAINING:
        for first in range(0, padded, BLOCK):
            at = first + columns
            z = tl.load(logits + at, mask=at < padded, other=0.0, eviction_policy="evict_first")
            slope = tl.exp(z.to(tl.float32) - log_total) - smoothing / width
            slope = tl.where(at == wanted, slope - (1.0 - smoothing), slope)
            slope = tl.where(counts & (at < width), slope, 0.0)
            slope = slope.to(LOGITS.dtype.element_ty)
            tl.store(logits + at, slope, mask=at < padded, cache_modifier=".cs")


def losses_and_slopes(
    logits: Tensor, wanted: Tensor, width: int, smoothing: float, training: bool
) -> tuple[Tensor, Tensor]:
    """(Σ −log p of what is wanted, Σ mean of −log p over the classes), of the first `width` alone.

    In training the logits become the gradient of the objective, zero beyond the first `width`.
    Rows that want a negative number count for nothing.
    """
    rows, padded = logits.shape
    nll = torch.empty(rows, device=logits.device, dtype=torch.float32)
    even = torch.empty_like(nll)
    block = min(COLUMNS, triton.next_power_of_2(padded))
    _row[(rows,)](
        logits, wanted, nll, even, width, padded, logits.stride(0), smoothing,
        TRAINING=training, BLOCK=block, num_warps=max(1, min(WARPS, block // 128)),
    )  # fmt: skip
    return nll.sum(), even.sum()
