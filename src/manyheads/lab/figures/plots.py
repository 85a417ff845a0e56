"""Plots that experiments and runs share: curves, maps of all heads, matrices, loss surfaces."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manyheads.errors import UserError
from manyheads.view.figures import HIGHLIGHT, WEIGHTS, canvas, pyplot


def curves(
    runs: Mapping[str, Sequence[tuple[float | int, float]]],
    title: str,
    label: str,
    path: Path,
    across: str = "step",
    logarithmic: Sequence[str] = (),
) -> None:
    """One line a run: a score against the step or another quantity, `across`.

    `logarithmic` names the logarithmic axes: "across", "up".
    """
    with canvas((7.0, 4.2), path) as (_, [axes]):
        for name, points in runs.items():
            marker = "o" if len(points) == 1 else None  # a line of one point is invisible
            axes.plot(*zip(*points, strict=True), label=name, marker=marker)
        scales = {"across": "xscale", "up": "yscale"}
        _set_logarithmic(axes, *(scales[name] for name in logarithmic))
        axes.set(xlabel=across, ylabel=label, title=title)
        axes.grid(alpha=0.3)
        axes.legend()


def growth(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], label: str, path: Path
) -> None:
    """Log-log panels by title, each with named lines."""
    with canvas((6.2 * len(panels), 5.2), path, columns=len(panels)) as (_, row):
        for axes, (title, lines) in zip(row, panels.items(), strict=True):
            for name, points in lines.items():
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
            axes.set(title=title, xlabel=label)
            _set_logarithmic(axes, "xscale", "yscale")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)


def _set_logarithmic(axes: Any, *scales: str) -> None:
    from matplotlib.ticker import LogFormatter

    for scale in scales:
        axes.set(**{scale: "log"})
        axis = axes.xaxis if scale == "xscale" else axes.yaxis
        axis.set_major_formatter("{x:g}")  # powers would be formulas
        axis.set_minor_formatter(LogFormatter())  # labels within a decade


def head_grid(weights: Float[Tensor, "layers heads t s"], title: str, path: Path) -> None:
    """Every head as a small map, one layer a row."""
    layers, heads = weights.shape[:2]
    size = (1.2 + 1.5 * heads, 0.9 + 1.6 * layers)
    with canvas(size, path, layers, heads) as (figure, grid):
        for index, (axes, head_weights) in enumerate(zip(grid, weights.flatten(0, 1), strict=True)):
            layer, head = divmod(index, heads)
            image = axes.imshow(head_weights.numpy(), aspect="auto", **WEIGHTS)
            axes.set(xticks=[], yticks=[])
            if layer == 0:
                axes.set_title(f"head {head + 1}", fontsize=9)
            if head == 0:
                axes.set_ylabel(f"layer {layer + 1}", fontsize=9)
        figure.suptitle(title)
        figure.colorbar(image, ax=grid, label="attention weight", fraction=0.03)


def matrices(panels: Mapping[str, Float[Tensor, "_ _"]], title: str, path: Path) -> None:
    """One matrix a panel, four in a row, each with its own scale around 0."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    with canvas((3.2 * columns, 0.5 + 2.9 * rows), path, rows, columns) as (figure, grid):
        for axes, (name, matrix) in zip(grid, panels.items(), strict=False):
            largest = float(matrix.abs().max()) or 1.0
            image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-largest, vmax=largest)
            axes.set_title(name, fontsize=10)
            axes.set(xlabel="key position", ylabel="query position")
            figure.colorbar(image, ax=axes, fraction=0.046)
        for axes in grid[len(panels) :]:
            axes.remove()
        figure.suptitle(title)


def surfaces(
    panels: Mapping[str, Float[Tensor, "n n"]], reach: float, title: str, path: Path
) -> None:
    """Losses over two directions as contours; the star is the trained model.

    Each panel has its own levels, 25 of them in a geometric sequence.
    """
    with canvas((5.6 * len(panels), 4.6), path, columns=len(panels)) as (figure, row):
        for axes, (name, losses) in zip(row, panels.items(), strict=True):
            finite = losses[losses.isfinite()]
            low, high = max(float(finite.min()), 1e-6), float(finite.max())
            ratio = max(high / low, 1.01)
            levels = [low * ratio ** (step / 24) for step in range(25)]
            shown = losses.nan_to_num(high, high, high).clamp(levels[0], levels[-1]).numpy()
            side = [reach * (2 * index / (len(losses) - 1) - 1) for index in range(len(losses))]
            image = axes.contourf(side, side, shown, levels=levels, cmap="viridis_r", norm="log")
            axes.contour(side, side, shown, levels=levels, colors="white", linewidths=0.4)
            axes.plot(0, 0, marker="*", color=HIGHLIGHT, markersize=11)
            axes.set(xlabel="along δ", ylabel="along η", aspect="equal", title=name)
            axes.locator_params(nbins=5)
            bar = figure.colorbar(image, ax=axes, label="loss (nats a token)", fraction=0.046)
            bar.ax.minorticks_off()
            bar.ax.set_yticks(levels[::4], [f"{level:.3g}" for level in levels[::4]])
        figure.suptitle(title)


def metric_curves(
    run: Path, warn: Callable[[str], None] = lambda line: None
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(step, value) by split and metric; `warn` gets a line about unreadable ones."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): train the run first") from None
    metrics: dict[tuple[str, str], list[tuple[int, float]]] = {}
    broken = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line, parse_int=float)
            step, split = int(record.pop("step")), str(record.pop("split"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            broken += number < len(lines)  # the last line may be incomplete during training
            continue
        for name, value in record.items():
            if isinstance(value, float) and math.isfinite(value):
                metrics.setdefault((split, name), []).append((step, value))
    if broken:
        warn(f"{path}: lines that could not be read, and are left out: {broken}")
    return metrics


def heat_map(
    weights: Float[Tensor, "t s"],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    path: Path,
    marks: Sequence[tuple[int, int]] = (),
) -> None:
    """Attention of each row's word over the columns' words; `marks` frame (row, column) cells."""
    size = (2.5 + 0.45 * len(columns), 2.2 + 0.38 * len(rows))
    with canvas(size, path) as (figure, [axes]):
        image = axes.imshow(weights.numpy(), aspect="auto", **WEIGHTS)
        axes.set_xticks(
            range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor"
        )
        axes.set_yticks(range(len(rows)), rows)
        axes.xaxis.tick_top()
        for row, column in marks:
            frame = pyplot().Rectangle(
                (column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=HIGHLIGHT, linewidth=1.8
            )
            axes.add_patch(frame)
        axes.set_xlabel(title)
        figure.colorbar(image, ax=axes, label="attention weight", fraction=0.05)
