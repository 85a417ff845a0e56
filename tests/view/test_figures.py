"""Pictures are real PNG files of a sensible size, for any words."""

import struct
import sys
import zlib
from pathlib import Path

import pytest
import torch

from manyheads.errors import UserError
from manyheads.view.figures import curves, heat_map

WORDS = ["The", "old", "dog", "sleeps", "."]


def png(path: Path) -> tuple[int, int, int]:
    """Width, height and different bytes of the picture, after checking every chunk of the file."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    place, packed, size = 8, b"", (0, 0)
    kind = b""
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        kind, data = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        (check,) = struct.unpack(">I", content[place + 8 + length : place + 12 + length])
        assert zlib.crc32(kind + data) == check
        if kind == b"IHDR":
            size = struct.unpack(">II", data[:8])
        packed += data if kind == b"IDAT" else b""
        place += 12 + length
    assert kind == b"IEND"
    return *size, len(set(zlib.decompress(packed)))


@pytest.fixture
def _drawing() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("_drawing")
def test_a_heat_map_is_a_picture(tmp_path: Path) -> None:
    """A readable size, not blank, in a folder that is made for it."""
    weights = torch.rand(4, 5).softmax(-1)
    path = tmp_path / "new" / "folder" / "map.png"
    heat_map(weights, WORDS[:4], WORDS, "layer 1, head 2", path, marks=[(0, 0), (3, 4)])
    width, height, colours = png(path)
    assert 300 < width < 2000
    assert 300 < height < 2000
    assert colours > 30


@pytest.mark.usefixtures("_drawing")
@pytest.mark.parametrize("word", ["$5_$", "$\\frac$", "", "x_^", "schläft", "\\", "a\nb", "%d {0}"])
def test_any_word_can_be_a_label(tmp_path: Path, word: str) -> None:
    """Words are text: a dollar or a backslash in them is no formula."""
    heat_map(torch.ones(1, 1), [word], [word], word, tmp_path / "map.png")
    curves({word or "run": [(0, 1.0), (1, 2.0)]}, word, word, tmp_path / "curves.png")
    assert png(tmp_path / "map.png")[0] > 100
    assert png(tmp_path / "curves.png")[0] > 100


@pytest.mark.usefixtures("_drawing")
def test_marks_and_weights_can_be_seen(tmp_path: Path) -> None:
    """Other weights and other marks make other pictures; the same ones the same picture."""
    weights = torch.eye(3)
    other = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    drawn = []
    for number, (values, marks) in enumerate(
        [(weights, []), (weights, []), (other, []), (weights, [(0, 1)]), (weights, [(1, 0)])]
    ):
        path = tmp_path / f"{number}.png"
        heat_map(values, WORDS[:3], WORDS[:3], "title", path, marks=marks)
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4


@pytest.mark.usefixtures("_drawing")
def test_no_picture_stays_in_memory(tmp_path: Path) -> None:
    """Figures are closed once they are written."""
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    heat_map(torch.ones(1, 1), ["a"], ["b"], "title", tmp_path / "map.png")
    curves({"run": [(0, 1.0)]}, "title", "label", tmp_path / "curves.png")
    assert pyplot.get_fignums() == before


def test_without_matplotlib_there_is_a_word_on_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake names the package to install, and no file is left."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"manyheads\[figures\]"):
        heat_map(torch.ones(1, 1), ["a"], ["b"], "title", tmp_path / "map.png")
    assert not list(tmp_path.iterdir())
