"""Loss: cross-entropy with label smoothing, computed together with the output layer.

L = −Σ_v q_v log p_v,  q = (1 − ε) one-hot + ε / V,  log p_v = z_v − log Σ e^z,  z = h Wᵀ + b
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.data.batching import IGNORE_INDEX

# Logits of so many rows stay in a CPU's caches, and keep a GPU busy between two launches.
ROWS_AT_ONCE = {"cpu": 1024, "cuda": 8192}
ALIGNED = 64  # classes, so that every row of logits begins where a GPU reads well


@dataclass(frozen=True)
class Loss:
    """A term of the training loss, as sums over `count` predictions.

    `objective` is differentiated; `nll` is reported (−log p without label smoothing); `weight` is
    the factor of the term in the total.
    """

    objective: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    count: int
    weight: float = 1.0


def rows_at_once(hidden: Tensor) -> int:
    """The number of predictions whose logits are held at once."""
    return ROWS_AT_ONCE.get(hidden.device.type, ROWS_AT_ONCE["cuda"])


def cross_entropy(
    hidden: Float[Tensor, "*n d"],
    matrix: Float[Tensor, "v d"],
    labels: Int[Tensor, "*n"],
    *,
    bias: Float[Tensor, " v"] | None = None,
    smoothing: float = 0.0,
    loss_mask: Bool[Tensor, "*n"] | None = None,
    count: int | None = None,
) -> Loss:
    """Cross-entropy of labels, from hidden states through the output matrix.

    Positions outside `loss_mask`, or with the label IGNORE_INDEX, do not count. `count` is the
    number of the others; if the caller knows it, a GPU need not be waited for.
    """
    kind = hidden.device.type
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if loss_mask is not None and kind == "cpu":  # where it is cheap to drop rows
        hidden, labels = hidden[loss_mask.flatten()], labels[loss_mask.flatten()]
    elif loss_mask is not None:
        labels = labels.masked_fill(~loss_mask.flatten(), IGNORE_INDEX)
    if count is None:
        count = len(labels) if loss_mask is None else int((labels != IGNORE_INDEX).sum())
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    # Inside a Function gradients are always disabled, so the mode is passed to it.
    training = torch.is_grad_enabled()
    objective, nll = _LinearCrossEntropy.apply(hidden, matrix, bias, labels, smoothing, training)  # type: ignore[no-untyped-call]
    return Loss(objective, nll, count)


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
        slopes = _by_kernel if _has_kernel(hidden) else _losses_and_slopes
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        nll_sum = torch.zeros((), dtype=precise, device=hidden.device)
        even_sum = torch.zeros_like(nll_sum)
        d_hidden = torch.empty_like(hidden) if training else None
        d_bias = torch.zeros_like(bias) if training and bias is not None else None
        size = rows_at_once(hidden)
        classes = len(matrix)
        weight = _aligned(matrix, hidden)
        d_matrix = torch.zeros_like(weight, dtype=matrix.dtype) if training else None
        shift = None if bias is None else _aligned(bias, hidden)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            h, y = hidden[rows], wanted[rows]
            # Logits at first, and their gradient from here on.
            d_logits = F.linear(h, weight, shift)
            nll, even, d_logits = slopes(d_logits, y, classes, smoothing, training)
            nll_sum += nll
            even_sum += even
            if d_hidden is None or d_matrix is None:
                continue
            torch.mm(d_logits, weight, out=d_hidden[rows])
            _add_product(d_matrix, d_logits.T, h)
            if d_bias is not None:
                d_bias += d_logits.sum(0)[:classes]
        ctx.save_for_backward(d_hidden, None if d_matrix is None else d_matrix[:classes], d_bias)
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


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; where a GPU can, added by the product, before anything is rounded."""
    if total.dtype == b.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += a @ b


def _aligned(weights: Tensor, like: Tensor) -> Tensor:
    """In the type of the hidden states, and on a GPU with zeros up to a length that is aligned.

    A matrix product whose rows begin anywhere (50,257 tokens) is several times slower there.
    """
    missing = -len(weights) % ALIGNED if like.device.type == "cuda" else 0
    weights = weights.to(like.dtype)
    return F.pad(weights, (0, 0) * (weights.ndim - 1) + (0, missing)) if missing else weights


def _losses_and_slopes(
    logits: Tensor, wanted: Tensor, classes: int, smoothing: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(Σ −log p of what is wanted, Σ mean over the classes of −log p, the gradient of logits)."""
    dtype, missing = logits.dtype, logits.shape[-1] - classes
    y, counts = wanted[:, None].clamp(min=0), wanted[:, None] >= 0
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    logits = logits[:, :classes].to(precise)
    highest, at = logits.amax(-1, keepdim=True), logits.gather(-1, y)
    even = logits.mean(-1, keepdim=True) if smoothing else at
    # One exponential serves both the sum and the gradient.
    powers = logits.sub_(highest).exp_()
    total = powers.sum(-1, keepdim=True)
    log_total = highest + total.log()
    sums = ((log_total - at) * counts).sum(), ((log_total - even) * counts).sum()
    if training:
        powers.div_(total)
        if smoothing:
            powers -= smoothing / classes
        powers.scatter_add_(-1, y, torch.full_like(total, smoothing - 1.0))
        if logits.is_cuda or not counts.all():  # a GPU is not asked: it may be recording
            powers *= counts
    slopes = powers.to(dtype)
    return *sums, F.pad(slopes, (0, missing)) if missing else slopes


def _has_kernel(hidden: Tensor) -> bool:
    """Whether our kernel is for this device and type; Triton comes with PyTorch for a GPU alone."""
    return (
        hidden.device.type == "cuda"
        and hidden.dtype != torch.float64
        and find_spec("triton") is not None
    )


def _by_kernel(
    logits: Tensor, wanted: Tensor, classes: int, smoothing: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from manyheads.kernels.cross_entropy import losses_and_slopes

    return *losses_and_slopes(logits, wanted, classes, smoothing, training), logits
