"""States of modules that are not attention: recurrent and convolutional layers."""

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from manyheads.nn.attention import Cache

States = tuple[Tensor, ...]  # each [layers or positions, rows, width]


@runtime_checkable
class StateCache(Cache, Protocol):
    """A cache that also keeps the newest states of modules; rows are hypotheses."""

    @property
    def length(self) -> int: ...

    def advance(self, positions: int | None = None) -> None:
        """As in `Cache`; a model that asks for no mask names how many positions it has read."""
        ...

    def state(self, module: nn.Module) -> States | None:
        """The states after the last position; None before the first."""
        ...

    def set_state(self, module: nn.Module, states: States) -> None: ...
