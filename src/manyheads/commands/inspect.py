"""Commands that describe a model or a tokenizer: info, tokenize."""

from pathlib import Path
from typing import Annotated, Any

from manyheads.commands import options
from manyheads.commands.options import argument, option
from manyheads.commands.shared import print_json, say, write
from manyheads.errors import UserError

_COST = "Cost of a training"


def info(
    name: Annotated[str, argument("MODEL", "A preset, a run or a Hugging Face folder")],
    overrides: options.Overrides = None,
    steps: Annotated[int | None, option("Cost of a training of N steps", panel=_COST)] = None,
    batch_tokens: Annotated[
        int | None, option("Tokens in a step; as many of source and target", panel=_COST)
    ] = None,
    length: Annotated[
        int | None, option("Tokens of a text [default: model.max_length]", panel=_COST)
    ] = None,
    device_kind: Annotated[
        str,
        option(
            "p100, v100, a100, h100, h200, rtx4090, tpu-v2 or tpu-v3", metavar="NAME", panel=_COST
        ),
    ] = "h200",
    utilization: Annotated[
        float, option("Share of the device's peak", metavar="X", panel=_COST)
    ] = 0.4,
    as_json: options.Json = False,
) -> None:
    """Count parameters, FLOPs per token and memory of a model.

    Examples
      $ manyheads info runs/demo
      $ manyheads info gpt3-175b model.layers=24
      $ manyheads info transformer-base --steps 100000 --batch-tokens 25000

    Nothing is loaded: the model is built on the meta device. An unknown name lists
    the presets.
    """
    from rich.console import Console

    from manyheads.config import override_all
    from manyheads.exchange.huggingface import CONFIG, import_model
    from manyheads.lab.training_cost import training_cost
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
    config = override_all(config, settings)
    summary = summarize(config, length)
    cost = None
    if steps is not None or batch_tokens is not None:
        cost = training_cost(config, steps, batch_tokens, length, device_kind, utilization)
    if as_json:
        print_json(
            {"name": name, **summary.as_dict(), **({"cost": cost.as_dict()} if cost else {})}
        )
    else:
        Console().print(table(summary))
        if cost is not None:
            write(cost.text())


def tokenize(
    run: Annotated[Path, argument("RUN", "A run folder or a tokenizer.json")],
    text: Annotated[list[str], argument("TEXT", "Text to tokenize")],
    as_json: options.Json = False,
) -> None:
    """Show how a text is split into tokens, merge by merge.

    Examples
      $ manyheads tokenize runs/demo unbelievable
    """
    from manyheads.run import read_tokenizer
    from manyheads.tokenizer.tokenizer import Tokenizer
    from manyheads.tokenizer.trace import Step

    tokenizer = read_tokenizer(run) if run.is_dir() else Tokenizer.load(run)
    joined = " ".join(text)
    ids = tokenizer.encode(joined)
    try:
        steps = tokenizer.trace(joined)
    except UserError as reason:  # an imported tokenizer: its result can be shown
        say(f"{reason}; the tokens are:")
        steps = [Step(subwords=tuple(tokenizer.subwords(ids)))]
    if as_json:
        states = [{"pieces": s.subwords, "merged": s.merged, "rank": s.rank} for s in steps]
        print_json({"text": joined, "ids": ids, "pieces": tokenizer.subwords(ids), "steps": states})
        return
    for step in steps:
        merge = f"{step.merged}" + ("" if step.rank is None else f"  (merge {step.rank + 1})")
        write("  " + "|".join(step.subwords) + (f"    ← {merge}" if step.merged else "") + "\n")
    write(f"{len(ids)} tokens: {' '.join(map(str, ids))}\n")
