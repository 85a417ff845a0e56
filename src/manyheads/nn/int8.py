"""Weights and activations in eight bits for writing on a CPU: a quarter of the bytes, faster sums.

    x ≈ s_x x̂,  x̂ = round(x / s_x),  s_x = max|x| / 127        one scale a row of x
    W ≈ s_W Ŵ                                                 one scale a row of W
    x Wᵀ + b ≈ (x̂ Ŵᵀ) s_x s_W + b,  x̂ Ŵᵀ in whole numbers

A row has a scale of its own, so that what a sentence gets does not hang on its neighbours.
"""

from typing import TypeVar

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from manyheads.errors import UserError
from manyheads.nn.embedding import Head
from manyheads.nn.replaced import with_products

MOST = 127
M = TypeVar("M", bound=nn.Module)


def quantize(x: Float[Tensor, "n d"]) -> tuple[Int8[Tensor, "n d"], Float[Tensor, "n 1"]]:
    """Whole numbers from −127 to 127, and what each row of them is to be multiplied with."""
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny).div_(MOST)
    return (x / scale).round_().to(torch.int8), scale


class Product(nn.Module):
    """x Wᵀ + b in whole numbers, for a matrix W that stays as it is."""

    matrix: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Float[Tensor, "v d"], bias: Float[Tensor, " v"] | None) -> None:
        super().__init__()
        matrix, scale = quantize(weight.detach())
        # Columns by columns, as the kernel wants them.
        self.register_buffer("matrix", matrix.T.contiguous())
        self.register_buffer("scale", scale[:, 0].contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        rows, scale = quantize(x.flatten(0, -2))
        y = torch._int_mm(rows, self.matrix).to(x.dtype).mul_(scale).mul_(self.scale)
        if self.bias is not None:
            y.add_(self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def in_int8(model: M) -> M:
    """A copy of a model that writes, with every linear layer and its output in eight bits."""
    table = getattr(model, "target_table", getattr(model, "tokens", None))
    head = getattr(model, "head", None)
    if not isinstance(head, Head) or not isinstance(table, nn.Embedding):
        raise UserError(
            "eight bits are for models that write (translators, language models): leave them out"
        )
    if next(model.parameters()).device.type != "cpu":
        raise UserError("eight bits are for the CPU: choose --device cpu, or leave them out")
    return with_products(model, head, table, Product)
