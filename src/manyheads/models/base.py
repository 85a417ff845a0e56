"""The interface of every model to viewers and exporters: its stacks and embeddings."""

from torch import nn

from manyheads.nn.block import Stack
from manyheads.nn.layers import Embedding


class Model(nn.Module):
    """A model; one without Transformer blocks has no stacks."""

    def stacks(self) -> dict[str, Stack]:
        """Stacks of Transformer blocks by name (encoder, decoder), in the order of computation."""
        return {}

    def embeddings(self) -> dict[str, Embedding]:
        """The embedding layer below each stack that reads tokens."""
        return {}
