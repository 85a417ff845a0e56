"""What training minimises: cross-entropy with label smoothing, head included.

L = −Σ_v q_v log p_v,  q = (1 − ε) one-hot + ε / V,  log p_v = z_v − log Σ e^z,  z = h Wᵀ + b
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads import ops
from manyheads.data.batching import NOTHING


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
    hidden: Float[Tensor, "*n d"],
    matrix: Float[Tensor, "v d"],
    wanted: Int[Tensor, "*n"],
    *,
    bias: Float[Tensor, " v"] | None = None,
    smoothing: float = 0.0,
    scored: Bool[Tensor, "*n"] | None = None,
    count: int | None = None,
) -> Loss:
    """The loss of predicting `wanted` from hidden states through the output matrix.

    Of the predictions that are `scored`, and want something else than `NOTHING`. `count` is how
    many these are: whoever knows it spares a GPU the asking.
    """
    kind = hidden.device.type
    hidden, wanted = hidden.flatten(0, -2), wanted.flatten()
    if scored is not None and kind == "cpu":  # where it is cheap to leave them out
        hidden, wanted = hidden[scored.flatten()], wanted[scored.flatten()]
    elif scored is not None:
        wanted = wanted.masked_fill(~scored.flatten(), NOTHING)
    if count is None:
        count = len(wanted) if scored is None else int((wanted != NOTHING).sum())
    objective, nll = ops.linear_cross_entropy(hidden, matrix, bias, wanted, smoothing)
    return Loss(objective, nll, count)
