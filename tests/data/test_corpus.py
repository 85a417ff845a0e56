"""Users' text files: what is read, and the one line for each thing that is wrong with them."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.data.corpus import hold_out, read_lines, read_pairs
from manyheads.errors import DataError, UserError


def message(caught: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    assert read_lines(path) == lines
    assert read_lines(tmp_path / "train.de") == lines


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "train.de.gz").write_bytes(gzip.compress(b"x\n"))
    (tmp_path / "notes.md").write_bytes(b"x\n")
    with pytest.raises(UserError) as caught:
        read_lines(tmp_path / "trian.de")
    assert caught.value.exit_code == 2
    assert f"no file {tmp_path / 'trian.de'}" in message(caught)
    assert "train.de" in message(caught)
    assert "notes" not in message(caught)


def test_a_missing_folder_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "multi30k").mkdir()
    with pytest.raises(UserError) as caught:
        read_lines(tmp_path / "multi30" / "deep" / "train.de")
    assert f"no folder {tmp_path / 'multi30'} " in message(caught)
    assert "multi30k" in message(caught)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "train.de").write_bytes(b"x\n")
    with pytest.raises(UserError) as caught:
        read_lines(tmp_path)
    assert "is a folder" in message(caught)
    assert "train.de" in message(caught)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_is_not_utf8_is_named_by_line_and_byte(
    suffix: str, mark: bytes, tmp_path: Path
) -> None:
    content = mark + b"good\n\nb\xc3\xa4d \xe4 here\n"
    path = tmp_path / f"latin.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError) as caught:
        read_lines(path)
    assert str(path) in message(caught)
    assert "line 3 " in message(caught)
    assert f"0xe4 at byte {len(mark) + 11} " in message(caught)
    assert "UTF-8" in message(caught)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_lines(path)
    assert f"{path}: the file is empty" in message(caught)


@pytest.mark.parametrize("damage", ["truncate", "plain", "flipped", "garbled", "headless", "empty"])
def test_a_damaged_gzip_is_refused(damage: str, tmp_path: Path) -> None:
    whole = gzip.compress(b"some lines of text\n" * 50)
    middle = len(whole) // 2
    contents = {
        "truncate": whole[:-9],
        "plain": b"not zipped\n",
        "flipped": whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :],
        "garbled": whole[:10] + b"\xff" * 20,
        "headless": whole[10:],
        "empty": b"",
    }
    path = tmp_path / "train.de.gz"
    path.write_bytes(contents[damage])
    with pytest.raises(DataError) as caught:
        read_lines(path)
    assert str(path) in message(caught)


def files(folder: Path, source: str, target: str) -> tuple[Path, Path]:
    (folder / "train.de").write_text(source, encoding="utf-8", newline="")
    (folder / "train.en").write_text(target, encoding="utf-8", newline="")
    return folder / "train.de", folder / "train.en"


def test_pairs_go_line_by_line(tmp_path: Path) -> None:
    read = read_pairs(*files(tmp_path, "ein\nzwei\n", "one\r\ntwo"), empty_lines="refuse")
    assert read.pairs == [("ein", "one"), ("zwei", "two")]
    assert read.skipped == 0


def test_different_counts_are_refused_with_both(tmp_path: Path) -> None:
    source, target = files(tmp_path, "ein\nzwei\ndrei\n", "one\ntwo\n")
    with pytest.raises(DataError) as caught:
        read_pairs(source, target, empty_lines="skip")
    assert f"{source} has 3 lines but {target} has 2" in message(caught)


@pytest.mark.parametrize(
    ("source", "target", "where"),
    [("ein\n \t\ndrei\n", "one\ntwo\nthree\n", 0), ("ein\nzwei\ndrei\n", "one\n\nthree\n", 1)],
)
def test_an_empty_side_is_refused_or_skipped(
    source: str, target: str, where: int, tmp_path: Path
) -> None:
    paths = files(tmp_path, source, target)
    with pytest.raises(DataError) as caught:
        read_pairs(*paths, empty_lines="refuse")
    assert f"{paths[where]}:2: empty line" in message(caught)
    assert "data.empty_lines=skip" in message(caught)
    read = read_pairs(*paths, empty_lines="skip")
    assert read.pairs == [("ein", "one"), ("drei", "three")]
    assert read.skipped == 1


@given(
    count=st.integers(2, 300),
    share=st.floats(0, 1, exclude_min=True, exclude_max=True),
    seed=st.integers(0, 2**32),
)
def test_held_out_rows_are_a_split(count: int, share: float, seed: int) -> None:
    training, validation = hold_out(count, share, seed)
    assert training
    assert validation
    assert sorted(training + validation) == list(range(count))
    assert abs(len(validation) - count * share) <= 1
    assert (training, validation) == hold_out(count, share, seed)


@pytest.mark.parametrize("count", [0, 1])
def test_one_row_cannot_be_split(count: int) -> None:
    with pytest.raises(UserError) as caught:
        hold_out(count, 0.5, 0)
    assert f"{count} rows" in message(caught)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0, float("nan")])
def test_a_share_lies_between_nothing_and_all(share: float) -> None:
    with pytest.raises(UserError) as caught:
        hold_out(10, share, 0)
    assert "above 0, below 1" in message(caught)
