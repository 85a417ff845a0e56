"""Mutation testing: change the code in small ways and see whether a test fails.

    make mutants                                                 200 mutants with seed 1
    python scripts/mutants.py --count 20 --seed 2 --processes 1  fewer, others, in one process
    python scripts/mutants.py --processes 14 --minutes 9         end after 9 minutes
    python scripts/mutants.py --only nn/masks.py                 mutants of one file
    python scripts/mutants.py --retry                            test survivors again

A mutant is one change inside a function of `PACKAGES`: an operator, a constant, a condition, an
argument, a returned value or a statement.

First the tests run without a mutant, with a probe in each block of code. This baseline gives the
tests that pass, their seconds and the blocks that each test executes. A file of tests that cannot
be imported, for example because a package is not installed, is absent for baseline and mutants.
Then each mutant runs the tests that execute its block, until one fails: first the tests named
after its file, those that import it and those of its package, then the others, in each group the
fast ones first, up to `--seconds` of tests. A mutant that no test executes survives. One that
takes three times the expected seconds plus 30 counts as killed.

A verdict is printed and appended to `--out` when it is known; a second call with the same code
continues there. At the time limit the rest is left out. Mutants that compute the same are listed
in scripts/mutants-equivalent.txt with the reason, and do not count. The last line is a JSON object.

On a machine without pip, carry the packages that it lacks in a folder (19 MB) and name the folder
in PYTHONPATH:

    INTO="--no-compile --no-deps -c constraints.txt --target carry"
    pip install $INTO --python-version 3.12 --only-binary=:all: hypothesis sortedcontainers \\
        beartype mido tomli-w starlette uvicorn anyio h11 idna absl-py six nltk
    pip install $INTO rouge-score
    PYTHONPATH=carry python scripts/mutants.py --processes 14 --minutes 9 --out mutants.jsonl
"""

import argparse
import ast
import copy
import hashlib
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # as in CI: kernels run in Triton's interpreter
    "TRITON_INTERPRET": "1",
    "CI": "1",  # hypothesis then draws the same examples in each run
}
PACKAGES = ("nn", "decode", "train", "data", "evaluate")
# These need a GPU.
EXCLUDED = ("train/cuda_graphs.py", "decode/cuda_graphs.py")
# Tests of other things, and tests that depend on the time.
OTHER_TESTS = ("web", "docs", "lab", "benchmarks", "examples", "serve", "view")
EQUIVALENT = ROOT / "scripts" / "mutants-equivalent.txt"
PYTEST = (
    *("-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-m", "not slow and not gpu and not compile", "-o", "addopts="),
)
SHAPES = "--jaxtyping-packages=manyheads,beartype.beartype"
PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr)),
    (ast.And, ast.Or),
]
SWAPS = dict(PAIRS) | {b: a for a, b in PAIRS}
SWAPS |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)


