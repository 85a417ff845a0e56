"""Lines and rows of files: text, TSV, CSV, JSON lines and Parquet, plain, .gz or .zst.

Files are read as streams: a table may be larger than memory.
"""

import csv
import difflib
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any

from manyheads.errors import DataError, UserError, import_optional
from manyheads.fileio import decode_lines

PACKED = (".gz", ".zst")
TABLES = (".tsv", ".csv", ".jsonl", ".parquet")
STDIN = Path("-")
LARGEST_CELL = 1 << 26  # characters of a cell of CSV; a quote without its end reads up to here
ROWS_AT_ONCE = 1024  # of Parquet


def plain_name(name: str) -> str:
    """The name of a file without the suffix of its compression."""
    return name.removesuffix(".gz").removesuffix(".zst")


def is_table(path: Path) -> bool:
    return _suffix(path) in TABLES


def is_here(path: Path) -> bool:
    return any(candidate.is_file() for candidate in _candidates(path))


def _candidates(path: Path) -> list[Path]:
    return [path, *(path.with_name(path.name + suffix) for suffix in PACKED if path.name)]


@lru_cache(maxsize=1)
def _content(stream: Any) -> bytes:
    """Standard input, kept: training reads its data once for each split."""
    content: bytes = stream.read()
    return content


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes] | io.BufferedIOBase]:
    """A file as a stream, decompressed by the suffix of its name; `-` is standard input."""
    try:
        if path == STDIN and sys.stdin is not None:
            yield io.BytesIO(_content(sys.stdin.buffer))
            return
        with path.open("rb") as file:
            if path.suffix == ".gz":
                yield gzip.GzipFile(fileobj=file)
            elif path.suffix == ".zst":
                # Python has zstd from 3.14 on; the zstandard package ignores truncation.
                arrow = import_optional("pyarrow", "parquet")
                yield io.BufferedReader(arrow.CompressedInputStream(file, "zstd"))
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DataError(f"{path}: not a complete gzip file; copy it again, or rename it") from None
    except OSError as error:
        if error.errno is None:  # of pyarrow
            raise DataError(f"{path}: not a complete zstd file; copy it again") from None
        raise UserError(f"cannot read {path} ({error.strerror}); check the path") from None


def read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed by the suffix of its name."""
    with open_file(path) as file:
        return file.read()


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their ends; a generator, so that errors here are of this file."""
    with open_file(find_file(path)) as file:
        yield from file


