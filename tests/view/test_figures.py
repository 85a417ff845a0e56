"""Figures are valid files of a sensible size, for any words, and show what they should."""

import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from manyheads.errors import UserError
from manyheads.lab.figures.plots import curves, heat_map
from manyheads.view.figures import confusion


def png(path: Path) -> tuple[int, int, int]:
    """Width, height and number of different bytes, after checking every chunk of the file."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, size, kind = 8, b"", (0, 0), b""
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, data = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", content[at + 8 + length : at + 12 + length])
        assert zlib.crc32(kind + data) == check
        if kind == b"IHDR":
            size = struct.unpack(">II", data[:8])
        packed += data if kind == b"IDAT" else b""
        at += 12 + length
    assert kind == b"IEND"
    return *size, len(set(zlib.decompress(packed)))


@pytest.fixture
def _svg_text() -> Iterator[None]:
    """Words in an SVG file stay text."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield


@pytest.mark.usefixtures("_svg_text")
@pytest.mark.parametrize("word", ["$5_$", "$\\frac$", "", "x_^", "schläft", "\\", "a\nb", "%d {0}"])
def test_any_word_can_be_a_label(tmp_path: Path, word: str) -> None:
    """A dollar or a backslash is no formula. Folders are made; figures are closed."""
    from matplotlib import pyplot

    heat_map(torch.ones(1, 1), [word], [word], word, tmp_path / "new" / "map.png")
    curves({word or "run": [(0, 1.0), (1, 2.0)]}, word, word, tmp_path / "curves.png")
    assert png(tmp_path / "new" / "map.png")[0] > 100
    assert png(tmp_path / "curves.png")[0] > 100
    assert not pyplot.get_fignums()


def test_characters_without_a_glyph_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    unassigned = "\U0001fbff\U0001fbfe"  # in no font
    heat_map(torch.ones(1, 1), [unassigned], ["a"], "", tmp_path / "map.png")
    [line] = capsys.readouterr().err.splitlines()
    assert "2 of its characters" in line
    assert "install one" in line


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"manyheads\[figures\]"):
        heat_map(torch.ones(1, 1), ["a"], ["b"], "title", tmp_path / "map.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_svg_text")
def test_a_confusion_matrix_has_its_accuracy(tmp_path: Path) -> None:
    """A class without images changes nothing."""
    for counts, accuracy in (
        ([[3, 1], [2, 4]], "70.00 % of 10"),
        ([[3, 1], [0, 0]], "75.00 % of 4"),
    ):
        confusion(counts, ["cat", "dog"], "run, test", tmp_path / "confusion.svg")
        assert f"accuracy {accuracy}" in (tmp_path / "confusion.svg").read_text("utf-8")
