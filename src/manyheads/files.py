"""Files that are whole or not there: written beside, flushed to the disk, then moved into place."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from manyheads.errors import BadData

PARTIAL = ".partial"


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file beside `path`, then put it there: a reader sees old or new."""
    beside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        # Some writers make files that only their owner can read; a run is as open as its folder.
        beside.chmod(path.parent.stat().st_mode & 0o666)
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        kept = "the one before it is untouched" if path.exists() else "nothing was written"
        raise BadData(f"{path} could not be saved ({error}): {kept}; make room and go on") from None


def write_text(path: Path, text: str) -> None:
    """A small text file, whole or not at all."""
    replace_file(path, lambda beside: _write(beside, text))


def _write(path: Path, text: str) -> None:
    # Not `write_text` of the path: that would turn line ends on some systems.
    path.write_bytes(text.encode("utf-8"))


def drop_partials(folder: Path) -> None:
    """Remove what a kill in the middle of a write has left."""
    for path in folder.rglob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)
