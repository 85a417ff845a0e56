"""What training minimises: cross-entropy with label smoothing, head included.

L = −Σ_v q_v log p_v,  q = (1 − ε) one-hot + ε / V,  log p_v = z_v − log Σ e^z,  z = h Wᵀ + b
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

# What stays in a CPU's caches, and what keeps a GPU busy between two launches.
ROWS_AT_ONCE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Loss:
    """A term of what is minimised, as sums over `count` predictions.

    `objective` is what gradients are taken of, `nll` what is told of it (−log p without
    smoothing), `weight` its weight among several terms.
    """

    objective: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    count: int
    weight: float = 1.0


def cross_entropy(
    hidden: Float[Tensor, "n d"],
    matrix: Float[Tensor, "v d"],
    wanted: Int[Tensor, " n"],
    *,
    bias: Float[Tensor, " v"] | None = None,
    smoothing: float = 0.0,
) -> Loss:
    """The loss of predicting `wanted` from hidden states through the output matrix."""
    # Inside a Function gradients are always off, so whether they are wanted is asked here.
    training = torch.is_grad_enabled()
    objective, nll = _LinearCrossEntropy.apply(hidden, matrix, bias, wanted, smoothing, training)  # type: ignore[no-untyped-call]
    return Loss(objective, nll, len(wanted))


class _LinearCrossEntropy(torch.autograd.Function):
    """Output layer and loss in one, some rows at a time.

    The gradient of the logits, softmax(z) − q, is formed where the logits stand, so that the
    logits of all rows are never held and are passed over as seldom as possible.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        wanted: Tensor,
        smoothing: float,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        training = training and any(ctx.needs_input_grad[:3])
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        classes = matrix.shape[0]
        nll_sum = torch.zeros((), dtype=precise, device=hidden.device)
        even_sum = torch.zeros_like(nll_sum)
        d_hidden = torch.empty_like(hidden) if training else None
        d_matrix = torch.zeros_like(matrix) if training else None
        d_bias = torch.zeros_like(bias) if training and bias is not None else None
        size = ROWS_AT_ONCE.get(hidden.device.type, ROWS_AT_ONCE["cuda"])
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            h, y = hidden[rows], wanted[rows, None]
            logits = F.linear(h, matrix.to(h.dtype), None if bias is None else bias.to(h.dtype))
            logits = logits.to(precise)
            highest, at = logits.amax(-1, keepdim=True), logits.gather(-1, y)
            even = logits.mean(-1, keepdim=True) if smoothing else at
            # One exponential serves both the sum and the gradient.
            powers = logits.sub_(highest).exp_()
            total = powers.sum(-1, keepdim=True)
            log_total = highest + total.log()
            nll_sum += (log_total - at).sum()
            even_sum += (log_total - even).sum()
            if d_hidden is None or d_matrix is None:
                continue
            d_logits = powers.div_(total)
            if smoothing:
                d_logits -= smoothing / classes
            d_logits.scatter_add_(-1, y, torch.full_like(total, smoothing - 1.0))
            d_logits = d_logits.to(h.dtype)
            torch.mm(d_logits, matrix.to(h.dtype), out=d_hidden[rows])
            if d_matrix.dtype == h.dtype:
                d_matrix.addmm_(d_logits.T, h)
            else:
                d_matrix += d_logits.T @ h
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_hidden, d_matrix, d_bias)
        objective = (1 - smoothing) * nll_sum + smoothing * even_sum
        ctx.mark_non_differentiable(nll_sum)
        return objective, nll_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        d_hidden, d_matrix, d_bias = ctx.saved_tensors
        scaled = (
            None if d is None else d * scale.to(d.dtype) for d in (d_hidden, d_matrix, d_bias)
        )
        return *scaled, None, None, None
