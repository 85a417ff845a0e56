"""Text files: which lines are read, and the one line for each problem."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.helpers import refusal, write

from manyheads.config import parse
from manyheads.data.corpus import hold_out, report_leaks
from manyheads.data.files import read_lines, stream_parallel
from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.data.translation import FilesData
from manyheads.errors import DataError, UserError


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\r\n", ["a", "b\r"]),
        (b"a\n\n", ["a", ""]),
        (b"\n", [""]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        ("ü\u2028ü\x0c\x85\x1c\rü\n".encode(), ["ü\u2028ü\x0c\x85\x1c\rü"]),
    ],
)
@pytest.mark.parametrize("name", ["train.de", "train.de.gz"])
def test_lines_end_at_newlines_only(
    name: str, content: bytes, lines: list[str], tmp_path: Path
) -> None:
    assert read_lines(write(tmp_path / name, content)) == lines
    assert read_lines(tmp_path / "train.de") == lines


def test_a_missing_path_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "train.de.gz", "x\n")
    write(tmp_path / "notes.md", "x\n")
    message = refusal(UserError, read_lines, tmp_path / "trian.de")
    assert f"no file {tmp_path / 'trian.de'}" in message
    assert "train.de" in message
    assert "notes" not in message
    message = refusal(UserError, read_lines, tmp_path / "multi30" / "train.de")
    assert f"no folder {tmp_path / 'multi30'};" in message
    assert "is a folder" in refusal(UserError, read_lines, tmp_path)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_bytes_that_are_not_utf8_are_named_by_line(
    suffix: str, mark: bytes, tmp_path: Path
) -> None:
    path = write(tmp_path / f"latin.txt{suffix}", mark + b"good\n\nb\xc3\xa4d \xe4 here\n")
    message = refusal(DataError, read_lines, path)
    assert message.startswith(f"{path}:3: ")
    assert "0xe4 at byte 6 of the line" in message


def test_empty_and_damaged_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\xef\xbb\xbf"):
        empty = write(tmp_path / "empty.txt", content)
        assert refusal(DataError, read_lines, empty).startswith(f"{empty}: ")
    packed = gzip.compress(b"some lines of text\n" * 50)
    middle = len(packed) // 2
    flipped = packed[:middle] + bytes([packed[middle] ^ 0xFF]) + packed[middle + 1 :]
    path = tmp_path / "train.de.gz"
    for content in (packed[:-9], b"plain\n", flipped, packed[:10] + b"\xff" * 20, packed[10:], b""):
        path.write_bytes(content)
        assert refusal(DataError, read_lines, path).startswith(f"{path}: ")


def test_pairs_are_read_line_by_line(tmp_path: Path) -> None:
    source, target = write(tmp_path / "de", "ein\nzwei\n"), write(tmp_path / "en", "one\r\ntwo")
    assert [*stream_parallel(source, target)] == [(1, ["ein", "one"]), (2, ["zwei", "two"])]
    write(target, "one\n")
    message = refusal(DataError, lambda: [*stream_parallel(source, target, skip_empty=True)])
    assert f"{source} has 2 lines but {target} has 1" in message


@pytest.mark.parametrize(
    ("source", "target", "side"),
    [("ein\n \t\ndrei\n", "one\ntwo\nthree\n", "de"), ("ein\nzwei\ndrei\n", "one\n\nthree", "en")],
)
def test_a_pair_with_an_empty_line_is_refused_or_skipped(
    source: str, target: str, side: str, tmp_path: Path
) -> None:
    paths = write(tmp_path / "de", source), write(tmp_path / "en", target)
    message = refusal(DataError, lambda: [*stream_parallel(*paths)])
    assert message.startswith(f"{tmp_path / side}:2: ")
    assert "data.empty_lines=skip" in message
    rows = [(1, ["ein", "one"]), (2, None), (3, ["drei", "three"])]
    assert [*stream_parallel(*paths, skip_empty=True)] == rows


@given(
    count=st.integers(2, 300),
    fraction=st.floats(0, 1, exclude_min=True, exclude_max=True),
    seed=st.integers(0, 2**32),
)
def test_held_out_rows_are_a_seeded_split(count: int, fraction: float, seed: int) -> None:
    training, validation = hold_out(count, fraction, seed)
    assert training
    assert validation
    assert sorted(training + validation) == list(range(count))
    assert abs(len(validation) - count * fraction) <= 1
    assert (training, validation) == hold_out(count, fraction, seed)


def test_fractions_and_rows_that_cannot_be_divided_are_refused() -> None:
    for count in (0, 1):
        assert f"{count} rows" in refusal(UserError, hold_out, count, 0.5, 0)
    for fraction in (0.0, 1.0, -0.1, 2.0, float("nan")):
        for name in ("valid_fraction", "held_out"):  # the name of 0.1 is an alias
            message = refusal(UserError, parse, TextData, {name: fraction}, "data")
            assert message.startswith("data.valid_fraction=")
    assert parse(TextData, {"held_out": 0.3}, "data") == TextData(valid_fraction=0.3)


def test_items_of_other_splits_that_occur_in_training_are_counted(tmp_path: Path) -> None:
    def notes(data: Any) -> list[str]:
        return report_leaks(data, data.read("train"), data.read("valid"))

    rows = [f"a text that is quite long, and has its own number, {n}" for n in range(10)]
    content = {"train": rows[:6], "valid": rows[5:8], "test": [rows[0], rows[0], rows[9]]}
    for split, texts in content.items():
        write(tmp_path / f"{split}.en", "\n".join(texts))
        write(tmp_path / f"{split}.de", "\n".join(texts))
        table = [f"{text}\t{number % 2}" for number, text in enumerate(texts)]
        write(tmp_path / "table" / f"{split}.tsv", "\n".join(["text\tlabel", *table]))
        write(tmp_path / "text" / f"{split}.txt", "\n".join(texts))
    for data, unit in (
        (FilesData(folder=str(tmp_path), source="en", target="de"), "pairs"),
        (LabelledData(folder=str(tmp_path / "table")), "texts"),
        (TextData(folder=str(tmp_path / "text")), "long lines"),
    ):
        assert notes(data) == [
            f"1 of 3 {unit} of 'valid' also occur in training",
            f"2 of 3 {unit} of 'test' also occur in training",
        ]
    (tmp_path / "table" / "test.tsv").write_bytes(b"\xff")  # does not stop a training
    assert len(notes(LabelledData(folder=str(tmp_path / "table")))) == 1
    write(tmp_path / "text" / "valid.txt", rows[9])
    write(tmp_path / "text" / "test.txt", "short\nlines")
    assert notes(TextData(folder=str(tmp_path / "text"))) == []
