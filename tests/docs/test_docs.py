"""The documentation is true: its code runs, and the files and settings it names exist."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checks import unchecked

from manyheads.config import describe

ROOT = Path(__file__).parents[2]
NOTES = sorted(ROOT.glob("docs/research-notes/*.md"))  # history: it may name what is gone
BUILT = {"_build", "generated"}  # written by `make docs`
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += [
    page
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if page not in NOTES and not BUILT & set(page.parts)
]

COMMAND_LINE = ROOT / "docs" / "command-line.md"
PROMISE = "# → "


def fenced(page: Path) -> Iterator[tuple[int, str, str]]:
    """(number, language, text) of each line inside a ``` fence."""
    language: str | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            language = line.removeprefix("```").strip() if language is None else None
        elif language is not None:
            yield number, language, line


# Imports once, then runs the program of each folder in a process of its own.
RUN = """
import os, pathlib, sys, traceback
import manyheads, torch

for folder in sys.argv[1:]:
    if not os.fork():
        os.chdir(folder)
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        source, name = (pathlib.Path(file).read_text("utf-8") for file in ("page.py", "name"))
        status = 1
        try:
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    pathlib.Path(folder, "status").write_text(str(os.wait()[1]))
"""


# Pages whose Python blocks run elsewhere: one needs a server, the other an export.
RUN_ELSEWHERE = {
    "docs/serving.md": "tests/serve",
    "docs/models.md": "tests/exchange/test_onnx.py",
    "docs/how-to/activations.md": "tests/test_cli.py",
}


PROGRAMS = [
    name
    for page in PAGES
    if any(kind == "python" for _, kind, _ in fenced(page))
    and (name := page.relative_to(ROOT).as_posix()) not in RUN_ELSEWHERE
]
NOTEBOOK = "docs/notebooks/attention-by-hand.py"  # the shortest; `make notebooks` executes all


