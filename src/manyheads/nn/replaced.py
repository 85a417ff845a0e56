"""Models that only write, with their matrices held in another form (nn/int8, nn/arranged)."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.nn.embedding import Head

M = TypeVar("M", bound=nn.Module)
Make = Callable[[Tensor, Tensor | None], nn.Module]  # of W and b, what computes x Wᵀ + b


class OwnHead(nn.Module):
    """A head whose matrix is its own, whatever it was tied to."""

    def __init__(self, product: nn.Module, scale: float) -> None:
        super().__init__()
        self.product, self.scale = product, scale

    def forward(self, hidden: Float[Tensor, "*n d"], table: nn.Embedding) -> Float[Tensor, "*n v"]:
        return self.product(hidden if self.scale == 1.0 else hidden * self.scale)


def with_products(model: M, head: Head, table: nn.Embedding, make: Make) -> M:
    """A copy that shares all tensors, but for the matrices of linear layers and of the output."""
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    for module in list(other.modules()):
        for name, part in module.named_children():
            if isinstance(part, nn.Linear):
                setattr(module, name, make(part.weight, part.bias))
    other.head = OwnHead(make(head.matrix(table), head.bias), head.scale)
    return other
