"""The command line: its commands by group, and how it ends."""

import functools
import inspect
import io
import os
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
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
from manyheads.commands.lab import claims, compare, cost, plan, quiz, scale, tables
from manyheads.commands.serve import serve, view
from manyheads.commands.shared import row_processes, say, write
from manyheads.commands.training import demo, distill, prepare, train
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
# Commands and options of release 0.1, which still work.
OLD_NAMES: dict[str, Callable[..., None]] = {"fill": fill_mask, "tokens": tokenize, "scale": scale}
OLD_OPTIONS = {
    "--picture": ["--plot"],
    "--with": ["--ensemble"],
    "--half": ["--dtype", "bfloat16"],
    "--int8": ["--dtype", "int8"],
    "--rows": ["--max-batch-size"],
    "--waiting": ["--max-queue"],
    "--cores": ["--attention"],
}


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """A command in which options that belong together are single ones, and with --plugin.

    Such options are a dataclass, e.g. `compute: Compute = Compute()` has --device and --threads.
    """
    signature = inspect.signature(command)
    groups: dict[str, Any] = {}
    options_of = []  # name, default, annotation
    for name, parameter in signature.parameters.items():
        if is_dataclass(default := parameter.default):
            groups[name] = default
            options_of += [(x.name, getattr(default, x.name), x.type) for x in fields(default)]
        else:
            options_of.append((name, default, parameter.annotation))
    options_of.append(("plugin", None, options.Plugins))

    @functools.wraps(command)
    def run(plugin: list[Path] | None, **named: Any) -> None:
        for file in plugin or []:
            from manyheads.plugins import use

            use(file)
        for name, group in groups.items():
            changes = {field.name: named.pop(field.name) for field in fields(group)}
            named[name] = replace(group, **changes)
        command(**named)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, kind, default=default, annotation=annotation)
        for name, default, annotation in options_of
    ]
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
        app.command(_name, cls=Command, rich_help_panel=_group)(flat(_function))
for _name, _function in OLD_NAMES.items():
    app.command(_name, cls=Command, hidden=True)(flat(_function))


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


def _arguments() -> list[str]:
    """The command line by the present names."""
    words: list[str] = []
    for word in sys.argv[1:]:
        name, equals, value = word.partition("=")
        *first, last = OLD_OPTIONS.get(name, [name])
        words += [*first, f"{last}{equals}{value}"]
    if words[:1] == ["generate"] and {"--out", "-o", "--prime"} & {*words}:  # music in 0.1
        words[0] = "compose"
    return words


def _run() -> int:
    """The exit code of a command; a command line that cannot be parsed is a UserError."""
    try:
        code = app(_arguments(), prog_name="manyheads", standalone_mode=False)
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
        with row_processes(next(iter(sys.argv[1:]), "")):
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
