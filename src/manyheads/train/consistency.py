"""Consistency losses: two forward passes over a batch have to predict the same distributions.

R-Drop (Liang et al. 2021): the passes p and q differ in dropout.

    L = ½ (L₁ + L₂) + α/2 · ½ (KL(p ‖ q) + KL(q ‖ p))
    KL(p ‖ q) + KL(q ‖ p) = Σ (p − q) log (p/q)

The paper's loss is L₁ + L₂ + α/2 (…), twice this one.

SimCut (Gao et al. 2022): in the second pass q, each token vector of source and target is zero with
probability `p_cut`. Gradients flow through both passes.

    L = L₁ + α KL(p ‖ q)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from manyheads.ops import rows_per_chunk
from manyheads.train.step import Loss

F32 = torch.float32


@contextmanager
def cut_off(tables: set[nn.Embedding], probability: float) -> Iterator[None]:
    """Within this context, vectors of the second half of a batch are zero with a probability."""

    def cut(table: nn.Embedding, inputs: tuple[Tensor], vectors: Tensor) -> Tensor:
        keep = torch.rand_like(vectors[..., :1]) >= probability
        keep[: len(vectors) // 2] = True
        return vectors * keep

    handles = [table.register_forward_hook(cut) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def consistency(
    hidden: Float[Tensor, "bb t d"],
    matrix: Float[Tensor, "v d"],
    loss_mask: Bool[Tensor, "b t"],
    *,
    bias: Float[Tensor, " v"] | None,
    count: int,
    weight: float,
    symmetric: bool,
) -> Loss:
    """KL(p ‖ q), or ½ (KL(p ‖ q) + KL(q ‖ p)), over the `count` predictions of the mask.

    The second half of the hidden states is the second pass over the same batch. Logits are computed
    chunk by chunk, and again in the backward pass.
    """
    first, second = hidden.flatten(0, 1).chunk(2)
    mask, size = loss_mask.flatten(), max(1, rows_per_chunk(hidden) // 4)  # p and q, in float32
    if hidden.device.type == "cpu":  # a GPU would have to wait for the count
        first, second, mask = first[mask], second[mask], mask[mask]
    total = torch.zeros((), device=hidden.device, dtype=torch.promote_types(hidden.dtype, F32))
    for start in range(0, len(mask), size):
        rows = slice(start, start + size)
        inputs = (first[rows], second[rows], matrix, bias, mask[rows], symmetric)
        total = total + checkpoint(_kl, *inputs, use_reentrant=False, preserve_rng_state=False)
    return Loss(total, total.detach(), count, weight)


def _kl(
    first: Tensor,
    second: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    symmetric: bool,
) -> Tensor:
    p, q = (_log_probs(hidden, matrix, bias) for hidden in (first, second))
    weights = 0.5 * (p.exp() - q.exp()) if symmetric else p.exp()
    return ((weights * (p - q)).sum(-1) * mask).sum()


def _log_probs(hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    logits = F.linear(hidden, matrix, bias)
    return logits.to(torch.promote_types(logits.dtype, F32)).log_softmax(-1)
