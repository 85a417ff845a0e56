"""What viewers and exporters ask of every model: its stacks and embeddings."""

from torch import nn

from manyheads.nn.block import Stack
from manyheads.nn.layers import Embedding


class Model(nn.Module):
    """Base class of models; those without Transformer blocks have no stacks."""

    def stacks(self) -> dict[str, Stack]:
        """Stacks of Transformer blocks by name (encoder, decoder), in the order of computation."""
        return {name: part for name, part in self.named_children() if isinstance(part, Stack)}

    def embeddings(self) -> dict[str, Embedding]:
        """The embedding layer of each stack that takes tokens: its own, or the model's only one."""
        embeddings = {}
        for name in self.stacks():
            layer = getattr(self, f"{name}_embedding", getattr(self, "embedding", None))
            if isinstance(layer, Embedding):
                embeddings[name] = layer
        return embeddings
