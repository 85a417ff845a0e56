"""Position schemes on Bach's chorales: the same model, the same budget, each scheme and seed a run.

    python benchmarks/chorales.py jsb_chorales --seeds 1,2,3 --device cuda > chorales.jsonl
    python benchmarks/chorales.py --table chorales.jsonl

A token is one voice at one sixteenth note; the figure is the mean −log P in nats over all tokens in
a split. Each chorale is scored from its beginning, without its end token (docs/music.md).
The weights are those of the best validation loss. One JSON object a line.
"""

import argparse
import gc
import json
import shlex
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from manyheads.loading import load_torch_run
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.summary import summarize

SCHEMES = {
    "none": "model.position=none",
    "sinusoidal": "model.position=sinusoidal model.embed.scale=sqrt-dim",  # or it drowns all else
    "learned": "model.position=learned",
    "rotary": "model.position=rotary",
    "shaw": "model.position=shaw model.attention=dense",
    "relative": "model.position=relative",
}
SHOWN = ("valid_nll", "test_nll")


def measure(scheme: str, seed: int, folder: str, device: str, more: list[str]) -> dict[str, Any]:
    settings = [f"data.folder={folder}", *SCHEMES[scheme].split(), *more, f"seed={seed}"]
    run = read_recipe("jsb-chorales", settings)
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.monotonic()
        make_trainer(run, Path(scratch), torch.device(device)).run()
        row = {"scheme": scheme, "seed": seed, "seconds": time.monotonic() - begun}
        opened = load_torch_run(Path(scratch), device)
        for split in ("valid", "test"):
            row[f"{split}_nll"] = opened.evaluate(opened.run.data, split)["nll"]
        row["parameters"] = summarize(opened.run.model).parameters
    return row | {"command": shlex.join(["manyheads", "train", "jsb-chorales", *settings])}


def table(path: Path) -> None:
    """Mean ± standard deviation over the seeds, and each seed's own test figure."""
    by_scheme = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        by_scheme[row["scheme"]].append(row)
    print("| scheme | parameters | valid | test | test by seed |\n|---|---|---|---|---|")
    for scheme, rows in by_scheme.items():
        cells = []
        for key in SHOWN:
            values = [row[key] for row in rows]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        each = " ".join(f"{row['test_nll']:.3f}" for row in sorted(rows, key=lambda r: r["seed"]))
        size = f"{rows[0]['parameters'] / 1e6:.2f}M"
        print(f"| {scheme} | {size} | {' | '.join(cells)} | {each} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("settings", nargs="*", help="settings for all schemes, a.b=c")
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="names between semicolons")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", type=Path)
    inputs = parser.parse_intermixed_args()
    if inputs.table is not None:
        table(inputs.table)
        return
    if inputs.folder is None:
        parser.error("a folder with the chorales is needed")
    torch.set_num_threads(1)
    for seed in inputs.seeds.split(","):
        for scheme in inputs.schemes.split(";"):
            row = measure(scheme, int(seed), inputs.folder, inputs.device, inputs.settings)
            print(json.dumps(row), flush=True)
            gc.collect()  # a training's recordings, before the next one begins


if __name__ == "__main__":
    main()
