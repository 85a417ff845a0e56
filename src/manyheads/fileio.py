"""Atomic writes, checksums that detect damaged files, and lines of text.

A file is written under a temporary name, flushed to disk, then renamed. A settings file begins with
checksums, as comments: of its own text, and of a file next to it. They come first, so that a
truncated file still has them; without them, as in older folders, nothing is checked.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from manyheads.errors import DataError

PARTIAL, SAFETENSORS = ".partial", ".safetensors"
BYTE_ORDER_MARK = "\ufeff"
CHECK_SUM = re.compile(rb"# check sum ([0-9a-f]{8}) of ([\w.]+)")


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then rename it to `path`: a reader sees old or new."""
    partial = None
    try:
        # New, with a name that nobody can guess: a link put there would be written through.
        descriptor, name = tempfile.mkstemp(PARTIAL, f".{path.name}.", path.parent)
        os.close(descriptor)
        partial = Path(name)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        # A temporary file is its owner's; a run is as open as its folder.
        partial.chmod(path.parent.stat().st_mode & 0o666)
        os.replace(partial, path)
    except OSError as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        state = "the previous one is untouched" if path.exists() else "nothing was written"
        raise DataError(
            f"{path} could not be saved ({error}): {state}; free disk space and try again"
        ) from None


@contextlib.contextmanager
def replace_files(folder: Path, last: str = "") -> Iterator[Path]:
    """A temporary folder that becomes `folder` once all is written, all or nothing.

    Into a folder that exists its files move one by one, `last` last.
    """
    new = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(PARTIAL, f".{folder.name}.", folder.parent) as temporary:
            inside = Path(temporary) / (folder.name or "files")
            inside.mkdir()  # with the permissions of a new folder
            yield inside
            for path in sorted(inside.iterdir(), key=lambda path: path.name == last):
                path.chmod((folder if folder.is_dir() else inside).stat().st_mode & 0o666)
                if folder.is_dir():
                    os.replace(path, folder / path.name)
            if not folder.is_dir():
                os.replace(inside, folder)
    except BaseException as error:
        for parent in new:
            with contextlib.suppress(OSError):  # not empty: another process has written there
                parent.rmdir()
        if not isinstance(error, OSError):
            raise
        raise DataError(
            f"{folder} could not be written ({error}): free disk space and try again"
        ) from None


def make_subfolder(path: Path) -> None:
    """Make a folder inside a run, if it is missing.

    A link in its place is refused: files that it leads to are not the run's to change or delete.
    """
    if path.is_symlink():
        raise DataError(f"{path} is a link, which is not followed: replace it by a folder")
    path.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically; as bytes, so that line ends are the same everywhere."""
    replace_file(path, lambda partial: partial.write_bytes(text.encode("utf-8")))


def write_json(path: Path, table: dict[str, Any]) -> None:
    """Write a table as JSON, with a checksum of its content."""
    content = {**table, "checksum": check_sum(json.dumps(table).encode())}
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """A table that `write_json` has written; a damaged one is DataError, with this fix."""
    try:
        table: dict[str, Any] = json.loads(path.read_bytes())
        if table.pop("checksum") != check_sum(json.dumps(table).encode()):
            raise ValueError("it does not match its checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): {fix}") from None
    return table


def check_sum(content: bytes) -> str:
    """CRC-32, which detects any damage to up to 32 bits in a row."""
    return f"{zlib.crc32(content):08x}"


def check_sum_of(path: Path) -> str:
    """The same of a file that may be larger than the memory."""
    total = 0
    with path.open("rb") as file:
        while part := file.read(2**24):
            total = zlib.crc32(part, total)
    return f"{total:08x}"


def with_sums(text: str, name: str, neighbour: Path | None) -> str:
    """The content of the file `name`: a text after the checksums of a neighbour and of itself."""
    header = f"# check sum {check_sum(text.encode())} of {name} from here; delete it to change them"
    if neighbour is None or not neighbour.is_file():
        return f"{header}\n{text}"
    return f"# check sum {check_sum_of(neighbour)} of {neighbour.name}\n{header}\n{text}"


def check_sound(path: Path, name: str) -> None:
    """Refuse the file `name` next to `path`, or `path`, if it does not match its checksum there."""
    rest = path.read_bytes() if path.is_file() else b""
    while match := CHECK_SUM.match(rest):
        _, _, rest = rest.partition(b"\n")
        if match[2] == name.encode():
            file = path.with_name(name)
            if check_sum(rest if file == path else file.read_bytes()) != match[1].decode():
                raise DataError(
                    f"{file} does not match its checksum: restore it, or accept the change by "
                    f"deleting the line '# check sum … of {name}' of {path}"
                )


def drop_partials(folder: Path) -> None:
    """Remove temporary files that a kill in the middle of a write has left."""
    for path in folder.rglob(f".*{PARTIAL}"):
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif SAFETENSORS in path.suffixes:  # other folders may be written by another process
            shutil.rmtree(path)


def decode_lines(stream: Iterable[bytes], name: str = "input") -> Iterator[str]:
    """Lines of a UTF-8 stream without their ends, as they come; `name` is for errors.

    Only a newline ends a line: form feeds and U+2028 would shift the rows of a pair.
    """
    for number, raw in enumerate(stream, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}:{number}: not UTF-8 (0x{raw[error.start]:02x} at byte {error.start + 1} "
                "of the line); convert the file, for example with iconv -t UTF-8"
            ) from None
        if number == 1 and line.startswith(BYTE_ORDER_MARK):
            line = line.removeprefix(BYTE_ORDER_MARK)
            if not line:  # the file is empty
                return
        yield line.removesuffix("\n").removesuffix("\r")
