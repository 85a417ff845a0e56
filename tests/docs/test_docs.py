"""The documents are true: their code runs, what they name exists, their tree is the disk's.

Also the two guards of the design that concern the sources as a whole: imports go one way, and
files and functions stay short enough to read.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "manyheads"
PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if path.exists()]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

PROMISE = "# → "
LONGEST_FILE = 450
LONGEST_FUNCTION = 70

# A module imports only from modules that stand earlier here. A name stands for all that is in it.
STAGES = [
    "errors files config replay memory_use tokens segments vocabularies",
    "data.corpus data.phrasebook data.batching data.translation data.summaries data.masking",
    "data.language data.sentences data.hidden data.labelled data.midi data.events data.music",
    "data.augmentation data.pictures data.images",
    "nn.shapes nn.masks nn.skew nn.positions nn.relative nn.grid_positions nn.scores",
    "nn.trusted nn.early nn.dropped nn.totals",
    "nn.biased nn.short nn.glance nn.placed nn.foremost nn.beside nn.normed nn.fed",
    "nn.cores",
    "nn.tiled nn.packed nn.flex nn.local nn.linformer nn.performer nn.compressed nn.attention",
    "nn.feedforward nn.experts nn.residual nn.embedding nn.replaced nn.int8 nn.arranged nn.block",
    "nn.single nn.newest nn.states nn.memory nn.convolution",
    "models presets account_streams account account_table",
    "train.softmax train.objective train.agreement train.optimizer train.progress",
    "train.checkpoint train.saving train.metrics",
    "train.parallel train.ahead train.graphs train.steps train.loop",
    "decode.cache decode.fixed_cache decode.logits decode.sample decode.hypotheses decode.beam",
    "decode.recorded",
    "decode.beam_cache decode.tree_cache decode.best_first",
    "decode.steady decode.search decode.writer decode.generate",
    "decode.speculative",
    "decode.compose decode.translate decode.together",
    "decode.lines",
    "encode view.capture evaluate.scores evaluate.rouge evaluate.alignment view.figures",
    "exchange.foreign exchange.settings exchange.families exchange.channels exchange.huggingface",
    "exchange.writing exchange.folder exchange.ctranslate2 exchange.ctranslate2_runtime",
    "exchange.onnx exchange.onnx_runtime",
    "tasks run opened beginning training scoring compare cost cost_table demo",
    "scaling.law scaling.plan scaling.prediction scaling.sweep scaling.report",
    "view.maps view.schemes view.measured view.landscape",
    "claims.claim claims.parts claims.clock claims.trial claims.word_for_word claims.translators",
    "claims.reading claims.recurrent claims.phrases claims.decks claims.runner claims.report",
    "web.answers web.guard web.traces web.library web.heads web.passes web.attention",
    "web.fitting web.runs",
    "web.formulas web.journey web.outcome web.flow",
    "web.writing web.watching web.decoding web.translating",
    "web.tokens web.positions web.lens web.fill web.image web.music web.app",
    "web.serving",
    "commands cli",
]
ORDER = [name for stage in STAGES for name in stage.split()]
# Within these, any order that is not a circle will do.
GROUPS = {"data.phrasebook", "models", "tasks", "exchange.families", "claims.decks"}
GROUPS |= {"web.serving", "commands"}


def fenced(page: Path) -> Iterator[tuple[int, str, str]]:
    """(number, language, text) of each line inside a ``` fence."""
    language: str | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            language = line.removeprefix("```").strip() if language is None else None
        elif language is not None:
            yield number, language, line


RUN = """
import sys
path, name = sys.argv[1:]
source = open(path, encoding="utf-8").read()
exec(compile(source, name, "exec"), {"__name__": "__main__"})
"""


