"""Where a patch stands in an image: waves of its row and of its column, and learned places resized.

The positions of a square image are its patches row by row. Where there is one more than a square
has, the first is the class token, which stands nowhere.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import UserError, check_above_zero
from manyheads.nn.positions import Position, PositionSizes, SinusoidalPosition
from manyheads.nn.shapes import Hidden, Positions

Table = Float[Tensor, "places d"]
Resized = Float[Tensor, "_ d"]


class GridPosition(Position):
    """PE(row, column) = [PE(row), PE(column)], each the waves of a line, in half of the channels.

    The `before` positions that come before the first patch get nothing.
    """

    def __init__(self, columns: int, before: int, base: float) -> None:
        super().__init__()
        self.columns, self.before = columns, before
        self.line = SinusoidalPosition(base, "interleaved")

    def embed(self, x: Hidden, positions: Positions) -> Hidden:
        place = (positions - self.before).clamp(min=0)
        rows, columns = x.chunk(2, dim=-1)
        placed = torch.cat(
            [
                self.line.embed(rows, place // self.columns),
                self.line.embed(columns, place % self.columns),
            ],
            dim=-1,
        )
        return torch.where((positions < self.before)[..., None], x, placed)


@dataclass(frozen=True, kw_only=True)
class Sinusoidal2d:
    """Fixed waves added to the patches of a square image: of the row, then of the column."""

    base: float = 10_000.0
    kind: ClassVar[str] = "sinusoidal-2d"
    per_layer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_above_zero("position.base", self.base)

    def build(self, sizes: PositionSizes) -> Position:
        if sizes.dim % 2:
            raise UserError(
                f"positions of rows and columns share the channels: model.dim={sizes.dim} is odd, "
                "so choose an even one"
            )
        columns = math.isqrt(sizes.max_length)
        return GridPosition(columns, sizes.max_length - columns**2, self.base)


def resize_places(table: Table, old: int, new: int) -> Resized:
    """Learned vectors of a grid of old × old patches for one of new × new, bicubic between them.

    What comes before the patches in the table stays as it is.
    """
    before, grid = table[: len(table) - old**2], table[len(table) - old**2 :]
    image = rearrange(grid, "(row column) d -> 1 d row column", row=old)
    resized = F.interpolate(image, size=(new, new), mode="bicubic", align_corners=False)
    return torch.cat([before, rearrange(resized, "1 d row column -> (row column) d")])
