"""Which runs a page can show that is for one kind of them, told by their settings alone."""

from collections.abc import Callable

from manyheads.errors import Mistake
from manyheads.run import SETTINGS, Run, read_run
from manyheads.web.library import Library


def fitting_runs(library: Library, fits: Callable[[Run], bool]) -> list[str]:
    """The names of those that fit; one that cannot be read is told of on the Runs page."""
    found = []
    for name, folder in library.folders().items():
        if not (folder / SETTINGS).is_file():
            continue
        try:
            if fits(read_run(folder)):
                found.append(name)
        except (Mistake, OSError):
            continue
    return found
