"""What `generate` does with a run of music: a MIDI file, its numbers, and a piano roll."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from manyheads.commands.shared import PICTURES, say, write
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.data.events import Statistics
    from manyheads.data.midi import Performance
    from manyheads.data.music import MusicData
    from manyheads.decode.generate import BaseGenerator
    from manyheads.decode.sample import Sample
    from manyheads.loading import OpenRun
    from manyheads.run import Run

PLACES = ("data.folder", "data.file")
CLASSES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


@dataclass(frozen=True, kw_only=True)
class MusicFiles:
    """The files that `generate` was given for music."""

    out: Path | None
    prime: Path | None
    picture: Path | None

    def check(self, opened: "OpenRun", *, texts: bool) -> None:
        """Refuse what does not go with the run, or could not be written, before anything is."""
        from manyheads.data.midi import SUFFIXES
        from manyheads.data.music import MusicData

        if not isinstance(opened.run.data, MusicData):
            if self.out or self.prime or self.picture:
                raise UserError(
                    f"--out, --prime and --picture are for music, and {opened.folder} writes none: "
                    "leave them out"
                )
            return
        if self.out is None:
            raise UserError(f"{opened.folder} writes music: say where to, --out music.mid")
        if self.prime is not None and self.out.resolve() == self.prime.resolve():
            raise UserError(f"--out {self.out} is the prime itself: choose another name")
        if texts:
            raise UserError("--prompt and --stop are for texts: leave them out, or give a --prime")
        for name, path, ends in (("out", self.out, SUFFIXES), ("picture", self.picture, PICTURES)):
            if path is not None and path.suffix.lower() not in ends:
                raise UserError(f"--{name} {path} must end in one of {', '.join(ends)}")
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise UserError(f"--{name} {path} must be a file in a folder that is there")


def moved(opened: "OpenRun", settings: list[str]) -> "OpenRun":
    """The run with its music where it is now; nothing else of it changes."""
    from manyheads.config import override_all
    from manyheads.data.music import MusicData

    for setting in settings:
        if setting.partition("=")[0] not in PLACES:
            raise UserError(
                f"'{setting}' has no say here: a text to continue is --prompt, and where the "
                f"data of a model of music are is {'=... or '.join(PLACES)}=..."
            )
        if not isinstance(opened.run.data, MusicData):
            raise UserError(
                f"{setting} is for music, and {opened.folder} writes none: leave it out"
            )
    return replace(opened, run=override_all(opened.run, settings)) if settings else opened


def decoding(run: "Run", limit: int | None) -> dict[str, Any]:
    """How music is written unless told: a few words before an end, none for an end at the limit.

    A model that has learned little, or has a whole piece for a prime, would often end at once.
    """
    least = cast("MusicData", run.data).encoding.least
    return {"shortest": min(least, limit or run.model.max_length // 2), "at_limit": "cut"}


def write_music(
    generator: "BaseGenerator",
    data: "MusicData",
    files: MusicFiles,
    *,
    limit: int | None,
    sample: "Sample | None",
) -> None:
    """Continue the prime, or begin anew; say what was written beside what the data has."""
    from manyheads.data.events import Statistics
    from manyheads.data.midi import read_bytes, write_midi
    from manyheads.decode.compose import compose

    encoding, out, prime = data.encoding, files.out, files.prime
    assert out is not None  # as `check` has it
    begun = encoding.words(read_bytes(prime), str(prime)) if prime is not None else []
    words = compose(generator, encoding, begun, limit=limit, sample=sample)
    whole, first = encoding.parts([*begun, *words]), encoding.parts(begun)
    from_step = max((note.end for part in first for note in part), default=0)
    new = [[note for note in part if note.start >= from_step] for part in whole]
    if not any(new):
        raise UserError(
            f"{len(words)} words were written and no note is among them: choose another --seed, "
            "a longer --min-new-tokens, or train longer"
        )
    write_midi(whole, out, encoding.step)
    seconds = max(note.end for part in whole for note in part) * encoding.step / 1000
    say(f"{out}: {sum(map(len, whole)):,} notes, {seconds:.1f} seconds, {len(words):,} new words")
    if files.picture is not None:
        _draw(whole, encoding.step, from_step, out.name, files.picture)
    _show(Statistics.of([new], encoding.step), _of_data(data))


def _of_data(data: "MusicData") -> "Statistics | None":
    """The same numbers of the validation pieces, where they are still there."""
    from manyheads.data.events import Statistics

    try:
        pieces = data.read("valid").pieces_of_words
    except UserError as error:  # the music is worth having all the same
        say(f"no numbers of the data: {error}")
        return None
    return Statistics.of([data.encoding.parts(words) for words in pieces], data.encoding.step)


def _show(music: "Statistics", data: "Statistics | None") -> None:
    found = [one for one in (music, data) if one is not None]
    rows = [
        ("", ["music", "valid"][: len(found)]),
        ("notes per second", [f"{one.notes_per_second:.2f}" for one in found]),
        ("velocity mean", [f"{one.velocity_mean:.1f}" for one in found]),
        ("velocity spread", [f"{one.velocity_spread:.1f}" for one in found]),
    ]
    for number, name in enumerate(CLASSES):
        rows.append((f"share of {name}", [f"{one.pitch_classes[number]:.3f}" for one in found]))
    for name, values in rows:
        write(f"{name:>16}" + "".join(f"{value:>9}" for value in values) + "\n")


def _draw(parts: "list[Performance]", step: int, from_step: int, title: str, picture: Path) -> None:
    from manyheads.data.events import VOICES
    from manyheads.data.midi import VELOCITIES
    from manyheads.view.figures import piano_roll

    second = 1000 / step
    drawn = [
        [(n.start / second, n.end / second, n.pitch, n.velocity / VELOCITIES) for n in part]
        for part in parts
    ]
    names = VOICES if len(parts) == len(VOICES) else [""]
    by_name = dict(zip(names, drawn, strict=True))
    piano_roll(by_name, title, picture, begun=from_step / second)
    say(f"picture: {picture}")
