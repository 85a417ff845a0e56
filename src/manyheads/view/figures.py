"""Pictures as files. matplotlib is imported here alone, when a picture is drawn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manyheads.errors import Mistake


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise Mistake(
            "pictures need matplotlib: install it with pip install 'manyheads[figures]'"
        ) from None
    return pyplot


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
    runs: Mapping[str, Sequence[tuple[int, float]]], title: str, label: str, path: Path
) -> None:
    """One line a run: a score against the step."""
    with _figure((7.0, 4.2), path) as (_, axes):
        for name, points in runs.items():
            mark = "o" if len(points) == 1 else None  # a line of one point is not seen
            steps, values = [step for step, _ in points], [value for _, value in points]
            axes.plot(steps, values, label=name, marker=mark)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend()
