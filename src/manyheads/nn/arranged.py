"""Linear layers whose weights lie as the CPU's kernels read them, for models that only write.

oneDNN multiplies fastest when a matrix lies in blocks of its own order. To bring it there costs as
much as a product, so that it pays where weights stay as they are: in decoding, where a product has
few rows, it is up to three times as fast.
"""

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.nn.embedding import Head
from manyheads.nn.replaced import with_products

ROWS = 64  # what a matrix is arranged for: any number of rows is computed
MOST_BYTES = 2**30  # of weights that are held twice
M = TypeVar("M", bound=nn.Module)


class Arranged(nn.Module):
    """x Wᵀ + b."""

    def __init__(self, weight: Float[Tensor, "v d"], bias: Float[Tensor, " v"] | None) -> None:
        super().__init__()
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocks, self.bias, "none", [], "")
        return y


def can_be_arranged(model: nn.Module) -> bool:
    """In float32 on a CPU that has the kernels, and not too large to be held twice."""
    weights = [part.weight for part in model.modules() if isinstance(part, nn.Linear)]
    return (
        torch.backends.mkldnn.is_available()
        and isinstance(getattr(model, "head", None), Head)
        and all(x.device.type == "cpu" and x.dtype == torch.float32 for x in model.parameters())
        and sum(4 * x.numel() for x in weights) <= MOST_BYTES
    )


def arranged(model: M, table: nn.Embedding) -> M:
    """A copy for writing."""
    head = model.head
    assert isinstance(head, Head)
    return with_products(model, head, table, Arranged)


class Arrangement:
    """Keeps the arranged copy of a model as long as its weights are what they were."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.kept: Any = None

    def of(self, model: M, table: nn.Embedding) -> M:
        """The copy, or the model itself where there is nothing to gain."""
        key = (id(model), *((x.data_ptr(), x._version) for x in model.parameters()))
        if key != self.key:
            self.key = key
            self.kept = arranged(model, table) if can_be_arranged(model) else model
        return self.kept
