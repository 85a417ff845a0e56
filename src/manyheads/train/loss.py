"""Loss: cross-entropy with label smoothing, computed together with the output layer.

L = −Σ_v q_v log p_v,  q = (1 − ε) one-hot + ε / V,  log p_v = z_v − log Σ e^z,  z = h Wᵀ + b
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads import ops
from manyheads.data.batching import IGNORE_INDEX


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
    objective, nll = ops.linear_cross_entropy(hidden, matrix, bias, labels, smoothing)
    return Loss(objective, nll, count)
