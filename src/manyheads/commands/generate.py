"""Commands that continue texts and music: generate, compose."""

from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.commands import options
from manyheads.commands.options import argument, option, out_option
from manyheads.commands.shared import (
    Decoding,
    Sampling,
    check_image,
    input_lines,
    say,
    write,
)
from manyheads.errors import UserError, check_at_least

if TYPE_CHECKING:
    from manyheads.data.events import Performance, Statistics
    from manyheads.data.music import MusicData
    from manyheads.decode.generate import BaseGenerator
    from manyheads.decode.sample import Sample
    from manyheads.loading import LoadedRun

NEW_TOKENS = 200
DATA_PATHS = ("data.folder", "data.file")
PITCH_CLASSES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


@dataclass(frozen=True)
class Continuation(Sampling):
    """How texts and music are continued."""

    max_new_tokens: Annotated[
        int | None,
        option(f"Most tokens to add [default: {NEW_TOKENS}; music: the context]", panel="Length"),
    ] = None
    min_new_tokens: Annotated[
        int | None, option("Fewest tokens before an end [default: 0; music: 64]", panel="Length")
    ] = None
    beam: Annotated[int | None, option("Beam search of width N, no sampling", panel="Search")] = (
        None
    )

    def checked(self) -> "Sample":
        check_at_least("--min-new-tokens", self.min_new_tokens, 0)
        check_at_least("--max-new-tokens", self.max_new_tokens, max(1, self.min_new_tokens or 1))
        sampling = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        if self.beam is not None and Sampling(**sampling) != Sampling():
            raise UserError("options of sampling do not work with beam search: leave out --beam")
        return Sampling(**sampling).checked()

    def generator(
        self, loaded: "LoadedRun", **decode: Any
    ) -> "tuple[BaseGenerator, Sample | None]":
        """A generator with some settings of `decode`, and how it samples; None if it searches."""
        sample = self.checked()
        if self.beam is not None:
            decode["beam"] = self.beam
        if self.min_new_tokens is not None:
            # An end that is forced at the limit would leave one token fewer.
            decode |= {"min_length": self.min_new_tokens, "at_limit": "truncate"}
        generator = loaded.generator(cache(say), **decode)  # each warning once
        return generator, sample if self.beam is None else None


def generate(
    run: options.RunFolder,
    file: options.InputFile = None,
    prompt: Annotated[
        str | None, option("Continue this; no input is read", "--prompt", "-p", metavar="TEXT")
    ] = None,
    stop: Annotated[
        list[str] | None,
        option("End before this text (repeatable)", metavar="TEXT", panel="Length"),
    ] = None,
    continuation: Continuation = Continuation(),
    decoding: Decoding = Decoding(),
) -> None:
    """Continue texts with a language model.

    Examples
      $ manyheads generate runs/lm --prompt "Once upon a time"
      $ manyheads generate runs/lm prompts.txt --temperature 0
      $ manyheads generate runs/lm -p "ROMEO:" --top-p 0.9 --max-new-tokens 400

    Without --prompt and FILE, each line of standard input is continued. Tokens are
    printed during sampling; --temperature 0 takes the likeliest ones, as generate()
    does in Python by default. For music see manyheads compose.
    """
    from manyheads.data.music import MusicData

    continuation.checked()
    if stop and "" in stop:
        raise UserError("--stop is empty: name the text to end before, or leave it out")
    reason = "beam search for language models here" if continuation.beam else ""
    reason = reason or ("sampling with a seed" if continuation.temperature > 0 else "")
    loaded = decoding.open(run, say, only_torch=reason)
    if isinstance(loaded.run.data, MusicData):
        raise UserError(f"{run} is a model of music: use manyheads compose")
    generator, sample = continuation.generator(loaded)
    limit = continuation.max_new_tokens or max(NEW_TOKENS, continuation.min_new_tokens or 0)
    _continue_texts(generator, prompt, file, limit, sample, stop or [])


