"""The command that continues texts and music: generate."""

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands.shared import (
    PICTURES,
    Compile,
    Device,
    EightBits,
    Half,
    RunFolder,
    Threads,
    given,
    open_model,
    say,
    write,
)
from manyheads.errors import UserError, check_at_least

if TYPE_CHECKING:
    from manyheads.data.events import Statistics
    from manyheads.data.midi import Performance
    from manyheads.data.music import MusicData
    from manyheads.decode.generate import BaseGenerator
    from manyheads.decode.sample import Sample
    from manyheads.loading import LoadedRun
    from manyheads.run import Run

PLACES = ("data.folder", "data.file")
CLASSES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")
TEMPERATURE = 0.8


def generate(
    run: RunFolder,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[a.b=c]...", help="Of music: data.folder, if it has moved"),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to continue; else lines of stdin")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="The most tokens to write; else 200, of music what the model reads"),
    ] = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(help="The fewest before an end; else none, of music 64")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time")
    ] = TEMPERATURE,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest of this mass")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest; 0 is off")] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given again")
    ] = None,
    beam: Annotated[int | None, typer.Option(help="Search with this width, draw nothing")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws")] = 0,
    draft: Annotated[
        Path | None, typer.Option(help="A smaller run, to propose what may be taken")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Of music: the MIDI file to write")] = None,
    prime: Annotated[Path | None, typer.Option(help="Of music: a MIDI file to continue")] = None,
    picture: Annotated[Path | None, typer.Option(help="Of music: a piano roll to draw")] = None,
    int8: EightBits = False,
    half: Half = False,
    compile: Compile = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Continue a text, written as it comes.

    manyheads generate RUN --prompt "Once upon a time"

    Without --prompt each line of standard input is continued.
    Tokens are drawn; --temperature 0 and --beam N take the likeliest.

    manyheads generate RUN --out music.mid --prime beginning.mid

    A run of music writes a MIDI file, anew unless there is a --prime.
    """
    from manyheads.data.music import MusicData
    from manyheads.decode.sample import Sample
    from manyheads.decode.speculative import Speculative

    sample = Sample(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    check_at_least("--min-new-tokens", min_new_tokens, 0)
    check_at_least("--max-new-tokens", max_new_tokens, max(1, min_new_tokens or 1))
    if beam is not None and sample != Sample(temperature=TEMPERATURE):
        raise UserError("the options of sampling do not go with a search: leave out --beam")
    if stop and "" in stop:
        raise UserError("--stop is empty: give the text to end before, or leave it out")
    opened = open_model(run, device, threads, say, int8=int8, half=half, compile=compile)
    opened = _moved(opened, settings or [])
    files = MusicFiles(out=out, prime=prime, picture=picture)
    files.check(opened, texts=prompt is not None or bool(stop))
    how = _decoding(opened.run, beam, min_new_tokens, max_new_tokens)
    other = None if draft is None else open_model(draft, device, None, say, half=half)
    generator = _generator(opened, how, other)
    if not generator.supports_seed and sample == Sample(temperature=TEMPERATURE):
        sample = replace(sample, temperature=0.0)
        if beam is None:
            say("CTranslate2 cannot draw by a seed: the likeliest token is taken each time")
    drawn = sample if beam is None else None
    if isinstance(opened.run.data, MusicData):
        _write_music(generator, opened.run.data, files, limit=max_new_tokens, sample=drawn)
    else:
        limit = max_new_tokens or max(200, min_new_tokens or 0)
        _continue_texts(generator, prompt, limit, drawn, stop or [])
    if isinstance(generator, Speculative):
        say(f"draft: {generator.acceptance}")


def _generator(
    opened: "LoadedRun", how: dict[str, Any], draft: "LoadedRun | None"
) -> "BaseGenerator":
    from manyheads.decode.speculative import with_draft

    generator = opened.generator(cache(say), **how)  # what holds for many prompts is said once
    if draft is None:
        return generator
    if "beam" in how:
        raise UserError("--draft proposes what is drawn: leave out --beam")
    if getattr(opened, "compiles", False):
        raise UserError("--draft has steps of many sizes: leave out --compile")
    return with_draft(generator, draft.generator())


def _decoding(run: "Run", beam: int | None, fewest: int | None, most: int | None) -> dict[str, Any]:
    from manyheads.data.music import MusicData

    # An end that is forced at the limit would leave one token fewer.
    how = given(beam=beam, min_length=fewest, at_limit=None if fewest is None else "truncate")
    if not isinstance(run.data, MusicData):
        return how
    # Music: a few words before an end, because a weak model would often end at once.
    least = min(run.data.encoding.least, most or run.model.max_length // 2)
    return {"min_length": least, "at_limit": "truncate"} | how


def _continue_texts(
    generator: "BaseGenerator",
    prompt: str | None,
    limit: int,
    sample: "Sample | None",
    stops: list[str],
) -> None:
    """Write on after the prompt, or after each line of standard input; searching draws nothing."""
    from manyheads.decode.generate import as_text, until
    from manyheads.decode.translate import read_lines

    prompts = [prompt] if prompt is not None else read_lines(sys.stdin.buffer)
    for number, text in enumerate(prompts):
        ids = [*generator.tokenizer.frame()[0], *generator.tokenizer.encode(text)]
        if sample is None:
            found = generator.search([ids], limit, n_best=1)[0]
            tokens = iter(found[0].tokens if found else [])
        else:
            tokens = generator.stream(ids, limit, sample, number)
        write(text)
        for piece in until(as_text(generator.tokenizer, ids, tokens), stops):
            write(piece)
        write("\n")


# ---------------------------------------------------------------------------------------------
# Music


@dataclass(frozen=True, kw_only=True)
class MusicFiles:
    out: Path | None
    prime: Path | None
    picture: Path | None

    def check(self, opened: "LoadedRun", *, texts: bool) -> None:
        """Refuse what does not go with the run, or could not be written, before anything is."""
        from manyheads.data.midi import SUFFIXES
        from manyheads.data.music import MusicData

        if not isinstance(opened.run.data, MusicData):
            if self.out or self.prime or self.picture:
                raise UserError("--out, --prime and --picture are for music: leave them out")
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


def _moved(opened: "LoadedRun", settings: list[str]) -> "LoadedRun":
    from manyheads.config import override_all
    from manyheads.data.music import MusicData

    for setting in settings:
        if setting.partition("=")[0] not in PLACES:
            raise UserError(
                f"'{setting}' cannot be set here: only {' and '.join(PLACES)} of music; a text to "
                "continue is --prompt"
            )
        if not isinstance(opened.run.data, MusicData):
            raise UserError(f"{setting} is for music, not {opened.folder}: leave it out")
    return replace(opened, run=override_all(opened.run, settings)) if settings else opened


def _write_music(
    generator: "BaseGenerator",
    data: "MusicData",
    files: MusicFiles,
    *,
    limit: int | None,
    sample: "Sample | None",
) -> None:
    """Continue the prime, or begin anew; say what was written beside what the data has."""
    from manyheads.data.corpus import read_bytes
    from manyheads.data.events import Statistics
    from manyheads.data.midi import write_midi
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
