"""What a step of writing asks of rows of logits: on a GPU by our own kernels (kernels/topk.py)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.kernels.dispatch import HALF, TRITON, trusted

FEW = 32  # up to so many of a row our kernel is faster


def log_mass(logits: Float[Tensor, "rows v"]) -> Float[Tensor, "rows 1"]:
    """The log of what the exponentials of each row sum to, in float32 at least; one is above −∞."""
    if has_kernel(logits):
        from manyheads.kernels.topk import log_mass

        total: Tensor = log_mass(logits)
        return total
    if logits.device.type == "cpu":  # a softmax has the faster exponentials there
        top, share = logits.amax(-1, keepdim=True), logits.log_softmax(-1).amax(-1, keepdim=True)
        return top - share
    return logits.logsumexp(-1, keepdim=True)


def foremost(
    values: Float[Tensor, "rows v"], most: int
) -> tuple[Float[Tensor, "rows w"], Int[Tensor, "rows w"]]:
    """The greatest of each row, in order, and where they are; which of equal ones is left open."""
    if most <= FEW and has_kernel(values):
        from manyheads.kernels.topk import foremost

        best, places = foremost(values, most)
        return best, places
    best, places = values.topk(most, dim=-1)
    return best, places


def likeliest(logits: Float[Tensor, "rows v"]) -> Int[Tensor, " rows"]:
    """The place of the greatest of each row; of equal ones the first."""
    return foremost(logits, 1)[1][:, 0] if has_kernel(logits) else logits.argmax(-1)


def has_kernel(values: Tensor) -> bool:
    """Whether our kernels are for these rows; they give float32."""
    return (
        values.device.type == "cuda"
        and values.dtype in (torch.float32, *HALF)
        and len(values) > 0
        and TRITON
        and trusted("topk", values.device.index)
    )
