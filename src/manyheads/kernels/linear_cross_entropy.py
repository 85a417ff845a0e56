"""The output layer and its cross-entropy in one, some rows at a time.

    L = −Σ_v q_v log p_v,  q = (1 − ε) one-hot + ε / V,  log p_v = z_v − log Σ e^z,  z = h Wᵀ + b

The gradient of the logits, softmax(z) − q, overwrites the logits, so that the logits of all rows
are never held together.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.dispatch import runs_triton, verified

# As many as stay in a CPU's caches, or keep a GPU busy between two launches.
ROWS_PER_CHUNK = {"cpu": 1024, "cuda": 8192}
ALIGNMENT = 64  # classes: GPU matrix products are fast if rows start at multiples of it


def rows_per_chunk(hidden: Tensor) -> int:
    """For how many predictions the logits are held together."""
    return ROWS_PER_CHUNK.get(hidden.device.type, ROWS_PER_CHUNK["cuda"])


def cross_entropy_grad_by_torch(
    logits: Tensor, labels: Tensor, classes: int, smoothing: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(Σ −log p of the labels, Σ over rows of the mean −log p, gradient) over `classes`.

    Only the first `classes` of the logits [n padded] count. Without smoothing the second sum equals
    the first. Rows with a negative label count 0. The logits are overwritten.
    """
    dtype, missing = logits.dtype, logits.shape[-1] - classes
    labels, counts = labels[:, None].clamp(min=0), labels[:, None] >= 0
    logits = logits[:, :classes].to(_accumulation_dtype(dtype))
    highest, label_logits = logits.amax(-1, keepdim=True), logits.gather(-1, labels)
    mean_logits = logits.mean(-1, keepdim=True) if smoothing else label_logits
    # One exponential serves both the sum and the gradient.
    powers = logits.sub_(highest).exp_()
    total = powers.sum(-1, keepdim=True)
    log_total = highest + total.log()
    nll = ((log_total - label_logits) * counts).sum()
    uniform = ((log_total - mean_logits) * counts).sum()
    if training:
        powers.div_(total)
        if smoothing:
            powers -= smoothing / classes
        powers.scatter_add_(-1, labels, torch.full_like(total, smoothing - 1.0))
        if logits.is_cuda or not counts.all():  # no host synchronisation on a GPU
            powers *= counts
    grad = powers.to(dtype)
    return nll, uniform, F.pad(grad, (0, missing)) if missing else grad


class LinearCrossEntropy(torch.autograd.Function):
    """(objective, Σ −log p) of hidden [n d] with output weight [v d], bias [v], labels [n]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        training = training and any(ctx.needs_input_grad[:3])
        nll_sum = torch.zeros((), dtype=_accumulation_dtype(hidden.dtype), device=hidden.device)
        uniform_sum = torch.zeros_like(nll_sum)
        d_hidden = torch.empty_like(hidden) if training else None
        d_bias = torch.zeros_like(bias) if training and bias is not None else None
        classes, size = len(weight), rows_per_chunk(hidden)
        aligned = _align(weight, hidden)
        d_weight = torch.zeros_like(aligned, dtype=weight.dtype) if training else None
        aligned_bias = None if bias is None else _align(bias, hidden)
        sums_and_grad = cross_entropy_grad_by_torch
        if (
            runs_triton(hidden)
            and hidden.dtype != torch.float64
            and verified("softmax_grad", hidden.device.index)
        ):
            from manyheads.kernels.softmax_grad import cross_entropy_grad as sums_and_grad
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = F.linear(hidden[rows], aligned, aligned_bias)
            nll, uniform, d_logits = sums_and_grad(
                logits, labels[rows], classes, smoothing, training
            )
            nll_sum += nll
            uniform_sum += uniform
            if d_hidden is None or d_weight is None:
                continue
            torch.mm(d_logits, aligned, out=d_hidden[rows])
            _add_product(d_weight, d_logits.T, hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(0)[:classes]
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight[:classes], d_bias)
        objective = (1 - smoothing) * nll_sum + smoothing * uniform_sum
        ctx.mark_non_differentiable(nll_sum)
        return objective, nll_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        scaled = (None if d is None else d * scale.to(d.dtype) for d in ctx.saved_tensors)
        return *scaled, None, None, None


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; on a GPU accumulated by the product itself, before anything is rounded."""
    if total.dtype == b.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += a @ b


def _align(weights: Tensor, like: Tensor) -> Tensor:
    """Weights in the dtype of the hidden states, on a GPU zero-padded to an aligned length.

    A matrix product whose rows start anywhere (50,257 tokens) is several times slower there.
    """
    missing = -len(weights) % ALIGNMENT if like.device.type == "cuda" else 0
    weights = weights.to(like.dtype)
    return F.pad(weights, (0, 0) * (weights.ndim - 1) + (0, missing)) if missing else weights
