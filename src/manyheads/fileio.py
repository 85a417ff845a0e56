"""Files that are whole or not there, and what tells that they are as they were written.

A file is written beside its place, flushed to the disk, then moved there. Settings begin with check
sums, as comments: of what follows, and of a file beside them. They stand first, so that a file that
was cut has them still; without them, as in older folders, nothing is checked.
"""

import contextlib
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from manyheads.errors import DataError

PARTIAL = ".partial"
CHECK_SUM = re.compile(rb"# check sum ([0-9a-f]{8}) of ([\w.]+)")


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
        raise DataError(
            f"{path} could not be saved ({error}): {kept}; make room and go on"
        ) from None


@contextlib.contextmanager
def replace_files(folder: Path, last: str = "") -> Iterator[Path]:
    """A temporary folder whose files move into `folder` at the end, all or none, `last` last."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(PARTIAL, f".{folder.name}.", folder.parent) as temporary:
            yield Path(temporary)
            folder.mkdir(exist_ok=True)
            for path in sorted(Path(temporary).iterdir(), key=lambda path: path.name == last):
                path.chmod(folder.stat().st_mode & 0o666)
                os.replace(path, folder / path.name)
    except OSError as error:
        raise DataError(f"{folder} could not be written ({error}): make room, try again") from None


def write_text(path: Path, text: str) -> None:
    """A small text file, whole or not at all."""
    replace_file(path, lambda beside: _write(beside, text))


def _write(path: Path, text: str) -> None:
    # Not `write_text` of the path: that would turn line ends on some systems.
    path.write_bytes(text.encode("utf-8"))


def check_sum(content: bytes) -> str:
    """CRC-32: whatever happens to up to 32 bits in a row of a file gives it another one."""
    return f"{zlib.crc32(content):08x}"


def check_sum_of(path: Path) -> str:
    """The same of a file that may be larger than the memory."""
    total = 0
    with path.open("rb") as file:
        while part := file.read(2**24):
            total = zlib.crc32(part, total)
    return f"{total:08x}"


def with_sums(text: str, name: str, beside: Path | None) -> str:
    """What a file of that name is to hold: a text, after the check sums of it and of another."""
    own = f"# check sum {check_sum(text.encode())} of {name} from here; delete it to change them"
    if beside is None or not beside.is_file():
        return f"{own}\n{text}"
    return f"# check sum {check_sum_of(beside)} of {beside.name}\n{own}\n{text}"


def check_sound(path: Path, name: str) -> None:
    """Refuse a file beside `path`, or itself, that is not what the sums in `path` are of."""
    rest = path.read_bytes() if path.is_file() else b""
    while found := CHECK_SUM.match(rest):
        _, _, rest = rest.partition(b"\n")
        if found[2] == name.encode():
            file = path.with_name(name)
            known, real = found[1].decode(), check_sum(rest if file == path else file.read_bytes())
            if known != real:
                raise DataError(
                    f"{file} is not as it was written (its check sum is another): copy it again, "
                    f"or accept it by deleting the line '# check sum … of {name}' of {path}"
                )


def drop_partials(folder: Path) -> None:
    """Remove what a kill in the middle of a write has left."""
    for path in folder.rglob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)
