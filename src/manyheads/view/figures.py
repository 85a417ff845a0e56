"""Pictures as files, and the metrics of a run as curves; matplotlib is imported when drawing."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manyheads.errors import UserError, import_optional

Curve = list[tuple[int, float]]
MOST_VELOCITY = 127
PART_COLOURS = ("#2b6cb0", "#2f9e44", "#8d5fd3", "#4a4a4a")
SECONDS_BEFORE = 5.0


def _pyplot() -> Any:
    import_optional("matplotlib", "figures").use("Agg")
    return import_optional("matplotlib.pyplot", "figures")


@contextmanager
def _figure(size: tuple[float, float], path: Path) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, written at the end. Words in it are text, `$` too: no formulas."""
    pyplot = _pyplot()
    with pyplot.rc_context({"text.parse_math": False}):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        try:
            yield figure, axes
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
    with _figure(size, path) as (figure, axes):
        image = axes.imshow(weights.numpy(), cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_xticks(
            range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor"
        )
        axes.set_yticks(range(len(rows)), rows)
        axes.xaxis.tick_top()
        for row, column in marks:
            frame = _pyplot().Rectangle(
                (column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#ff5c39", linewidth=1.8
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
    """One line a run: a score against the step, or what else stands across.

    `logarithmic` names the axes that are: "across", "up".
    """
    with _figure((7.0, 4.2), path) as (_, axes):
        for name, points in runs.items():
            mark = "o" if len(points) == 1 else None  # a line of one point is not seen
            steps, values = [step for step, _ in points], [value for _, value in points]
            axes.plot(steps, values, label=name, marker=mark)
        for name, of, axis in (("across", "x", axes.xaxis), ("up", "y", axes.yaxis)):
            if name in logarithmic:
                axes.set(**{f"{of}scale": "log"})
                axis.set_major_formatter("{x:g}")  # powers would be formulas
                axis.set_minor_formatter("")
        axes.set_xlabel(across)
        axes.set_ylabel(label)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend()


def growth(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], label: str, path: Path
) -> None:
    """One panel a title, both axes logarithmic, and a line a name, which stands where it ends."""
    tallest = max(len(lines) for lines in panels.values())
    with _figure((6.2 * len(panels), 2.6 + 0.26 * tallest), path) as (figure, single):
        single.remove()
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, lines) in zip(row, panels.items(), strict=True):
            axes.set(xscale="log", yscale="log", title=title, xlabel=label)
            drawn = [axes.plot(*zip(*lines[name], strict=True), marker="o")[0] for name in lines]
            lengths = sorted({length for points in lines.values() for length, _ in points})
            axes.set_xticks(lengths, list(map(str, lengths)), rotation=45)
            _mark_heights(axes.yaxis)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            _name_ends(axes, list(lines), drawn, gap=0.75 / tallest)


def _mark_heights(axis: Any) -> None:
    """Tens on a logarithmic axis; where fewer than two are in sight, 1, 2, 5; else even steps."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    for locator in (LogLocator(), LogLocator(subs=(1, 2, 5)), MaxNLocator(5)):
        axis.set_major_locator(locator)
        low, high = axis.get_view_interval()
        if sum(low <= mark <= high for mark in axis.get_majorticklocs()) > 1:
            break
    axis.set_major_formatter("{x:g}")  # powers would be formulas


def _name_ends(axes: Any, names: Sequence[str], lines: Sequence[Any], gap: float) -> None:
    """The name of each line at its end, beside the axes and at a distance from each other."""
    ends = [line.get_xydata()[-1] for line in lines]
    frame = axes.transData - axes.transAxes
    heights = [float(frame.transform(end)[1]) for end in ends]
    order = sorted(range(len(lines)), key=heights.__getitem__)
    apart = _apart([heights[number] for number in order], min(gap, 0.06))
    places = dict(zip(order, apart, strict=True))
    for number, name in enumerate(names):
        axes.annotate(
            name,
            ends[number],
            (1.04, places[number]),
            textcoords="axes fraction",
            color=lines[number].get_color(),
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": lines[number].get_color(),
                "alpha": 0.4,
                "relpos": (0.0, 0.5),
            },
            annotation_clip=False,
        )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights, moved as little as keeps them a gap apart: those that collide share it."""
    groups: list[list[float]] = []
    for number, height in enumerate(heights):
        groups.append([height - number * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = [fmean(group) for group in groups for _ in group]
    return [height + number * gap for number, height in enumerate(moved)]


def head_grid(weights: Float[Tensor, "layers heads t s"], title: str, path: Path) -> None:
    """Every head as a small map, a layer in each row; all have the same scale from 0 to 1."""
    layers, heads = weights.shape[:2]
    size = (1.2 + 1.5 * heads, 0.9 + 1.6 * layers)
    with _figure(size, path) as (figure, single):
        single.remove()
        grid = figure.subplots(layers, heads, squeeze=False)
        for layer in range(layers):
            for head in range(heads):
                axes = grid[layer][head]
                image = axes.imshow(
                    weights[layer, head].numpy(), cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto"
                )
                axes.set(xticks=[], yticks=[])
                if layer == 0:
                    axes.set_title(f"head {head + 1}", fontsize=9)
                if head == 0:
                    axes.set_ylabel(f"layer {layer + 1}", fontsize=9)
        figure.suptitle(title)
        figure.colorbar(image, ax=grid.ravel().tolist(), label="attention weight", fraction=0.03)


def matrices(panels: Mapping[str, Float[Tensor, "_ _"]], title: str, path: Path) -> None:
    """A matrix a panel, four in a row, each with a scale of its own, 0 in the middle of colours."""
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    with _figure((3.2 * columns, 0.5 + 2.9 * lines), path) as (figure, single):
        single.remove()
        grid = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
        for axes, (name, matrix) in zip(grid, panels.items(), strict=False):
            most = float(matrix.abs().max()) or 1.0
            image = axes.imshow(matrix.numpy(), cmap="RdBu_r", vmin=-most, vmax=most)
            axes.set_title(name, fontsize=10)
            axes.set(xlabel="key position", ylabel="query position")
            figure.colorbar(image, ax=axes, fraction=0.046)
        for axes in grid[len(panels) :]:
            axes.remove()
        figure.suptitle(title)


def surfaces(
    panels: Mapping[str, Float[Tensor, "n n"]], reach: float, title: str, path: Path
) -> None:
    """Losses over two directions as contours, each panel with levels of its own.

    Levels are further apart the higher they are; the star is where training ended.
    """
    with _figure((5.6 * len(panels), 4.6), path) as (figure, single):
        single.remove()
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (name, losses) in zip(row, panels.items(), strict=True):
            levels, shown = _levels(losses)
            places = [reach * (2 * at / (len(losses) - 1) - 1) for at in range(len(losses))]
            image = axes.contourf(
                places, places, shown, levels=levels, cmap="viridis_r", norm="log"
            )
            axes.contour(places, places, shown, levels=levels, colors="white", linewidths=0.4)
            axes.plot(0, 0, marker="*", color="#ff5c39", markersize=11)
            axes.set(xlabel="along δ", ylabel="along η", aspect="equal", title=name)
            axes.locator_params(nbins=5)
            bar = figure.colorbar(image, ax=axes, label="loss (nats a token)", fraction=0.046)
            bar.ax.minorticks_off()
            bar.ax.set_yticks(levels[::4], [f"{level:.3g}" for level in levels[::4]])
        figure.suptitle(title)


def _levels(losses: Float[Tensor, "n n"]) -> tuple[list[float], Any]:
    """Rising levels from the least to the greatest loss, and losses that are all numbers."""
    finite = losses[losses.isfinite()]
    least, most = float(finite.min()), float(finite.max())
    low = max(least, 1e-6)
    growth = max(most / low, 1.01)
    levels = [low * growth ** (step / 24) for step in range(25)]
    return levels, losses.nan_to_num(most, most, most).clamp(levels[0], levels[-1]).numpy()


def confusion(
    counts: Sequence[Sequence[int]], names: Sequence[str], title: str, path: Path
) -> None:
    """How often the class of a row is taken for that of a column, as a share of the row.

    A class without pictures has no shares: its row is empty, and says so.
    """
    totals = [sum(row) for row in counts]
    shares = [
        [n / total if total else nan for n in row]
        for row, total in zip(counts, totals, strict=True)
    ]
    right = sum(row[number] for number, row in enumerate(counts)) / max(1, sum(totals))
    accuracy = f"accuracy {100 * right:.2f} % of {sum(totals):,} pictures"
    side = min(24.0, 2.4 + 0.42 * len(names))
    with _figure((side + 1.0, side), path) as (figure, axes):
        colours = _pyplot().get_cmap("viridis").with_extremes(bad="0.85")
        image = axes.imshow(shares, cmap=colours, vmin=0.0, vmax=1.0)
        axes.set(xlabel="taken for", ylabel="class", title=f"{title}\n{accuracy}")
        for row in (number for number, total in enumerate(totals) if not total):
            axes.text((len(names) - 1) / 2, row, "no picture", ha="center", va="center", fontsize=6)
        if side < 24:  # so many that each has room for its name
            axes.set_xticks(
                range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor"
            )
            axes.set_yticks(range(len(names)), names)
            for row, column in ((r, c) for r in range(len(names)) for c in range(len(names))):
                colour = "black" if shares[row][column] > 0.6 else "white"
                count = counts[row][column] or ""
                axes.text(column, row, count, ha="center", va="center", color=colour, fontsize=6)
        figure.colorbar(image, ax=axes, label="share of the class", fraction=0.05)


def piano_roll(
    parts: Mapping[str, Sequence[tuple[float, float, int, float]]],
    title: str,
    path: Path,
    begun: float = 0.0,
) -> None:
    """A bar for each note (start, end, pitch, how loud from 0 to 1); a line where `begun` ends.

    Notes of a single part have the colour of their velocity, those of several that of their part.
    What is begun is drawn from its last seconds on, as many as are new and five at least.
    """
    end = max(note[1] for part in parts.values() for note in part)
    start = max(0.0, begun - max(SECONDS_BEFORE, end - begun))
    shown = {name: [note for note in part if note[1] > start] for name, part in parts.items()}
    pitches = [note[2] for part in shown.values() for note in part]
    with _figure((min(30.0, 5.0 + 0.3 * (end - start)), 4.4), path) as (figure, axes):
        _bars(figure, axes, shown)
        if begun:
            axes.axvline(begun, color="#ff5c39", linewidth=1.2, label="the prime ends")
        if begun or len(parts) > 1:
            figure.legend(loc="outside lower center", ncols=len(parts) + 1, frameon=False)
        low, high = min(pitches), max(pitches)
        cs = range(low - low % 12, high + 12, 12)
        axes.set_yticks(cs, [f"C{pitch // 12 - 1}" for pitch in cs])
        across = f"seconds (from {start:.0f} on)" if start else "seconds"
        axes.set(xlabel=across, ylabel="pitch", title=title)
        axes.set(xlim=(start, end + 0.01 * (end - start)), ylim=(low - 2, high + 2))
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3)


def _bars(
    figure: Any, axes: Any, parts: Mapping[str, Sequence[tuple[float, float, int, float]]]
) -> None:
    loudness = _pyplot().cm.ScalarMappable(_pyplot().Normalize(0, MOST_VELOCITY), "viridis_r")
    for number, (name, notes) in enumerate(parts.items()):
        colour = PART_COLOURS[number % len(PART_COLOURS)]
        for start, end, pitch, loud in notes:
            own = loudness.to_rgba(loud * MOST_VELOCITY) if len(parts) == 1 else colour
            axes.barh(pitch, end - start, left=start, height=0.9, color=own)
        if len(parts) > 1:
            axes.plot([], [], color=colour, linewidth=6, label=name)
    if len(parts) == 1:
        figure.colorbar(loudness, ax=axes, label="velocity", fraction=0.05, pad=0.01)


def measured(
    run: Path, warn: Callable[[str], None] = lambda line: None
) -> dict[tuple[str, str], Curve]:
    """(step, value) by split and name; `warn` is told of lines that cannot be read."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: nothing was measured there ({error.strerror})") from None
    found: dict[tuple[str, str], Curve] = {}
    broken = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line, parse_int=float)
            step, split = int(record.pop("step")), str(record.pop("split"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            broken += number < len(lines)  # the last one may be being written
            continue
        for name, value in record.items():
            if isinstance(value, float) and math.isfinite(value):
                found.setdefault((split, name), []).append((step, value))
    if broken:
        warn(f"{path}: lines that could not be read, and are left out: {broken}")
    return found
