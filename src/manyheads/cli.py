"""The command line: its commands by group, and how it ends."""

import functools
import inspect
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.commands import options
from manyheads.commands.catalogue import recipes, settings, version_text
from manyheads.commands.encode import classify, embed, fill_mask
from manyheads.commands.evaluate import evaluate
from manyheads.commands.exchange import export, import_folder
from manyheads.commands.figure import figure
from manyheads.commands.generate import compose, generate
from manyheads.commands.help import Command, Group
from manyheads.commands.inspect import capture, info, tokenize
from manyheads.commands.lab import claims, cost, plan, quiz, scale, tables
from manyheads.commands.serve import serve, view
from manyheads.commands.shared import say, write
from manyheads.commands.training import compare, demo, distill, prepare, train
from manyheads.commands.translate import summarize, translate
from manyheads.errors import DataError, UserError

COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "demo": demo,
        "prepare": prepare,
        "train": train,
        "distill": distill,
        "compare": compare,
    },
    "Use": {
        "translate": translate,
        "summarize": summarize,
        "generate": generate,
        "compose": compose,
        "classify": classify,
        "embed": embed,
        "fill-mask": fill_mask,
    },
    "Inspect": {
        "evaluate": evaluate,
        "info": info,
        "capture": capture,
        "tokenize": tokenize,
        "view": view,
        "figure": figure,
    },
    "Exchange and serve": {"import": import_folder, "export": export, "serve": serve},
    "Discover": {"recipes": recipes, "settings": settings},
    "Lab": {
        "claims": claims,
        "scaling-laws": scale,
        "plan": plan,
        "cost": cost,
        "tables": tables,
        "quiz": quiz,
    },
}
# Those of release 0.1, which still work.
OLD_NAMES: dict[str, Callable[..., None]] = {"fill": fill_mask, "tokens": tokenize, "scale": scale}
SUMMARIZE = """Summarize documents, one a line.

Examples
  $ manyheads summarize runs/summaries < documents.txt
  $ manyheads summarize runs/summaries documents.txt --beam 8

A document is one line, with ⏎ in place of its line ends; a document that is too
long is truncated. The options are those of translate.
"""


def with_plugins(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the option --plugin, which is applied before the command runs."""

    @functools.wraps(command)
    def run(plugin: list[Path] | None, **named: Any) -> None:
        for file in plugin or []:
            from manyheads.plugins import use

            use(file)
        command(**named)

    signature = inspect.signature(command)
    named_only = inspect.Parameter.KEYWORD_ONLY
    plugin = inspect.Parameter("plugin", named_only, default=None, annotation=options.Plugins)
    parameters = [*signature.parameters.values(), plugin]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _group, _commands in COMMANDS.items():
    for _name, _function in _commands.items():
        _help = SUMMARIZE if _name == "summarize" else None
        _command = _function if _group == "Lab" else with_plugins(_function)
        app.command(_name, cls=Command, rich_help_panel=_group, help=_help)(_command)
for _name, _function in OLD_NAMES.items():
    app.command(_name, cls=Command, hidden=True)(_function)


def _print_version(requested: bool) -> bool:
    if requested:
        write(version_text())
        raise typer.Exit
    return requested


@app.callback()
def manyheads(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print versions; stop"
        ),
    ] = False,
) -> None:
    """Train, run and explain Transformers.

    Start with
      $ manyheads demo                      train a translator in minutes
      $ manyheads recipes                   what can be trained
      $ manyheads settings RECIPE           what can be set, as KEY=VALUE
      $ manyheads COMMAND --help            options and examples
    """


def _run() -> int:
    """The exit code of a command; a command line that cannot be parsed is a UserError."""
    try:
        code = app(prog_name="manyheads", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # only the parser's errors have it
            raise
        if not sys.argv[1:]:  # no command: the message is the help
            write(f"{error.format_message()}\n")
            return UserError.exit_code
        raise UserError(_parse_error(error)) from None
    return code if isinstance(code, int) else 0


def _parse_error(error: Any) -> str:
    command = getattr(error.ctx, "command_path", "manyheads")
    return f"{' '.join(error.format_message().split()).rstrip('.')}: see {command} --help"


def main() -> None:
    """Run a command; a user's error is one line and an exit code, never a traceback."""
    # Threads that sleep while they wait: spinning ones slow down a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # closed by the caller
                setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8")  # whatever the locale
        code = _run()
        write("")  # a broken pipe shows when the buffer is flushed
    except UserError as error:
        say(f"manyheads: {error}")
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        say("")
        code = 130
    except OSError as error:  # a full disk, a missing permission: it names its file
        say(f"manyheads: {error}")
        code = DataError.exit_code
        _discard_output()
    sys.exit(code)


def _discard_output() -> None:
    """The rest of the buffer would fail again, with a traceback, at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
