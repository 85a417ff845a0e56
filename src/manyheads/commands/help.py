"""The layout of --help: usage, description, then arguments and options under headings.

Plain text, so that it is quick to print and reads the same in a pipe. Headings are bold on a
terminal. An option's heading is its `rich_help_panel`.
"""

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

WIDEST = 100
RECIPES = "{recipes}"  # ends a description: print the built-in recipes after the options


def columns() -> int:
    return min(WIDEST, shutil.get_terminal_size().columns)


def bold(text: str) -> str:
    styled = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\033[1m{text}\033[0m" if styled else text


def two_columns(rows: Iterable[tuple[str, str]], widest_name: int = 26) -> str:
    """Names and their explanations, wrapped to the terminal; a long name has its own line."""
    rows = list(rows)
    indent = 4 + max((len(name) for name, _ in rows if len(name) <= widest_name), default=0)
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(24, columns() - indent), break_on_hyphens=False) or [""]
        if len(name) > indent - 4:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name:<{indent - 4}}  {wrapped.pop(0)}".rstrip())
        lines += [" " * indent + line for line in wrapped]
    return "\n".join(lines)


def recipe_list() -> str:
    from manyheads.commands.catalogue import headers

    return two_columns((recipe.name, recipe.summary) for recipe in headers())


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    return f"{bold(title)}\n{two_columns(rows)}"


def _description(help_text: str | None) -> str:
    """A docstring: paragraphs, and headings with an indented block, which is not wrapped."""
    parts = []
    for part in inspect.cleandoc(help_text or "").split("\n\n"):
        heading, _, block = part.partition("\n")
        if block.startswith("  "):
            parts.append(f"{bold(heading)}\n{block}")
        else:
            parts.append(textwrap.fill(part, columns(), break_on_hyphens=False))
    return "\n\n".join(part for part in parts if part)


def _argument_name(param: Any) -> str:
    name = param.metavar or param.name.upper()
    if name.startswith("["):
        return str(name)
    # Without its recipe, `train` lists them and fails.
    name = name if param.required or name == "RECIPE" else f"[{name}]"
    return f"{name}..." if param.nargs == -1 else name


def _usage(command: Any, path: str) -> str:
    arguments = [_argument_name(p) for p in command.params if p.param_type_name == "argument"]
    text = " ".join([f"Usage: {path} [OPTIONS]", *arguments])
    return textwrap.fill(text, columns(), subsequent_indent=" " * 7, break_on_hyphens=False)


def _option(param: Any) -> tuple[str, str]:
    """How an option is written, and what it does."""
    name = ", ".join(sorted(param.opts, key=lambda name: name.startswith("--")))
    if param.secondary_opts:
        name += "/" + param.secondary_opts[0]
    if not param.is_flag:
        name += f" {param.metavar or 'N'}"
    notes = []
    if param.required:
        notes.append("[required]")
    elif not param.is_flag and param.default is not None and param.show_default is not False:
        notes.append(f"[default: {param.default}]")
    if param.envvar:
        notes.append(f"[env: {param.envvar}]")
    return name, " ".join([(param.help or "").partition(", to copy")[0].rstrip("."), *notes])


def _panels(entries: Iterable[tuple[str | None, tuple[str, str]]]) -> list[str]:
    """Sections of rows with the same title, in the order of the titles; Options come last."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for title, row in entries:
        panels.setdefault(title or "Options", []).append(row)
    titles = sorted(panels, key=lambda title: title == "Options")
    return [_section(title, panels[title]) for title in titles]


class Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        text, lists_recipes, _ = (self.help or "").partition(RECIPES)
        sections = [_usage(self, ctx.command_path), _description(text)]
        params = [param for param in self.get_params(ctx) if not getattr(param, "hidden", False)]
        arguments = [p for p in params if p.param_type_name == "argument"]
        if arguments:
            rows = [(_argument_name(param), getattr(param, "help", "")) for param in arguments]
            sections.append(_section("Arguments", rows))
        sections += _panels(
            (getattr(param, "rich_help_panel", None), _option(param))
            for param in params
            if param.param_type_name == "option"
        )
        if lists_recipes:
            sections.append(f"{bold('Recipes')}\n{recipe_list()}")
        formatter.write("\n\n".join(sections) + "\n")


class Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands: list[Any] = [x for x in self.commands.values() if not x.hidden]
        options: list[Any] = [x for x in self.get_params(ctx) if not getattr(x, "hidden", False)]
        usage = f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]..."
        summaries = [(x.name, x.help.partition("\n")[0].rstrip(".")) for x in commands]
        titles = [x.rich_help_panel for x in commands]
        rows = [*zip(titles, summaries, strict=True), *((None, _option(x)) for x in options)]
        formatter.write("\n\n".join([usage, _description(self.help), *_panels(rows)]) + "\n")
