"""The command line: its commands by name, and how it ends."""

import io
import os
import sys
from typing import Any

import typer

from manyheads.commands.claims import claims
from manyheads.commands.cost import cost
from manyheads.commands.encode import classify, embed, fill
from manyheads.commands.exchange import export, import_folder
from manyheads.commands.figure import figure
from manyheads.commands.generate import generate
from manyheads.commands.inspect import info, tokens
from manyheads.commands.scale import scale
from manyheads.commands.serve import serve, view
from manyheads.commands.shared import say, write
from manyheads.commands.training import compare, demo, evaluate, train
from manyheads.commands.translate import translate
from manyheads.errors import DataError, UserError

app = typer.Typer(
    help="Trains, runs and shows Transformers. Start with: manyheads demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(train)
app.command()(evaluate)
app.command()(translate)
app.command()(generate)
app.command()(embed)
app.command()(fill)
app.command()(classify)
app.command()(info)
app.command()(tokens)
app.command()(view)
app.command()(figure)
app.command()(serve)
app.command("import")(import_folder)
app.command()(export)
app.command()(compare)
app.command()(cost)
app.command()(claims)
app.command()(scale)


def _run() -> int:
    """The exit code of a command; words that it does not understand are a mistake like others."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # as the parser's have, and no others
            raise
        if not sys.argv[1:]:  # nothing was asked for, and all that there is has been told
            return UserError.exit_code
        raise UserError(_told(error)) from None
    return code if isinstance(code, int) else 0


def _told(unread: Any) -> str:
    command = getattr(unread.ctx, "command_path", "manyheads")
    what = " ".join(unread.format_message().split()).rstrip(".")
    if command.endswith(" translate") and "extra argument" in what:
        return f"{what}: it reads lines from a pipe, {command} RUN < FILE"
    return f"{what}: see {command} --help"


def main() -> None:
    """Run a command; a user's mistake is one line and an exit code, never a traceback."""
    # Threads that sleep while they wait: spinning ones slow a shared machine many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # as what is read, whatever the locale
    try:
        sys.exit(_run())
    except UserError as error:
        say(f"manyheads: {error}")
        sys.exit(error.exit_code)
    except SystemExit:  # how every command ends
        write("")
        raise
    except OSError as error:
        # A full disk, a missing permission: it names its file, and is nothing to debug here.
        say(f"manyheads: {error}")
        sys.exit(DataError.exit_code)
