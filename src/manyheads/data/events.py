"""Music as rows of words, which a language model reads and writes as it does text.

An encoding is a vocabulary, what a file comes to in its words, and what its words come to as notes.
Unless told, a model writes `least` words before it may end, of which none is `silent`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from manyheads.data.midi import (
    PITCHES,
    SIXTEENTH,
    STEP,
    VELOCITIES,
    Note,
    Pedal,
    Performance,
    has_drums,
    performance_in,
    settled,
    voices_in,
)
from manyheads.errors import DataError, UserError

LONGEST = 100  # steps that one word lets pass
EVENT = re.compile(r"(on|off|shift|velocity)(\d+)")
PITCHED = re.compile(r"(on|off|p)(\d+)")
REST = "rest"
MOST_HOURS = 24
VOICES = ("soprano", "alto", "tenor", "bass")
Frame = Sequence[int | None]  # the pitch of each voice at a sixteenth; None is silence


def events_of(performance: Iterable[Note]) -> list[str]:
    """A performance as events, in order of time.

    At each step first the keys that are let go, then those that are struck, from the lowest on;
    a velocity where it is another than the last one's, and as many shifts as the time before
    takes.
    """
    notes = settled(performance)
    ends = [(note.end, 0, note.pitch, 0) for note in notes]
    begins = [(note.start, 1, note.pitch, note.velocity) for note in notes]
    events: list[str] = []
    now = velocity = 0
    for moment, begun, pitch, struck in sorted(ends + begins):
        while now < moment:
            passed = min(LONGEST, moment - now)
            events.append(f"shift{passed}")
            now += passed
        if begun and struck != velocity:
            velocity = struck
            events.append(f"velocity{velocity}")
        events.append(f"on{pitch}" if begun else f"off{pitch}")
    return events


def performance_of(events: Iterable[str]) -> Performance:
    """The notes of any row of events; for those of `events_of` the same as went in.

    A key that is let go without having been struck makes nothing, a note that never ends lasts
    to the end of the row, and notes before any velocity have the middle one.
    """
    notes: list[Note] = []
    held: dict[int, tuple[int, int]] = {}
    now, velocity = 0, VELOCITIES // 2

    def end(pitch: int) -> None:
        if pitch in held:
            start, struck = held.pop(pitch)
            notes.append(Note(start, pitch, now, struck))

    for event in events:
        found = EVENT.fullmatch(event)
        if found is None:
            raise UserError(f"'{event}' is no event of a performance: give on60, off60, shift25, …")
        name, number = found[1], int(found[2])
        if name == "shift":
            now += number
        elif name == "velocity":
            velocity = number
        else:
            end(number)
            if name == "on":
                held[number] = now, velocity
    for pitch in list(held):
        end(pitch)
    return settled(notes)


def grid_of(frames: Iterable[Frame]) -> list[str]:
    """A chorale as tokens: of each sixteenth the four voices in order, soprano to bass."""
    return [REST if pitch is None else f"p{pitch}" for frame in frames for pitch in frame]


def voices_of(tokens: Sequence[str]) -> list[Performance]:
    """The four voices of a grid as notes: equal pitches that follow each other are one.

    The grid does not say where a note is struck again, so nor do the notes. A last sixteenth that
    is not whole is left out.
    """
    whole = len(tokens) - len(tokens) % len(VOICES)
    voices = []
    for voice in range(len(VOICES)):
        row = [_pitch(token) for token in tokens[voice:whole:4]]
        bounds = [at for at, (one, other) in enumerate(pairwise(row), start=1) if one != other]
        cuts = pairwise([0, *bounds, len(row)]) if row else ()
        loud = VELOCITIES // 2
        spans = [(start, row[start], stop) for start, stop in cuts]
        voices.append([Note(a, pitch, b, loud) for a, pitch, b in spans if pitch is not None])
    return voices


def _pitch(token: str) -> int | None:
    if token == REST:
        return None
    found = PITCHED.fullmatch(token)
    if found is None or found[1] != "p":
        raise UserError(f"'{token}' is no token of a chorale: give p60 or {REST}")
    return int(found[2])


def transposed(word: str, semitones: int) -> str | None:
    """A word so many semitones higher; None where there is no such pitch."""
    found = PITCHED.fullmatch(word)
    if found is None:
        return word
    pitch = int(found[2]) + semitones
    return f"{found[1]}{pitch}" if 0 <= pitch < PITCHES else None


@dataclass(frozen=True, kw_only=True)
class PerformanceEvents:
    """A piano performance as events (Oore et al. 2018; Huang et al. 2018, Music Transformer).

    128 note-ons, 128 note-offs, 100 time shifts of 10 to 1,000 milliseconds and 32 velocities:
    388 words, `on60 off60 shift25 velocity20`. `pedal` says whether a note sounds on while the
    sustain pedal is down.
    """

    pedal: Pedal = "extend"
    kind: ClassVar[str] = "performance"
    step: ClassVar[int] = STEP
    unit: ClassVar[int] = 1
    least: ClassVar[int] = 64
    closing: ClassVar[tuple[str, ...]] = ()
    silent: ClassVar[tuple[str, ...]] = ()

    def vocabulary(self) -> list[str]:
        return [
            *(f"on{pitch}" for pitch in range(PITCHES)),
            *(f"off{pitch}" for pitch in range(PITCHES)),
            *(f"shift{steps}" for steps in range(1, LONGEST + 1)),
            *(f"velocity{level}" for level in range(1, VELOCITIES + 1)),
        ]

    def words(self, content: bytes, name: str, tempo: float = 1.0) -> list[str]:
        """The events of a MIDI file; with a tempo of 2 they pass twice as fast."""
        notes = performance_in(content, name, self.pedal)
        if not notes:
            raise _no_notes(content, name)
        _check_end(name, max(note.end for note in notes) * self.step)
        if tempo != 1:
            notes = [
                note._replace(start=round(note.start / tempo), end=round(note.end / tempo))
                for note in notes
            ]
        return events_of(notes)

    def parts(self, words: Sequence[str]) -> list[Performance]:
        return [performance_of(words)]


@dataclass(frozen=True, kw_only=True)
class ChoraleGrid:
    """Four voices on a grid of sixteenth notes, written out voice by voice.

    A token is one voice at one sixteenth: `p60`, its MIDI pitch, or `rest`. Each sixteenth is four
    tokens, soprano, alto, tenor, bass, and a note that lasts is its pitch again at every sixteenth:
    nothing says whether a pitch is held or struck again. So a chorale of s sixteenths has exactly
    4·s tokens, as in Coconet's and Music Transformer's score of the JSB Chorales.

    For training three rests close a piece before its end token, which is the fourth of a sixteenth
    then: so a place in the stream has the same voice in every piece.
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
        """The grid of a MIDI file in which each voice has a track, or a channel, of its own.

        Where two notes of a voice overlap, the later one sounds. The grid has no tempo.
        """
        voices = voices_in(content, name)
        sounding = [voice for voice in voices if voice]
        if not sounding:
            raise _no_notes(content, name)
        if len(voices) != len(VOICES):  # other tracks say what they like and are no voices
            voices = sounding
        if len(voices) != len(VOICES):
            raise DataError(
                f"{name}: {len(voices)} tracks with notes, and a chorale has four, soprano to "
                "bass; give such a file, or choose data.encoding=performance"
            )
        length = max(note.end for voice in voices for note in voice)
        _check_end(name, length * self.step)
        frames: list[list[int | None]] = [[None] * len(VOICES) for _ in range(length)]
        for number, voice in enumerate(voices):
            for note in voice:
                for frame in frames[note.start : note.end]:
                    frame[number] = note.pitch
        return grid_of(frames)

    def parts(self, words: Sequence[str]) -> list[Performance]:
        return voices_of(words)