def _continue_texts(
    generator: "BaseGenerator",
    prompt: str | None,
    file: Path | None,
    limit: int,
    sample: "Sample | None",
    stops: list[str],
) -> None:
    """Continue the prompt, or each line of the input."""
    from manyheads.decode.generate import as_text

    def continue_text(number: int, text: str) -> None:
        ids = [*generator.tokenizer.frame()[0], *generator.tokenizer.encode(text)]
        if sample is None:
            best = generator.search([ids], limit, n_best=1)[0]
            tokens = iter(best[0].tokens if best else [])
        else:
            tokens = generator.stream(ids, limit, sample, number)
        write(text)
        for part in as_text(generator.tokenizer, ids, tokens, stops):
            write(part)
        write("\n")

    if prompt is not None:
        continue_text(0, prompt)
        return
    with input_lines(file) as lines:
        for number, text in enumerate(lines):
            continue_text(number, text)


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
    continuation: Continuation = Continuation(),
    decoding: Decoding = Decoding(engine="torch"),
) -> None:
    """Compose music as a MIDI file.

    Examples
      $ manyheads compose runs/piano --out music.mid --prime beginning.mid
      $ manyheads compose runs/chorales -o chorale.mid --plot chorale.png --seed 3

    Statistics of the new notes are printed next to those of the validation data.
    """
    from manyheads.config import override_all
    from manyheads.data.events import Statistics, write_midi
    from manyheads.data.files import read_bytes
    from manyheads.data.music import MusicData
    from manyheads.decode.compose import compose

    continuation.checked()
    loaded = decoding.open(run, say, only_torch="music")
    for setting in settings or []:
        if setting.partition("=")[0] not in DATA_PATHS:
            raise UserError(f"'{setting}' cannot be set here: only {' and '.join(DATA_PATHS)} can")
    data = override_all(loaded.run, settings or []).data
    if not isinstance(data, MusicData):
        raise loaded.unsupported("composes music", "a language model of music")
    out = _check_files(run, out, prime, plot)
    encoding, most = data.encoding, continuation.max_new_tokens
    # A weak model would often end at once.
    least = min(encoding.least, most or loaded.run.model.max_length // 2)
    generator, sample = continuation.generator(loaded, min_length=least, at_limit="truncate")
    primed = encoding.words(read_bytes(prime), str(prime)) if prime is not None else []
    words = compose(generator, encoding, primed, limit=most, sample=sample)
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
    if plot is not None:
        _plot(parts, encoding.step, prime_end, out.name, plot)
    _print_statistics(Statistics.of([new], encoding.step), _data_statistics(data))


def _check_files(folder: Path, out: Path | None, prime: Path | None, plot: Path | None) -> Path:
    """Refuse files that cannot be written before anything is composed."""
    from manyheads.data.events import SUFFIXES

    if out is None:
        raise UserError(f"{folder} composes music: name the file, --out music.mid")
    if prime is not None and out.resolve() == prime.resolve():
        raise UserError(f"--out {out} is the prime itself: choose another name")
    if out.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out {out} must end in one of {', '.join(SUFFIXES)}")
    check_image("--plot", plot)
    for name, path in (("--out", out), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UserError(f"{name} {path} must be a file in a folder that exists")
    return out


def _data_statistics(data: "MusicData") -> "Statistics | None":
    from manyheads.data.events import Statistics

    try:
        pieces = data.read("valid").pieces_of_words
    except UserError as error:  # the music is written all the same
        say(f"no statistics of the data: {error}")
        return None
    return Statistics.of([data.encoding.parts(words) for words in pieces], data.encoding.step)


def _print_statistics(music: "Statistics", data: "Statistics | None") -> None:
    by_name = partial(zip, PITCH_CLASSES, strict=True)
    columns = [
        {
            "": title,
            "notes per second": f"{column.notes_per_second:.2f}",
            "velocity mean": f"{column.velocity_mean:.1f}",
            "velocity spread": f"{column.velocity_spread:.1f}",
        }
        | {f"share of {n}": f"{x:.3f}" for n, x in by_name(column.pitch_classes)}
        for title, column in (("music", music), ("valid", data))
        if column is not None
    ]
    for name in columns[0]:
        write(f"{name:>16}" + "".join(f"{column[name]:>9}" for column in columns) + "\n")


def _plot(parts: "list[Performance]", step: int, prime_end: int, title: str, path: Path) -> None:
    from manyheads.data.events import VELOCITIES, VOICES
    from manyheads.view.figures import piano_roll

    second = 1000 / step
    notes = [
        [(n.start / second, n.end / second, n.pitch, n.velocity / VELOCITIES) for n in part]
        for part in parts
    ]
    names = VOICES if len(parts) == len(VOICES) else [""]
    piano_roll(dict(zip(names, notes, strict=True)), title, path, begun=prime_end / second)
    say(f"plot: {path}")
