"""Music that is read in a blink: random performances, chorales, and MIDI files spelled out."""

import json
import random
from pathlib import Path
from typing import Any

import mido

from manyheads.data.events import Note, Performance, resolve_overlaps, write_midi

SCALE = (60, 62, 64, 65, 67, 69, 71, 72)


def random_performance(seed: int, notes: int = 60) -> Performance:
    """Any notes: they overlap, last nothing, are struck twice at once, or follow long silences."""
    draw = random.Random(seed)
    actual = []
    for _ in range(notes):
        start = draw.choice((draw.randrange(40), draw.randrange(2000)))
        length = draw.choice((0, 1, draw.randrange(30), draw.randrange(500)))
        pitch = draw.choice((draw.randrange(58, 62), draw.randrange(128)))
        actual.append(Note(start, pitch, start + length, draw.randint(1, 32)))
    return resolve_overlaps(actual)


def midi_bytes(*tracks: list[Any], path: Path, beat: int = 480, kind: int = 1) -> bytes:
    """A file of these tracks of mido's messages."""
    file = mido.MidiFile(type=kind, ticks_per_beat=beat)
    file.tracks.extend(mido.MidiTrack(track) for track in tracks)
    file.save(path)
    return path.read_bytes()


def scale_up(first: int) -> Performance:
    """Eight notes of a scale, each as long as the next comes."""
    pitches = (SCALE[(first + step) % len(SCALE)] for step in range(8))
    return [Note(20 * at, pitch, 20 * at + 20, 10 + at % 3) for at, pitch in enumerate(pitches)]


def write_performances(folder: Path, files: int = 12) -> Path:
    """A folder of scales that begin anywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        write_midi([scale_up(number)], folder / f"scale{number:02}.mid")
    return folder


def write_chorales(folder: Path, pieces: int = 4) -> Path:
    """A JSON file of chorales with silences, each split with some."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(3)
    table = {
        split: [
            [[draw.choice((72, 74, -1)), 67, draw.choice((60, 59)), 48] for _ in range(12)]
            for _ in range(pieces)
        ]
        for split in ("train", "valid", "test")
    }
    (folder / "chorales.json").write_text(json.dumps(table), encoding="utf-8")
    return folder
