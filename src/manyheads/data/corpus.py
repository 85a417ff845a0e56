"""Files of a data set: their lines and rows, the files of each split, and held-out rows."""

import csv
import difflib
import gzip
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from manyheads.config import Between, nearest
from manyheads.errors import DataError, UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# File names of each split, in order of preference.
STEMS = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}
TABLES = (".tsv", ".csv", ".jsonl")

ValidFraction = Annotated[
    float,
    Between(0, 1, open_low=True, open_high=True),
    "Fraction of the training data held out if there are no validation files",
]
Files = TypeVar("Files")
Part = TypeVar("Part")


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

    def read(self, split: str) -> Any:
        """The data of a split."""
        files, is_held_out = self._locate(split)
        part = self._read(files)
        return part.part(split, self.valid_fraction) if is_held_out else part

    def _read(self, files: Files) -> Any:
        """The data of files, of which `part(split, valid_fraction)` gives a part."""
        raise NotImplementedError

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
        names = ", ".join(f"train{suffix}" for suffix in TABLES)
        return f"data.train=FILE is needed, or data.folder with one of {names}"


@dataclass(frozen=True, kw_only=True)
class TableData(SplitData[Path]):
    """Settings of data with one table for each split, such as train.tsv."""

    train: Annotated[str, "Training file, in `folder` if that is set"] = ""
    valid: Annotated[str, "Validation file"] = ""
    test: Annotated[str, "Test file"] = ""

    def _find(self, split: str) -> Path | None:
        folder = check_folder(self.folder, "data.train")
        if name := getattr(self, split):
            return folder / name
        paths = [folder / f"{stem}{suffix}" for stem in STEMS[split] for suffix in TABLES]
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


def select_rows(part: Part, rows: Sequence[int]) -> Part:
    """Some rows of a dataclass of parallel lists."""
    lists = {name: value for name, value in vars(part).items() if isinstance(value, list)}
    selected: dict[str, Any] = {name: [x[row] for row in rows] for name, x in lists.items()}
    return replace(part, **selected)  # type: ignore[type-var]


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


@dataclass(frozen=True)
class Row:
    """A row of a table: its values by column, and its file and line."""

    values: dict[str, Any]
    file: Path
    line: int
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def text(self, column: str, setting: str) -> str:
        """A value as text; `setting` names the column in `data`."""
        if self.problem:
            raise DataError(f"{self}: {self.problem}: fix the row, or remove it")
        if column not in self.values:
            close = difflib.get_close_matches(column, self.values, n=1)
            fix = f"set data.{setting}={close[0] if close else 'COLUMN'}, or check the file"
            if len(self.values) == 1:
                fix = "put tabs between the columns, or name a table with commas .csv"
            names = join_names(list(self.values))
            raise DataError(f"{self}: no column '{column}' among {names}: {fix}")
        value = self.values[column]
        if isinstance(value, list | dict | None):
            raise DataError(f"{self}: '{column}' is not a text: fix the row")
        text = str(value).strip()
        if not text:
            raise DataError(f"{self}: '{column}' is empty: fix the row, or remove it")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{self}: '{column}' contains a lone surrogate (\\ud…): fix it")
        return text


def read_rows(path: Path, *, has_header: bool = True) -> Iterator[Row]:
    """The rows of a table: JSON lines, CSV, or columns between tabs, by the ending of its name.

    A file with another ending is JSON lines if it begins with `{`, otherwise columns between tabs.
    The keys of JSON objects, or the first row of other tables, are the names of the columns;
    without a header columns are numbered from 1. A row with too few cells ends in empty ones.
    Between tabs a quote is a character.
    """
    lines = read_lines(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    is_object = lines[0].startswith("{") and suffix not in (".tsv", ".csv")
    if is_object or suffix in (".json", ".jsonl"):
        for number, line in enumerate(lines, start=1):
            yield Row(_parse_json(line, f"{path}:{number}"), path, number)
        return
    names: list[str] = []
    for number, cells in _read_csv(path, lines) if suffix == ".csv" else _split_tabs(lines):
        if not names:
            names = cells if has_header else [str(n) for n in range(1, len(cells) + 1)]
            if has_header:
                continue
        values = dict(zip_longest(names, cells[: len(names)], fillvalue=""))
        # A tab in a text shifts the columns after it.
        problem = f"{len(cells)} columns where the first row has {len(names)}"
        yield Row(values, path, number, problem if any(cells[len(names) :]) else "")


def _split_tabs(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=1):
        yield number, [cell.strip() for cell in line.split("\t")]


def _read_csv(path: Path, lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, and the number of its last line: quoted cells may have line ends."""
    reader = csv.reader(f"{line}\n" for line in lines)
    try:
        for cells in reader:
            yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not CSV ({error}); fix the row") from None


def _parse_json(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{str(error).partition(': line')[0]}, at character {getattr(error, 'colno', 1)}"
        raise DataError(f"{where}: not JSON ({reason}); write one object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object; write one per line")
    return row


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
        if candidate.exists() and not candidate.is_dir():
            return candidate
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise UserError(f"no folder {path.parent}; check the path")
    names = [entry.name.removesuffix(".gz") for entry in path.parent.iterdir()]
    similar = difflib.get_close_matches(path.name, names)
    did_you_mean = f" (did you mean {', '.join(similar)}?)" if similar else ""
    raise UserError(f"no file {path}{did_you_mean}; check the path")
