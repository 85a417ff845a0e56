# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A kernel of our own: rows of logits become the gradient of their loss, where they stand.

    −log p = log Σ e^z − z_y,    dL/dz = softmax(z) − q

PyTorch passes over the logits once for each of maximum, exponential, sum and difference, in
float32. Here a row is read twice and written once in the type that it has, and summed in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _row(
    LOGITS, WANTED, NLL, EVEN, width, stride, smoothing,
    TRAINING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, columns = LOGITS + row * stride, tl.arange(0, BLOCK)
    wanted = tl.load(WANTED + row)
    highest, powers, total = float("-inf"), 0.0, 0.0
    for first in range(0, width, BLOCK):
        inside = first + columns < width
        z = tl.load(logits + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(z, 0))
        powers = powers * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher), 0)
        total += tl.sum(tl.where(inside, z, 0.0), 0)
        highest = higher
    log_total = highest + tl.log(powers)
    counts = wanted >= 0
    own = tl.load(logits + tl.maximum(wanted, 0)).to(tl.float32)
    tl.store(NLL + row, tl.where(counts, log_total - own, 0.0))
    tl.store(EVEN + row, tl.where(counts, log_total - total / width, 0.0))
    if TRAINING:
        for first in range(0, width, BLOCK):
            at = first + columns
            z = tl.load(logits + at, mask=at < width, other=float("-inf")).to(tl.float32)
            slope = tl.exp(z - log_total) - smoothing / width
            slope = tl.where(at == wanted, slope - (1.0 - smoothing), slope)
            slope = tl.where(counts, slope, 0.0)
            tl.store(logits + at, slope.to(LOGITS.dtype.element_ty), mask=at < width)


def losses_and_slopes(
    logits: Tensor, wanted: Tensor, width: int, smoothing: float, training: bool
) -> tuple[Tensor, Tensor]:
    """(Σ −log p of what is wanted, Σ mean of −log p over the classes), of the first `width` alone.

    In training the logits become the gradient of the objective. Rows that want a negative number
    count for nothing.
    """
    rows = len(logits)
    nll = torch.empty(rows, device=logits.device, dtype=torch.float32)
    even = torch.empty_like(nll)
    block = min(16384, triton.next_power_of_2(width))
    _row[(rows,)](
        logits, wanted, nll, even, width, logits.stride(0), smoothing,
        TRAINING=training, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    return nll.sum(), even.sum()