@pytest.mark.parametrize(
    "name", ["docs/follow-a-sentence.md", "docs/extend.md", "docs/pretraining.md"]
)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    """All Python blocks of a page are one program, and print the lines that follow a `# →`.

    It runs as a reader's would: in a process of its own, without the shape-checking hook, from
    another folder. Each line keeps its number, so that a traceback names the line of the page.
    """
    lines = {number: line for number, kind, line in fenced(ROOT / name) if kind == "python"}
    assert lines
    program = tmp_path / "page.py"
    program.write_text(
        "\n".join(lines.get(number, "") for number in range(1, max(lines) + 1)), encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", RUN, program, name],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0, f"{name} does not run:\n{done.stderr}"
    promised = [
        (number, line.removeprefix(PROMISE))
        for number, line in lines.items()
        if line.startswith(PROMISE)
    ]
    printed = done.stdout.splitlines()
    for (number, expected), found in zip(promised, printed, strict=False):
        assert found == expected, f"{name}:{number} promises another line than is printed"
    assert len(printed) == len(promised), f"{name} prints {len(printed)} lines"


@pages
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Paths in code marks, as the page writes them; `path::test` also names a test in it."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks|recipes)/[\w./-]+)(?:::(\w+))?`", text)
    missing = []
    for path, test in named:
        file = ROOT / path
        if not file.exists():
            missing.append(path)
        elif test and f"def {test}(" not in file.read_text(encoding="utf-8"):
            missing.append(f"{path}::{test}")
    assert not missing, f"{page.name} names what is not there: {sorted(set(missing))}"


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `manyheads` of each command in the fences and code marks of a page."""
    outside = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    code = [line for _, kind, line in fenced(page) if kind != "python"]
    code += re.findall(r"`([^`\n]+)`", outside) + re.findall(r"^ {4}(.+)$", outside, flags=re.M)
    for line in code:
        for found in re.findall(r"(?:^|[|;$(]\s*|-m )manyheads ([a-z][^|<>#;)]*)", line):
            yield found.split()


@pages
def test_commands_that_a_page_names_exist(page: Path) -> None:
    from typer.main import get_command

    from manyheads.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = {words[0] for words in commands(page)}
    assert named <= known, f"{page.name} names no commands: {sorted(named - known)}"


@pages
def test_settings_that_a_page_names_exist(page: Path) -> None:
    """`a.b=c` of a command on a built-in recipe or preset is a setting with such a value."""
    from manyheads.config import override_all
    from manyheads.presets import preset, presets
    from manyheads.training import read_recipe, recipes

    for command, *words in (words for words in commands(page) if len(words) > 1):
        given = [word for word in words if re.match(r"[a-z_]+(\.[a-z_]+)*=\w", word)]
        given = [word for word in given if not word.startswith("model=")]  # a reader's folder
        # The position that docs/extend.md adds is not there before it is added.
        given = [word.replace(",gaussian", "") for word in given]
        first = [word.split(",")[0] for word in given]
        if command == "info" and words[0] in presets():
            override_all(preset(words[0]), given)
        elif command in ("train", "compare") and words[0] in recipes():
            read_recipe(words[0], first)
            for name, values in (word.split("=", 1) for word in given):
                for value in values.split(","):
                    read_recipe(words[0], [*first, f"{name}={value}"])


@pages
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    """No place that a figure was to come into."""
    assert not re.findall(
        r"\b[A-Z]{4,}_[A-Z_]+\b(?!=)|\?\?\?|TBD",
        re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8")),
    )


@pages
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:", t)]
    broken = [target for target in local if target and not (page.parent / target).exists()]
    assert not broken, f"{page.name} has broken links: {broken}"


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
    from manyheads.account import account
    from manyheads.presets import preset, presets

    text = (ROOT / "docs" / "lectures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z0-9.-]+) \| ([\d,]+) \|", text, flags=re.M)
    assert [name for name, _ in rows] == presets()
    counted = {name: f"{account(preset(name), 64).parameters:,}" for name in presets()}
    assert dict(rows) == counted


def on_disk() -> tuple[set[str], set[str]]:
    """What a tree must name and what it may: names as `data`, `data/corpus`, `recipes`.

    A package inside a package may be named as one; so may what is no module of its own.
    """
    must, may = {"recipes"}, {"py.typed"}
    for path in SOURCES.rglob("*"):
        name = str(path.relative_to(SOURCES).with_suffix(""))
        if path.suffix == ".toml" or path.name in ("__init__.py", "__main__.py"):
            may.add(name)
        elif path.suffix == ".py":
            (must if name.count("/") < 2 else may).add(name)
            must |= {str(folder) for folder in Path(name).parents} - {"."}
    return must, may


def indent(line: str) -> int:
    return len(re.match(r"[\s│├└─]*", line)[0])  # type: ignore[index]


def tree_in(lines: list[str]) -> set[str]:
    """The names in an indented tree below the line of src/manyheads.

    A folder ends with `/`, and what is in it stands deeper, or on its line between ` · `. Of any
    other line the first word counts; the rest says what it is. A far indented line goes on with
    the one above.
    """
    start = next(i for i, line in enumerate(lines) if "src/manyheads" in line)
    below: list[str] = []
    for line in lines[start + 1 :]:
        if indent(line) <= indent(lines[start]):
            break
        if indent(line) > 24:
            below[-1] += f" {line[indent(line) :]}"
        else:
            below.append(line)
    found: set[str] = set()
    above: list[tuple[int, str]] = []
    for line in below:
        above = [(depth, name) for depth, name in above if depth < indent(line)]
        first, _, rest = line[indent(line) :].partition(" ")
        name = "".join(folder for _, folder in above) + first
        found.add(re.sub(r"/$|\.\w+$", "", name))
        if first.endswith("/"):
            above.append((indent(line), first))
            listed = [re.match(r"[\w-]*", part.strip())[0] for part in rest.split(" · ")]  # type: ignore[index]
            if len(listed) > 1 or (SOURCES / name / f"{listed[0]}.py").exists():
                found |= {name + word for word in listed}
    return found


def test_both_forms_of_a_tree_are_read() -> None:
    lists = [
        "  src/manyheads/",
        "    cli.py   the command",
        "    nn/      masks (who) · scores",
        " x",
    ]
    drawn = ["└── src/manyheads/", "    ├── cli.py", "    └── nn/", "        ├── masks.py  who"]
    assert tree_in(lists) == {"cli", "nn", "nn/masks", "nn/scores"}
    assert tree_in(drawn) == {"cli", "nn", "nn/masks"}


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="there is no README.md")
def test_the_tree_of_the_readme_is_the_disk() -> None:
    blocks: list[list[str]] = [[]]
    last = 0
    for number, _, line in fenced(ROOT / "README.md"):
        if number > last + 1:
            blocks.append([])
        blocks[-1].append(line)
        last = number
    trees = [block for block in blocks if any("src/manyheads/" in line for line in block)]
    assert trees, "README.md has no tree of src/manyheads in a ``` fence"
    shown, (must, may) = tree_in(trees[0]), on_disk()
    assert sorted(must - shown) == [], "the tree leaves these out"
    assert sorted(shown - must - may) == [], "the tree names what is not there"


def modules() -> dict[str, Path]:
    """The package's modules by dotted name, without the package itself and its entry point."""
    named = {}
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name not in ("", "__main__"):
            named[name] = path
    return named


