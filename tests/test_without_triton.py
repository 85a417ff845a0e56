"""Without Triton (Windows, macOS) every module can be imported and a model trained."""

import subprocess
import sys
from pathlib import Path

from tests.test_cli import TINY

PROGRAM = """
import importlib, pkgutil, sys

sys.modules["triton"] = None  # importing it raises ImportError
import manyheads

for module in pkgutil.walk_packages(manyheads.__path__, "manyheads."):
    if not module.name.startswith("manyheads.kernels."):
        importlib.import_module(module.name)
run = manyheads.train("phrasebook", sys.argv[2:], sys.argv[1], "cpu")
assert len(run.translate(["The dog sees the tree."])) == 1
print(sorted(name for name in sys.modules if name.startswith("triton.")))
"""


def test_nothing_imports_triton(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
