"""The figures by name, and how a command line becomes one."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from manyheads.config import is_setting, override_all
from manyheads.errors import UserError
from manyheads.lab.figures.complexity import Complexity
from manyheads.lab.figures.depth import Depth
from manyheads.lab.figures.flash import AttentionTime, FlashTiles, MemoryHierarchy
from manyheads.lab.figures.gradients import VanishingGradients
from manyheads.lab.figures.head_roles import HeadRoles
from manyheads.lab.figures.kaplan import Kaplan
from manyheads.lab.figures.schedule import Schedule
from manyheads.lab.figures.two_landscapes import TwoLandscapes

FIGURES: dict[str, type[Any]] = {
    "schedule": Schedule,
    "vanishing-gradients": VanishingGradients,
    "depth": Depth,
    "two-landscapes": TwoLandscapes,
    "flash-tiles": FlashTiles,
    "memory-hierarchy": MemoryHierarchy,
    "attention-time": AttentionTime,
    "complexity": Complexity,
    "head-roles": HeadRoles,
    "kaplan": Kaplan,
}
OF_A_RUN = ("head-roles", "kaplan")


def find(words: Sequence[str]) -> str | None:
    """The figure that a command line names: its first word, or the second after a folder."""
    if words[1:2] and words[1] in OF_A_RUN:
        return words[1]
    return words[0] if words[0] in FIGURES else None


def make(name: str, words: Sequence[str], out: Path | None) -> tuple[list[Path], tuple[str, ...]]:
    """Draw a figure with KEY=VALUE settings: the written files, and lines to print.

    Without `out` an SVG and a PNG file are written; the numbers are CSV either way.
    """
    at = list(words).index(name)
    settings = [word for word in words[at + 1 :] if is_setting(word)]
    folders = [*words[:at], *(word for word in words[at + 1 :] if not is_setting(word))]
    if name in OF_A_RUN:
        settings = [*(f"run={folder}" for folder in folders[:1]), *settings]
        folders = folders[1:]
    if folders:
        raise UserError(f"'{folders[0]}' is no setting of {name}: settings are KEY=VALUE")
    figure = override_all(FIGURES[name](), settings)
    for field in fields(figure):
        if getattr(figure, field.name) == ():
            raise UserError(f"{field.name}= is empty: give at least one value")
    drawing = figure.make()
    images = [out] if out is not None else [Path(f"{name}{end}") for end in (".svg", ".png")]
    return drawing.save(images), drawing.lines