def place(module: str) -> int | None:
    """Where a module stands in the order; None for a package that only holds others."""
    for index, name in enumerate(ORDER):
        if module == name or module.startswith(f"{name}."):
            return index
    return None


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import from the package, also inside functions."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            yield from imported(node)
            continue
        for name in names:
            if name.startswith("manyheads.") and name != "manyheads.__version__":
                yield node.lineno, name.removeprefix("manyheads.")


def test_every_module_has_a_place_in_the_order() -> None:
    known = modules()
    homeless = [
        name for name, path in known.items() if place(name) is None and path.name != "__init__.py"
    ]
    assert not homeless, f"add to ORDER: {homeless}"
    gone = [name for name in ORDER if not any(place(m) == ORDER.index(name) for m in known)]
    assert not gone, f"ORDER names what is not there: {gone}"


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module: str) -> None:
    path = modules()[module]
    own = place(module)
    back = []
    for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        other = place(name)
        if own is None or other is None or other > own:
            back.append(f"{path.name}:{line} imports {name}")
        elif other == own and ORDER[own] not in GROUPS:
            back.append(f"{path.name}:{line} imports itself")
    assert not back, "; ".join(back)


@pytest.mark.parametrize("path", modules().values(), ids=modules())
def test_files_and_functions_can_be_read_at_once(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    assert lines <= LONGEST_FILE, f"{path.name} has {lines} lines"
    long = [
        f"{node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert not long, f"{path.name}: {', '.join(long)}"
