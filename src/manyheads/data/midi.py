"""MIDI files and the notes in them, through mido, which is imported when a file is read or written.

Time is counted in steps of a grid: of 10 milliseconds for performances, of a sixteenth note for
chorales.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from manyheads.errors import DataError, UserError, import_optional
from manyheads.fileio import replace_file

Pedal = Literal["extend", "ignore"]
Clock = Callable[[int], int]  # from ticks of a file to steps

PITCHES = 128
VELOCITIES = 32
SUFFIXES = (".mid", ".midi")
BEGINS = b"MThd"  # every MIDI file

# A tick of what is written is a millisecond: 500 to a quarter note of half a second.
TICKS, TEMPO = 500, 500_000
STEP = 10  # of performances, in ticks
SIXTEENTH = TICKS // 4

DRUMS = 9  # the channel on which a key is a drum and no pitch
SUSTAIN, PRESSED = 64, 64


class Note(NamedTuple):
    """A key that is struck at a step and let go at another, with a velocity from 1 to 32.

    Velocity v stands for MIDI's 4v − 3 to 4v, and is written as 4v − 2.
    """

    start: int
    pitch: int
    end: int
    velocity: int


Performance = list[Note]


def settled(notes: Iterable[Note]) -> Performance:
    """Notes as one keyboard plays them, in order of start and pitch.

    A note lasts at least a step. A key that is struck again ends the note before it, and what is
    struck twice at once is one note, as long as the longer and as loud as the louder.
    """
    keys: dict[int, list[Note]] = {}
    for note in sorted(notes):
        whole = note._replace(end=max(note.end, note.start + 1))
        played = keys.setdefault(note.pitch, [])
        before = played[-1] if played else None
        if before is not None and before.start == note.start:
            loud = max(before.velocity, note.velocity)
            played[-1] = whole._replace(end=max(before.end, whole.end), velocity=loud)
            continue
        if before is not None:
            played[-1] = before._replace(end=min(before.end, note.start))
        played.append(whole)
    return sorted(note for played in keys.values() for note in played)


def read_midi(path: Path, pedal: Pedal = "extend") -> Performance:
    """The notes of a file on the grid of 10 milliseconds, whatever its tracks and tempi."""
    return performance_in(read_bytes(path), str(path), pedal)


def performance_in(content: bytes, name: str, pedal: Pedal = "extend") -> Performance:
    """The notes of a file that was read, which messages call by its name.

    While the sustain pedal is down, a key that is let go sounds on until the pedal is up or the
    key is struck again, unless pedals are ignored. A note that is never ended ends with the file.
    """
    file = _opened(content, name)
    parts = _parts(file, _seconds(file), pedal)
    return settled(note for part in parts.values() for note in part)


def voices_in(content: bytes, name: str) -> list[Performance]:
    """The notes of each track (and channel) on the grid of sixteenth notes.

    One that only names an instrument is a voice that is silent.
    """
    file = _opened(content, name)
    beat = file.ticks_per_beat
    parts = _parts(file, lambda tick: _nearest(4 * tick, beat), "ignore")
    return [settled(part) for _, part in sorted(parts.items())]


def has_drums(content: bytes, name: str) -> bool:
    """Whether something is struck on the channel that is left out."""
    messages = (message for _, _, message in _messages(_opened(content, name)))
    return any(one.type == "note_on" and one.velocity and one.channel == DRUMS for one in messages)


def write_midi(parts: Sequence[Performance], path: Path, step: int = STEP) -> None:
    """A file that any player opens: a piano track for each part, a step so many milliseconds.

    What `read_midi`, or for several parts `voices_in`, reads back are the same notes.
    """
    mido = import_optional("mido", "music")
    file = mido.MidiFile(type=0 if len(parts) == 1 else 1, ticks_per_beat=TICKS)
    for channel, part in enumerate(parts):
        track = mido.MidiTrack()
        if not channel:
            track.append(mido.MetaMessage("set_tempo", tempo=TEMPO))
        track.append(mido.Message("program_change", program=0, channel=channel))
        ends = [(note.end, 0, note.pitch, 0) for note in part]
        begins = [(note.start, 1, note.pitch, 4 * note.velocity - 2) for note in part]
        now = 0
        for moment, begun, pitch, velocity in sorted(ends + begins):
            kind = "note_on" if begun else "note_off"
            settings = {"channel": channel, "note": pitch, "velocity": velocity}
            track.append(mido.Message(kind, time=(moment - now) * step, **settings))
            now = moment
        file.tracks.append(track)
    replace_file(path, lambda beside: file.save(beside))


def read_bytes(path: Path) -> bytes:
    """What a file holds, or a mistake."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); check the path") from None


