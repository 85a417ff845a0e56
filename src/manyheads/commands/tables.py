"""The command that prints the lectures' tables next to our results: tables."""

from typing import Annotated

from manyheads.commands import options
from manyheads.commands.options import argument
from manyheads.commands.shared import print_json, write


def tables(
    name: Annotated[
        str | None, argument("NAME", "bleu, glue, summaries, gpt3 or sizes [default: a list]")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print a table of the lectures with our rows next to it.

    Examples
      $ manyheads tables bleu
      $ manyheads tables glue --json

    Published numbers are as printed. Parameters and training FLOPs are counted now;
    each score of ours has the command that made it.
    """
    from rich.console import Console

    from manyheads.lab.tables import table

    if name is None:
        titles = table.titles()
        if as_json:
            print_json({"tables": titles})
        else:
            write("".join(f"{each:10} {title}\n" for each, title in titles.items()))
        return
    chosen = table.lecture_table(name)
    if as_json:
        print_json(table.as_dict(chosen))
        return
    # Wide enough that no number is cut: a pipe has 80 columns, a terminal may wrap.
    Console(width=max(220, Console().width), highlight=False).print(table.as_text(chosen))
    write("".join(f"- {line}\n" for line in table.notes(chosen)))
