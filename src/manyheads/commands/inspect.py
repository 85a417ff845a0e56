"""Commands that look inside: info, tokens."""

from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.commands.shared import Json, Overrides, print_json, say
from manyheads.errors import UserError


def info(
    name: Annotated[
        str, typer.Argument(metavar="PRESET|RUN", help="A preset, a run or a HuggingFace folder")
    ],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Parameters by part, FLOPs per token, memory: on paper, so that 175B costs nothing.

    manyheads info gpt3-175b model.layers=24
    """
    from rich.console import Console

    from manyheads.config import override_all
    from manyheads.exchange.huggingface import CONFIG, import_model
    from manyheads.presets import preset, presets
    from manyheads.run import SETTINGS, read_run
    from manyheads.summary import summarize, table

    config: Any
    folder = Path(name)
    if (folder / CONFIG).is_file() and not (folder / SETTINGS).is_file():
        config = import_model(folder).model.config
    else:
        is_run = (folder / SETTINGS).is_file()
        known = not is_run and (name in presets() or not folder.is_dir())
        config = preset(name) if known else read_run(folder).model
    settings = [setting.removeprefix("model.") for setting in overrides or []]
    summary = summarize(override_all(config, settings))
    if as_json:
        print_json({"name": name, **summary.as_dict()})
    else:
        Console().print(table(summary))


def tokens(
    run: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run folder or tokenizer.json")],
    text: Annotated[list[str], typer.Argument(help="What to split")],
    as_json: Json = False,
) -> None:
    """Show how a text is split into tokens, merge by merge.

    manyheads tokens RUN unbelievable
    """
    from manyheads.run import read_tokenizer
    from manyheads.tokenizer.tokenizer import Tokenizer
    from manyheads.tokenizer.trace import Step

    tokenizer = read_tokenizer(run) if run.is_dir() else Tokenizer.load(run)
    whole = " ".join(text)
    ids = tokenizer.encode(whole)
    try:
        steps = tokenizer.trace(whole)
    except UserError as reason:  # a tokenizer from elsewhere: what it gives can be shown
        say(f"{reason}; the tokens are:")
        steps = [Step(subwords=tuple(tokenizer.subwords(ids)))]
    if as_json:
        states = [{"pieces": s.subwords, "merged": s.merged, "rank": s.rank} for s in steps]
        print_json({"text": whole, "ids": ids, "pieces": tokenizer.subwords(ids), "steps": states})
        return
    for step in steps:
        why = f"{step.merged}" + ("" if step.rank is None else f"  (merge {step.rank + 1})")
        print("  " + "|".join(step.subwords) + (f"    ← {why}" if step.merged else ""))
    print(f"{len(ids)} tokens: {' '.join(map(str, ids))}")