def _opened(content: bytes, name: str) -> Any:
    mido = import_optional("mido", "music")
    if not content:
        raise DataError(f"{name}: the file is empty; copy it again, or take it away")
    if content[: len(BEGINS)] != BEGINS[: len(content)]:
        raise DataError(f"{name}: not a MIDI file (no {BEGINS.decode()} at its start); remove it")
    try:
        file = mido.MidiFile(file=BytesIO(content))
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split()) or "it is cut off"
        raise DataError(f"{name}: broken MIDI file ({reason}); copy it again") from None
    if file.type == 2 or file.ticks_per_beat <= 0:
        what = "tracks that are songs of their own" if file.type == 2 else "no ticks per beat"
        raise DataError(f"{name}: this MIDI file has {what}; save it as format 0 or 1")
    return file


def _messages(file: Any) -> list[tuple[int, int, Any]]:
    """(tick, track, message) of all tracks, in order of time."""
    found = []
    for number, track in enumerate(file.tracks):
        ticks = accumulate(message.time for message in track)
        found += [(tick, number, message) for tick, message in zip(ticks, track, strict=True)]
    return sorted(found, key=lambda one: one[0])


def _nearest(part: int, whole: int) -> int:
    """part / whole to the nearest whole number, halves up, without rounding on the way."""
    return (2 * part + whole) // (2 * whole)


def _seconds(file: Any) -> Clock:
    """Steps of 10 milliseconds by the tempi of a file, in whole numbers: no error adds up."""
    tempi = [(tick, one.tempo) for tick, _, one in _messages(file) if one.type == "set_tempo"]
    tempi = [(0, TEMPO), *tempi]
    passed = [(after - tick) * tempo for (tick, tempo), (after, _) in pairwise(tempi)]
    reached = [0, *accumulate(passed)]
    ticks = [tick for tick, _ in tempi]

    def step(tick: int) -> int:
        last = bisect_right(ticks, tick) - 1
        microseconds = reached[last] + (tick - ticks[last]) * tempi[last][1]
        return _nearest(microseconds, file.ticks_per_beat * 10_000)

    return step


class _Keys:
    """The keys of a track and channel while a file is played, and the notes they have made."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.notes: list[Note] = []
        self.held: dict[int, tuple[int, int]] = {}  # pitch → tick and velocity
        self.ringing: list[tuple[int, int, int]] = []  # let go while the pedal was down

    def strike(self, pitch: int, tick: int, velocity: int) -> None:
        self.let_go(pitch, tick, rings=False)
        self.held[pitch] = tick, velocity

    def let_go(self, pitch: int, tick: int, *, rings: bool) -> None:
        if pitch not in self.held:
            return
        start, velocity = self.held.pop(pitch)
        self.ringing.append((pitch, start, velocity))
        if not rings:
            self._end(self.ringing.pop(), tick)

    def pedal_up(self, tick: int) -> None:
        for one in self.ringing:
            self._end(one, tick)
        self.ringing = []

    def close(self, tick: int) -> None:
        self.pedal_up(tick)
        for pitch in list(self.held):
            self.let_go(pitch, tick, rings=False)

    def _end(self, one: tuple[int, int, int], tick: int) -> None:
        pitch, start, velocity = one
        level = -(-velocity // 4)
        self.notes.append(Note(self.clock(start), pitch, self.clock(tick), level))


def _parts(file: Any, clock: Clock, pedal: Pedal) -> dict[tuple[int, int], list[Note]]:
    """The notes of each track and channel that has keys or an instrument; drums are left out."""
    keys: dict[tuple[int, int], _Keys] = {}
    down: set[int] = set()  # channels whose pedal is
    tick = 0
    for tick, track, message in _messages(file):
        kind, channel = message.type, getattr(message, "channel", DRUMS)
        if channel == DRUMS:
            continue
        if kind == "control_change" and message.control == SUSTAIN and pedal == "extend":
            if message.value >= PRESSED:
                down.add(channel)
                continue
            down.discard(channel)
            for (_, other), part in keys.items():
                if other == channel:
                    part.pedal_up(tick)
        elif kind in ("note_on", "note_off"):
            part = keys.setdefault((track, channel), _Keys(clock))
            if kind == "note_on" and message.velocity:
                part.strike(message.note, tick, message.velocity)
            else:
                part.let_go(message.note, tick, rings=channel in down)
        elif kind == "program_change":
            keys.setdefault((track, channel), _Keys(clock))
    for part in keys.values():
        part.close(tick)
    return {where: part.notes for where, part in keys.items()}
