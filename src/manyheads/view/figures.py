"""Figures as files; matplotlib is imported when one is drawn. See also lab/figures."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manyheads.errors import import_optional

Note = tuple[float, float, int, float]  # start and end in seconds, pitch, loudness from 0 to 1
MAX_VELOCITY = 127
HIGHLIGHT = "#ff5c39"
PART_COLOURS = ("#2b6cb0", "#2f9e44", "#8d5fd3", "#4a4a4a")
MIN_PRIME_SECONDS = 5.0
MAX_SIDE = 24.0  # of a confusion matrix, in inches
# For characters that matplotlib's own font lacks: the first installed one is taken.
OTHER_FONTS = ("Noto Sans CJK JP", "Noto Sans JP", "IPAexGothic", "WenQuanYi Zen Hei", "Noto Sans")
WEIGHTS = {"cmap": "viridis", "vmin": 0.0, "vmax": 1.0}  # one scale for all attention weights


def pyplot() -> Any:
    import_optional("matplotlib", "figures").use("Agg")
    return import_optional("matplotlib.pyplot", "figures")


@contextmanager
def canvas(
    size: tuple[float, float], path: Path, rows: int = 1, columns: int = 1, **more: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its axes, row by row; saved at the end. A `$` is shown as a `$`."""
    module = pyplot()
    known = {font.name for font in module.matplotlib.font_manager.fontManager.ttflist}
    fonts = [*module.rcParams["font.family"], *(name for name in OTHER_FONTS if name in known)]
    settings = {"text.parse_math": False, "svg.hashsalt": "manyheads", "font.family": fonts}
    with module.rc_context(settings):
        figure, axes = module.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, **more
        )
        try:
            yield figure, axes.ravel().tolist()
            path.parent.mkdir(parents=True, exist_ok=True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("always", "Glyph")
                figure.savefig(path, dpi=140)
            if missing := sum("missing from font" in str(each.message) for each in caught):
                print(
                    f"{path}: no installed font has {missing} of its characters; "
                    "install one, e.g. fonts-noto-cjk for Chinese, Japanese and Korean",
                    file=sys.stderr,
                )
        finally:
            module.close(figure)


def confusion(
    counts: Sequence[Sequence[int]], names: Sequence[str], title: str, path: Path
) -> None:
    """Confusion matrix: the share of each true class (row) that is predicted as each class."""
    total = sum(map(sum, counts))
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    correct = sum(row[index] for index, row in enumerate(counts)) / max(1, total)
    accuracy = f"accuracy {100 * correct:.2f} % of {total:,} pictures"
    side = min(MAX_SIDE, 2.4 + 0.42 * len(names))
    with canvas((side + 1.0, side), path) as (figure, [axes]):
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
    module, is_single = pyplot(), len(parts) == 1
    velocity = module.cm.ScalarMappable(module.Normalize(0, MAX_VELOCITY), "viridis_r")
    pitches = []
    with canvas((min(30.0, 5.0 + 0.3 * (end - start)), 4.4), path) as (figure, [axes]):
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
