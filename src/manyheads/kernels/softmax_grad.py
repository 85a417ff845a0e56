# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Cross-entropy of rows of logits, and its gradient in place of the logits.

    −log p = log Σ e^z − z_y,    dL/dz = softmax(z) − q

PyTorch passes over the logits once each for maximum, exponential, sum and difference, in float32.
Here a row is read twice and written once in its own dtype, and summed in float32; cache hints keep
it in L2 between the two reads. Each thread keeps a running maximum m and sum over sixteen logits at
a time, and threads are combined once, at the end of the row:

    m′ = max(m, z₁ … z₁₆),    Σ ← Σ e^(m−m′) + e^(z₁−m′) + … + e^(z₁₆−m′)

Only the last block of a row has bounds checks, and the label's own entry is corrected after the
row: arithmetic costs time here too.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.common import device_guard
from manyheads.kernels.linear_cross_entropy import cross_entropy_grad_by_torch
from manyheads.kernels.selftest import Comparison, Inputs
from manyheads.kernels.topk import LOG2_E, LOW, MAX_BLOCK, PER_THREAD, online_logsumexp


@triton.jit
def _softmax_grad(
    LOGITS, LABELS, NLL, UNIFORM, width, padded, stride, smoothing,
    TRAINING: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr, PER_THREAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, columns = LOGITS + row * stride, tl.arange(0, BLOCK)
    label = tl.load(LABELS + row)
    counts, label_at = label >= 0, tl.maximum(label, 0)
    # Before the reduction, which synchronises threads: later another thread may overwrite it.
    label_logit = tl.load(logits + label_at).to(tl.float32)
    unmasked = width // BLOCK * BLOCK
    maxima = tl.full([BLOCK // PER_THREAD], LOW, tl.float32)
    sums, total = tl.zeros([BLOCK // PER_THREAD], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, unmasked, BLOCK):
        z = tl.load(logits + first + columns, eviction_policy="evict_last").to(tl.float32)
        maxima, sums = online_logsumexp(z, maxima, sums, BLOCK, PER_THREAD)
        if SMOOTHS:
            total += z
    if unmasked < width:
        at = unmasked + columns
        # Up to the padded end, which is aligned; otherwise loads would not be vectorised.
        z = tl.load(logits + at, mask=at < padded, other=0.0, eviction_policy="evict_last")
        z = z.to(tl.float32)
        total += tl.where(at < width, z, 0.0)
        z = tl.where(at < width, z, float("-inf"))
        maxima, sums = online_logsumexp(z, maxima, sums, BLOCK, PER_THREAD)
    top = tl.max(maxima, 0)
    log_total = top + tl.log(tl.sum(sums * tl.exp2((maxima - top) * LOG2_E), 0))
    nll = tl.where(counts, log_total - label_logit, 0.0)
    tl.store(NLL + row, nll)
    uniform = tl.where(counts, log_total - tl.sum(total, 0) / width, 0.0) if SMOOTHS else nll
    tl.store(UNIFORM + row, uniform)
    if TRAINING:
        if counts:
            log2_total, smoothed = log_total * LOG2_E, smoothing / width
            for first in range(0, unmasked, BLOCK):
                z = tl.load(logits + first + columns, eviction_policy="evict_first")
                grad = tl.exp2(z.to(tl.float32) * LOG2_E - log2_total)
                if SMOOTHS:
                    grad -= smoothed
                grad = grad.to(LOGITS.dtype.element_ty)
                tl.store(logits + first + columns, grad, cache_modifier=".cs")
            for first in range(unmasked, padded, BLOCK):
                at = first + columns
                z = tl.load(logits + at, mask=at < padded, other=0.0, eviction_policy="evict_first")
                grad = tl.exp2(z.to(tl.float32) * LOG2_E - log2_total) - smoothed
                grad = tl.where(at < width, grad, 0.0).to(LOGITS.dtype.element_ty)
                tl.store(logits + at, grad, mask=at < padded, cache_modifier=".cs")
            tl.debug_barrier()  # the label's entry is written last, whichever thread wrote it first
            grad = tl.exp2(label_logit * LOG2_E - log2_total) - smoothed - (1.0 - smoothing)
            tl.store(logits + label_at, grad.to(LOGITS.dtype.element_ty))
        else:
            zeros = tl.zeros([BLOCK], LOGITS.dtype.element_ty)
            for first in range(0, padded, BLOCK):
                at = first + columns
                tl.store(logits + at, zeros, mask=at < padded, cache_modifier=".cs")


def cross_entropy_grad(
    logits: Tensor, labels: Tensor, classes: int, smoothing: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy_grad_by_torch` by a kernel; without training the logits stay."""
    rows, padded = logits.shape
    nll = torch.empty(rows, device=logits.device, dtype=torch.float32)
    uniform = torch.empty_like(nll)
    block = min(MAX_BLOCK, max(PER_THREAD, triton.next_power_of_2(padded)))
    with device_guard(logits):
        _softmax_grad[(rows,)](
            logits, labels, nll, uniform, classes, padded, logits.stride(0), smoothing,
            TRAINING=training, SMOOTHS=smoothing > 0, BLOCK=block, PER_THREAD=PER_THREAD,
            num_warps=max(1, block // (32 * PER_THREAD)),
        )  # fmt: skip
    return nll.sum(), uniform.sum(), logits


def case(
    new: Inputs, classes: int, padding: int, smoothing: float, scale: float, training: bool
) -> Iterator[Comparison]:
    """Both sums and the gradient; one label is ignored."""
    logits = scale * new.randn((5, classes + padding))[0].float()
    logits[:, classes:] = 5.0
    labels = torch.tensor([3, classes - 1, -1, 0, classes // 2], device=new.device)
    expected = cross_entropy_grad_by_torch(logits.double(), labels, classes, smoothing, training)
    results = cross_entropy_grad(logits.clone(), labels, classes, smoothing, training)
    yield from zip(results[:2], expected[:2], strict=True)
    yield results[2], expected[2] if training else logits


SELFTEST = [(151, 41, smoothing, 1.0, True) for smoothing in (0.0, 0.1)]
