"""A figure of the lectures: numbers as rows, and a function that draws them."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.fileio import write_text

Cell = str | int | float
COLOURS = ("#2b6cb0", "#d9480f", "#2f9e44", "#8d5fd3", "#4a4a4a", "#c2255c")


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a figure shows: `rows` go into the CSV file, `lines` to standard output."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    draw: Callable[[Path], None]
    lines: tuple[str, ...] = ()

    def save(self, images: Sequence[Path]) -> list[Path]:
        """Write the images, and the rows as CSV next to the first."""
        for path in images:
            self.draw(path)
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerows([self.columns, *(map(_shown, row) for row in self.rows)])
        numbers = images[0].with_suffix(".csv")
        write_text(numbers, table.getvalue())
        return [*images, numbers]


def _shown(cell: Cell) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def plain_ticks(axis: Any) -> None:
    """Logarithmic ticks as numbers: powers would be formulas."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