Encoding = PerformanceEvents | ChoraleGrid


def _check_end(name: str, milliseconds: int) -> None:
    """A few damaged bytes can name a pause of years, and its words would fill the memory."""
    hours = milliseconds // 3_600_000
    if hours >= MOST_HOURS:
        raise DataError(f"{name}: lasts {hours:,} hours, more than {MOST_HOURS}; remove the file")


def _no_notes(content: bytes, name: str) -> DataError:
    if has_drums(content, name):
        return DataError(
            f"{name}: no note but drums (channel 10), which are left out; take the file away"
        )
    return DataError(f"{name}: no note in any track; take the file away")


@dataclass(frozen=True)
class Statistics:
    """What notes come to: how many a second, of which pitch classes, and how loud."""

    notes_per_second: float
    pitch_classes: tuple[float, ...]  # shares of C, C♯, …, B
    velocity_mean: float  # as MIDI counts them, 1 to 127
    velocity_spread: float  # their standard deviation

    @staticmethod
    def of(pieces: Sequence[Sequence[Performance]], step: int) -> "Statistics":
        """Of all parts of these pieces; the seconds run from the first note of each to its end."""
        played = [[note for part in piece for note in part] for piece in pieces]
        notes = [note for piece in played for note in piece]
        if not notes:
            raise DataError("music without a note has no statistics; write more of it")
        spans = [max(n.end for n in p) - min(n.start for n in p) for p in played if p]
        counts = [sum(note.pitch % 12 == key for note in notes) for key in range(12)]
        velocities = [4 * note.velocity - 2 for note in notes]
        mean = sum(velocities) / len(notes)
        spread = (sum((one - mean) ** 2 for one in velocities) / len(notes)) ** 0.5
        return Statistics(
            notes_per_second=len(notes) / (sum(spans) * step / 1000),
            pitch_classes=tuple(count / len(notes) for count in counts),
            velocity_mean=mean,
            velocity_spread=spread,
        )
