"""A copy of the package with one more file and one changed line, used from the command line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import manyheads

TINY = (
    *("data.train_pairs=200", "data.valid_pairs=10", "data.test_pairs=10"),
    *("tokens.vocab_size=400", "model.dim=16", "model.ffn_dim=32", "model.layers=1"),
    *("model.heads=2", "train.batch_tokens=300", "train.steps=3", "train.validate_every=3"),
    *("train.save_every=3", "decode.bleu_sentences=2"),
)


class Extended:
    """`file` with `source` is added to the package; `line` of `table` is replaced by `changed`."""

    def __init__(
        self, folder: Path, file: str, source: str, table: str, line: str, changed: str
    ) -> None:
        package = folder / "manyheads"
        shutil.copytree(
            Path(manyheads.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
        )
        assert not (package / file).exists()
        (package / file).write_text(source, encoding="utf-8")
        text = (package / table).read_text(encoding="utf-8")
        assert text.count(line) == 1, f"{table} has no such line"
        (package / table).write_text(text.replace(line, changed), encoding="utf-8")
        self.folder = folder

    def run(self, *arguments: str, stdin: str = "") -> str:
        """What `manyheads ARGUMENTS` prints, with the extended package."""
        result = subprocess.run(
            [sys.executable, "-m", "manyheads", *arguments],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            cwd=self.folder,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout
