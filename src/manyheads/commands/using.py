"""Commands that use a model: translate, generate, embed, fill, classify."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands.shared import (
    Device,
    RunFolder,
    Threads,
    choose,
    given,
    say,
    to_reader,
    write,
)
from manyheads.errors import Mistake

if TYPE_CHECKING:
    import numpy as np


def translate(
    run: RunFolder,
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 is greedy")] = None,
    n_best: Annotated[
        int, typer.Option(help="Print N translations a line: number ||| text ||| score")
    ] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Draw instead of searching")] = False,
    temperature: Annotated[float, typer.Option(help="Of --sample; 0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of --sample; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Of --sample; 1 is off")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of --sample")] = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Translate lines of text: as many lines out as in, in the same order.

    manyheads translate RUN < in.txt > out.txt
    """
    from manyheads.decode.lines import translate_lines
    from manyheads.decode.sample import Sample
    from manyheads.opened import open_any

    draw = Sample(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if draw != Sample() and not sample:
        raise Mistake("--temperature, --top-k, --top-p and --seed are for drawing: add --sample")
    if n_best < 1:
        raise Mistake(f"--n-best {n_best} must be at least 1")
    if sample and n_best > 1:
        raise Mistake("--n-best lists what a search found: leave out --sample")
    width = beam if n_best == 1 else max(beam or 1, n_best)
    translator = open_any(run, choose(device, threads)).translator(**given(beam=width))
    # A person at a terminal waits for each line; a file is quicker in batches.
    at_once = 1 if sys.stdin.isatty() else None
    drawing = draw if sample else None
    for line in translate_lines(
        translator, sys.stdin.buffer, n_best, drawing, warn=say, at_once=at_once
    ):
        write(line + "\n")


TEMPERATURE = 0.8
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time")]
Lines = Annotated[
    int, typer.Option("--top", min=1, help="How many words to list for each mask; 1 fills them in")
]


def generate(
    run: RunFolder,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to continue; else lines of stdin")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write")] = 200,
    temperature: Temperature = TEMPERATURE,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest of this mass")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest; 0 is off")] = 0.0,
    beam: Annotated[int | None, typer.Option(help="Search with this width, draw nothing")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws")] = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Continue a text, written as it comes.

    manyheads generate RUN --prompt "Once upon a time"

    Without --prompt each line of standard input is continued.
    Tokens are drawn; --temperature 0 and --beam N take the likeliest.
    """
    from manyheads.decode.generate import as_text
    from manyheads.decode.lines import read_lines
    from manyheads.decode.sample import Sample
    from manyheads.opened import open_any

    sample = Sample(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    if beam is not None and sample != Sample(temperature=TEMPERATURE):
        raise Mistake(
            "--temperature, --top-k, --top-p, --min-p and --seed are for drawing: leave out --beam"
        )
    generator = open_any(run, choose(device, threads)).generator(say, **given(beam=beam))
    prompts = [prompt] if prompt is not None else read_lines(sys.stdin.buffer)
    for number, text in enumerate(prompts):
        ids = [*generator.tokenizer.frame()[0], *generator.tokenizer.encode(text)]
        if beam is not None:
            found = generator.search([ids], max_tokens, n_best=1)[0]
            tokens = iter(found[0].tokens if found else [])
        else:
            own = replace(sample, seed=seed + number)
            tokens = generator.stream(ids, max_tokens, own)
        write(text)
        for piece in as_text(generator.tokenizer, ids, tokens):
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
    from manyheads.files import replace_file
    from manyheads.opened import open_any
    from manyheads.train.progress import Bar

    if pool not in ("mean", "cls", "tokens"):
        raise Mistake(f"--pool {pool}: {nearest(pool, ('mean', 'cls', 'tokens'))}")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise Mistake(f"--out {out} must be a file in a folder that is there")
    if out is None and sys.stdout.isatty():
        raise Mistake("vectors are no text: write them to a file, > out.npy or --out out.npy")
    encoder = open_any(run, choose(device, threads)).encoder()
    lines = list(read_lines(sys.stdin.buffer))
    if not lines:
        raise Mistake("there are no lines on standard input: embed RUN < in > out.npy")
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
    top: Lines = 1,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Fill in the masked words of lines of text.

    echo "The [MASK] sees a tree." | manyheads fill RUN --top 5

    A mask is [MASK] or <mask>, whatever the model calls it.
    With --top N a line is followed by the N likeliest words of each mask:
    mask, probability, word.
    """
    from manyheads.decode.lines import BREAKS
    from manyheads.opened import open_any

    encoder = open_any(run, choose(device, threads)).encoder()
    for first, lines in _chunks():
        for line, guesses in zip(lines, encoder.fill(lines, top, first), strict=True):
            write(encoder.filled(line, guesses).translate(BREAKS) + "\n")
            for number, words in enumerate(guesses if top > 1 else [], start=1):
                for guess in words:
                    word = guess.word.translate(BREAKS)
                    write(f"  mask {number}\t{guess.probability:.4f}\t{word}\n")


def classify(
    run: RunFolder,
    scores: Annotated[
        bool, typer.Option("--scores", help="Also the probability of every label")
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Label lines of text, one label a line.

    manyheads classify RUN < in.txt > out.txt

    A tab in a line parts a pair of texts. What is too long is cut.
    A model with a single label gives a number, a tagger token/label pairs.
    """
    from manyheads.encode import Answer
    from manyheads.opened import open_any

    def shown(answer: Answer) -> str:
        numbers = [f"{name}={value:.4f}" for name, value in answer.scores.items()]
        if len(answer.scores) == 1:
            return numbers[0].partition("=")[2]
        label = f"{answer.piece}/{answer.label}" if answer.piece else answer.label
        return "\t".join([label, *numbers]) if scores else label

    encoder = open_any(run, choose(device, threads)).encoder()
    for _, lines in _chunks():
        for answers in encoder.classify(lines):
            write(" ".join(map(shown, answers)) + "\n")


def _chunks() -> Iterator[tuple[int, list[str]]]:
    """Lines of standard input, as many as are read at once, and the number of the first."""
    from manyheads.decode.lines import LINES_AT_ONCE, read_lines

    lines, first = read_lines(sys.stdin.buffer), 1
    # A person at a terminal waits for each line; a file is quicker in batches.
    while chunk := list(islice(lines, 1 if sys.stdin.isatty() else LINES_AT_ONCE)):
        yield first, chunk
        first += len(chunk)
