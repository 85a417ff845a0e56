"""Piano rolls and confusion matrices say what is to be seen in them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import matplotlib

from manyheads.view.figures import confusion, piano_roll

Notes = list[tuple[float, float, int, float]]
OLD: Notes = [(0.0, 1.0, 30, 0.2), (3.0, 4.0, 90, 0.9)]
NEW: Notes = [(float(at), at + 1.0, 60 + at % 5, 0.1 * (at % 9)) for at in range(94, 104)]


def words_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _words_are_kept() -> Iterator[None]:
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield


def test_colours_and_the_line_are_explained(tmp_path: Path) -> None:
    roll = tmp_path / "roll.svg"
    piano_roll({"": NEW}, "music.mid", roll)
    assert "velocity" in words_of(roll)
    assert "the prime ends" not in words_of(roll)
    piano_roll({"": NEW}, "music.mid", roll, begun=98.0)
    assert "the prime ends" in words_of(roll)
    piano_roll({"high": NEW, "low": [], "lower": OLD}, "music.mid", roll)
    said = words_of(roll)
    assert "velocity" not in said
    assert all(f">{name}<" in said for name in ("high", "low", "lower"))


def test_voices_differ_in_colour_and_not_in_loudness(tmp_path: Path) -> None:
    loud = [(*note[:3], 1.0) for note in NEW]
    drawn = {}
    for name, parts in {
        "one": {"": NEW},
        "one, loud": {"": loud},
        "two": {"a": NEW, "b": OLD},
        "two, loud": {"a": loud, "b": OLD},
        "two, changed": {"a": OLD, "b": NEW},
    }.items():
        piano_roll(parts, "music.mid", tmp_path / "roll.png")
        drawn[name] = (tmp_path / "roll.png").read_bytes()
    assert drawn["one"] != drawn["one, loud"]
    assert drawn["two"] == drawn["two, loud"]
    assert drawn["two"] != drawn["two, changed"]


def test_a_long_prime_is_drawn_from_its_last_seconds_on(tmp_path: Path) -> None:
    """As many as are new, five at least; a short one from its beginning on."""
    roll, same = tmp_path / "roll.png", tmp_path / "same.png"
    piano_roll({"": [*OLD, *NEW]}, "music.mid", roll, begun=102.0)
    piano_roll({"": NEW}, "music.mid", same, begun=102.0)
    assert roll.read_bytes() == same.read_bytes()
    words = tmp_path / "roll.svg"
    for begun, across in ((102.0, "from 97 on"), (96.0, "from 88 on"), (4.0, "seconds<")):
        piano_roll({"": [*OLD, *NEW]}, "music.mid", words, begun=begun)
        assert across in words_of(words)


def test_a_class_without_pictures_is_not_a_class_never_right(tmp_path: Path) -> None:
    picture = tmp_path / "confusion.svg"
    confusion([[3, 1], [2, 4]], ["cat", "dog"], "run, test", picture)
    said = words_of(picture)
    assert "accuracy 70.00 % of 10 pictures" in said
    assert "no picture" not in said
    confusion([[3, 1], [0, 0]], ["cat", "dog"], "run, test", picture)
    said = words_of(picture)
    assert "accuracy 75.00 % of 4 pictures" in said
    assert said.count("no picture") == 1