# ---- Mutants --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """The bytes from `start` to `end` of a file, and what replaces them."""

    file: str
    line: int
    start: int
    end: int
    text: str  # the line
    before: str
    after: str
    block: str  # the innermost block of statements around it

    @property
    def key(self) -> str:
        return f"{self.file}: {self.text} [{self.before} -> {self.after}]"

    @property
    def id(self) -> str:
        return f"{self.key} at {self.start}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The mutations of a node, each as a new node."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPS:
            yield ast.Compare(left, [SWAPS[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.IfExp(test, body, other):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, other)
        case ast.Call(function, arguments, keywords):
            if len(arguments) > 1:
                yield ast.Call(function, arguments[:-1], keywords)
            for at in range(len(keywords)):
                yield ast.Call(function, arguments, keywords[:at] + keywords[at + 1 :])
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield ast.Pass()


def sites(node: ast.AST, block: str = "") -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """(node, replacement, block) inside functions; not in annotations, messages or asserts."""
    if block and isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.AnnAssign):
        return
    if block:
        if isinstance(node, ast.If | ast.While):
            yield node.test, ast.UnaryOp(ast.Not(), node.test), block
        yield from ((node, change, block) for change in changes(node))
    inside = bool(block) or is_function(node)
    for name, value in ast.iter_fields(node):
        if is_function(node) and name != "body":  # decorators, defaults
            continue
        values = value if isinstance(value, list) else [value]
        own = f"{name} {values[0].lineno}" if inside and is_block(value) else block
        for child in values:
            if isinstance(child, ast.AST):
                yield from sites(child, own)


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def is_block(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def add_probes(source: str, file: str) -> str:
    """The code with a call at the start of each block inside a function."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if is_function(node)]
    for node in {inner: None for function in functions for inner in ast.walk(function)}:
        for name, value in ast.iter_fields(node):
            if is_block(value):
                label = f"{file} {name} {value[0].lineno}"
                first = is_function(node) and ast.get_docstring(node) is not None
                value[int(first) : int(first)] = ast.parse(f"_mutants_hit({label!r})").body
    start = 0
    while start < len(tree.body) and (
        isinstance(tree.body[start], ast.Expr)
        or (
            isinstance(tree.body[start], ast.ImportFrom) and tree.body[start].module == "__future__"
        )
    ):
        start += 1
    tree.body[start:start] = ast.parse("from mutants_probe import hit as _mutants_hit").body
    return ast.unparse(ast.fix_missing_locations(tree))


# The module that the probes call. The test that runs is in a variable of the environment, which
# the processes that a test starts inherit.
PROBE = """
import os
seen = set()
def hit(block):
    test = os.environ.get("MUTANTS_TEST", "")
    if (test, block) not in seen:
        seen.add((test, block))
        with open(os.environ["MUTANTS_HITS"], "a") as file:
            file.write(f"{test}\\t{block}\\n")
"""


def mutants_of(path: Path) -> list[Mutant]:
    source, name = path.read_bytes(), str(path.relative_to(ROOT))
    lines = source.splitlines(keepends=True)
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    mutants = []
    for node, change, block in sites(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        code = ast.unparse(ast.fix_missing_locations(copy.deepcopy(change)))
        before = " ".join(source[start:end].decode().split())
        after = f"({code})" if isinstance(node, ast.expr) else code
        line = lines[node.lineno - 1].decode().strip()
        label = f"{name} {block}"
        mutants.append(Mutant(name, node.lineno, start, end, line, before, after, label))
    return mutants


def package(name: str) -> list[Path]:
    folder = ROOT / "src" / "manyheads" / name
    return sorted(path for path in folder.glob("*.py") if not str(path).endswith(EXCLUDED))


# ---- Tests ----------------------------------------------------------------------------------


def test_files(part: str) -> list[str]:
    """Paths that contain `part`, the largest file first."""
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: -path.stat().st_size)
    names = [path.relative_to(ROOT) for path in files if "_gpu" not in path.name]
    return [str(n) for n in names if n.parts[1] not in OTHER_TESTS and part in str(n)]


@cache
def is_near(test_file: str, file: str) -> bool:
    """True if tests are named after a source file, import it, or are those of its package."""
    test, source = Path(test_file), Path(file)
    module = f"{source.parent.name}.{source.stem}"
    return (
        test.name.startswith(f"test_{source.stem}")
        or test.parent.name == source.parent.name
        or module in (ROOT / test).read_text(encoding="utf-8")
    )


class Plugin:
    """Runs `tests` in their order (all if None), and records each result in `path`."""

    def __init__(self, path: Path, tests: list[str] | None = None):
        self.path, self.order = path, {name: at for at, name in enumerate(tests or ())}
        self.label("")

    def label(self, name: str) -> None:
        os.environ["MUTANTS_TEST"] = name

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        if self.order:
            chosen = [item for item in items if item.nodeid in self.order]
            items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.label(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.label("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a shared fixture executes belongs to every test of the file."""
        before = os.environ["MUTANTS_TEST"]
        if fixturedef.scope != "function":
            self.label("")
        try:
            return (yield)
        finally:
            self.label(before)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.record(report.nodeid, "failed", 0.0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.when == "call":
            self.record(report.nodeid, report.outcome, report.duration)

    def record(self, test: str, outcome: str, seconds: float) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([test, outcome, seconds]) + "\n")


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def run_tests(
    tree: Path, files: list[str], limit: float, tests: list[str] | None = None, *options: str
) -> tuple[str, list[tuple[str, str, float]]]:
    """Run pytest in a forked process: "passed", "failed" or "timeout", and the results of tests."""
    results = tree / "results.jsonl"
    results.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:  # a session of its own, so that a limit also ends processes that tests start
        os.setsid()
        with (tree / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree / "src")]
        folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        paths = [str(tree / "src"), *(str(ROOT / folder) for folder in folders)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["MUTANTS_HITS"] = str(tree / "hits.txt")
        shapes = [SHAPES] if importlib.util.find_spec("beartype") else []
        status = 1
        try:
            arguments = [*PYTEST, *shapes, f"--rootdir={tree}", *options, *files]
            status = int(pytest.main(arguments, plugins=[Plugin(results, tests)]))
        finally:
            os._exit(status)
    end, status = time.monotonic() + limit, None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else time.sleep(0.05)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    records = [tuple(json.loads(line)) for line in read_lines(results)]
    if status is None:
        return "timeout", records
    # 5: every test of a file is skipped or left out
    passed = os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, 5)
    return "passed" if passed else "failed", records


def copy_tree(folder: Path) -> Path:
    """A copy of what the tests need: large folders of the checkout stay out."""
    left_out = (".git", ".venv", "runs", "carry", "node_modules", "hits.txt", "_build", "shared")
    tree = Path(tempfile.mkdtemp(prefix="tree-", dir=folder))
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True, symlinks=True
    )
    return tree


