"""The generated part of the reference: commands, recipes, settings, presets, HTTP routes, tasks."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import run_notebooks
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]


def write_pages(folder: Path) -> None:
    """Write all pages; a page without changes keeps its time, so that Sphinx skips it."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"commands": commands, "recipes": recipes, "settings": settings}
    pages |= {"presets": presets, "http": http, "tasks": tasks}
    for name, page in pages.items():
        write(folder / f"{name}.md", page().encode())


def write_notebooks(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in run_notebooks.pages().items():
        write(folder / name, content)


def write(file: Path, content: bytes) -> None:
    if not file.exists() or file.read_bytes() != content:
        file.write_bytes(content)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    head = list(head)
    return "\n".join([line(head), "|" + "---|" * len(head), *(line(row) for row in rows)])


def code(text: str) -> str:
    return f"`{text}`" if text.strip() else ""


def commands() -> str:
    from typer.main import get_command
    from typer.testing import CliRunner

    from manyheads.cli import COMMANDS, app

    parts = [
        "# Commands",
        "Generated from `--help`. See also [real output](../../command-line.md).",
    ]
    runner, known = CliRunner(), get_command(app).commands  # type: ignore[attr-defined]
    for group, names in COMMANDS.items():
        parts.append(f"## {group}")
        for name in names:
            assert name in known
            shown = runner.invoke(app, [name, "--help"], prog_name="manyheads").output
            parts += [f"### manyheads {name}", f"```text\n{shown.rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def recipes() -> str:
    from manyheads.commands.catalogue import headers

    parts = ["# Recipes", "Generated from the recipe files. `manyheads recipes` prints this list."]
    for recipe in headers():
        facts = "\n".join(f"- {name}: {text}" for name, text in recipe.facts.items())
        text = (ROOT / "src/manyheads/recipes" / f"{recipe.name}.toml").read_text("utf-8")
        about = f"{recipe.summary}.\n\n- task: `{recipe.task}`\n{facts}".rstrip()
        parts += [f"## {recipe.name}", about, f"```toml\n{text.rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def kind_of(text: str) -> str:
    return text.replace("|", " | ").replace(f"from 0 to {2**63 - 1}", "at least 0")


def settings() -> str:
    from manyheads.config import describe
    from manyheads.recipes import read_recipe
    from manyheads.recipes import recipes as names

    head = ("name", "type or choices", "default", "meaning")
    parts = [
        "# Settings",
        "Generated. Each setting is an argument of `manyheads train`, as in `train.steps=400`. "
        "`manyheads settings RECIPE` prints the same list.",
    ]
    for name in names():
        every = list(describe(read_recipe(name)))
        parts.append(f"## {name}")
        parents = {s.name.partition(".")[0] for s in every if "." in s.name}
        groups = {s.name: s.name.partition(".")[0] for s in every}
        groups = {key: group if group in parents else "run" for key, group in groups.items()}
        for group in dict.fromkeys(groups.values()):
            rows = [
                (code(s.name), kind_of(s.type), code(s.text), s.meaning)
                for s in every
                if groups[s.name] == group
            ]
            parts += [f"### {name}: {group}", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def presets() -> str:
    from manyheads.presets import preset
    from manyheads.presets import presets as names
    from manyheads.summary import summarize

    rows = []
    for name in names():
        config = preset(name)
        sizes = [str(getattr(config, size, "")) for size in ("layers", "dim", "heads")]
        count = f"{summarize(config, 64).parameters:,}"
        rows.append((code(name), code(config.kind), *sizes, count))
    head = ("preset", "model", "layers", "dim", "heads", "parameters")
    text = "Generated. `manyheads info PRESET` shows parameters, FLOPs and memory of one, and "
    text += '`manyheads.build("PRESET")` builds it with new weights.'
    return "\n\n".join(["# Presets", text, table(head, rows)]) + "\n"


def http() -> str:
    from manyheads import serve, web

    def rows(package: ModuleType) -> str:
        names = [module.name for module in pkgutil.iter_modules(package.__path__)]
        modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
        cells = []
        for route in (route for module in modules for route in getattr(module, "ROUTES", ())):
            method = "POST" if "POST" in route.methods else "GET"
            about = (inspect.getdoc(route.endpoint) or "").partition("\n\n")[0].replace("\n", " ")
            cells.append((code(f"{method} {route.path}"), about.removeprefix(method).strip(" :")))
        return table(("route", "parameters: meaning"), cells)

    parts = [
        "# HTTP interfaces",
        "Generated from the routes. `GET /health` answers on both servers.",
        "## manyheads serve",
        "Requests, answers and limits are on [Serve over HTTP](../../serving.md).",
        rows(serve),
        "## manyheads view",
        "The interface of [the page](../../page.md). It may change with each release.",
        rows(web),
    ]
    return "\n\n".join(parts) + "\n"


def tasks() -> str:
    from manyheads.tasks.spec import kinds
    from manyheads.tasks.table import TASKS

    def words(values: Iterable[str]) -> str:
        return ", ".join(code(value) for value in values)

    rows = [
        (code(name), words(kinds(row.models)), words(kinds(row.data)), words(sorted(row.offers)))
        for name, row in TASKS.items()
    ]
    text = "Generated from the task table: the models and data that each task takes, and its uses."
    return "\n\n".join(["# Tasks", text, table(("task", "model", "data", "uses"), rows)]) + "\n"


def link_outside(app: Sphinx, name: str, source: list[str]) -> None:
    """A link to a file outside of docs/ becomes its path: the site has no copy of it."""

    def path(link: re.Match[str]) -> str:
        text, target = link[1].strip("`"), code(link[2])
        return target if link[2].endswith(text) else f"{text} ({target})"

    outside = r"((?:src|tests|examples|benchmarks|scripts)/[^)]*|[A-Z]+\.md)"
    source[0] = re.sub(rf"\[([^\]]*)\]\((?:\.\./)+{outside}\)", path, source[0])


def add_mathml(app: Sphinx) -> None:
    """Formulas as MathML, which browsers show without a script and without a network."""

    def write(display: str) -> Callable[[Any, nodes.Element], None]:
        def visit(writer: Any, node: nodes.Element) -> None:
            formula = convert(node.astext(), display=display)
            is_block = display == "block"
            writer.body.append(f'<div class="math">{formula}</div>' if is_block else formula)
            raise nodes.SkipNode

        return visit

    app.add_html_math_renderer("mathml", (write("inline"), None), (write("block"), None))
