"""Position schemes on Bach's chorales: the same model, the same budget, each scheme and seed a run.

    python benchmarks/chorales.py jsb_chorales --seeds 1,2,3 --jobs 6 --device cuda > chorales.jsonl
    python benchmarks/chorales.py --table chorales.jsonl

A token is one voice at one sixteenth note; the figure is −log P in nats, the mean over all tokens
of all pieces of a split, the end of a piece included, each piece read from its beginning. The
weights are those of the best validation loss. One JSON object a line.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCHEMES = {
    "none": "model.position=none",
    "sinusoidal": "model.position=sinusoidal model.embed.scale=sqrt-dim",  # or it drowns all else
    "learned": "model.position=learned",
    "rotary": "model.position=rotary",
    "shaw": "model.position=shaw model.core=dense",
    "relative": "model.position=relative",
    "relative, voice and time": "model.position=relative model.position.period=4 "
    "model.position.first=1",
}
SHOWN = ("valid_nll", "test_nll")


def measure(scheme: str, seed: int, folder: str, device: str, more: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        run = str(Path(scratch) / "run")
        settings = [f"data.folder={folder}", *SCHEMES[scheme].split(), *more, f"seed={seed}"]
        command = ["train", "jsb-chorales", *settings]
        begun = time.monotonic()
        _manyheads(*command, "--out", run, "--device", device, "--threads", "1")
        row = {"scheme": scheme, "seed": seed, "seconds": time.monotonic() - begun}
        for split in ("valid", "test"):
            found = _manyheads("evaluate", run, "--split", split, "--json", "--device", device)
            row[f"{split}_nll"] = json.loads(found)["nll"]
        row["parameters"] = json.loads(_manyheads("info", run, "--json"))["parameters"]
    return row | {"command": shlex.join(["manyheads", *command])}


def _manyheads(*arguments: str) -> str:
    command = [sys.executable, "-m", "manyheads", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(arguments)}: {done.stderr[-500:]}")
    return done.stdout


def table(path: Path) -> None:
    """Mean ± standard deviation over the seeds, and each seed's own test figure."""
    found = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found[row["scheme"]].append(row)
    print("| scheme | parameters | valid | test | test by seed |\n|---|---|---|---|---|")
    for scheme, rows in found.items():
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
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", type=Path)
    given = parser.parse_intermixed_args()
    if given.table is not None:
        table(given.table)
        return
    if given.folder is None:
        parser.error("a folder with the chorales is needed")
    with ThreadPoolExecutor(given.jobs) as pool:
        waiting = [
            pool.submit(measure, scheme, int(seed), given.folder, given.device, given.settings)
            for seed in given.seeds.split(",")
            for scheme in given.schemes.split(";")
        ]
        for one in waiting:
            print(json.dumps(one.result()), flush=True)


if __name__ == "__main__":
    main()
