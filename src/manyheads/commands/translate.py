"""The command that translates lines: translate."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import typer

from manyheads.commands.shared import (
    Compile,
    Device,
    EightBits,
    Half,
    RunFolder,
    Threads,
    With,
    open_model,
    say,
    write,
)
from manyheads.errors import UserError

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
    from manyheads.tasks.summaries import truncate_lines

    for setting in settings or []:
        if not setting.startswith("decode."):
            known = "cannot change once a run is trained: only decode"
            piped = "is no setting: lines come from a pipe, manyheads translate RUN < FILE"
            raise UserError(f"'{setting}' {known if '=' in setting else piped}")
    if not sample and (temperature, top_k, top_p, seed) != (1.0, 0, 1.0, 0):
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
        lines = truncate_lines(translator, lines, say)
    # A person at a terminal waits for each line; a file is quicker in batches.
    at_once = 1 if sys.stdin.isatty() else None
    drawing = None
    if sample:
        drawing = Sample(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    for line in translate_lines(translator, lines, n_best, drawing, warn=say, at_once=at_once):
        write(line + "\n")
