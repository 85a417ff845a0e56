"""Music as sequences of words, which a language model reads and generates like text.

An encoding has a vocabulary, converts a MIDI file to words, and words to notes. By default a
model generates at least `least` words before it may end, none of them `silent`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from manyheads.data.midi import (
    PITCHES,
    SIXTEENTH,
    STEP,
    VELOCITIES,
    Note,
    Performance,
    parse_performance,
    parse_voices,
    resolve_overlaps,
)
from manyheads.errors import DataError, UserError

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
