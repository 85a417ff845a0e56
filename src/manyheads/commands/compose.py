"""The command that continues music: compose."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from manyheads.commands import options
from manyheads.commands.generate import (
    TEMPERATURE,
    MaxNewTokens,
    MinNewTokens,
    SearchBeam,
    check_options,
    decoding_options,
    make_generator,
)
from manyheads.commands.options import argument, option, out_option
from manyheads.commands.shared import check_image, open_model, say, write
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.data.events import Statistics
    from manyheads.data.midi import Performance
    from manyheads.data.music import MusicData
    from manyheads.decode.generate import BaseGenerator
    from manyheads.decode.sample import Sample
    from manyheads.loading import LoadedRun

DATA_PATHS = ("data.folder", "data.file")
PITCH_CLASSES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


@dataclass(frozen=True, kw_only=True)
class Music:
    """The files of a composition: MIDI to write, MIDI to continue, piano roll to plot."""

    out: Path | None
    prime: Path | None
    plot: Path | None

    def check(self, folder: Path) -> Path:
        """Refuse files that cannot be written before anything is composed."""
        from manyheads.data.midi import SUFFIXES

        if self.out is None:
            raise UserError(f"{folder} composes music: name the file, --out music.mid")
        if self.prime is not None and self.out.resolve() == self.prime.resolve():
            raise UserError(f"--out {self.out} is the prime itself: choose another name")
        if self.out.suffix.lower() not in SUFFIXES:
            raise UserError(f"--out {self.out} must end in one of {', '.join(SUFFIXES)}")
        check_image("--plot", self.plot)
        for name, path in (("--out", self.out), ("--plot", self.plot)):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise UserError(f"{name} {path} must be a file in a folder that exists")
        return self.out


def compose(
    run: options.RunFolder,
    settings: Annotated[
        list[str] | None, argument("KEY=VALUE", "data.folder or data.file, if the data moved")
    ] = None,
    out: Annotated[Path | None, out_option("MIDI file to write")] = None,
    plot: Annotated[
        Path | None, options.plot_option("Plot a piano roll (.png, .svg, .pdf)")
    ] = None,
    prime: Annotated[Path | None, option("MIDI file to continue", metavar="FILE")] = None,
    max_new_tokens: MaxNewTokens = None,
    min_new_tokens: MinNewTokens = None,
    temperature: options.Temperature = TEMPERATURE,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.SampleSeed = 1,
    beam: SearchBeam = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Compose music as a MIDI file.

    Examples
      $ manyheads compose runs/piano --out music.mid --prime beginning.mid
      $ manyheads compose runs/chorales -o chorale.mid --plot chorale.png --seed 3

    Statistics of the new notes are printed next to those of the validation data.
    """
    from manyheads.decode.sample import Sample

    sample = Sample(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    lengths = (min_new_tokens, max_new_tokens)
    check_options(lengths, sample, beam)
    loaded = open_model(run, device, threads, say, dtype=dtype)
    music = Music(out=out, prime=prime, plot=plot)
    compose_run(loaded, settings or [], music, lengths, sample, beam)


def compose_run(
    loaded: "LoadedRun",
    settings: list[str],
    music: Music,
    lengths: tuple[int | None, int | None],
    sample: "Sample",
    beam: int | None,
) -> None:
    """Continue the prime, or start from nothing; print statistics next to those of the data."""
    from manyheads.data.music import MusicData

    loaded = _moved(loaded, settings)
    data = loaded.run.data
    if not isinstance(data, MusicData):
        raise loaded.unsupported("composes music", "a language model of music")
    out = music.check(loaded.folder)
    fewest, most = lengths
    # A weak model would often end at once.
    least = min(data.encoding.least, most or loaded.run.model.max_length // 2)
    options = {"min_length": least, "at_limit": "truncate"} | decoding_options(beam, fewest)
    generator, sampling = make_generator(loaded, options, sample, beam)
    _write_music(generator, data, music, out, most, sampling)


def _moved(loaded: "LoadedRun", settings: list[str]) -> "LoadedRun":
    from manyheads.config import override_all

    for setting in settings:
        if setting.partition("=")[0] not in DATA_PATHS:
            raise UserError(f"'{setting}' cannot be set here: only {' and '.join(DATA_PATHS)} can")
    return replace(loaded, run=override_all(loaded.run, settings)) if settings else loaded


def _write_music(
    generator: "BaseGenerator",
    data: "MusicData",
    music: Music,
    out: Path,
    limit: int | None,
    sample: "Sample | None",
) -> None:
    from manyheads.data.events import Statistics
    from manyheads.data.files import read_bytes
    from manyheads.data.midi import write_midi
    from manyheads.decode.compose import compose

    encoding, prime = data.encoding, music.prime
    primed = encoding.words(read_bytes(prime), str(prime)) if prime is not None else []
    words = compose(generator, encoding, primed, limit=limit, sample=sample)
    parts, primed_parts = encoding.parts([*primed, *words]), encoding.parts(primed)
    prime_end = max((note.end for part in primed_parts for note in part), default=0)
    new = [[note for note in part if note.start >= prime_end] for part in parts]
    if not any(new):
        raise UserError(
            f"no note among the {len(words)} generated tokens: try another --seed, a greater "
            "--min-new-tokens, or train longer"
        )
    write_midi(parts, out, encoding.step)
    seconds = max(note.end for part in parts for note in part) * encoding.step / 1000
    notes = sum(map(len, parts))
    say(f"{out}: {notes:,} notes, {seconds:.1f} seconds, {len(words):,} new tokens")
    if music.plot is not None:
        _plot(parts, encoding.step, prime_end, out.name, music.plot)
    _print_statistics(Statistics.of([new], encoding.step), _data_statistics(data))


def _data_statistics(data: "MusicData") -> "Statistics | None":
    from manyheads.data.events import Statistics

    try:
        pieces = data.read("valid").pieces_of_words
    except UserError as error:  # the music is written all the same
        say(f"no statistics of the data: {error}")
        return None
    return Statistics.of([data.encoding.parts(words) for words in pieces], data.encoding.step)


def _print_statistics(music: "Statistics", data: "Statistics | None") -> None:
    columns = [statistics for statistics in (music, data) if statistics is not None]
    rows = [
        ("", ["music", "valid"][: len(columns)]),
        ("notes per second", [f"{column.notes_per_second:.2f}" for column in columns]),
        ("velocity mean", [f"{column.velocity_mean:.1f}" for column in columns]),
        ("velocity spread", [f"{column.velocity_spread:.1f}" for column in columns]),
    ]
    for number, name in enumerate(PITCH_CLASSES):
        values = [f"{column.pitch_classes[number]:.3f}" for column in columns]
        rows.append((f"share of {name}", values))
    for name, values in rows:
        write(f"{name:>16}" + "".join(f"{value:>9}" for value in values) + "\n")


def _plot(parts: "list[Performance]", step: int, prime_end: int, title: str, path: Path) -> None:
    from manyheads.data.events import VOICES
    from manyheads.data.midi import VELOCITIES
    from manyheads.view.figures import piano_roll

    second = 1000 / step
    notes = [
        [(n.start / second, n.end / second, n.pitch, n.velocity / VELOCITIES) for n in part]
        for part in parts
    ]
    names = VOICES if len(parts) == len(VOICES) else [""]
    piano_roll(dict(zip(names, notes, strict=True)), title, path, begun=prime_end / second)
    say(f"plot: {path}")
