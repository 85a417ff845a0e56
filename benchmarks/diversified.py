"""Data diversification: adds model translations of its training pairs to a parallel corpus.

    python benchmarks/diversified.py multi30k-prepared more --source en --target de \\
        --runs kept/literature-ours-en-de-1 kept/literature-ours-de-en-1

After Nguyen et al. (2020): a run from source to target translates the sources, one from target to
source translates the targets. The new folder has the original pairs, then the new pairs of each
run, without duplicates. All other files of the two languages are copied. Only training pairs are
translated, with the decoding settings of each run (beam).
"""

import argparse
import gzip
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyheads.data.files import stream_parallel
from manyheads.errors import UserError
from manyheads.fileio import replace_file
from manyheads.loading import load_torch_run
from manyheads.train.metrics import Bar
from translations import stems

Pair = tuple[str, str]


def told_again(pairs: list[Pair], written: list[str], forward: bool) -> list[Pair]:
    """Each pair with what a model has written for its other side; none where that is nothing."""
    return [
        (source, other) if forward else (other, target)
        for (source, target), other in zip(pairs, written, strict=True)
        if other.strip() and (source if forward else target).strip()
    ]


def direction(data: Any, folder: Path, source: str, target: str) -> bool:
    """Whether a run writes the target language; refuse one of other languages."""
    ends = (getattr(data, "source", "another text"), getattr(data, "target", "something else"))
    if ends not in ((source, target), (target, source)):
        raise UserError(
            f"{folder} translates {ends[0]} to {ends[1]}, which the corpus is not of: "
            f"give runs between {source} and {target}"
        )
    return bool(ends == (source, target))


def diversify(
    folder: Path, out: Path, source: str, target: str, runs: list[Path], device: str
) -> None:
    """Write the corpus of `folder` to `out`, its training pairs with what the runs make of them."""
    there = stems(folder, source, target)
    if "train" not in there:
        raise UserError(f"{folder} has no train.{source} and train.{target}: nothing to tell again")
    if out.exists():
        raise UserError(f"{out} is there already: choose another folder")
    ways = [direction(load_torch_run(path, "cpu").run.data, path, source, target) for path in runs]
    files = [folder / f"train.{end}" for end in (source, target)]
    first = [tuple(row) for _, row in stream_parallel(*files, skip_empty=True) if row is not None]
    sides: list[list[str]] = [[pair[side] for pair in first] for side in (0, 1)]
    pairs, seen = list(first), set(first)
    for path, forward in zip(runs, ways, strict=True):
        opened = load_torch_run(path, device)
        with Bar(f"translate by {path.name}", len(first)) as bar:
            written = opened.translator().translate_long(
                sides[0 if forward else 1],
                lambda done, bar=bar: bar.update(done, "sentences"),  # type: ignore[misc]
            )
        made = [pair for pair in told_again(first, written, forward) if pair not in seen]
        new = list(dict.fromkeys(made))
        pairs += new
        seen |= set(new)
        print(f"{path}: {len(new):,} new pairs", file=sys.stderr)
    out.mkdir(parents=True)
    for end, side in ((source, 0), (target, 1)):
        text = "".join(pair[side] + "\n" for pair in pairs)
        content = gzip.compress(text.encode("utf-8"), mtime=0)
        replace_file(out / f"train.{end}.gz", partial(_write, content))
        for stem in there:
            if stem != "train":
                name = f"{stem}.{end}"
                file = folder / name if (folder / name).is_file() else folder / f"{name}.gz"
                shutil.copy(file, out / file.name)
    print(f"{out}: {len(pairs):,} training pairs, {len(first):,} before", file=sys.stderr)


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    inputs = parser.parse_args(arguments)
    try:
        diversify(
            inputs.folder, inputs.out, inputs.source, inputs.target, inputs.runs, inputs.device
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