# ---- Baseline -------------------------------------------------------------------------------


@dataclass
class Baseline:
    """Seconds of each test that passes without a mutant, and the tests that execute each block."""

    seconds: dict[str, float]
    tests: dict[str, set[str]]
    failed: list[str]

    def select(self, mutant: Mutant, limit: float) -> list[list[str]]:
        """Tests that execute the mutant's block: the near ones, then others, fast ones first."""
        tests = sorted(self.tests.get(mutant.block, ()), key=lambda name: self.seconds[name])
        near = [name for name in tests if is_near(name.split("::")[0], mutant.file)]
        far = [name for name in tests if name not in {*near}]
        groups, left = [], limit
        for group in (near, far):
            ends = list(itertools.accumulate(self.seconds[name] for name in group))
            groups.append([name for name, end in zip(group, ends, strict=True) if end <= left])
            left -= sum(self.seconds[name] for name in groups[-1])
        return [group for group in groups if group]


def measure_file(deadline: float, file: str) -> tuple[list[Any], list[str]]:
    hits = TREE / "hits.txt"
    hits.unlink(missing_ok=True)
    limit = min(150.0, deadline - time.monotonic())
    status, records = run_tests(TREE, [file], limit) if limit > 0 else ("timeout", [])
    if status == "timeout":
        records.append((f"{file} (in part: time limit)", "failed", limit))
    return records, read_lines(hits)


def measure(pool: Executor, files: list[str], deadline: float) -> Baseline:
    baseline = Baseline({}, {}, [])
    for future in as_completed([pool.submit(measure_file, deadline, file) for file in files]):
        records, hits = future.result()
        baseline.failed += [test for test, outcome, _ in records if outcome == "failed"]
        passed = {test: seconds for test, outcome, seconds in records if outcome == "passed"}
        baseline.seconds |= {t: s for t, s in passed.items() if t not in baseline.failed}
        for line in hits:
            test, _, block = line.partition("\t")
            names = [test] if test else passed  # while the file is imported: all of its tests
            found = {name for name in names if name in baseline.seconds}
            baseline.tests.setdefault(block, set()).update(found)
    return baseline


# ---- Verdicts -------------------------------------------------------------------------------

TREE = Path()  # each worker process has its own


def start_worker(folder: Path, with_probes: bool) -> None:
    global TREE
    TREE = copy_tree(folder)
    if with_probes:
        (TREE / "src" / "mutants_probe.py").write_text(PROBE)
        for source in [path for name in PACKAGES for path in package(name)]:
            file = str(source.relative_to(ROOT))
            (TREE / file).write_text(add_probes(source.read_text(encoding="utf-8"), file))


