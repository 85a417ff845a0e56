"""A run's translations by length and best first, in one process: what each asks and how fast it is.

    python benchmarks/orders.py RUN --split test --rounds 5
    python benchmarks/orders.py RUN data.folder=corpus --sentences 200 --int8

By length is as the run says; best first comes with both of its rules of stopping. The sides take
turns, a figure is the median over the rounds, a ratio that of paired rounds. `asked` counts the
hypotheses that the model was asked for, `equal` is the share of texts equal to those by length.
Tokens are those that are written by length, whoever writes. One JSON object a line.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyheads.config import override_all
from manyheads.decode.cuda_graphs import steady
from manyheads.decode.lines import translate_whole
from manyheads.decode.translate import Seq2SeqForest, Seq2SeqStepper, Translator
from manyheads.errors import UserError
from manyheads.evaluate.scores import translation_scores
from manyheads.loading import TorchRun, load_torch_run
from speed import Row, Rows, compared, in_turns, options

OURS, FIRST, NOW = "ours", "ours, best first", "ours, best first, none-better-now"
SIDES: dict[str, dict[str, Any]] = {
    OURS: {"order": "length"},
    FIRST: {"order": "best-first", "stopping": "none-better-ever"},
    NOW: {"order": "best-first", "stopping": "none-better-now"},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="of data and of decode")
    options(parser)
    parser.add_argument("--split", default="test")
    parser.add_argument("--sentences", type=int, help="the first so many; else all")
    parser.add_argument("--int8", action="store_true", help="in eight bits")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_intermixed_args(arguments)
    torch.set_num_threads(given.threads)
    where = {
        "device": f"CPU, {given.threads} threads",
        "dtype": "int8" if given.int8 else "float32",
    }
    try:
        opened = changed(load_torch_run(given.run), given.settings)
        opened = opened.in_int8() if given.int8 else opened
        data: Any = opened.run.data
        corpus = data.read(given.split)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    name = ", ".join([str(given.run), given.split, *given.settings, *["int8"] * given.int8])
    pair = (corpus.sources[: given.sentences], corpus.targets[: given.sentences])
    Rows("orders", given, where).add(name, lambda: orders(opened, *pair, given.rounds))
    return 0


def changed(opened: TorchRun, settings: list[str]) -> TorchRun:
    """The run with other data and another way of writing; refuses what has one order alone."""
    if not isinstance(opened.translator(), Translator) or not steady(opened.model):
        raise UserError(f"{opened.folder} is searched by length alone: give a Transformer's run")
    for setting in settings:
        if not setting.startswith(("data.", "decode.")):
            raise UserError(
                f"'{setting}' cannot change once a run is trained: only data and decode"
            )
    return replace(opened, run=override_all(opened.run, settings))


def orders(opened: TorchRun, sources: list[str], targets: list[str], rounds: int) -> Row:
    """Each side's tokens a second, what it asks of the model, and how good its texts are."""
    write: dict[str, Callable[[], list[str]]] = {
        side: partial(translate_whole, opened.translator(**how), sources)
        for side, how in SIDES.items()
    }
    texts, asked, errors = {}, {}, {}
    for side, one in write.items():  # warms all up, too
        with counted() as rows:
            texts[side] = one()
        asked[side] = sum(rows)
    tokens = sum(len(ids) + 1 for ids in opened.tokenizer.encode_batch(texts[OURS]))
    sides = {side: lambda _, one=one: tokens / seconds(one) for side, one in write.items()}
    row = compared(in_turns(sides, rounds, errors), SIDES)
    for side, figures in row["sides"].items():
        scores = translation_scores(texts[side], targets)
        pairs = zip(texts[OURS], texts[side], strict=True)
        figures["asked"] = asked[side]
        figures["equal"] = sum(a == b for a, b in pairs) / len(sources)
        figures |= {key: scores[key] for key in ("bleu", "chrf")}
    told = {"sentences": len(sources), "tokens": tokens, "signature": scores["signature"]}
    return row | told | {"stopping": opened.run.decode.stopping, "errors": errors}


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many hypotheses each step asks for, in either order."""
    rows: list[int] = []
    whole: list[Any] = [Seq2SeqStepper, Seq2SeqForest]
    before = [kind.step for kind in whole]

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def count(self: Any, tokens: Any, *more: Any) -> Any:
            rows.append(len(tokens))
            return step(self, tokens, *more)

        return count

    for kind in whole:
        kind.step = counting(kind.step)
    try:
        yield rows
    finally:
        for kind, step in zip(whole, before, strict=True):
            kind.step = step


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
