"""Figures as files, and the metrics of a run as curves; matplotlib is imported when needed."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manyheads.errors import UserError, import_optional

Curve = list[tuple[int, float]]
Note = tuple[float, float, int, float]  # start and end in seconds, pitch, loudness from 0 to 1
MAX_VELOCITY = 127
HIGHLIGHT = "#ff5c39"
PART_COLOURS = ("#2b6cb0", "#2f9e44", "#8d5fd3", "#4a4a4a")
MIN_PRIME_SECONDS = 5.0
MAX_SIDE = 24.0  # of a confusion matrix, in inches
WEIGHTS = {"cmap": "viridis", "vmin": 0.0, "vmax": 1.0}  # one scale for all attention weights


def _pyplot() -> Any:
    import_optional("matplotlib", "figures").use("Agg")
    return import_optional("matplotlib.pyplot", "figures")


@contextmanager
def _figure(
    size: tuple[float, float], path: Path, rows: int = 1, columns: int = 1
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its axes, row by row; saved at the end. A `$` is shown as a `$`."""
    pyplot = _pyplot()
    with pyplot.rc_context({"text.parse_math": False}):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False
        )
        try:
            yield figure, axes.ravel().tolist()
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=140)
        finally:
            pyplot.close(figure)


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
    with _figure(size, path) as (figure, [axes]):
        image = axes.imshow(weights.numpy(), aspect="auto", **WEIGHTS)
        axes.set_xticks(
            range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor"
        )
        axes.set_yticks(range(len(rows)), rows)
        axes.xaxis.tick_top()
        for row, column in marks:
            frame = _pyplot().Rectangle(
                (column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=HIGHLIGHT, linewidth=1.8
            )
            axes.add_patch(frame)
        axes.set_xlabel(title)
        figure.colorbar(image, ax=axes, label="attention weight", fraction=0.05)


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
    with _figure((7.0, 4.2), path) as (_, [axes]):
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
    with _figure((6.2 * len(panels), 5.2), path, columns=len(panels)) as (_, row):
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
    with _figure(size, path, layers, heads) as (figure, grid):
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
    with _figure((3.2 * columns, 0.5 + 2.9 * rows), path, rows, columns) as (figure, grid):
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
    with _figure((5.6 * len(panels), 4.6), path, columns=len(panels)) as (figure, row):
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


def confusion(
    counts: Sequence[Sequence[int]], names: Sequence[str], title: str, path: Path
) -> None:
    """Confusion matrix: the share of each true class (row) that is predicted as each class."""
    total = sum(map(sum, counts))
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    correct = sum(row[index] for index, row in enumerate(counts)) / max(1, total)
    accuracy = f"accuracy {100 * correct:.2f} % of {total:,} pictures"
    side = min(MAX_SIDE, 2.4 + 0.42 * len(names))
    with _figure((side + 1.0, side), path) as (figure, [axes]):
        image = axes.imshow(shares, **WEIGHTS)
        axes.set(xlabel="predicted class", ylabel="true class", title=f"{title}\n{accuracy}")
        if side < MAX_SIDE:  # there is room for the name of each class
            axes.set_xticks(
                range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor"
            )
            axes.set_yticks(range(len(names)), names)
            for row, line in enumerate(shares):
                for column, share in enumerate(line):
                    colour = "black" if share > 0.6 else "white"
                    text = counts[row][column] or ""
                    axes.text(column, row, text, color=colour, ha="center", va="center", fontsize=6)
        figure.colorbar(image, ax=axes, label="share of the class", fraction=0.05)


def piano_roll(
    parts: Mapping[str, Sequence[Note]], title: str, path: Path, begun: float = 0.0
) -> None:
    """A bar for each note, and a line at `begun`, where the prime ends.

    Colours show the velocity of a single part, or tell several parts apart. The prime is shown
    from its last seconds on: as many as are new, and at least five.
    """
    end = max(note[1] for part in parts.values() for note in part)
    start = max(0.0, begun - max(MIN_PRIME_SECONDS, end - begun))
    pyplot, is_single = _pyplot(), len(parts) == 1
    velocity = pyplot.cm.ScalarMappable(pyplot.Normalize(0, MAX_VELOCITY), "viridis_r")
    pitches = []
    with _figure((min(30.0, 5.0 + 0.3 * (end - start)), 4.4), path) as (figure, [axes]):
        for number, (name, notes) in enumerate(parts.items()):
            part_colour = PART_COLOURS[number % len(PART_COLOURS)]
            for note_start, note_end, pitch, loudness in notes:
                if note_end <= start:
                    continue
                colour = velocity.to_rgba(loudness * MAX_VELOCITY) if is_single else part_colour
                length = note_end - note_start
                axes.barh(pitch, length, left=note_start, height=0.9, color=colour)
                pitches.append(pitch)
            if not is_single:
                axes.plot([], [], color=part_colour, linewidth=6, label=name)
        if is_single:
            figure.colorbar(velocity, ax=axes, label="velocity", fraction=0.05, pad=0.01)
        if begun:
            axes.axvline(begun, color=HIGHLIGHT, linewidth=1.2, label="the prime ends")
        if begun or not is_single:
            figure.legend(loc="outside lower center", ncols=len(parts) + 1, frameon=False)
        low, high = min(pitches), max(pitches)
        octaves = range(low - low % 12, high + 12, 12)
        axes.set_yticks(octaves, [f"C{pitch // 12 - 1}" for pitch in octaves])
        across = f"seconds (from {start:.0f} on)" if start else "seconds"
        axes.set(xlabel=across, ylabel="pitch", title=title)
        axes.set(xlim=(start, end + 0.01 * (end - start)), ylim=(low - 2, high + 2))
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3)


def metric_curves(
    run: Path, warn: Callable[[str], None] = lambda line: None
) -> dict[tuple[str, str], Curve]:
    """(step, value) by split and metric; `warn` gets a line about unreadable ones."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): train the run first") from None
    metrics: dict[tuple[str, str], Curve] = {}
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
