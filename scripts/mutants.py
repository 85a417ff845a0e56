"""Mutation testing: change the code in small ways and see whether a test fails.

    make mutants                                                 200 mutants with seed 1
    python scripts/mutants.py --count 20 --seed 2 --processes 1  fewer, others, in one process
    python scripts/mutants.py --processes 14 --minutes 9         end after 9 minutes
    python scripts/mutants.py --only nn/masks.py                 mutants of one file
    python scripts/mutants.py --retry                            test survivors again

A mutant is one change inside a function of `PACKAGES`: an operator, a constant, a condition, an
argument, a returned value or a statement. Each is made in its own temporary copy of the tree. The
tests that belong to its file run until the first failure: first those named after the file, then
those that import it, those of its package, and the golden record, in each group the fast files
first. Before that, the same tests run without a mutant: those that fail there, for example because
a package is not installed, are left out. Their time sets the time limit of a mutant, and one that
exceeds it counts as killed.

Results are kept in runs/mutants.jsonl; a second call with the same code continues there. Mutants
that compute the same are listed in scripts/mutants-equivalent.txt with the reason, and do not
count. The last line is a JSON object. 200 mutants take about 2 hours on 2 cores.
"""

import argparse
import ast
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parent.parent
PACKAGES = ("nn", "decode", "train", "data", "evaluate")
# These need a GPU.
EXCLUDED = ("train/cuda_graphs.py", "train/prefetch.py", "decode/cuda_graphs.py")
RESULTS = ROOT / "runs" / "mutants.jsonl"
EQUIVALENT = ROOT / "scripts" / "mutants-equivalent.txt"
PYTEST = (
    *("-m", "pytest", "-q", "--no-header", "-rfE", "--tb=no", "-p", "no:cacheprovider"),
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


def sites(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(node, replacement) inside functions; not in annotations, defaults, messages or asserts."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.AnnAssign) and inside:
        return
    if inside:
        if isinstance(node, ast.If | ast.While):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        yield from ((node, change) for change in changes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in node.body:
            yield from sites(statement, True)
        return
    for child in ast.iter_child_nodes(node):
        yield from sites(child, inside)


def mutants_of(path: Path) -> list[Mutant]:
    source, name = path.read_bytes(), str(path.relative_to(ROOT))
    lines = source.splitlines(keepends=True)
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    mutants = []
    for node, change in sites(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        code = ast.unparse(ast.fix_missing_locations(change))
        before = " ".join(source[start:end].decode().split())
        after = f"({code})" if isinstance(node, ast.expr) else code
        line = lines[node.lineno - 1].decode().strip()
        mutants.append(Mutant(name, node.lineno, start, end, line, before, after))
    return mutants


def imported(path: Path) -> set[str]:
    """The modules that a file imports, by their full names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def selections() -> dict[str, list[list[str]]]:
    """For each source file its tests in four groups: by name, by import, by package, golden."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    imports = {path: imported(path) for path in files}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    for _ in range(3):  # helpers of tests, and their helpers
        for path, names in imports.items():
            helpers = [modules[name] for name in names & modules.keys()]
            imports[path] = names.union(*(imports[helper] for helper in helpers))
    tests = [path for path in files if path.name.startswith("test_") and "_gpu" not in path.name]
    selected = {}
    for source in sorted(path for name in PACKAGES for path in package(name)):
        module = ".".join(source.relative_to(ROOT / "src").with_suffix("").parts)
        home = ROOT / "tests" / source.parent.name
        groups = [
            [path for path in tests if path.name.startswith(f"test_{source.stem}")],
            [path for path in tests if module in imports[path]],
            [path for path in tests if path.parent == home],
            [path for path in tests if path.parent.name == "golden"],
        ]
        names = [[str(path.relative_to(ROOT)) for path in group] for group in groups]
        selected[str(source.relative_to(ROOT))] = names
    return selected


def package(name: str) -> list[Path]:
    folder = ROOT / "src" / "manyheads" / name
    return [path for path in folder.glob("*.py") if not str(path).endswith(EXCLUDED)]


def copy_tree(source: Path) -> Path:
    target = Path(tempfile.mkdtemp(prefix="mutants-")) / "tree"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
    return target


def run_tests(tree: Path, tests: list[str], limit: float, *options: str) -> tuple[str, list[str]]:
    """ "passed", "failed" or "timeout", and the tests (or files, at import) that fail."""
    paths = [tree / "src", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {
        "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # as in CI: kernels run in Triton's interpreter
    }
    shapes = [SHAPES] if importlib.util.find_spec("beartype") else []
    # A group of its own, so that a limit also ends processes that tests have started.
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *shapes, *options, *tests],
        cwd=tree,
        env=os.environ | variables,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=max(0.0, limit))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "timeout", tests
    if process.returncode in (0, 5):  # 5: every test of a file is skipped or left out
        return "passed", []
    failures = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    return "failed", failures or tests


@dataclass
class Baseline:
    """Seconds of each test file without a mutant, and the tests that fail there."""

    seconds: dict[str, float]
    failures: list[str]

    @classmethod
    def measure(cls, tree: Path, tests: list[str], pool: Executor, deadline: float) -> Self:
        self = cls({}, [])

        def measure(test: str) -> None:
            start = time.monotonic()
            _, failures = run_tests(tree, [test], min(300, deadline - start))
            self.failures.extend(failures)
            if test not in failures:
                self.seconds[test] = time.monotonic() - start

        list(pool.map(measure, tests))
        return self


def run_mutant(
    mutant: Mutant, tree: Path, groups: list[list[str]], baseline: Baseline, deadline: float
) -> tuple[str, str]:
    """The status, and the first test that fails."""
    path = tree / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    left_out = [f"--deselect={name}" for name in baseline.failures if "::" in name]
    done: set[str] = set()
    for group in groups:
        tests = sorted({*group} & baseline.seconds.keys() - done, key=baseline.seconds.__getitem__)
        if not tests:
            continue
        limit = 30 + 3 * sum(baseline.seconds[name] for name in tests)
        limit = min(limit, deadline - time.monotonic())
        status, failures = run_tests(tree, tests, limit, "-x", *left_out)
        if time.monotonic() >= deadline:
            return "unfinished", ""
        if status != "passed":
            return status, failures[0]
        done.update(tests)
    return "passed", ""


def report(mutant: Mutant, status: str, test: str) -> None:
    verdicts = {
        "passed": "SURVIVED",
        "failed": f"killed by {test}",
        "timeout": "killed by time",
        "unfinished": "not tested in time",
    }
    change = f"{mutant.text}  [{mutant.before} -> {mutant.after}]"
    print(f"{mutant.file}:{mutant.line}  {change}  {verdicts[status]}", flush=True)


def read_results(digest: str) -> dict[str, tuple[str, str]]:
    """Status and test of the mutants of this code, by key and start."""
    records = [json.loads(line) for line in RESULTS.open()] if RESULTS.exists() else []
    return {r["id"]: (r["status"], r["test"]) for r in records if r["code"] == digest}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600, help="start no mutant after these")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--retry", action="store_true", help="test survivors again")
    options = parser.parse_args()
    began, selected = time.monotonic(), selections()
    deadline = began + 60 * options.minutes
    everything = [m for f in selected if options.only in f for m in mutants_of(ROOT / f)]
    sample = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    equivalent = {line.rpartition("  # ")[0] for line in lines}
    sample = [mutant for mutant in sample if mutant.key not in equivalent]
    code = b"".join(path.read_bytes() for path in sorted((ROOT / "src").rglob("*.py")))
    digest = hashlib.sha256(code).hexdigest()[:12]
    results = read_results(digest)
    again = ("passed",) if options.retry else ()
    todo = [m for m in sample if m.id not in results or results[m.id][0] in again]
    print(
        f"{len(everything)} mutants, {len(sample)} in the sample, {len(todo)} to test", flush=True
    )
    needed = sorted({test for m in todo for group in selected[m.file] for test in group})
    pool, tree = ThreadPoolExecutor(options.processes), copy_tree(ROOT)
    baseline = Baseline.measure(tree, needed, pool, deadline)
    for name in sorted(baseline.failures):
        print(f"fails without a mutant and is left out: {name}")
    if todo and not baseline.seconds:
        sys.exit("No test passes without a mutant.")
    print(
        f"{len(baseline.seconds)} files of tests after {time.monotonic() - began:.0f} s", flush=True
    )
    RESULTS.parent.mkdir(exist_ok=True)

    def test(mutant: Mutant) -> None:
        if time.monotonic() >= deadline:
            results[mutant.id] = ("unfinished", "")
            return
        copy = copy_tree(tree)
        status, failure = run_mutant(mutant, copy, selected[mutant.file], baseline, deadline)
        shutil.rmtree(copy.parent, ignore_errors=True)
        results[mutant.id] = (status, failure)
        report(mutant, status, failure)
        record = {"id": mutant.id, "code": digest, "status": status, "test": failure}
        if status != "unfinished":
            with RESULTS.open("a") as file:
                file.write(json.dumps(record) + "\n")

    list(pool.map(test, todo))
    shutil.rmtree(tree.parent, ignore_errors=True)
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
        "left_out": len(baseline.failures),
        "seed": options.seed,
        "code": digest,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
