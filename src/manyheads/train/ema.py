"""Exponential moving average of the weights (EMA), which validation and the saved model use.

    θ̄ ← d θ̄ + (1 − d) θ,   d = min(decay, (1 + t) / (10 + t)) after update t

The smaller d of the first updates forgets the initial weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Ema:
    """The average of a model's parameters, by name; `swapped` exchanges the two in place."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After update number `step`, counted from 1."""
        average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        average(list(self.averages.values()), list(self.parameters.values()), 0)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the averages in this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            current = parameter.clone()
            parameter.copy_(self.averages[name])
            self.averages[name].copy_(current)
