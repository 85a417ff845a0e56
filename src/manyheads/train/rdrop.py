"""Two readings of a batch, each with other dropout, and how far apart they are (R-Drop).

    L = ½ (L₁ + L₂) + α/2 · ½ (KL(p ‖ q) + KL(q ‖ p))
    KL(p ‖ q) + KL(q ‖ p) = Σ (p − q) log (p/q)

Liang et al. 2021, but for a factor of two on all of it. A model of few sentences learns what it
predicts with half of its parts away as well.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from manyheads.ops import rows_per_chunk
from manyheads.train.loss import Loss

F32 = torch.float32


def disagreement(
    hidden: Float[Tensor, "bb t d"],
    matrix: Float[Tensor, "v d"],
    scored: Bool[Tensor, "b t"],
    *,
    bias: Float[Tensor, " v"] | None,
    count: int,
    weight: float,
) -> Loss:
    """½ (KL(p ‖ q) + KL(q ‖ p)) of all predictions that are `scored`, of which there are `count`.

    The second half of the hidden states is the second reading of the same rows. Logits are held
    for some rows at a time, and made again when their gradient is wanted.
    """
    first, second = hidden.flatten(0, 1).chunk(2)
    counted, size = scored.flatten(), max(1, rows_per_chunk(hidden) // 4)  # of each, in float32
    if hidden.device.type == "cpu":  # where it is cheap to leave the others out
        first, second, counted = first[counted], second[counted], counted[counted]
    total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, F32))
    for start in range(0, len(counted), size):
        rows = slice(start, start + size)
        given = (first[rows], second[rows], matrix, bias, counted[rows])
        total = total + checkpoint(_apart, *given, use_reentrant=False, preserve_rng_state=False)
    return Loss(total, total.detach(), count, weight)


def _apart(
    first: Tensor, second: Tensor, matrix: Tensor, bias: Tensor | None, counted: Tensor
) -> Tensor:
    p, q = (_log_probabilities(hidden, matrix, bias) for hidden in (first, second))
    return 0.5 * (((p.exp() - q.exp()) * (p - q)).sum(-1) * counted).sum()


def _log_probabilities(hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    logits = F.linear(hidden, matrix, bias)
    return logits.to(torch.promote_types(logits.dtype, F32)).log_softmax(-1)
