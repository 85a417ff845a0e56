"""Commands that encode: embed, fill, classify."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands.shared import (
    Device,
    RunFolder,
    Threads,
    open_model,
    say,
    to_reader,
    write,
)
from manyheads.errors import UserError, check_at_least

if TYPE_CHECKING:
    import numpy as np

    from manyheads.loading import LoadedRun
    from manyheads.tasks.encode import HeadOutput

JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line")]


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
    from manyheads.decode.translate import read_lines
    from manyheads.fileio import replace_file
    from manyheads.train.metrics import Bar

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

        def save(path: Path) -> None:
            with path.open("wb") as file:
                _save(file, vectors)

        replace_file(with_suffix, save)


def _save(file: Any, vectors: "np.ndarray") -> None:
    """As `np.save`, which tells a reader that has gone from no other fault of a pipe."""
    from numpy.lib import format as npy

    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(vectors))
    file.write(vectors.data)


def fill(
    run: RunFolder,
    top: Annotated[
        int, typer.Option("--top", help="How many words to list for each mask; 1 fills them in")
    ] = 1,
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
    from manyheads.decode.translate import BREAKS

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
            _say_others(lines, first, len(data.columns) > 2)
        for at, answers in enumerate(encoder.classify(lines), start=first):
            if not as_json:
                write(_labelled(answers, scores, encoder.tags))
            elif encoder.tags:
                tokens = [{"token": a.piece, "label": a.label, "scores": a.scores} for a in answers]
                write(_object(line=at, tokens=tokens))
            else:
                write(_object(line=at, label=answers[0].label, scores=answers[0].scores))


def classify_pictures(opened: "LoadedRun", files: list[Path], scores: bool, as_json: bool) -> None:
    """One line a file; one that cannot be read is said, and the others are answered.

    Of a folder all pictures are labelled, also those in folders inside it, in order of their names.
    """
    from manyheads.data.images import find_images, read_image
    from manyheads.tasks.images import class_chances

    model = opened.labeller()
    if not files:
        raise UserError(f"{opened.folder} classifies images: classify RUN a.png b.png")
    if not model.config.pixel_mean:
        say("the model does not say what its pixels are normalised by: −1 to 1 is supposed")
    if model.config.unseen:
        say(f"the model does not see the last {model.config.unseen} rows and columns of a picture")
    failed = 0
    for file in [one for path in files for one in find_images(path)]:
        try:
            pixels = read_image(file, model.config.image_size, model.config.channels)
        except UserError as mistake:  # the others are answered all the same
            say(f"manyheads: {mistake}")
            failed = mistake.exit_code
            continue
        chances = class_chances(model, pixels[None])[0]
        label = max(chances, key=chances.__getitem__)
        if as_json:
            write(_object(file=str(file), label=label, scores=chances))
            continue
        every = [f"{name}={value:.4f}" for name, value in chances.items()]
        write(
            "\t".join([label, *(every if scores else [f"{chances[label]:.4f}"]), str(file)]) + "\n"
        )
    if failed:
        raise typer.Exit(failed)


def _say_others(lines: list[str], first: int, pairs: bool) -> None:
    """Warn of lines that are not what the run was trained on: single texts, or pairs of them."""
    others = [at for at, line in enumerate(lines, start=first) if ("\t" in line) != pairs]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        wanted = "pairs, with a tab between" if pairs else "single texts, without a tab"
        say(f"line {others[0]}{more}: the run was trained on {wanted}")


def _labelled(answers: "list[HeadOutput]", scores: bool, tags: bool) -> str:
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
    from manyheads.decode.translate import LINES_AT_ONCE, read_lines

    lines, first = read_lines(sys.stdin.buffer), 1
    # A person at a terminal waits for each line; a file is quicker in batches.
    while chunk := list(islice(lines, 1 if sys.stdin.isatty() else LINES_AT_ONCE)):
        yield first, chunk
        first += len(chunk)
