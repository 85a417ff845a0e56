"""MIDI files and their notes, through mido, which is imported when a file is read or written.

Time is counted in steps of a grid: 10 milliseconds for performances, a sixteenth note for
chorales.
"""

from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from manyheads.errors import DataError, import_optional
from manyheads.fileio import replace_file

PITCHES = 128
VELOCITIES = 32
SUFFIXES = (".mid", ".midi")

# A tick of a written file is a millisecond: 500 to a quarter note of half a second.
TICKS, TEMPO = 500, 500_000
STEP = 10  # of performances, in ticks
SIXTEENTH = TICKS // 4

DRUMS = 9  # the channel on which a key is a drum, not a pitch
SUSTAIN, PRESSED = 64, 64  # the control, and the least value of a pressed pedal


class Note(NamedTuple):
    """A key from a start step to an end step, with a velocity from 1 to 32.

    Velocity v stands for MIDI's 4v − 3 to 4v, and is written as 4v − 2.
    """

    start: int
    pitch: int
    end: int
    velocity: int


Performance = list[Note]


def resolve_overlaps(notes: Iterable[Note]) -> Performance:
    """Notes as one keyboard can play them, in order of start and pitch.

    A note lasts at least one step. A repeated key ends its previous note; two notes of a key with
    the same start are merged, with the longer duration and the greater velocity.
    """
    keys: dict[int, list[Note]] = {}
    for note in sorted(notes):
        note = note._replace(end=max(note.end, note.start + 1))
        played = keys.setdefault(note.pitch, [])
        if played and played[-1].start == note.start:
            last = played.pop()
            velocity = max(last.velocity, note.velocity)
            note = note._replace(end=max(last.end, note.end), velocity=velocity)
        elif played:
            played[-1] = played[-1]._replace(end=min(played[-1].end, note.start))
        played.append(note)
    return sorted(note for played in keys.values() for note in played)


def parse_performance(content: bytes, name: str) -> Performance:
    """The notes of all tracks on the grid of 10 milliseconds; `name` is for messages.

    A note whose key is released while the sustain pedal is down lasts until the pedal is up or
    the key is pressed again. A note without an end lasts to the end of the file.
    """
    parts = _read_parts(content, name, sixteenths=False)
    return resolve_overlaps(note for part in parts.values() for note in part)


def parse_voices(content: bytes, name: str) -> list[Performance]:
    """The notes of each track and channel on the grid of sixteenth notes, without the pedal.

    A track that only names an instrument is a silent voice.
    """
    parts = _read_parts(content, name, sixteenths=True)
    return [resolve_overlaps(part) for _, part in sorted(parts.items())]


def write_midi(parts: Sequence[Performance], path: Path, step: int = STEP) -> None:
    """A MIDI file with a piano track for each part; `step` is in milliseconds.

    `parse_performance`, or `parse_voices` for several parts, gives the same notes.
    """
    mido = import_optional("mido", "music")
    file = mido.MidiFile(type=0 if len(parts) == 1 else 1, ticks_per_beat=TICKS)
    for channel, part in enumerate(parts):
        track = file.add_track()
        if not channel:
            track.append(mido.MetaMessage("set_tempo", tempo=TEMPO))
        track.append(mido.Message("program_change", program=0, channel=channel))
        ends = [(note.end, "note_off", note.pitch, 0) for note in part]
        starts = [(note.start, "note_on", note.pitch, 4 * note.velocity - 2) for note in part]
        now = 0
        for moment, kind, pitch, velocity in sorted(ends + starts):  # note_off sorts first
            settings = {"note": pitch, "velocity": velocity, "time": (moment - now) * step}
            track.append(mido.Message(kind, channel=channel, **settings))
            now = moment
    replace_file(path, lambda temporary: file.save(temporary))


def _open(content: bytes, name: str) -> Any:
    mido = import_optional("mido", "music")
    try:
        file = mido.MidiFile(file=BytesIO(content))
    except Exception as error:  # mido raises nothing narrower
        reason = " ".join(str(error).split()) or "it is truncated"
        raise DataError(f"{name}: broken, or not a MIDI file ({reason}); copy it again") from None
    if file.type == 2 or file.ticks_per_beat <= 0:
        problem = "independent tracks" if file.type == 2 else "no ticks per beat"
        raise DataError(f"{name}: this MIDI file has {problem}; save it as format 0 or 1")
    return file


def _read_parts(
    content: bytes, name: str, *, sixteenths: bool
) -> dict[tuple[int, int], list[Note]]:
    """The notes of each (track, channel) with keys or an instrument, without drums."""
    file = _open(content, name)
    messages = []
    for track, track_messages in enumerate(file.tracks):
        ticks = accumulate(message.time for message in track_messages)
        messages += [(tick, track, m) for tick, m in zip(ticks, track_messages, strict=True)]

    parts: dict[tuple[int, int], list[Note]] = {}
    held: dict[
        tuple[int, int, int], tuple[int, int]
    ] = {}  # (track, channel, pitch) → (start, velocity)
    sustained: list[tuple[tuple[int, int, int], tuple[int, int]]] = []  # released, pedal down
    pedals: set[int] = set()  # channels whose pedal is down
    last_tick = elapsed = now = 0
    tempo = TEMPO

    def end(key: tuple[int, int, int], start: int, velocity: int) -> None:
        track, channel, pitch = key
        parts[track, channel].append(Note(start, pitch, now, -(-velocity // 4)))

    for tick, track, message in sorted(messages, key=lambda item: item[0]):
        # Integers throughout, so that no rounding error adds up: microseconds × ticks per beat.
        elapsed += (tick - last_tick) * tempo
        last_tick = tick
        time, unit = (4 * tick, 1) if sixteenths else (elapsed, 10_000)
        step = file.ticks_per_beat * unit
        now = (2 * time + step) // (2 * step)  # rounded, halves up
        if message.type == "set_tempo":
            tempo = message.tempo
        channel = getattr(message, "channel", DRUMS)
        if channel == DRUMS:
            continue
        if message.type == "control_change" and message.control == SUSTAIN and not sixteenths:
            pedals.add(channel)
            if message.value < PRESSED:
                pedals.discard(channel)
                for key, note in sustained:
                    if key[1] == channel:
                        end(key, *note)
                sustained = [item for item in sustained if item[0][1] != channel]
        elif message.type in ("note_on", "note_off"):
            parts.setdefault((track, channel), [])
            key = (track, channel, message.note)
            is_press = message.type == "note_on" and message.velocity > 0
            if key in held and channel in pedals and not is_press:
                sustained.append((key, held.pop(key)))
            elif key in held:
                end(key, *held.pop(key))
            if is_press:
                held[key] = now, message.velocity
        elif message.type == "program_change":
            parts.setdefault((track, channel), [])
    for key, note in [*sustained, *held.items()]:
        end(key, *note)
    return parts
