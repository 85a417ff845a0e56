"""Commands that encode: embed, fill-mask, classify."""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands import options
from manyheads.commands.options import argument, option, out_option
from manyheads.commands.shared import (
    Compute,
    input_lines,
    is_interactive,
    is_main_process,
    is_torchrun,
    say,
    to_reader,
    write,
)
from manyheads.errors import UserError, check_at_least

if TYPE_CHECKING:
    from manyheads.loading import LoadedRun
    from manyheads.tasks.encode import Prediction

POOLS = ("mean", "cls", "tokens")
_FILES = "Text: lines to read in place of standard input. Images: files or folders"


def embed(
    run: options.RunFolder,
    file: options.InputFile = None,
    pool: Annotated[
        str, option("mean (of the tokens), cls (the first) or tokens (all)", metavar="NAME")
    ] = "mean",
    out: Annotated[Path | None, out_option("The .npy file [default: standard output]")] = None,
    compute: Compute = Compute(),
) -> None:
    """Embed lines of text: a float32 .npy file with one row a line.

    Examples
      $ manyheads embed runs/bert in.txt --out vectors.npy
      $ manyheads embed runs/bert --pool cls < in.txt > vectors.npy

    A tab in a line separates a pair of texts. A text that is too long is truncated.
    With --pool tokens: [lines, longest, dim], NaN in place of padding.
    """
    import numpy as np

    from manyheads.config import nearest
    from manyheads.fileio import replace_file
    from manyheads.train.metrics import Bar

    if pool not in POOLS:
        raise UserError(f"--pool {pool}: {nearest(pool, POOLS)}")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"--out {out} must be a file in a folder that exists")
    if out is None and sys.stdout.isatty():
        raise UserError("vectors are binary: write them to a file, --out vectors.npy")
    if pool == "tokens" and is_torchrun():
        raise UserError("--pool tokens runs in one process: start it without torchrun")
    encoder = compute.open(run).encoder()
    with input_lines(file) as texts:
        lines = list(texts)
    if not lines:
        raise UserError("the input has no lines: embed RUN FILE, or embed RUN < FILE")
    with Bar("embed", len(lines)) as bar:
        vectors = encoder.embed(lines, pool, lambda done: bar.update(done, "lines"))  # type: ignore[arg-type]
    if not is_main_process():
        return
    content = io.BytesIO()  # np.save does not report a broken pipe as one
    np.save(content, vectors)
    if out is None:
        with to_reader():
            sys.stdout.buffer.write(content.getbuffer())
        return
    path = out if out.suffix == ".npy" else out.with_name(f"{out.name}.npy")
    replace_file(path, lambda partial: partial.write_bytes(content.getbuffer()))


def fill_mask(
    run: options.RunFolder,
    file: options.InputFile = None,
    top: Annotated[int, option("List the N most probable words for each mask")] = 1,
    as_json: options.JsonLines = False,
    compute: Compute = Compute(),
) -> None:
    """Fill in the masked words of lines of text.

    Examples
      $ echo "The [MASK] sees a tree." | manyheads fill-mask runs/bert
      $ manyheads fill-mask runs/bert in.txt --top 5 --json

    A mask is [MASK] or <mask>, or what the model's tokenizer calls it.

    Output
      --top 1   the line with its masks filled
      --top N   the same, then for each mask N lines: mask, probability, word
      --json    line, text, masks (for each a list of N words with probabilities)
    """
    from manyheads.decode.translate import BREAKS

    check_at_least("--top", top, 1)
    encoder = compute.open(run).encoder()
    for first, lines in _chunks(file):
        answers = encoder.fill(lines, top, first)
        for at, (line, guesses) in enumerate(zip(lines, answers, strict=True), start=first):
            text = encoder.filled(line, guesses)
            if not guesses and line.strip():
                say(f"line {at} has no mask")
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
    run: options.RunFolder,
    files: Annotated[list[Path] | None, argument("FILE", _FILES)] = None,
    scores: Annotated[
        bool, option("Also the probability of every label", "--scores", panel="Output")
    ] = False,
    as_json: options.JsonLines = False,
    compute: Compute = Compute(),
) -> None:
    """Classify lines of text, or image files.

    Examples
      $ manyheads classify runs/sst-2 < in.txt > labels.txt
      $ manyheads classify runs/reviews new.csv
      $ manyheads classify runs/mnist digits/ cat.png --scores

    Text: one label a line. A tab in a line separates a pair of texts; a text that is
    too long is truncated. In a table (.csv, .jsonl, .parquet) the columns have the
    names of the training. A regression model prints a number, a tagger token/label
    pairs (with --scores one token a line, and an empty line after each text).

    Images: label, probability and file. A file that cannot be read is reported and
    skipped; folders are searched.

    With --json: line, label, scores; for a tagger line, tokens; for images file,
    label, scores.
    """
    loaded = compute.open(run)
    if loaded.run.task == "images":
        classify_pictures(loaded, files or [], scores, as_json)
        return
    if files and (len(files) > 1 or files[0].suffix.lower() in (".png", ".jpg", ".jpeg")):
        raise UserError(f"{run} classifies lines of text, not images: classify RUN FILE")
    encoder = loaded.encoder()
    for first, lines in _chunks(files[0] if files else None, loaded.run.data):
        for at, answers in enumerate(encoder.classify(lines), start=first):
            if not as_json:
                write(_labelled(answers, scores, encoder.tags))
            elif encoder.tags:
                tokens = [{"token": a.piece, "label": a.label, "scores": a.scores} for a in answers]
                write(_object(line=at, tokens=tokens))
            else:
                write(_object(line=at, label=answers[0].label, scores=answers[0].scores))


