"""What a module keeps of all that it has read, where that does not grow with it."""

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from manyheads.nn.attention import Cache

States = tuple[Tensor, ...]  # each [layers or places, rows, width]


@runtime_checkable
class StateCache(Cache, Protocol):
    """A cache that also keeps the states of modules that are not attention."""

    def recall(self, owner: nn.Module) -> States | None: ...

    def remember(self, owner: nn.Module, states: States) -> None: ...
