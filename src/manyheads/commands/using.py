"""Commands that use a model: translate, generate, embed, fill, classify."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands.shared import (
    Compile,
    Device,
    EightBits,
    Half,
    RunFolder,
    Threads,
    With,
    given,
    open_model,
    say,
    to_reader,
    write,
)
from manyheads.errors import UserError, check_at_least

if TYPE_CHECKING:
    import numpy as np

    from manyheads.decode.generate import BaseGenerator
    from manyheads.decode.sample import Sample
    from manyheads.loading import OpenRun
    from manyheads.run import Run
    from manyheads.tasks.encode import Answer


HowToWrite = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="decode.*, for this time alone")
]


def translate(
    run: RunFolder,
    settings: HowToWrite = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 is greedy")] = None,
    n_best: Annotated[
        int, typer.Option(help="Print N translations a line: number ||| text ||| score")
    ] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Draw instead of searching")] = False,
    temperature: Annotated[float, typer.Option(help="Of --sample; 0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of --sample; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Of --sample; 1 is off")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of --sample")] = 0,
    others: With = None,
    int8: EightBits = False,
    half: Half = False,
    compile: Compile = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Translate lines of text: as many lines out as in, in the same order.

    manyheads translate RUN < in.txt > out.txt

    A run of summaries writes one for each line: a document is one line,
    with ⏎ where a line ends. What is too long is cut.
    """
    from manyheads.config import override_all
    from manyheads.decode.lines import translate_lines
    from manyheads.decode.sample import Sample
    from manyheads.tasks.summaries import beginnings

    for setting in settings or []:
        if not setting.startswith("decode."):
            known = "cannot change once a run is trained: only decode"
            piped = "is no setting: lines come from a pipe, manyheads translate RUN < FILE"
            raise UserError(f"'{setting}' {known if '=' in setting else piped}")
    draw = Sample(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if draw != Sample() and not sample:
        raise UserError("--temperature, --top-k, --top-p and --seed are for drawing: add --sample")
    if n_best < 1:
        raise UserError(f"--n-best {n_best} must be at least 1")
    if sample and n_best > 1:
        raise UserError("--n-best lists what a search found: leave out --sample")
    if sample and beam is not None:
        raise UserError("--beam is for searching: leave out --sample")
    form = {"int8": int8, "half": half, "compile": compile}
    opened = open_model(run, device, threads, say, **form, others=others or ())
    own = [] if beam is None else [f"decode.beam={beam}"]
    opened = replace(opened, run=override_all(opened.run, [*(settings or []), *own]))
    width = opened.run.decode.beam
    translator = opened.translator(beam=width if n_best == 1 else max(width, n_best))
    lines: Iterable[bytes] = sys.stdin.buffer
    if opened.run.task == "summaries":
        lines = beginnings(translator, lines, say)
    # A person at a terminal waits for each line; a file is quicker in batches.
    at_once = 1 if sys.stdin.isatty() else None
    drawing = draw if sample else None
    for line in translate_lines(translator, lines, n_best, drawing, warn=say, at_once=at_once):
        write(line + "\n")


TEMPERATURE = 0.8
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time")]
Top = Annotated[
    int, typer.Option("--top", help="How many words to list for each mask; 1 fills them in")
]
Moved = Annotated[
    list[str] | None,
    typer.Argument(metavar="[a.b=c]...", help="Of music: data.folder, if it has moved"),
]
Draft = Annotated[Path | None, typer.Option(help="A smaller run, to propose what may be taken")]

JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line")]


def generate(
    run: RunFolder,
    settings: Moved = None,
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
    temperature: Temperature = TEMPERATURE,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest of this mass")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest; 0 is off")] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given again")
    ] = None,
    beam: Annotated[int | None, typer.Option(help="Search with this width, draw nothing")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws")] = 0,
    draft: Draft = None,
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
    from manyheads.commands.music import MusicFiles, moved, write_music
    from manyheads.data.music import MusicData
    from manyheads.decode.sample import Sample

    sample = Sample(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    check_at_least("--min-new-tokens", min_new_tokens, 0)
    check_at_least("--max-new-tokens", max_new_tokens, max(1, min_new_tokens or 1))
    _check(sample, beam, stop)
    opened = open_model(run, device, threads, say, int8=int8, half=half, compile=compile)
    opened = moved(opened, settings or [])
    files = MusicFiles(out=out, prime=prime, picture=picture)
    files.check(opened, texts=prompt is not None or bool(stop))
    how = _decoding(opened.run, beam, min_new_tokens, max_new_tokens)
    other = None if draft is None else open_model(draft, device, None, say, half=half)
    generator = _generator(opened, how, other)
    if not generator.draws and sample == Sample(temperature=TEMPERATURE):
        sample = replace(sample, temperature=0.0)
        if beam is None:
            say("CTranslate2 cannot draw by a seed: the likeliest token is taken each time")
    drawn = sample if beam is None else None
    if isinstance(opened.run.data, MusicData):
        write_music(generator, opened.run.data, files, limit=max_new_tokens, sample=drawn)
    else:
        limit = max_new_tokens or max(200, min_new_tokens or 0)
        _continue_texts(generator, prompt, limit, drawn, stop or [])
    _say_taken(generator)


def _check(sample: "Sample", beam: int | None, stop: list[str] | None) -> None:
    from manyheads.decode.sample import Sample

    if beam is not None and sample != Sample(temperature=TEMPERATURE):
        raise UserError(
            "--temperature, --top-k, --top-p, --min-p and --seed are for drawing: leave out --beam"
        )
    if stop and "" in stop:
        raise UserError("--stop is empty: give the text to end before, or leave it out")


def _generator(opened: "OpenRun", how: dict[str, Any], draft: "OpenRun | None") -> "BaseGenerator":
    """What continues texts, with a draft if there is one."""
    from manyheads.decode.speculative import with_draft

    generator = opened.generator(cache(say), **how)  # what holds for many prompts is said once
    if draft is None:
        return generator
    if "beam" in how:
        raise UserError("--draft proposes what is drawn: leave out --beam")
    if getattr(opened, "compiles", False):
        raise UserError("--draft has steps of many sizes: leave out --compile")
    return with_draft(generator, draft.generator())


def _say_taken(generator: "BaseGenerator") -> None:
    from manyheads.decode.speculative import Speculative

    if isinstance(generator, Speculative):
        say(f"draft: {generator.acceptance}")


def _decoding(run: "Run", beam: int | None, fewest: int | None, most: int | None) -> dict[str, Any]:
    """The settings of `decode` that the options of `generate` come to."""
    from manyheads.commands.music import decoding
    from manyheads.data.music import MusicData

    # An end that is forced at the limit would leave one token fewer.
    how = given(beam=beam, shortest=fewest, at_limit=None if fewest is None else "cut")
    return decoding(run, most) | how if isinstance(run.data, MusicData) else how


def _continue_texts(
    generator: "BaseGenerator",
    prompt: str | None,
    limit: int,
    sample: "Sample | None",
    stops: list[str],
) -> None:
    """Write on after the prompt, or after each line of standard input; searching draws nothing."""
    from manyheads.decode.generate import as_text, until
    from manyheads.decode.lines import read_lines

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


def embed(
    run: RunFolder,
    pool: Annotated[
        str, typer.Option(help="mean (of the tokens), cls (the first), tokens (all of them)")
    ] = "mean",
    out: Annotated[Path | None, typer.Option(help="The .npy file; stdout unless given")] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Turn lines of text into vectors: a float32 .npy with one row a line.

    manyheads embed RUN < in.txt > out.npy

    A tab in a line parts a pair of texts. What is too long is cut.
    With --pool tokens: lines × longest × width, NaN behind an end.
    """
    from manyheads.config import nearest
    from manyheads.decode.lines import read_lines
    from manyheads.fileio import replace_file
    from manyheads.train.progress import Bar

    if pool not in ("mean", "cls", "tokens"):
        raise UserError(f"--pool {pool}: {nearest(pool, ('mean', 'cls', 'tokens'))}")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"--out {out} must be a file in a folder that is there")
    if out is None and sys.stdout.isatty():
        raise UserError("vectors are no text: write them to a file, > out.npy or --out out.npy")
    encoder = open_model(run, device, threads).encoder()
    lines = list(read_lines(sys.stdin.buffer))
    if not lines:
        raise UserError("there are no lines on standard input: embed RUN < in > out.npy")
    with Bar("embed", len(lines)) as bar:
        vectors = encoder.embed(lines, pool, lambda done: bar.update(done, "lines"))  # type: ignore[arg-type]
    if out is None:
        with to_reader():
            _save(sys.stdout.buffer, vectors)
    else:
        with_suffix = out if out.suffix == ".npy" else out.with_name(out.name + ".npy")
        replace_file(with_suffix, lambda beside: _save_to(beside, vectors))


def _save_to(path: Path, vectors: "np.ndarray") -> None:
    with path.open("wb") as file:
        _save(file, vectors)


def _save(file: Any, vectors: "np.ndarray") -> None:
    """As `np.save`, which tells a reader that has gone from no other fault of a pipe."""
    from numpy.lib import format as npy

    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(vectors))
    file.write(vectors.data)


def fill(
    run: RunFolder,
    top: Top = 1,
    as_json: JsonLines = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Fill in the masked words of lines of text.

    echo "The [MASK] sees a tree." | manyheads fill RUN --top 5

    A mask is [MASK] or <mask>, or as the model's tokenizer spells it.
    With --top N a line is followed by the N likeliest words of each mask:
    mask, probability, word.
    With --json a line is an object: line, text, masks (lists of N words
    with their probabilities).
    """
    from manyheads.decode.lines import BREAKS

    check_at_least("--top", top, 1)
    encoder = open_model(run, device, threads).encoder()
    for first, lines in _chunks():
        answers = encoder.fill(lines, top, first)
        for at, (line, guesses) in enumerate(zip(lines, answers, strict=True), start=first):
            text = encoder.filled(line, guesses)
            if not guesses and line.strip():
                say(f"line {at} has no mask to fill")
            if as_json:
                masks = [[asdict(guess) for guess in words] for words in guesses]
                write(_object(line=at, text=text, masks=masks))
                continue
            write(text.translate(BREAKS) + "\n")
            for number, words in enumerate(guesses if top > 1 else [], start=1):
                for guess in words:
                    word = guess.word.translate(BREAKS)
                    write(f"  mask {number}\t{guess.probability:.4f}\t{word}\n")


def classify(
    run: RunFolder,
    pictures: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE]...", help="Files or folders")
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Also the probability of every label")
    ] = False,
    as_json: JsonLines = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Label lines of text, one label a line.

    manyheads classify RUN < in.txt > out.txt

    A tab in a line parts a pair of texts. What is too long is cut.
    A model with a single label gives a number, a tagger token/label pairs;
    with --scores one token a line (token, label, scores; an empty line
    behind each text).
    With --json a line is an object: line, label, scores; of a tagger
    line, tokens (token, label, scores).

    manyheads classify RUN cat.png dog.jpg

    A model of images labels files, one line each: label, probability
    (or all with --scores) and file. One that cannot be read is said and
    left out. Of a folder all pictures are labelled.
    """
    from manyheads.commands.images import classify_pictures
    from manyheads.data.labelled import LabelledData

    opened = open_model(run, device, threads)
    if opened.run.task == "images":
        classify_pictures(opened, pictures or [], scores, as_json)
        return
    if pictures:
        raise UserError(f"{run} labels lines of text, not files: classify RUN < in.txt")
    encoder = opened.encoder()
    data = opened.run.data
    for first, lines in _chunks():
        if isinstance(data, LabelledData):
            _say_others(lines, first, bool(data.columns.pair))
        for at, answers in enumerate(encoder.classify(lines), start=first):
            if not as_json:
                write(_labelled(answers, scores, encoder.tags))
            elif encoder.tags:
                tokens = [{"token": a.piece, "label": a.label, "scores": a.scores} for a in answers]
                write(_object(line=at, tokens=tokens))
            else:
                write(_object(line=at, label=answers[0].label, scores=answers[0].scores))


def _say_others(lines: list[str], first: int, pairs: bool) -> None:
    """Warn of lines that are not what the run was trained on: single texts, or pairs of them."""
    others = [at for at, line in enumerate(lines, start=first) if ("\t" in line) != pairs]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        wanted = "pairs, with a tab between" if pairs else "single texts, without a tab"
        say(f"line {others[0]}{more}: the run was trained on {wanted}")


def _labelled(answers: "list[Answer]", scores: bool, tags: bool) -> str:
    """The labels of a text as a person reads them."""
    numbers = [[f"{name}={value:.4f}" for name, value in a.scores.items()] for a in answers]
    if tags and scores:
        rows = [[a.piece, a.label, *own] for a, own in zip(answers, numbers, strict=True)]
        return "".join("\t".join(row) + "\n" for row in rows) + "\n"
    shown = []
    for answer, own in zip(answers, numbers, strict=True):
        label = f"{answer.piece}/{answer.label}" if tags else answer.label
        if len(own) == 1:
            label = own[0].rpartition("=")[2]
        shown.append("\t".join([label, *own]) if scores and len(own) > 1 else label)
    return " ".join(shown) + "\n"


def _object(**values: Any) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


def _chunks() -> Iterator[tuple[int, list[str]]]:
    """Lines of standard input, as many as are read at once, and the number of the first."""
    from manyheads.decode.lines import LINES_AT_ONCE, read_lines

    lines, first = read_lines(sys.stdin.buffer), 1
    # A person at a terminal waits for each line; a file is quicker in batches.
    while chunk := list(islice(lines, 1 if sys.stdin.isatty() else LINES_AT_ONCE)):
        yield first, chunk
        first += len(chunk)
