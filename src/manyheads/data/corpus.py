"""Files of a data set: lines of text, the files of each split, and rows held out for validation."""

import difflib
import gzip
import os
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Generic, TypeVar

from manyheads.config import Between, nearest
from manyheads.errors import DataError, UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# File names of each split, in order of preference.
STEMS = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}

ValidFraction = Annotated[
    float,
    Between(0, 1, open_low=True, open_high=True),
    "Fraction of the training data held out if there are no validation files",
]
Files = TypeVar("Files")


@dataclass(frozen=True, kw_only=True)
class SplitData(Generic[Files]):
    """Settings of data with the splits train, valid and test.

    A subclass finds the files of a split. Without validation files, `valid_fraction` of the
    training data is held out, the same part for every seed of a run.
    """

    folder: Annotated[str, "Folder with the files"] = ""
    valid_fraction: ValidFraction = 0.1
    RENAMED: ClassVar[dict[str, str]] = {"held_out": "valid_fraction"}

    def splits(self) -> list[str]:
        return [split for split in STEMS if split != "test" or self._find(split) is not None]

    def _locate(self, split: str) -> tuple[Files, bool]:
        """The files of a split, and whether only a part of them belongs to it."""
        check_split(split, [*STEMS, *self._extra_splits()])
        is_held_out = split in ("train", "valid") and self._find("valid") is None
        files = self._find("train" if is_held_out else split)
        if files is None:
            raise UserError(self._missing(split))
        return files, is_held_out

    def _find(self, split: str) -> Files | None:
        """The files of a split, if it has its own."""
        raise NotImplementedError

    def _extra_splits(self) -> Iterable[str]:
        return ()

    def _missing(self, split: str) -> str:
        """The error message for a split without files."""
        if split == "test":
            return "there is no split 'test': set data.test=FILE, or use --split valid"
        return f"there is no {split} file: set data.train=FILE, or data.folder"


@dataclass(frozen=True, kw_only=True)
class FileData(SplitData[Path]):
    """Settings of data with one file for each split, such as train.tsv."""

    train: Annotated[str, "Training file, in `folder` if that is set"] = ""
    valid: Annotated[str, "Validation file"] = ""
    test: Annotated[str, "Test file"] = ""
    SUFFIX: ClassVar[str]

    def _find(self, split: str) -> Path | None:
        folder = check_folder(self.folder, "data.train")
        if name := getattr(self, split):
            return folder / name
        paths = [folder / f"{stem}{self.SUFFIX}" for stem in STEMS[split]]
        return next((path for path in paths if self.folder and is_here(path)), None)


def check_split(split: str, known: Iterable[str]) -> None:
    names = list(known)
    if split not in names:
        raise UserError(f"there is no split '{split}': {nearest(split, names)}")


def check_folder(folder: str, file_setting: str = "data.folder") -> Path:
    """The path of data.folder, which must be a folder if it is set."""
    path = Path(folder)
    if path.is_file():
        value = path.parent if file_setting == "data.folder" else folder
        raise UserError(f"data.folder={folder} is a file: set {file_setting}={value}")
    if folder and not path.is_dir():
        raise UserError(f"data.folder={folder} is not a folder: check the path")
    return path


def hold_out(count: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Rows for training and rows for validation, at least one of each, in ascending order."""
    if count < 2:
        raise UserError(f"cannot hold out some of {count} rows: add rows, or validation files")
    held_out = min(max(round(count * fraction), 1), count - 1)
    validation = set(random.Random(seed).sample(range(count), held_out))
    return [row for row in range(count) if row not in validation], sorted(validation)


def is_here(path: Path) -> bool:
    return path.is_file() or path.with_name(path.name + ".gz").is_file()


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text, plain or gzip by its name; `NAME` also finds `NAME.gz`."""
    path = _find_file(path)
    content = read_bytes(path)
    mark = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
    if len(content) == mark:
        raise DataError(f"{path}: the file is empty; replace or remove it")
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


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends in .gz."""
    try:
        content = path.read_bytes()
        if path.suffix != ".gz":
            return content
        if not content:
            raise EOFError
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DataError(f"{path}: not a complete gzip file; copy it again, or rename it") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); check the path") from None


def read_pairs(source: Path, target: Path, skip_empty: bool) -> tuple[list[str], list[str], int]:
    """Two files whose lines translate each other, and how many pairs were skipped.

    A pair with an empty line is skipped or refused.
    """
    source_lines, target_lines = read_lines(source), read_lines(target)
    if len(source_lines) != len(target_lines):
        raise DataError(
            f"{source} has {len(source_lines)} lines but {target} has {len(target_lines)}; "
            "line n of one must translate line n of the other"
        )
    pairs: list[tuple[str, str]] = []
    for row, pair in enumerate(zip(source_lines, target_lines, strict=True), start=1):
        if all(line.strip() for line in pair):
            pairs.append(pair)
        elif not skip_empty:
            path = target if pair[0].strip() else source
            raise DataError(f"{path}:{row}: empty line; fix it, or set data.empty_lines=skip")
    if not pairs:
        raise DataError(f"{source} and {target}: every pair has an empty line; check the files")
    skipped = len(source_lines) - len(pairs)
    return [source for source, _ in pairs], [target for _, target in pairs], skipped


def join_names(names: Sequence[str], limit: int = 10) -> str:
    """Names in parentheses for an error message: not too many, none too long."""
    short = [name if len(name) <= 30 else f"{name[:29]}…" for name in names[:limit]]
    return f"({', '.join(short)}{', …' if len(names) > limit else ''})"


def _find_file(path: Path) -> Path:
    """The path, or its `.gz`; a missing file is a UserError with similar names."""
    zipped = path.with_name(path.name + ".gz") if path.name else path
    for candidate in (path, zipped):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a text file in it{_similar_names(path, '')}")
    if path.exists():  # a pipe or a device
        return path
    missing = path
    while missing.parent != missing and not missing.parent.is_dir():
        missing = missing.parent
    kind = "file" if missing == path else "folder"
    similar = _similar_names(missing.parent, missing.name)
    raise UserError(f"no {kind} {missing}{similar}; check the path")


def _similar_names(folder: Path, name: str) -> str:
    """The end of an error message: names in the folder like this one (any, if it is empty)."""
    try:
        names = sorted(entry.removesuffix(".gz") for entry in os.listdir(folder))
    except OSError:
        return ""
    similar = difflib.get_close_matches(name, names) if name else names[:3]
    return f" (near names in {folder}: {', '.join(similar)})" if similar else ""
