"""Linear layers whose weights lie as the CPU's kernels read them, for models that only write.

oneDNN multiplies fastest when a matrix lies in blocks of its own order, and does some activations
on the way. To bring it there costs as much as a product, so that it pays where weights stay as they
are: in decoding, where a product has few rows, a large matrix is up to three times as fast. With a
small one a few rows take less time than oneDNN takes to begin. PyTorch keeps a program for each
number of rows that it has met, a thousand of them or up to a gigabyte: rows are filled up to one of
few numbers, and many rows go another way.
"""

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.nn.embedding import Head
from manyheads.nn.replaced import Product, with_activations_inside, with_products

ROWS = 64  # what a matrix is arranged for
LEAST_ROWS, MOST_ROWS = 32, 1024
LARGE = 2**18  # weights of a matrix for which any number of rows pays
MOST_BYTES = 2**30  # of weights that are held twice
# What oneDNN does to a product on the way, and does faster than PyTorch after it.
ON_THE_WAY = {"relu": ("relu", ""), "gelu-tanh": ("gelu", "tanh")}
M = TypeVar("M", bound=nn.Module)


class Arranged(Product):
    """act(x Wᵀ + b)."""

    def __init__(self, weight: Float[Tensor, "v d"], bias: Float[Tensor, " v"] | None) -> None:
        super().__init__(weight, bias)
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)
        self.least = 1 if weight.numel() >= LARGE else LEAST_ROWS

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        rows = x.numel() // x.shape[-1]
        if not self.least <= rows <= MOST_ROWS:
            return self.plain(x)
        flat = x.reshape(rows, -1)
        more = _filled(rows) - rows
        if more:
            flat = F.pad(flat, (0, 0, 0, more))
        act, how = ON_THE_WAY.get(self.activation or "", ("none", ""))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(flat, self.blocks, self.bias, act, [], how)
        return y[:rows].view(*x.shape[:-1], -1)


def _filled(rows: int) -> int:
    """The next of the few numbers of rows that products are computed with."""
    unit = 1 if rows <= 4 else 8 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // unit) * unit


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
    return with_activations_inside(with_products(model, head, table, Arranged), ON_THE_WAY)


class Arrangement:
    """Keeps the arranged copy of a model as long as its weights are what they were."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.kept: Any = None

    def of(self, model: M, table: nn.Embedding) -> M:
        """The copy, or the model itself where there is nothing to gain, and under autocast, where
        it is PyTorch's own products that compute in another type."""
        if torch.is_autocast_enabled("cpu"):
            return model
        key = (id(model), *((x.data_ptr(), x._version) for x in model.parameters()))
        if key != self.key:
            self.key = key
            self.kept = arranged(model, table) if can_be_arranged(model) else model
        return self.kept
