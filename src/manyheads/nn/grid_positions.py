"""Positions of image patches: sinusoids of row and column, and learned positions resized.

The positions of a square image are its patches row by row. If there are more positions than the
largest square, the first ones (the class token) have no place in the grid.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import UserError
from manyheads.nn.positions import Base, Position, PositionSizes, SinusoidalPosition
from manyheads.nn.shapes import Hidden, Positions


class GridPosition(Position):
    """PE(row, column) = [PE(row), PE(column)], each sinusoidal in half of the channels.

    The `before` positions in front of the first patch get nothing.
    """

    def __init__(self, columns: int, before: int, base: float) -> None:
        super().__init__()
        self.columns, self.before = columns, before
        self.line = SinusoidalPosition(base, "interleaved")

    def embed(self, x: Hidden, positions: Positions) -> Hidden:
        patch = (positions - self.before).clamp(min=0)
        of_row, of_column = x.chunk(2, dim=-1)
        embedded = torch.cat(
            [
                self.line.embed(of_row, patch // self.columns),
                self.line.embed(of_column, patch % self.columns),
            ],
            dim=-1,
        )
        return torch.where((positions < self.before)[..., None], x, embedded)


@dataclass(frozen=True, kw_only=True)
class Sinusoidal2d:
    """Fixed waves of row and column, added to the patches of a square image."""

    base: Base = 10_000.0
    kind: ClassVar[str] = "sinusoidal-2d"
    per_layer: ClassVar[bool] = False

    def build(self, sizes: PositionSizes) -> Position:
        if sizes.dim % 2:
            raise UserError(
                f"sinusoidal-2d positions need two halves, and model.dim={sizes.dim} is odd: "
                "choose an even one"
            )
        columns = math.isqrt(sizes.max_length)
        return GridPosition(columns, sizes.max_length - columns**2, self.base)


def resize_learned(table: Float[Tensor, "n d"], old: int, new: int) -> Float[Tensor, "_ d"]:
    """Learned vectors of a grid of old × old patches for one of new × new, by bicubic resampling.

    Rows of the table before the patches stay unchanged.
    """
    before, grid = table[: len(table) - old**2], table[len(table) - old**2 :]
    image = rearrange(grid, "(row column) d -> 1 d row column", row=old)
    resized = F.interpolate(image, size=(new, new), mode="bicubic", align_corners=False)
    return torch.cat([before, rearrange(resized, "1 d row column -> (row column) d")])
