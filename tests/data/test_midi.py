"""Performances and chorales: notes, events and MIDI files agree."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("mido")

from mido import Message, MetaMessage, MidiFile
from tests.data.helpers import refusal
from tests.data.small_music import midi_bytes, random_performance

from manyheads.data.events import (
    ChoraleGrid,
    Encoding,
    Note,
    PerformanceEvents,
    Statistics,
    decode_events,
    decode_grid,
    encode_events,
    parse_performance,
    resolve_overlaps,
    transpose_word,
    write_midi,
)
from manyheads.errors import DataError, UserError

ON, OFF = "note_on", "note_off"
ONE_NOTE = [Message(ON, note=60, velocity=64, time=480), Message(ON, note=60, velocity=0, time=480)]


@pytest.mark.parametrize("seed", range(25))
def test_events_and_files_restore_a_performance(seed: int, tmp_path: Path) -> None:
    notes = random_performance(seed)
    events = encode_events(notes)
    assert decode_events(events) == notes
    write_midi([notes], tmp_path / "one.mid")
    assert parse_performance((tmp_path / "one.mid").read_bytes(), "one.mid") == notes
    assert set(events) <= set(PerformanceEvents().vocabulary())
    # A key cannot be pressed twice at a time.
    assert resolve_overlaps(notes) == notes == sorted(notes)
    last: dict[int, int] = {}
    for note in notes:
        assert note.end > note.start >= last.get(note.pitch, 0)
        last[note.pitch] = note.end


def test_events_are_those_of_the_paper() -> None:
    """Velocities where they change, shifts of at most a second, ends before starts."""
    notes = [Note(0, 60, 150, 20), Note(150, 60, 151, 20), Note(150, 64, 151, 3)]
    assert encode_events(notes) == [
        *("velocity20", "on60", "shift100", "shift50", "off60", "on60", "velocity3", "on64"),
        *("shift1", "off60", "off64"),
    ]
    counts = {
        name: sum(word.startswith(name) for word in PerformanceEvents().vocabulary())
        for name in ("on", "off", "shift", "velocity")
    }
    assert counts == {"on": 128, "off": 128, "shift": 100, "velocity": 32}


def test_any_sequence_of_events_is_a_performance() -> None:
    """A model may generate ends without starts and starts without ends."""
    assert decode_events(["off60", "on61", "shift5", "on62", "shift5", "off62"]) == [
        Note(0, 61, 10, 16),
        Note(5, 62, 10, 16),
    ]
    assert decode_events(["on60", "on60", "off60"]) == [Note(0, 60, 1, 16)]
    assert "p60" in refusal(UserError, decode_events, ["p60"])
    assert "on60" in refusal(UserError, decode_grid, ["on60"] * 4)


@pytest.mark.parametrize("first", [250_000, 500_000])
def test_time_follows_the_tempo(first: int, tmp_path: Path) -> None:
    """Tempi are in another track than the notes, and change."""
    tempi = [
        MetaMessage("set_tempo", tempo=first, time=0),
        MetaMessage("set_tempo", tempo=1_000_000, time=480),
    ]
    content = midi_bytes(tempi, ONE_NOTE, path=tmp_path / "one.mid")
    start = first // 10_000
    assert parse_performance(content, "one.mid") == [Note(start, 60, start + 100, 16)]


def test_the_pedal_extends_notes(tmp_path: Path) -> None:
    """Until it is up (below 64) or the key is pressed again; a held key outlasts it."""
    track = [
        Message("control_change", control=64, value=64, time=0),
        Message(ON, note=60, velocity=64, time=0),
        Message(ON, note=72, velocity=64, time=0),
        Message(OFF, note=60, time=48),
        Message(ON, note=60, velocity=64, time=48),
        Message(OFF, note=60, time=48),
        Message("control_change", control=64, value=127, time=0, channel=1),
        Message(ON, note=80, velocity=64, time=0, channel=1),
        Message(OFF, note=80, time=0, channel=1),
        Message("control_change", control=64, value=63, time=96),
        Message("control_change", control=64, value=0, time=96, channel=1),
        Message(OFF, note=72, time=144),
    ]
    content = midi_bytes(track, path=tmp_path / "one.mid", kind=0)
    held = Note(0, 72, 50, 16)
    extended = [Note(0, 60, 10, 16), held, Note(10, 60, 25, 16), Note(15, 80, 35, 16)]
    assert parse_performance(content, "one.mid") == extended


def test_irregular_files_have_one_meaning(tmp_path: Path) -> None:
    """Pressed while it sounds, no length, no end, two channels at once; drums are ignored."""
    track = [
        Message(ON, note=60, velocity=64, time=0),
        Message(ON, note=60, velocity=127, time=96),
        Message(OFF, note=60, time=96),
        Message(OFF, note=60, time=0),
        Message(ON, note=61, velocity=1, time=0),
        Message(OFF, note=61, time=0),
        Message(ON, note=62, velocity=40, time=0),
        Message(ON, note=35, velocity=40, channel=9, time=0),
    ]
    other = [
        Message(ON, note=62, velocity=100, channel=1, time=192),
        Message(OFF, note=62, channel=1, time=48),
        MetaMessage("end_of_track", time=240),
    ]
    content = midi_bytes(track, other, path=tmp_path / "one.mid")
    assert parse_performance(content, "one.mid") == [
        Note(0, 60, 10, 16),
        Note(10, 60, 20, 32),
        Note(20, 61, 21, 1),
        Note(20, 62, 50, 25),
    ]


def test_a_chorale_is_restored_from_its_file(tmp_path: Path) -> None:
    grid = [
        *("p72", "p67", "p60", "p48", "p72", "p65", "rest", "p48"),
        *("p74", "p65", "p60", "rest", "p74", "p65", "p60", "p36"),
    ]
    voices = decode_grid(grid)
    assert voices[0] == [Note(0, 72, 2, 16), Note(2, 74, 4, 16)]
    assert decode_grid([*grid, "p60", "p61"]) == voices  # an incomplete sixteenth
    silent = [
        [*["p72", "p67", "p60", "p48"][:n], "rest", *["p67", "p60", "p48"][n:]] for n in range(4)
    ]
    path = tmp_path / "chorale.mid"
    for words in (grid, *(frame * 4 for frame in silent)):  # a silent voice keeps its position
        write_midi(decode_grid(words), path, ChoraleGrid.step)
        assert ChoraleGrid().words(path.read_bytes(), "chorale.mid") == words
    # MIDI format 1: the tempo is in the first track.
    types = [[message.type for message in track] for track in MidiFile(path).tracks]
    assert ["set_tempo" in track for track in types] == [True, False, False, False]


def test_tracks_without_notes_are_not_voices(tmp_path: Path) -> None:
    path = tmp_path / "chorale.mid"
    instrument = [Message("program_change", program=3, channel=5)]
    voices = [
        [Message(ON, note=note, velocity=64), Message(OFF, note=note, time=120)]
        for note in (72, 67, 60, 48)
    ]
    content = midi_bytes(instrument, *voices, instrument, path=path)
    assert ChoraleGrid().words(content, "x.mid") == ["p72", "p67", "p60", "p48"]
    content = midi_bytes(*voices[:3], path=path)
    assert "3 tracks" in refusal(DataError, ChoraleGrid().words, content, "x.mid")


def test_transposition_changes_pitches_only() -> None:
    for encoding in (PerformanceEvents(), ChoraleGrid()):
        for word in encoding.vocabulary():
            moved = transpose_word(word, 5)
            name = word.rstrip("0123456789")
            if name not in ("on", "off", "p"):
                assert moved == word
            elif int(word.removeprefix(name)) > 122:
                assert moved is None
            else:
                assert moved == f"{name}{int(word.removeprefix(name)) + 5}"
                assert transpose_word(moved, -5) == word


def test_statistics_are_over_all_notes() -> None:
    pieces = [[[Note(0, 60, 100, 10), Note(50, 64, 100, 20)]], [[Note(100, 72, 200, 30)], []]]
    statistics = Statistics.of(pieces, 10)
    assert statistics.notes_per_second == pytest.approx(3 / 2)
    assert statistics.pitch_classes == pytest.approx((2 / 3, 0, 0, 0, 1 / 3, *[0] * 7))
    assert statistics.velocity_mean == pytest.approx(78)
    assert statistics.velocity_spread == pytest.approx((2 / 3 * 40**2) ** 0.5)


def test_files_without_music_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "one.mid"

    def message(content: bytes, encoding: Encoding) -> str:
        line = refusal(DataError, encoding.words, content, "x.mid")
        assert line.startswith("x.mid: ")
        return line

    content = midi_bytes(ONE_NOTE, path=path)
    drums = midi_bytes([Message(ON, note=35, velocity=40, channel=9, time=0)], path=path)
    years = midi_bytes(
        [Message(ON, note=60, velocity=40), Message(OFF, note=60, time=2**27)], path=path
    )
    for encoding in (PerformanceEvents(), ChoraleGrid()):
        for other in (b"", b"RIFF and no MIDI", b"Dear diary", b"MT"[::-1]):
            assert "not a MIDI file" in message(other, encoding)
        for cut in (1, 3, 10, 20, len(content) - 8):
            assert "broken" in message(content[:cut], encoding)
        for silent in (midi_bytes([], path=path), drums):
            assert "no notes" in message(silent, encoding)
        assert "hours" in message(years, encoding)
        assert "format 0 or 1" in message(midi_bytes(ONE_NOTE, path=path, kind=2), encoding)
    assert "1 tracks" in message(content, ChoraleGrid())


def test_without_mido_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mido", None)
    assert "manyheads[music]" in refusal(UserError, parse_performance, b"MThd", "x.mid")
