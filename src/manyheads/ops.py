"""Operations of which the fastest correct implementation runs: the only door to `kernels/`.

Models call these functions and ask nothing about devices, dtypes or Triton.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.kernels.attention import (
    ATTENTION,
    AttentionCall,
    Mask,
    fits_kernels,
    share_heads,
)
from manyheads.kernels.dispatch import HALF_PRECISION, first_supported, runs_triton, verified
from manyheads.kernels.linear_cross_entropy import LinearCrossEntropy, rows_per_chunk

__all__ = [
    "append_attention",
    "argmax",
    "attention",
    "full_precision",
    "has_fused_topk",
    "is_capturing",
    "linear_cross_entropy",
    "logsumexp",
    "rows_per_chunk",
    "share_heads",
    "topk",
    "write_kv",
]

MAX_TOPK = 32  # up to this many of a row our kernel is faster than a sort
MAX_WRITTEN_POSITIONS = 32  # new positions whose keys and values one program holds


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    bias: Callable[[], Tensor | None] | None = None,
    bias_table: Callable[[], Tensor] | None = None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v over q [b h t c], k [b g s c], v [b g s c].

    `bias` computes the bias matrix, `bias_table` the same by distance where that is all it depends
    on; the implementation that runs calls at most one of them.
    """
    call = AttentionCall(q, k, v, mask, bias, bias_table, scale, dropout)
    out: Tensor = first_supported(ATTENTION, call, q).run(call)
    return out


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    """(objective, Σ −log p) of predicting labels [n] from hidden [n d]; negative labels count 0."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    # Gradients are off inside a Function, so whether they are needed is decided here.
    training = torch.is_grad_enabled()
    objective, nll = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, label_smoothing, training
    )
    return objective, nll


def has_fused_topk(logits: Tensor) -> bool:
    """True if our kernels reduce these rows; they return float32."""
    return (
        runs_triton(logits)
        and logits.dtype in (torch.float32, *HALF_PRECISION)
        and len(logits) > 0
        and verified("topk", logits.device.index)
    )


def logsumexp(logits: Tensor) -> Tensor:
    """log Σ e^z of each row [rows 1], in float32 at least; a row has at least one finite logit."""
    if has_fused_topk(logits):
        from manyheads.kernels import topk as kernel

        total: Tensor = kernel.logsumexp(logits)
        return total
    if logits.device.type == "cpu":  # where log_softmax has the faster exponentials
        top, log_share = logits.amax(-1, keepdim=True), logits.log_softmax(-1)
        return top - log_share.amax(-1, keepdim=True)
    return logits.logsumexp(-1, keepdim=True)


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row in descending order, and their indices; ties in any order."""
    if k <= MAX_TOPK and has_fused_topk(values):
        from manyheads.kernels import topk as kernel

        best, indices = kernel.topk(values, k)
        return best, indices
    best, indices = values.topk(k, dim=-1)
    return best, indices


def argmax(logits: Tensor) -> Tensor:
    """The index of the largest of each row; the first of equal ones."""
    return topk(logits, 1)[1][:, 0] if has_fused_topk(logits) else logits.argmax(-1)


def write_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [n g t c] into slots [t] of a cache [n g slots c], in place."""
    if (
        runs_triton(k)
        and k.shape[2] <= MAX_WRITTEN_POSITIONS
        and not torch.is_grad_enabled()
        and verified("append_attention", k.device.index)
    ):
        from manyheads.kernels import append_attention as kernel

        kernel.write_kv(keys, values, slots, k, v)
        return
    keys.index_copy_(2, slots, k.to(keys.dtype))
    values.index_copy_(2, slots, v.to(values.dtype))


def append_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor,
    counter: Tensor, scale: float,
) -> Tensor | None:  # fmt: skip
    """`write_kv` of one position, and its attention over all positions so far, in one kernel.

    q [b h 1 c], k and v [b g 1 c], position [1]; `counter` [b h] holds zeros and is left so.
    Returns None if the kernel does not support the call.
    """
    if not (runs_triton(q) and fits_kernels(q, k, v)) or torch.is_grad_enabled():
        return None
    from manyheads.kernels import append_attention as kernel

    fits = q.shape[2] == 1 and kernel.fits(q.shape[0], q.shape[1], keys.shape[2])
    if not fits or not verified("append_attention", q.device.index):
        return None
    out: Tensor = kernel.append_attention(q, k, v, keys, values, position, counter, scale)
    return out


def full_precision(x: Tensor) -> torch.autocast:
    """A context that computes without autocast on the device of a tensor."""
    return torch.autocast(x.device.type, enabled=False)


def is_capturing(x: Tensor) -> bool:
    """True while a CUDA graph records: no value can be read from the device."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