def run_mutant(
    mutant: Mutant, groups: list[list[str]], expected: list[float], deadline: float
) -> tuple[str, str]:
    """The status and the first test that fails."""
    path = TREE / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    try:
        for tests, seconds in zip(groups, expected, strict=True):
            files = sorted({name.split("::")[0] for name in tests})
            limit = min(30 + 3 * seconds, deadline - time.monotonic())
            if limit <= 0:
                return "unfinished", ""
            status, records = run_tests(TREE, files, limit, tests, "-x")
            if time.monotonic() >= deadline:
                return "unfinished", ""
            if status != "passed":
                failed = [test for test, outcome, _ in records if outcome == "failed"]
                return status, (failed or files)[0]
    finally:
        path.write_bytes(source)
    return "passed", "" if groups else "no test executes it"


def report(mutant: Mutant, status: str, test: str) -> None:
    verdicts = {
        "passed": "SURVIVED" + (f" ({test})" if test else ""),
        "failed": f"killed by {test}",
        "timeout": "killed by time",
        "unfinished": "not tested in time",
    }
    change = f"{mutant.text}  [{mutant.before} -> {mutant.after}]"
    print(f"{mutant.file}:{mutant.line}  {change}  {verdicts[status]}", flush=True)


def read_results(path: Path, digest: str) -> dict[str, tuple[str, str]]:
    """Status and test of the mutants of this code, by id."""
    records = [json.loads(line) for line in read_lines(path)]
    return {r["id"]: (r["status"], r["test"]) for r in records if r.get("code") == digest}


def not_equivalent(mutants: Iterable[Mutant]) -> list[Mutant]:
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    equivalent = {line.rpartition("  # ")[0] for line in lines}
    return [mutant for mutant in mutants if mutant.key not in equivalent]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600, help="end after these")
    parser.add_argument("--seconds", type=float, default=60, help="tests of one mutant, at most")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--tests", default="", help="files of tests whose path contains this")
    parser.add_argument("--retry", action="store_true", help="test survivors again")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    options = parser.parse_args()
    began = time.monotonic()
    deadline = began + 60 * options.minutes
    files = [path for name in PACKAGES for path in package(name) if options.only in str(path)]
    everything = [mutant for path in files for mutant in mutants_of(path)]
    sample = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    sample = not_equivalent(sample)
    code = b"".join(path.read_bytes() for path in sorted((ROOT / "src").rglob("*.py")))
    digest = hashlib.sha256(code).hexdigest()[:12]
    results = read_results(options.out, digest)
    again = ("passed",) if options.retry else ()
    todo = [m for m in sample if m.id not in results or results[m.id][0] in again]
    print(
        f"{len(everything)} mutants, {len(sample)} in the sample, {len(todo)} to test", flush=True
    )
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    os.environ |= VARIABLES
    importlib.import_module("torch")  # once, before processes are forked
    workers = partial(
        ProcessPoolExecutor,
        options.processes,
        multiprocessing.get_context("fork"),
        initializer=start_worker,
    )
    with workers(initargs=(folder, True)) as pool:
        baseline = measure(pool, test_files(options.tests), (began + deadline) / 2)
    for name in sorted(baseline.failed):
        print(f"fails without a mutant and is left out: {name}")
    seconds = sum(baseline.seconds.values())
    print(
        f"{len(baseline.seconds)} tests take {seconds:.0f} s; measured in "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with workers(initargs=(folder, False)) as pool:
        futures = {}
        for mutant in todo:
            groups = baseline.select(mutant, options.seconds)
            expected = [sum(map(baseline.seconds.__getitem__, group)) for group in groups]
            futures[pool.submit(run_mutant, mutant, groups, expected, deadline)] = mutant
        for future in as_completed(futures):
            mutant, (status, test) = futures[future], future.result()
            results[mutant.id] = (status, test)
            if status == "unfinished":
                continue
            report(mutant, status, test)
            record = {"id": mutant.id, "code": digest, "status": status, "test": test}
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    tested = [mutant for mutant in sample if results[mutant.id][0] != "unfinished"]
    survivors = [mutant for mutant in tested if results[mutant.id][0] == "passed"]
    print(f"\n{len(survivors)} survivors")
    for mutant in survivors:
        report(mutant, *results[mutant.id])
    summary = {
        "mutants": len(tested),
        "survived": len(survivors),
        "score": round(1 - len(survivors) / max(1, len(tested)), 4),
        "unfinished": len(sample) - len(tested),
        "left_out": len(baseline.failed),
        "tests": len(baseline.seconds),
        "seed": options.seed,
        "code": digest,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