def stream_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text; `NAME` also finds `NAME.gz` and `NAME.zst`."""
    path = find_file(path)
    is_empty = True
    for line in decode_lines(raw_lines(path), str(path)):
        is_empty = False
        yield line
    if is_empty:
        fix = "pipe the data in, or name a file" if path == STDIN else "replace or remove it"
        raise DataError(f"{path}: the file is empty; {fix}")


def read_lines(path: Path) -> list[str]:
    return list(stream_lines(path))


@dataclass(frozen=True)
class Row:
    """A row of a table: its values by column, and its file and line."""

    values: dict[str, Any]
    file: Path
    line: int
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def _inner(self, column: str) -> tuple[dict[str, Any], str]:
        """The object that has the value, and its key: `translation.en` may be nested."""
        outer, _, inner = column.partition(".")
        nested = self.values.get(outer)
        if inner and column not in self.values and isinstance(nested, dict):
            return nested, inner
        return self.values, column

    def has(self, column: str) -> bool:
        values, name = self._inner(column)
        return name in values

    def text(self, column: str, setting: str) -> str:
        """A value as text; `setting` names the column in `data`."""
        if self.problem:
            raise DataError(f"{self}: {self.problem}: fix the row, or remove it")
        if not self.has(column):
            close = difflib.get_close_matches(column, self.values, n=1)
            fix = f"set data.{setting}={close[0] if close else 'COLUMN'}, or check the file"
            if len(self.values) == 1 and _suffix(self.file) in (".tsv", ".csv"):
                fix = "put tabs between the columns, or name a table with commas .csv"
            names = join_names(list(self.values))
            raise DataError(f"{self}: no column '{column}' among {names}: {fix}")
        values, name = self._inner(column)
        value = values[name]
        if isinstance(value, list | dict | None):
            raise DataError(f"{self}: '{column}' is not a text: fix the row")
        text = str(value).strip()
        if not text:
            raise DataError(f"{self}: '{column}' is empty: fix the row, or remove it")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{self}: '{column}' contains a lone surrogate (\\ud…): fix it")
        return text


def read_rows(path: Path, *, has_header: bool = True) -> Iterator[Row]:
    """The rows of a table: Parquet, JSON lines, CSV, or columns between tabs, by its suffix.

    A file with another suffix is JSON lines if it begins with `{`, otherwise columns between tabs.
    The keys of JSON objects, or the first row of CSV and TSV, are the names of the columns;
    without a header columns are numbered from 1. A row with too few cells ends in empty ones.
    Between tabs a quote is a character.
    """
    path = find_file(path)
    suffix = _suffix(path)
    if suffix == ".parquet":
        yield from _read_parquet(path)
        return
    lines = stream_lines(path)
    first = next(lines)
    lines = chain([first], lines)
    if suffix in (".json", ".jsonl") or (first.startswith("{") and suffix not in TABLES):
        for number, line in enumerate(lines, start=1):
            yield Row(_parse_json(line, f"{path}:{number}"), path, number)
        return
    names: list[str] = []
    delimiter = ";" if first.count(";") > first.count(",") else ","
    is_csv = suffix == ".csv"
    for number, cells in _read_csv(path, lines, delimiter) if is_csv else _split_tabs(lines):
        if not names:
            names = cells if has_header else [str(n) for n in range(1, len(cells) + 1)]
            if has_header:
                continue
        values = dict(zip_longest(names, cells[: len(names)], fillvalue=""))
        # A tab in a text shifts the columns after it.
        problem = f"{len(cells)} columns where the first row has {len(names)}"
        yield Row(values, path, number, problem if any(cells[len(names) :]) else "")


def read_columns(
    path: Path,
    columns: dict[str, str],
    *,
    has_header: bool = True,
    skip: str = "",
    on: bool = False,
) -> Iterator[tuple[int, list[str] | None]]:
    """The line of each row, and its texts in some columns, {setting: column}.

    `skip` is the setting that skips broken rows; if it is `on`, these have None for texts.
    """
    for row in read_rows(path, has_header=has_header):
        try:
            yield row.line, [row.text(column, setting) for setting, column in columns.items()]
        except DataError as error:
            if not skip or not all(map(row.has, columns.values())):
                raise
            if not on:
                raise DataError(f"{error}, or set data.{skip}=skip") from None
            yield row.line, None


def _suffix(path: Path) -> str:
    return Path(plain_name(path.name)).suffix


def _split_tabs(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=1):
        yield number, [cell.strip() for cell in line.split("\t")]


def _read_csv(path: Path, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, and the number of its last line: quoted cells may have line ends."""
    csv.field_size_limit(LARGEST_CELL)
    reader = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
    last = 0
    try:
        for cells in reader:
            last = reader.line_num
            yield last, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise DataError(f"{path}:{last + 1}: not CSV ({error}); check the quotes") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    parquet = import_optional("pyarrow.parquet", "parquet")
    try:
        with parquet.ParquetFile(path) as table:
            batches = (batch.to_pylist() for batch in table.iter_batches(ROWS_AT_ONCE))
            for number, values in enumerate(chain.from_iterable(batches), start=1):
                yield Row(values, path, number)
    except (ValueError, OSError) as error:  # also those of Arrow
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise DataError(f"{path}: not a complete Parquet file ({reason}); copy it again") from None


def _parse_json(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{str(error).partition(': line')[0]}, at character {getattr(error, 'colno', 1)}"
        raise DataError(f"{where}: not JSON ({reason}); write one object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object; write one per line")
    return row


def stream_parallel(
    *paths: Path, skip_empty: bool = False
) -> Iterator[tuple[int, list[str] | None]]:
    """Files of which line n of one translates line n of the others, line by line from 1.

    A row with an empty line is refused, or None if it is skipped.
    """
    rows = zip_longest(*map(stream_lines, paths))
    for number, row in enumerate(rows, start=1):
        if None in row:
            counts = [number - 1 + (line is not None) for line in row]
            for more in rows:
                counts = [n + (line is not None) for n, line in zip(counts, more, strict=True)]
            path, count = next((p, n) for p, n in zip(paths, counts, strict=True) if n != counts[0])
            raise DataError(
                f"{paths[0]} has {counts[0]} lines but {path} has {count}; "
                "line n of one must translate line n of the other"
            )
        if all(line.strip() for line in row):
            yield number, list(row)
        elif skip_empty:
            yield number, None
        else:
            path = next(path for path, line in zip(paths, row, strict=True) if not line.strip())
            raise DataError(f"{path}:{number}: empty line; fix it, or set data.empty_lines=skip")


def join_names(names: Sequence[str], limit: int = 10) -> str:
    """Names in parentheses for an error message: not too many, none too long."""
    short = [name if len(name) <= 30 else f"{name[:29]}…" for name in names[:limit]]
    return f"({', '.join(short)}{', …' if len(names) > limit else ''})"


def find_file(path: Path) -> Path:
    """The path, or its `.gz` or `.zst`; a missing file is a UserError with similar names."""
    if path == STDIN:
        return path
    for candidate in _candidates(path):
        if candidate.exists() and not candidate.is_dir():
            return candidate
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise UserError(f"no folder {path.parent}; check the path")
    names = [plain_name(entry.name) for entry in path.parent.iterdir()]
    similar = difflib.get_close_matches(path.name, names)
    did_you_mean = f" (did you mean {', '.join(similar)}?)" if similar else ""
    raise UserError(f"no file {path}{did_you_mean}; check the path")
