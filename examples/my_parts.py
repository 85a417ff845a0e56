"""A plug-in: a position scheme and a metric of your own.

manyheads train phrasebook model.position=gaussian --plugin my_parts.py
manyheads evaluate runs/phrasebook --plugin my_parts.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import nn

from manyheads.nn.positions import Position, PositionSizes
from manyheads.plugins import Metric, Plugin


class GaussianPosition(Position):
    """−(i − j)² / 2σ_h² on the scores: each head learns its width σ."""

    def __init__(self, heads: int, width: float) -> None:
        super().__init__()
        self.log_width = nn.Parameter(torch.full((heads,), width).log())

    def score(self, q, queries, keys):
        distance = rearrange(queries, "b t -> b 1 t 1") - rearrange(keys, "b s -> b 1 1 s")
        width = rearrange(self.log_width.exp(), "h -> 1 h 1 1")
        return (-((distance / width) ** 2) / 2).to(q.dtype)


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """`width` is where σ starts, in positions."""

    width: float = 8.0
    kind: ClassVar[str] = "gaussian"
    per_layer: ClassVar[bool] = True

    def build(self, sizes: PositionSizes) -> Position:
        return GaussianPosition(sizes.heads, self.width)


def length_ratio(translations, references):
    """Characters of the translations per character of their first references."""
    return sum(map(len, translations)) / sum(len(texts[0]) for texts in references)


PLUGIN = Plugin(
    positions=[Gaussian],
    metrics=[Metric(name="length_ratio", score=length_ratio, signature="characters per character")],
)