def python_lines(name: str) -> dict[int, str]:
    return {number: line for number, kind, line in fenced(ROOT / name) if kind == "python"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the program of each page prints; fails with the errors of one that does not run."""
    folders = {name: tmp_path_factory.mktemp("page") for name in (*PROGRAMS, NOTEBOOK)}
    for name, folder in folders.items():
        lines = python_lines(name) if name != NOTEBOOK else {}
        source = "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))
        text = source if lines else (ROOT / name).read_text("utf-8")
        (folder / "page.py").write_text(text, "utf-8")
        (folder / "name").write_text(name, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-X", "utf8", "-c", RUN, *folders.values()]
    subprocess.run(command, env=environment, check=True)
    for name, folder in folders.items():
        errors = (folder / "stderr").read_text("utf-8")
        assert (folder / "status").read_text() == "0", f"{name} does not run:\n{errors}"
    return {name: (folder / "stdout").read_text("utf-8") for name, folder in folders.items()}


def test_a_notebook_runs_as_a_program(outputs: dict[str, str]) -> None:
    assert outputs[NOTEBOOK]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_of_a_page_runs(name: str, outputs: dict[str, str]) -> None:
    """All Python blocks of a page are one program, and print the lines that follow a `# →`.

    It runs as a reader's would: in a process of its own, without the shape-checking hook, from
    another folder. Each line keeps its number, so that a traceback names the line of the page.
    """
    lines = python_lines(name)
    promised = [
        (number, line.removeprefix(PROMISE))
        for number, line in lines.items()
        if line.startswith(PROMISE)
    ]
    printed = outputs[name].splitlines()
    for (number, expected), line in zip(promised, printed, strict=False):
        assert line == expected, f"{name}:{number} promises another line than is printed"
    assert len(printed) == len(promised), f"{name} prints {len(printed)} lines"


def test_files_that_a_page_names_exist() -> None:
    """Paths in code marks, as the page writes them; `path::test` also names a test in it."""
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        pattern = r"`((?:src|tests|docs|benchmarks|recipes)/[\w./-]+)(?:::(\w+))?`"
        for path, test in re.findall(pattern, text):
            file = ROOT / path
            if BUILT & set(file.parts):
                continue
            if not file.exists():
                missing.append(f"{page.name}: {path}")
            elif test and f"def {test}(" not in file.read_text(encoding="utf-8"):
                missing.append(f"{page.name}: {path}::{test}")
    assert not missing


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `manyheads` of each command in the fences and code marks of a page."""
    outside = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    code = [line for _, kind, line in fenced(page) if kind != "python"]
    code += re.findall(r"`([^`\n]+)`", outside) + re.findall(r"^ {4}(.+)$", outside, flags=re.M)
    for line in code:
        for command in re.findall(r"(?:^|[|;$(]\s*|-m )manyheads ([a-z][^|<>#;)]*)", line):
            yield command.split()


def known_commands() -> set[str]:
    from typer.main import get_command

    from manyheads.cli import app

    return set(get_command(app).commands)  # type: ignore[attr-defined]


def test_commands_that_a_page_names_exist() -> None:
    known = known_commands()
    named = {(page.name, words[0]) for page in PAGES for words in commands(page)}
    assert not {(page, command) for page, command in named if command not in known}


def test_settings_that_a_page_names_exist() -> None:
    """`a.b=c` of a command with a built-in recipe or preset is a valid setting."""
    from manyheads.config import override_all
    from manyheads.presets import preset, presets
    from manyheads.recipes import read_recipe, recipes

    pages = [page for page in PAGES if page != COMMAND_LINE]  # it shows errors
    lines = {tuple(words) for page in pages for words in commands(page) if len(words) > 1}
    for command, *words in sorted(lines):
        if "--plugin" in words:  # names a part that only the plugin has
            continue
        settings = [word for word in words if re.match(r"[a-z_]+(\.[a-z_]+)*=\w", word)]
        settings = [word for word in settings if not word.startswith("init=")]  # a folder
        # The position that docs/extend.md adds does not exist before.
        settings = [word.replace(",gaussian", "") for word in settings]
        tuning = [word for word in settings if word.startswith("finetune.")]  # needs init=FOLDER
        settings = [word for word in settings if word not in tuning]
        if tuning:
            known = {setting.name for setting in describe(read_recipe(words[0]))}
            assert {word.partition("=")[0] for word in tuning} <= known
        first = [word.split(",")[0] for word in settings]
        with unchecked():
            if command == "info" and words[0] in presets():
                override_all(preset(words[0]), settings)
            elif command in ("train", "compare", "settings") and words[0] in recipes():
                read_recipe(words[0], first)
                for name, values in (word.split("=", 1) for word in settings if "," in word):
                    for value in values.split(",")[1:]:
                        read_recipe(words[0], [*first, f"{name}={value}"])


def test_the_command_line_page_shows_the_real_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite it with docs/cli_output.py; parts that depend on the machine are not compared."""
    from tests.test_cli import call

    monkeypatch.setenv("COLUMNS", "80")
    blocks = re.findall(
        r"```console\n\$ manyheads (.+)\n([^`]*)\n```", COMMAND_LINE.read_text(encoding="utf-8")
    )
    shown = dict(blocks)
    assert len(shown) >= 12
    quick = [name for name in shown if name.endswith(("--help", "recipes", "phrasebok", "=1.5"))]
    assert len(quick) >= 5
    for command in quick:
        _, out, err = call(*command.split())
        assert f"{out}{err}".rstrip("\n") == shown[command], command


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES + NOTES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        targets = re.findall(r"\]\(([^)\s]+)\)", text)
        local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:|(?:.*/)?generated/", t)]
        missing = [target for target in local if target and not (page.parent / target).exists()]
        broken += [(page.name, target) for target in missing]
    assert not broken


def test_every_row_of_the_lectures_is_there() -> None:
    text = (ROOT / "docs" / "lectures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(?:\| *|#+ )(L\d+)\b", text, flags=re.M)
    assert rows == [f"L{number}" for number in range(1, 31)]


def test_names_that_the_lectures_page_gives_exist() -> None:
    """`file.py`: `Name`, `name` … in one cell: each name is defined in one of its files."""
    text = (ROOT / "docs" / "lectures.md").read_text(encoding="utf-8")
    missing = []
    for cell in re.findall(r"^- code: (.+)$", text, flags=re.M):
        marks = re.findall(r"`([^`]+)`", cell)
        files = [mark for mark in marks if "/" in mark]
        defined = " ".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        names = [mark for mark in marks if re.fullmatch(r"[A-Za-z_]\w*", mark)]
        missing += [
            name
            for name in names
            if not re.search(rf"(?:class|def) {name}\b|^{name}\b.*=", defined, flags=re.M)
        ]
    assert not missing, f"docs/lectures.md names what is not in its files: {missing}"


def test_parameter_counts_on_the_lectures_page_are_what_info_gives() -> None:
    from manyheads.presets import preset, presets
    from manyheads.summary import summarize

    text = (ROOT / "docs" / "lectures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z0-9.-]+) \| ([\d,]+) \|", text, flags=re.M)
    assert [name for name, _ in rows] == presets()
    counted = {name: f"{summarize(preset(name), 64).parameters:,}" for name in presets()}
    assert dict(rows) == counted


def test_every_page_is_in_the_navigation() -> None:
    """Sphinx warns too; this needs no build."""
    sources = [ROOT / "docs/index.md", ROOT / "docs/notebooks/README.md"]
    text = "".join(page.read_text("utf-8") for page in sources)
    trees = re.findall(r"```\{toctree\}\n(.*?)```", text, re.S)
    listed = {
        line for tree in trees for line in tree.split("\n") if re.fullmatch(r"[\w/.-]+", line)
    }
    here = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES[3:] + NOTES}
    assert here - listed == {"index"}
    assert all("/generated/" in name for name in listed - here)


def test_the_citation_has_the_version_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), flags=re.M)
    assert cited
    assert cited[1] == project["version"]


NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.py"))


def test_notebooks_name_only_what_exists() -> None:
    """Their imports and `manyheads.NAME` resolve, without running them; each is on its page."""
    import manyheads

    listed = (ROOT / "docs/notebooks/README.md").read_text("utf-8")
    assert len(NOTEBOOKS) == listed.count("\n/notebooks/generated/") == 7
    for notebook in NOTEBOOKS:
        assert f"generated/{notebook.stem}.md" in listed
        tree = ast.parse(notebook.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), notebook.name
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "manyheads":
                assert node.attr in manyheads.__all__, f"{notebook.name}: {node.attr}"


def test_settings_of_notebooks_exist() -> None:
    from manyheads.recipes import read_recipe

    for notebook in NOTEBOOKS:
        text = notebook.read_text("utf-8")
        recipes = re.findall(r'manyheads\.train\(\s*"([\w-]+)"', text)
        names = re.findall(r'"((?:data|model|tokens|objective|train|decode)(?:\.\w+)+)":', text)
        known = {s.name for recipe in recipes for s in describe(read_recipe(recipe))}
        known |= {name.rpartition(".")[0] for name in known}
        assert not set(names) - known, notebook.name
