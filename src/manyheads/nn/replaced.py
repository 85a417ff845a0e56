"""Models that only write, with their matrices held or multiplied in another form.

In eight bits (nn/int8), as a CPU reads them best (nn/arranged), by a kernel for one row
(kernels/gemv), or by a product and a sum.
"""

import copy
from collections.abc import Callable, Container
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.nn.embedding import Head
from manyheads.nn.feedforward import ACTIVATIONS, FeedForward

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


class Product(nn.Module):
    """act(x Wᵀ + b), of weights that stay as they are; what computes it is a subclass's own.

    It begins as x Wᵀ + b: `with_activations_inside` gives it the name of an activation.
    """

    def __init__(self, weight: Float[Tensor, "v d"], bias: Float[Tensor, " v"] | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.activation: str | None = None

    def plain(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        """As PyTorch computes it."""
        y = F.linear(x, self.weight, self.bias)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


def with_activations_inside(model: M, kinds: Container[str]) -> M:
    """Let products compute the activations of these kinds that stand behind them."""
    for part in model.modules():
        if type(part) is FeedForward and part.named in kinds:
            assert isinstance(part.inner, Product)
            part.inner.activation, part.activation = part.named, _same
    return model


def _same(x: Tensor) -> Tensor:
    return x


class Separate(Product):
    """x Wᵀ + b, first the one and then the other.

    A product with one row alone is as fast as W is read. PyTorch writes such a kernel, and joins
    what is beside it, where it is asked for the product; a product with its sum it leaves to a
    library that is made for many rows.
    """

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        product = F.linear(x, self.weight)
        return product if self.bias is None else product + self.bias


def with_products_of(model: M, make: Make) -> M:
    """The same, of a model that writes."""
    head: Any = model.head
    table: Any = getattr(model, "target_table", None) or model.tokens
    return with_products(model, head, table, make)
