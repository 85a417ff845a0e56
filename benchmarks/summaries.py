"""Five systems that write summaries, with as many parameters and trained on as many tokens.

    python benchmarks/summaries.py dialogsum --seeds 1 --device cuda > summaries.jsonl
    python benchmarks/summaries.py --table summaries.jsonl

The systems of the table of Liu et al. (2018): an LSTM with attention (rnn), an encoder–decoder
(ed), a decoder that reads and writes one sequence (d), that with memory-compressed attention
(dmca), and that with a mixture of experts too (moe, which has more parameters, of which a token
meets as many as in dmca). The folder is one that the recipe `summaries` reads. One JSON object a
line: the scores of the test split, the parameters, the best validation loss, the seconds.
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
from pathlib import Path
from typing import Any

TRAIN = """train.batch_tokens=16000 train.steps=1200 train.warmup_steps=300 train.learning_rate=1e-3
    train.validate_every=300 train.save_every=1200 decode.bleu_sentences=0"""
SIZES = """model.dim=256 model.heads=4 model.ffn_dim=1024 model.max_length=512 model.dropout=0.2
    model.embed.scale=sqrt-dim"""
DECODER_ONLY = f"model=decoder-only-seq2seq model.layers=9 {SIZES}"
DMCA = f"{DECODER_ONLY} model.attention=memory-compressed model.attention.size=128"
SYSTEMS = {
    "rnn": "model=rnn model.dim=416 model.max_length=512 model.dropout=0.3",
    "ed": f"model.layers=4 {SIZES}",
    "d": DECODER_ONLY,
    "dmca": DMCA,
    "moe": f"{DMCA} model.feedforward=experts model.feedforward.experts=4",
}
SHOWN = ("rouge1", "rouge2", "rougeL", "rougeLsum", "loss")


def measure(system: str, seed: int, folder: str, device: str, more: list[str]) -> dict[str, Any]:
    """Train a system, then score it on the test split."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / system
        settings = [f"data.folder={folder}", *shlex.split(TRAIN), *shlex.split(SYSTEMS[system])]
        command = ["train", "summaries", *settings, *more, f"seed={seed}"]
        begun = time.monotonic()
        _manyheads(*command, "--out", str(run), "--device", device)
        seconds = time.monotonic() - begun
        scores = _manyheads("evaluate", str(run), "--split", "test", "--json", "--device", device)
        parameters = json.loads(_manyheads("info", str(run), "--json"))["parameters"]
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        valid = min(row["loss"] for row in rows if row["split"] == "valid")
    named = {"system": system, "seed": seed, "parameters": parameters, "seconds": seconds}
    reported = {"valid_loss": valid, "command": shlex.join(["manyheads", *command])}
    return {**named, **reported, **json.loads(scores)}


def _manyheads(*arguments: str) -> str:
    command = [sys.executable, "-m", "manyheads", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def table(path: Path) -> None:
    """Mean ± standard deviation over the seeds, and each seed's own where there are several."""
    by_system = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        by_system[row["system"]].append(row)
    print(f"| system | parameters | {' | '.join(SHOWN)} |")
    print("|---" * (len(SHOWN) + 2) + "|")
    for system in SYSTEMS:
        if system in by_system:
            rows = sorted(by_system[system], key=lambda row: row["seed"])
            cells = [_cell([row[key] for row in rows], key != "loss") for key in SHOWN]
            print(f"| {system} | {rows[0]['parameters'] / 1e6:.1f}M | {' | '.join(cells)} |")


def _cell(values: list[float], percent: bool) -> str:
    shown = [f"{100 * value:.1f}" if percent else f"{value:.3f}" for value in values]
    if len(values) == 1:
        return shown[0]
    mean, spread = statistics.mean(values), statistics.stdev(values)
    if percent:
        return f"{100 * mean:.1f} ± {100 * spread:.1f} ({' '.join(shown)})"
    return f"{mean:.3f} ± {spread:.3f} ({' '.join(shown)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("settings", nargs="*", help="settings for all systems, a.b=c")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", type=Path)
    options = parser.parse_intermixed_args()
    if options.table is not None:
        table(options.table)
        return
    if options.folder is None:
        parser.error("a folder with documents and their summaries is needed")
    for seed in map(int, options.seeds.split(",")):
        for system in options.systems.split(","):
            row = measure(system, seed, options.folder, options.device, options.settings)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
