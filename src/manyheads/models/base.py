"""What viewers and exporters ask of every model: its stacks and embeddings."""

from torch import nn

from manyheads.nn.block import Stack
from manyheads.nn.layers import Embedding


class Model(nn.Module):
    """Base class of models; those without Transformer blocks have no stacks."""

    def stacks(self) -> dict[str, Stack]:
        """Stacks of Transformer blocks by name (encoder, decoder), in the order of computation."""
        return {}

    def embeddings(self) -> dict[str, Embedding]:
        """The embedding layer of each stack that takes tokens."""
        return {}
