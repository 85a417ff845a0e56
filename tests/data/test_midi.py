"""Performances and chorales: notes, events and MIDI files say the same."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mido")

from mido import Message, MetaMessage
from tests.data.small_music import midi_bytes, random_performance

from manyheads.data.events import (
    ChoraleGrid,
    PerformanceEvents,
    Statistics,
    events_of,
    performance_of,
    transposed,
    voices_of,
)
from manyheads.data.midi import Note, performance_in, read_midi, settled, write_midi
from manyheads.errors import DataError, UserError

SEEDS = range(25)
TEMPO_LATER = [
    Message("note_on", note=60, velocity=64, time=480),
    Message("note_on", note=60, velocity=0, time=480),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_events_and_files_give_a_performance_back(seed: int, tmp_path: Path) -> None:
    notes = random_performance(seed)
    events = events_of(notes)
    assert performance_of(events) == notes
    write_midi([notes], tmp_path / "one.mid")
    assert read_midi(tmp_path / "one.mid") == notes
    assert events_of(read_midi(tmp_path / "one.mid")) == events
    assert set(events) <= set(PerformanceEvents().vocabulary())


@pytest.mark.parametrize("seed", SEEDS)
def test_settled_notes_are_what_keys_can_play(seed: int) -> None:
    notes = random_performance(seed)
    assert settled(notes) == notes
    assert notes == sorted(notes)
    last: dict[int, int] = {}
    for note in notes:
        assert note.end > note.start >= last.get(note.pitch, 0)
        last[note.pitch] = note.end


def test_a_row_of_events_is_written_as_the_paper_has_it() -> None:
    """Velocities where they change, shifts of at most a second, what ends before what begins."""
    notes = [Note(0, 60, 150, 20), Note(150, 60, 151, 20), Note(150, 64, 151, 3)]
    assert events_of(notes) == [
        *("velocity20", "on60", "shift100", "shift50", "off60", "on60", "velocity3", "on64"),
        *("shift1", "off60", "off64"),
    ]
    counts = {
        name: sum(word.startswith(name) for word in PerformanceEvents().vocabulary())
        for name in ("on", "off", "shift", "velocity")
    }
    assert counts == {"on": 128, "off": 128, "shift": 100, "velocity": 32}


def test_any_row_of_events_is_a_performance() -> None:
    """A model writes what it likes: ends without begins, begins without ends."""
    assert performance_of(["off60", "on61", "shift5", "on62", "shift5", "off62"]) == [
        Note(0, 61, 10, 16),
        Note(5, 62, 10, 16),
    ]
    assert performance_of(["on60", "on60", "off60"]) == [Note(0, 60, 1, 16)]
    with pytest.raises(UserError, match="no event of a performance"):
        performance_of(["p60"])


@pytest.mark.parametrize("first", [250_000, 500_000])
def test_time_follows_the_tempo(first: int, tmp_path: Path) -> None:
    """Tempi stand in another track than the notes, and change."""
    tempi = [
        MetaMessage("set_tempo", tempo=first, time=0),
        MetaMessage("set_tempo", tempo=1_000_000, time=480),
    ]
    content = midi_bytes(tempi, TEMPO_LATER, path=tmp_path / "one.mid")
    start = first // 10_000
    assert performance_in(content, "one.mid") == [Note(start, 60, start + 100, 16)]


def test_the_pedal_lets_notes_sound_on(tmp_path: Path) -> None:
    """To where it is up or the key is struck again; a held key outlasts it."""
    track = [
        Message("control_change", control=64, value=127, time=0),
        Message("note_on", note=60, velocity=64, time=0),
        Message("note_on", note=72, velocity=64, time=0),
        Message("note_off", note=60, time=48),
        Message("note_on", note=60, velocity=64, time=48),
        Message("note_off", note=60, time=48),
        Message("control_change", control=64, value=0, time=96),
        Message("note_off", note=72, time=240),
    ]
    content = midi_bytes(track, path=tmp_path / "one.mid", kind=0)
    assert performance_in(content, "one.mid") == [
        Note(0, 60, 10, 16),
        Note(0, 72, 50, 16),
        Note(10, 60, 25, 16),
    ]
    assert performance_in(content, "one.mid", "ignore") == [
        Note(0, 60, 5, 16),
        Note(0, 72, 50, 16),
        Note(10, 60, 15, 16),
    ]


def test_what_files_get_wrong_has_one_meaning(tmp_path: Path) -> None:
    """Struck while it sounds, no length, never ended, on two channels at once; drums are left."""
    track = [
        Message("note_on", note=60, velocity=64, time=0),
        Message("note_on", note=60, velocity=127, time=96),
        Message("note_off", note=60, time=96),
        Message("note_off", note=60, time=0),
        Message("note_on", note=61, velocity=1, time=0),
        Message("note_off", note=61, time=0),
        Message("note_on", note=62, velocity=40, time=0),
        Message("note_on", note=35, velocity=40, channel=9, time=0),
    ]
    other = [
        Message("note_on", note=62, velocity=100, channel=1, time=192),
        Message("note_off", note=62, channel=1, time=48),
        MetaMessage("end_of_track", time=240),
    ]
    content = midi_bytes(track, other, path=tmp_path / "one.mid")
    assert performance_in(content, "one.mid") == [
        Note(0, 60, 10, 16),
        Note(10, 60, 20, 32),
        Note(20, 61, 21, 1),
        Note(20, 62, 50, 25),
    ]


def test_a_chorale_comes_back_from_its_file(tmp_path: Path) -> None:
    grid = [
        *("p72", "p67", "p60", "p48", "p72", "p65", "rest", "p48"),
        *("p74", "p65", "p60", "rest", "p74", "p65", "p60", "p36"),
    ]
    path = tmp_path / "chorale.mid"
    voices = voices_of(grid)
    assert voices[0] == [Note(0, 72, 2, 16), Note(2, 74, 4, 16)]
    write_midi(voices, path, ChoraleGrid.step)
    assert ChoraleGrid().words(path.read_bytes(), "chorale.mid") == grid
    assert voices_of([*grid, "p60", "p61"]) == voices  # no whole sixteenth


def test_a_voice_that_is_silent_keeps_its_place(tmp_path: Path) -> None:
    """In a file written here; tracks without notes beside four with some are no voices."""
    path = tmp_path / "chorale.mid"
    for silent in range(4):
        frame = ["p72", "p67", "p60", "p48"]
        frame[silent] = "rest"
        write_midi(voices_of(frame * 4), path, ChoraleGrid.step)
        assert ChoraleGrid().words(path.read_bytes(), "chorale.mid") == frame * 4
    named = [Message("program_change", program=3, channel=5)]
    voices = [
        [Message("note_on", note=note, velocity=64), Message("note_off", note=note, time=120)]
        for note in (72, 67, 60, 48)
    ]
    content = midi_bytes(named, *voices, named, path=path)
    assert ChoraleGrid().words(content, "chorale.mid") == ["p72", "p67", "p60", "p48"]
    assert "3 tracks with notes" in refusal(midi_bytes(*voices[:3], path=path), ChoraleGrid())


def test_transposition_changes_pitches_alone() -> None:
    for encoding in (PerformanceEvents(), ChoraleGrid()):
        for word in encoding.vocabulary():
            moved = transposed(word, 5)
            name = word.rstrip("0123456789")
            if name not in ("on", "off", "p"):
                assert moved == word
            elif int(word.removeprefix(name)) > 122:
                assert moved is None
            else:
                assert moved == f"{name}{int(word.removeprefix(name)) + 5}"
                assert transposed(moved, -5) == word


def test_statistics_are_of_all_notes() -> None:
    pieces = [[[Note(0, 60, 100, 10), Note(50, 64, 100, 20)]], [[Note(100, 72, 200, 30)], []]]
    found = Statistics.of(pieces, 10)
    assert found.notes_per_second == pytest.approx(3 / 2)
    assert found.pitch_classes == pytest.approx((2 / 3, 0, 0, 0, 1 / 3, *[0] * 7))
    assert found.velocity_mean == pytest.approx(78)
    assert found.velocity_spread == pytest.approx((2 / 3 * 40**2) ** 0.5)


def refusal(content: bytes, encoding: Any = None) -> str:
    with pytest.raises(DataError) as caught:
        (encoding or PerformanceEvents()).words(content, "x.mid")
    [line] = str(caught.value).splitlines()
    assert line.startswith("x.mid: ")
    return line


def test_files_without_music_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "one.mid"
    whole = midi_bytes(TEMPO_LATER, path=path)
    assert "empty" in refusal(b"")
    for other in (b"RIFF and no MIDI", b"Dear diary", b"MT"[::-1]):
        assert "not a MIDI file" in refusal(other)
    for cut in (1, 3, 10, 20, len(whole) - 8):
        assert "broken MIDI file" in refusal(whole[:cut])
    assert "no note in any track" in refusal(midi_bytes([], path=path))
    assert "no note in any track" in refusal(midi_bytes([], path=path), ChoraleGrid())
    drums = [Message("note_on", note=35, velocity=40, channel=9, time=0)]
    for encoding in (PerformanceEvents(), ChoraleGrid()):
        assert "no note but drums" in refusal(midi_bytes(drums, path=path), encoding)
    assert "1 tracks with notes" in refusal(whole, ChoraleGrid())
    assert "format 0 or 1" in refusal(midi_bytes(TEMPO_LATER, path=path, kind=2))
    with pytest.raises(UserError, match="cannot read"):
        read_midi(tmp_path / "none.mid")


def test_without_mido_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mido", None)
    with pytest.raises(UserError, match=r"manyheads\[music\]"):
        performance_in(b"MThd", "x.mid")
