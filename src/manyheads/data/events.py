"""Music as sequences of words, which a language model reads and generates like text.

Notes come from MIDI files, through mido, which is imported when a file is read or written. Time is
counted in steps of a grid: 10 milliseconds for performances, a sixteenth note for chorales.

An encoding has a vocabulary, converts a MIDI file to words, and words to notes. By default a
model generates at least `least` words before it may end, none of them `silent`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from manyheads.errors import DataError, UserError, import_optional
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


MAX_SHIFT = 100  # steps of one time shift
EVENT = re.compile(r"(on|off|shift|velocity)(\d+)")
PITCHED = re.compile(r"(on|off|p)(\d+)")
REST = "rest"
MAX_HOURS = 24
VOICES = ("soprano", "alto", "tenor", "bass")
Frame = Sequence[int | None]  # the pitch of each voice at a sixteenth; None is silence


def encode_events(performance: Iterable[Note]) -> list[str]:
    """A performance as events, in order of time.

    At each step released keys come before pressed ones, low pitches before high ones. A velocity
    is given where it changes, and a long time takes several shifts.
    """
    notes = resolve_overlaps(performance)
    ends = [(note.end, 0, note.pitch, 0) for note in notes]
    starts = [(note.start, 1, note.pitch, note.velocity) for note in notes]
    events: list[str] = []
    now = velocity = 0
    for moment, is_start, pitch, new_velocity in sorted(ends + starts):
        while now < moment:
            shift = min(MAX_SHIFT, moment - now)
            events.append(f"shift{shift}")
            now += shift
        if is_start and new_velocity != velocity:
            velocity = new_velocity
            events.append(f"velocity{velocity}")
        events.append(f"on{pitch}" if is_start else f"off{pitch}")
    return events


def decode_events(events: Iterable[str]) -> Performance:
    """The notes of any sequence of events; the inverse of `encode_events`.

    A release without a press is ignored, a note without an end lasts to the end of the sequence,
    and notes before the first velocity have the middle one.
    """
    notes: list[Note] = []
    held: dict[int, tuple[int, int]] = {}  # pitch → start, velocity
    now, velocity = 0, VELOCITIES // 2
    for event in events:
        match = EVENT.fullmatch(event)
        if match is None:
            raise UserError(f"'{event}' is not a performance event, such as on60, off60, shift25")
        name, number = match[1], int(match[2])
        if name == "shift":
            now += number
        elif name == "velocity":
            velocity = number
        else:
            if number in held:
                start, old_velocity = held.pop(number)
                notes.append(Note(start, number, now, old_velocity))
            if name == "on":
                held[number] = now, velocity
    notes += [Note(start, pitch, now, v) for pitch, (start, v) in held.items()]
    return resolve_overlaps(notes)


def encode_grid(frames: Iterable[Frame]) -> list[str]:
    """A chorale as tokens: for each sixteenth the four voices, soprano to bass."""
    return [REST if pitch is None else f"p{pitch}" for frame in frames for pitch in frame]


def decode_grid(tokens: Sequence[str]) -> list[Performance]:
    """The four voices of a grid as notes: consecutive equal pitches are one note.

    The grid does not record repeated notes, so they are merged. An incomplete last sixteenth is
    left out.
    """
    length = len(tokens) - len(tokens) % len(VOICES)
    voices = []
    for voice in range(len(VOICES)):
        notes, start = [], 0
        for token, run in groupby(tokens[voice : length : len(VOICES)]):
            end = start + len(list(run))
            match = PITCHED.fullmatch(token)
            if match is not None and match[1] == "p":
                notes.append(Note(start, int(match[2]), end, VELOCITIES // 2))
            elif token != REST:
                raise UserError(f"'{token}' is not a chorale token, such as p60 or {REST}")
            start = end
        voices.append(notes)
    return voices


def transpose_word(word: str, semitones: int) -> str | None:
    """A word that many semitones higher; None if the pitch leaves MIDI's range."""
    match = PITCHED.fullmatch(word)
    if match is None:
        return word
    pitch = int(match[2]) + semitones
    return f"{match[1]}{pitch}" if 0 <= pitch < PITCHES else None


