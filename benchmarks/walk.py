"""Follow a sentence through the program: which files run from text to BLEU, and in which order.

    python benchmarks/walk.py           train a few steps, evaluate and translate
    python benchmarks/walk.py --list    also every file with its lines and functions

The built-in corpus is left out; the command line and the settings are counted. The last line is
one JSON object.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from manyheads import cli

ROOT = Path(cli.__file__).parent
OPTIMIZED = 1  # flag of code that belongs to a function, not to a class body
SMALL = (
    *("data.train_pairs=300", "data.valid_pairs=20", "data.test_pairs=20"),
    *("tokens.vocab_size=600", "model.dim=32", "model.ffn_dim=64", "model.layers=2"),
    *("model.heads=2", "train.batch_tokens=400", "train.steps=4", "train.warmup_steps=2"),
    *("train.validate_every=4", "train.save_every=4", "decode.bleu_sentences=4"),
)


class Walk:
    """The functions of the package that ran, by file, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.functions: dict[str, set[str]] = defaultdict(set)

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_flags & OPTIMIZED or is_importing(frame):
            return
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and "phrasebook" not in path.parts:
            name = str(path.relative_to(ROOT))
            self.files.append(name)
            self.functions[name].add(code.co_name)

    def run(self, *arguments: str, stdin: str = "") -> dict[str, int]:
        """Run one command; gives its files, their lines and how often the file changes."""
        begin, streams = len(self.files), (sys.stdin, sys.stdout)
        sys.argv = ["manyheads", *arguments]
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
        sys.stdout = io.TextIOWrapper(io.BytesIO())
        sys.setprofile(self.profile)
        threading.setprofile(self.profile)
        try:
            cli.main()
        except SystemExit as ending:
            if ending.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.stdin, sys.stdout = streams
        visited = self.files[begin:]
        switches = sum(a != b for a, b in pairwise(visited))
        return {**size(set(visited)), "switches": switches}


def is_importing(frame: FrameType | None) -> bool:
    """True for a call made while a module of the package is imported."""
    while frame is not None:
        in_module = frame.f_code.co_name == "<module>"
        if in_module and Path(frame.f_code.co_filename).is_relative_to(ROOT):
            return True
        frame = frame.f_back
    return False


def lines_of(name: str) -> int:
    return len((ROOT / name).read_text(encoding="utf-8").splitlines())


def size(names: set[str]) -> dict[str, int]:
    return {"files": len(names), "lines": sum(map(lines_of, names))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name every file and its functions")
    listing = parser.parse_args().list
    walk, results = Walk(), {}
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        train = ("train", "phrasebook", *SMALL, "--threads", "1", "--out", run)
        for title, arguments, stdin in (
            ("train", train, ""),
            ("evaluate", ("evaluate", run, "--json"), ""),
            ("translate", ("translate", run, "--beam", "4"), "The dog sees the tree.\n"),
        ):
            results[title] = walk.run(*arguments, stdin=stdin)
            print(title, results[title], flush=True)
    results["all"] = size(set(walk.files))
    if listing:
        for name in sorted(walk.functions):
            functions = ", ".join(sorted(walk.functions[name])[:12])
            print(f"  {name:<36} {lines_of(name):>5}  {functions}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
