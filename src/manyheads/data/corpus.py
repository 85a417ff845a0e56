"""Users' text files: lines, pairs of lines, and rows held out for validation."""

import difflib
import gzip
import os
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manyheads.config import nearest
from manyheads.errors import DataError, UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# How files of each split are called, the first that is there.
STEMS = {
    "train": ("train",),
    "valid": ("valid", "val", "dev"),
    "test": ("test",),
}


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Lines that translate each other, and how many pairs were left out for an empty side."""

    pairs: list[tuple[str, str]]
    skipped: int


def is_here(path: Path) -> bool:
    return path.is_file() or path.with_name(path.name + ".gz").is_file()


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text, plain or gzip by its name; `NAME` also finds `NAME.gz`."""
    path = _find(path)
    content = _read_bytes(path)
    mark = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
    if len(content) == mark:
        raise DataError(f"{path}: the file is empty; give one with text in it")
    try:
        text = content[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = mark + error.start
        line = content.count(b"\n", 0, offset) + 1
        raise DataError(
            f"{path}: line {line} is not UTF-8 (0x{content[offset]:02x} at byte {offset} of the "
            "text); convert the file, for example with iconv -t UTF-8"
        ) from error
    # Not splitlines: it also splits at form feeds and U+2028, which would shift the rows of a pair.
    lines = text.removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


def read_pairs(source: Path, target: Path, *, empty_lines: Literal["refuse", "skip"]) -> Pairs:
    """Two files whose lines translate each other, row by row."""
    source_lines, target_lines = read_lines(source), read_lines(target)
    if len(source_lines) != len(target_lines):
        raise DataError(
            f"{source} has {len(source_lines)} lines but {target} has {len(target_lines)}; "
            "line n of one must translate line n of the other"
        )
    pairs: list[tuple[str, str]] = []
    for row, pair in enumerate(zip(source_lines, target_lines, strict=True), start=1):
        blank = [
            path for path, line in zip((source, target), pair, strict=True) if not line.strip()
        ]
        if not blank:
            pairs.append(pair)
        elif empty_lines == "refuse":
            raise DataError(f"{blank[0]}:{row}: empty line; fix it, or set data.empty_lines=skip")
    if not pairs:
        raise DataError(f"{source} and {target}: every pair has an empty side; check the files")
    return Pairs(pairs=pairs, skipped=len(source_lines) - len(pairs))


# What of a file with rows held out is meant.
SHARES = {"train": "without what is held out", "valid": "what is held out"}


def check_held_out(share: float) -> None:
    if not 0 < share < 1:
        raise UserError(f"data.held_out={share} must be above 0, below 1")


def check_split(split: str, known: Iterable[str]) -> None:
    names = list(known)
    if split not in names:
        raise UserError(f"there is no split '{split}': {nearest(split, names)}")


def check_folder(folder: str, file_setting: str = "data.train") -> Path:
    """The path of data.folder, which must be a folder if it is set."""
    path = Path(folder)
    if path.is_file():
        instead = folder if file_setting != "data.folder" else path.parent
        raise UserError(f"data.folder={folder} is a file: give {file_setting}={instead}")
    if folder and not path.is_dir():
        raise UserError(f"data.folder={folder} is not a folder here: give data.folder=...")
    return path


def split_file(folder: str, named: str, split: str, suffix: str) -> Path | None:
    """The file of a split: as named, or found in the folder by its stem."""
    path = check_folder(folder)
    if named:
        return path / named
    paths = [path / f"{stem}{suffix}" for stem in STEMS[split]]
    return next((path for path in paths if folder and is_here(path)), None)


def hold_out(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Rows for training and rows for validation, at least one of each, both in rising order."""
    if not 0 < share < 1:
        raise UserError(f"a held-out share of {share} must be above 0, below 1")
    if count < 2:
        raise UserError(f"cannot hold out some of {count} rows: give more, or validation files")
    held = min(max(round(count * share), 1), count - 1)
    validation = set(random.Random(seed).sample(range(count), held))
    return [row for row in range(count) if row not in validation], sorted(validation)


def _find(path: Path) -> Path:
    """The path itself, or its `.gz`, or a mistake that names what is near."""
    zipped = path.with_name(path.name + ".gz") if path.name else path
    for candidate in (path, zipped):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a text file in it{_near(path, '')}")
    if path.exists():  # a pipe or a device: read it as it is
        return path
    missing = path
    while missing.parent != missing and not missing.parent.is_dir():
        missing = missing.parent
    kind = "file" if missing == path else "folder"
    raise UserError(f"no {kind} {missing}{_near(missing.parent, missing.name)}; check the path")


def _near(folder: Path, name: str) -> str:
    """Names in the folder like this one (any, for no name), to be put after a message."""
    try:
        names = sorted(entry.removesuffix(".gz") for entry in os.listdir(folder))
    except OSError:
        return ""
    near = difflib.get_close_matches(name, names) if name else names[:3]
    return f" (near names in {folder}: {', '.join(near)})" if near else ""


def _read_bytes(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file; copy it again, or rename it") from error
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); check its permissions") from error
