"""The command that translates or summarizes lines: translate, also called summarize."""

import inspect
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from manyheads.commands import options
from manyheads.commands.options import option
from manyheads.commands.shared import (
    Decoding,
    Sampling,
    input_lines,
    is_interactive,
    say,
    split_words,
    write,
)
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.decode.translate import Annotate, BaseTranslator


def translate(
    run: options.RunFolder,
    words: options.InputAndDecode = None,
    beam: options.Beam = None,
    n_best: Annotated[
        int, option("Print the N best of each line: number ||| text ||| score", panel="Search")
    ] = 1,
    alignment: Annotated[
        bool, option("Add word links: text ||| source-target ...", "--alignment", panel="Output")
    ] = False,
    scores: Annotated[
        bool,
        option(
            "Add log P of each token and the end: text ||| -0.1 ...", "--scores", panel="Output"
        ),
    ] = False,
    others: options.Ensemble = None,
    sample: Annotated[
        bool, option("Sample in place of searching", "--sample", panel="Sampling")
    ] = False,
    sampling: Sampling = Sampling(temperature=1.0),
    decoding: Decoding = Decoding(),
) -> None:
    """Translate lines of text, one line out for each line in.

    Examples
      $ manyheads translate runs/demo < in.txt > out.txt
      $ manyheads translate runs/demo in.txt --beam 8 decode.length_penalty=0.8
      $ echo "The dog sleeps." | manyheads translate runs/demo --n-best 3
      $ manyheads translate runs/a in.txt --ensemble runs/b
      $ manyheads translate runs/demo in.txt --alignment --scores

    A summarization run gives one summary for each line: a document is one line,
    with ⏎ in place of its line ends. A line that is too long is translated in parts.
    """
    from manyheads.config import override_all
    from manyheads.decode.translate import LINES_AT_ONCE, LineFormat, translate_lines
    from manyheads.tasks.summaries import truncate_lines

    file, settings = split_words(words, "decode.")
    if not sample and sampling != Sampling(temperature=1.0):
        raise UserError("--temperature, --top-k, --top-p, --min-p and --seed need --sample: add it")
    if n_best < 1:
        raise UserError(f"--n-best {n_best} must be at least 1")
    chosen = (("--n-best", n_best > 1), ("--alignment", alignment), ("--scores", scores))
    for name, is_set in (*chosen, ("--beam", beam is not None)):
        if sample and is_set:
            raise UserError(f"{name} works only with beam search: leave out --sample")
    only_torch = "sampling with a seed" if sample else "such n-best lists" if n_best > 1 else ""
    loaded = decoding.open(run, say, others or (), only_torch=only_torch)
    width = [] if beam is None else [f"decode.beam={beam}"]
    loaded = replace(loaded, run=override_all(loaded.run, [*settings, *width]))
    translator = loaded.translator(beam=max(loaded.run.decode.beam, n_best))
    form = LineFormat(n_best, alignment, scores, _annotator(translator, alignment, scores))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    with input_lines(file) as lines:
        if loaded.run.task == "summaries":
            lines = truncate_lines(translator, lines, say)
        for line in translate_lines(
            *(translator, lines, form),
            sample=sampling.checked() if sample else None,
            warn=say,
            at_once=1 if is_interactive(file) else LINES_AT_ONCE * processes,
        ):
            write(line + "\n")


def summarize(*, run: Path, **named: Any) -> None:
    """Summarize documents, one a line.

    Examples
      $ manyheads summarize runs/summaries < documents.txt
      $ manyheads summarize runs/summaries documents.txt --beam 8

    A document is one line, with ⏎ in place of its line ends; a document that is too
    long is truncated. The options are those of translate.
    """
    from manyheads.run import SETTINGS, read_run

    if (run / SETTINGS).is_file():
        settings = read_run(run)
        if settings.task == "translation" and settings.data is not None:
            raise UserError(f"{run} was trained to translate: use manyheads translate")
    translate(run, **named)


summarize.__signature__ = inspect.signature(translate)  # type: ignore[attr-defined]


def _annotator(translator: "BaseTranslator", alignment: bool, scores: bool) -> "Annotate | None":
    """Computes --alignment and --scores with the PyTorch model, whichever engine translates."""
    from manyheads.evaluate.alignment import annotate
    from manyheads.models.capture import has_cross_attention

    if not (alignment or scores):
        return None
    scorer = translator.in_torch()
    if scorer is None:
        raise UserError(
            "--alignment and --scores need one PyTorch model: leave out --ensemble and --dtype int8"
        )
    if alignment and not has_cross_attention(scorer.model):
        raise UserError("--alignment needs cross-attention, which this model lacks: leave it out")
    return partial(annotate, scorer, alignment=alignment)