def classify_pictures(loaded: "LoadedRun", files: list[Path], scores: bool, as_json: bool) -> None:
    """One line a file, in order of names; one that cannot be read is reported and skipped."""
    from manyheads.data.images import find_images, read_image
    from manyheads.tasks.images import class_probabilities

    model = loaded.labeller()
    if not files:
        raise UserError(f"{loaded.folder} classifies images: classify RUN a.png b.png")
    if not model.config.pixel_mean:
        say("the model does not name its pixel normalisation: -1 to 1 is assumed")
    if model.config.unseen:
        say(f"the model ignores the last {model.config.unseen} rows and columns of an image")
    exit_code = 0
    for file in [file for path in files for file in find_images(path)]:
        try:
            pixels = read_image(file, model.config.image_size, model.config.channels)
        except UserError as error:
            say(f"manyheads: {error}")
            exit_code = error.exit_code
            continue
        chances = class_probabilities(model, pixels[None])[0]
        label = max(chances, key=chances.__getitem__)
        if as_json:
            write(_object(file=str(file), label=label, scores=chances))
            continue
        every = [f"{name}={value:.4f}" for name, value in chances.items()]
        shown = every if scores else [f"{chances[label]:.4f}"]
        write("\t".join([label, *shown, str(file)]) + "\n")
    if exit_code:
        raise typer.Exit(exit_code)


def _labelled(answers: "list[Prediction]", scores: bool, tags: bool) -> str:
    """The labels of a text, readable."""
    if tags and not scores:
        return " ".join(f"{answer.piece}/{answer.label}" for answer in answers) + "\n"
    rows = []
    for answer in answers:
        numbers = [f"{name}={value:.4f}" for name, value in answer.scores.items()]
        if len(numbers) == 1:  # a regression model
            row = [numbers[0].rpartition("=")[2]]
        else:
            row = [answer.label, *(numbers if scores else [])]
        rows.append("\t".join([answer.piece, *row] if tags else row) + "\n")
    return "".join(rows) + ("\n" if tags else "")


def _object(**values: Any) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


def _chunks(file: Path | None, data: Any = None) -> Iterator[tuple[int, list[str]]]:
    """Lines of the input, as many as are encoded at once, and the number of the first.

    `data` are settings of labelled data that name the columns of a table.
    """
    from manyheads.data.files import is_table
    from manyheads.data.labelled import LabelledData
    from manyheads.decode.translate import LINES_AT_ONCE

    with input_lines(file) as lines:
        first = 1
        is_other_table = file is not None and is_table(file) and ".tsv" not in file.suffixes
        if file is not None and is_other_table and isinstance(data, LabelledData):
            lines = data.read_texts(file)  # a .tsv has lines with pairs of texts, without a header
        while chunk := list(islice(lines, 1 if is_interactive(file) else LINES_AT_ONCE)):
            yield first, chunk
            first += len(chunk)