@dataclass(frozen=True, kw_only=True)
class PerformanceEvents:
    """A piano performance as events (Oore et al. 2018; Huang et al. 2018, Music Transformer).

    128 note-ons, 128 note-offs, 100 time shifts of 10 to 1,000 milliseconds and 32 velocities:
    388 words, `on60 off60 shift25 velocity20`.
    """

    kind: ClassVar[str] = "performance"
    REMOVED: ClassVar[dict[str, tuple[Any, ...]]] = {"pedal": ("extend",)}
    step: ClassVar[int] = STEP
    unit: ClassVar[int] = 1
    least: ClassVar[int] = 64
    closing: ClassVar[tuple[str, ...]] = ()
    silent: ClassVar[tuple[str, ...]] = ()

    def vocabulary(self) -> list[str]:
        return [
            *(f"on{pitch}" for pitch in range(PITCHES)),
            *(f"off{pitch}" for pitch in range(PITCHES)),
            *(f"shift{steps}" for steps in range(1, MAX_SHIFT + 1)),
            *(f"velocity{level}" for level in range(1, VELOCITIES + 1)),
        ]

    def words(self, content: bytes, name: str, tempo: float = 1.0) -> list[str]:
        """The events of a MIDI file; a tempo of 2 is twice as fast."""
        notes = parse_performance(content, name)
        _check_length([notes], self.step, name)
        if tempo != 1:
            notes = [
                note._replace(start=round(note.start / tempo), end=round(note.end / tempo))
                for note in notes
            ]
        return encode_events(notes)

    def parts(self, words: Sequence[str]) -> list[Performance]:
        return [decode_events(words)]


@dataclass(frozen=True, kw_only=True)
class ChoraleGrid:
    """Four voices on a grid of sixteenth notes, serialized voice by voice.

    A token is one voice at one sixteenth: `p60`, its MIDI pitch, or `rest`. Each sixteenth is four
    tokens, soprano, alto, tenor, bass; a long note repeats its pitch at every sixteenth, and
    repeated notes are not marked. A chorale of s sixteenths has exactly 4·s tokens, as in
    Coconet's and Music Transformer's encoding of the JSB Chorales.

    For training three rests close a piece before its end token, which is the fourth token of a
    sixteenth: so a position in the stream has the same voice in every piece.
    """

    kind: ClassVar[str] = "chorale"
    step: ClassVar[int] = SIXTEENTH
    unit: ClassVar[int] = len(VOICES)
    least: ClassVar[int] = 16 * len(VOICES)  # a bar of four quarters
    closing: ClassVar[tuple[str, ...]] = (REST,) * (len(VOICES) - 1)
    silent: ClassVar[tuple[str, ...]] = (REST,)

    def vocabulary(self) -> list[str]:
        return [*(f"p{pitch}" for pitch in range(PITCHES)), REST]

    def words(self, content: bytes, name: str, tempo: float = 1.0) -> list[str]:
        """The grid of a MIDI file in which each voice has its own track or channel.

        If two notes of a voice overlap, the later one sounds. The grid has no tempo.
        """
        voices = parse_voices(content, name)
        length = _check_length(voices, self.step, name)
        if len(voices) != len(VOICES):  # tracks without notes are not voices
            voices = [voice for voice in voices if voice]
        if len(voices) != len(VOICES):
            raise DataError(
                f"{name}: {len(voices)} tracks with notes, and a chorale has four, soprano to "
                "bass; replace the file, or set data.encoding=performance"
            )
        frames: list[list[int | None]] = [[None] * len(VOICES) for _ in range(length)]
        for number, voice in enumerate(voices):
            for note in voice:
                for frame in frames[note.start : note.end]:
                    frame[number] = note.pitch
        return encode_grid(frames)

    def parts(self, words: Sequence[str]) -> list[Performance]:
        return decode_grid(words)


Encoding = PerformanceEvents | ChoraleGrid


def _check_length(parts: Sequence[Performance], step: int, name: str) -> int:
    """The length of a piece in steps; a silent or endless one is refused.

    A few damaged bytes can encode a pause of years, and its words would fill the memory.
    """
    length = max((note.end for part in parts for note in part), default=0)
    if not length:
        raise DataError(f"{name}: no notes (drums, on channel 10, are ignored); remove the file")
    hours = length * step // 3_600_000
    if hours >= MAX_HOURS:
        raise DataError(f"{name}: lasts {hours:,} hours, more than {MAX_HOURS}; remove the file")
    return length


@dataclass(frozen=True)
class Statistics:
    """Notes per second, pitch classes and velocities of music."""

    notes_per_second: float
    pitch_classes: tuple[float, ...]  # fractions of C, C♯, …, B
    velocity_mean: float  # of MIDI velocities, 1 to 127
    velocity_spread: float  # their standard deviation

    @staticmethod
    def of(pieces: Sequence[Sequence[Performance]], step: int) -> "Statistics":
        """Over all parts of these pieces; a piece lasts from its first note to its last end."""
        played = [[note for part in piece for note in part] for piece in pieces]
        notes = [note for piece in played for note in piece]
        if not notes:
            raise DataError("music without notes has no statistics; generate more of it")
        spans = [max(n.end for n in p) - min(n.start for n in p) for p in played if p]
        counts = np.bincount([note.pitch % 12 for note in notes], minlength=12)
        velocities = np.array([4 * note.velocity - 2 for note in notes])
        return Statistics(
            notes_per_second=len(notes) / (sum(spans) * step / 1000),
            pitch_classes=tuple((counts / len(notes)).tolist()),
            velocity_mean=float(velocities.mean()),
            velocity_spread=float(velocities.std()),
        )
