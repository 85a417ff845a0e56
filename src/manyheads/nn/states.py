"""States of modules that are not attention: recurrent and convolutional layers."""

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from manyheads.nn.attention import Cache

States = tuple[Tensor, ...]  # each [layers or positions, rows, width]


@runtime_checkable
class StateCache(Cache, Protocol):
    """A cache that also keeps the newest states of modules; rows are hypotheses.

    A model that uses no mask passes the number of its positions to `advance`.
    """

    @property
    def length(self) -> int: ...

    def state(self, module: nn.Module) -> States | None:
        """The states after the last position; None before the first."""
        ...

    def set_state(self, module: nn.Module, states: States) -> None: ...
