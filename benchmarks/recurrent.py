"""The LSTM with attention beside the Transformer: as many parameters, as much time.

    python benchmarks/recurrent.py phrasebook --seconds 180 --out runs/recurrent
    python benchmarks/recurrent.py translation --seconds 900 --out runs/recurrent \
        data.folder=multi30k data.source=en data.target=de train.batch_tokens=4000

The recipe's model is the Transformer; the LSTM's width is that which comes nearest to its number
of parameters. Each has a learning rate of its own. Both are timed for a few steps first, after
some that are not (`--timed`: more on a GPU, where the first epoch records each shape of batch),
and then have as many steps as fit into the seconds; they are trained side by side, one thread
each, or one after the other with `--device cuda`. BLEU of the test split, also of its sentences
by their length in words. One JSON object and a picture, in the folder.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyheads.config import override_all
from manyheads.evaluate.scores import translation_scores
from manyheads.lab.figures.plots import curves
from manyheads.loading import load_torch_run
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.summary import summarize
from manyheads.tasks.translation import evaluate_translation

BUCKETS = 5


def width_like(recipe: str, settings: list[str]) -> int:
    """The width at which the LSTM has as many parameters as the recipe's model."""
    run = read_recipe(recipe, settings)
    vocabulary = run.tokens.vocab_size
    expected = summarize(override_all(run, [f"model.vocab_size={vocabulary}"]).model).parameters

    def apart(dim: int) -> int:
        other = [*settings, "model=rnn", f"model.dim={dim}", f"model.vocab_size={vocabulary}"]
        return abs(summarize(read_recipe(recipe, other).model).parameters - expected)

    return min(range(32, 1025, 4), key=apart)


def pace(arguments: list[str], warm: int, steps: int, device: str) -> float:
    """Seconds of a step, without what a training begins and ends with."""
    recipe, *settings = arguments
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(read_recipe(recipe, settings), Path(folder), torch.device(device))
        for step in range(warm):
            trainer.step(step)
        begun = _now(device)
        for step in range(warm, warm + steps):
            trainer.step(step)
        passed = _now(device) - begun
        trainer.close()
    return passed / steps


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def train(arguments: dict[str, list[str]], out: Path, device: str) -> dict[str, float]:
    """Seconds of each training; all at the same time on the CPU."""
    begun: dict[str, float] = {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    seconds: dict[str, float] = {}
    waiting = list(arguments)
    while waiting or running:
        while waiting and (device == "cpu" or not running):
            name = waiting.pop(0)
            command = [sys.executable, "-m", "manyheads", "train", *arguments[name]]
            command += ["--device", device, "--threads", "1", "--out", str(out / name)]
            begun[name], running[name] = time.monotonic(), subprocess.Popen(command)
        time.sleep(0.05)
        for name, process in list(running.items()):
            if process.poll() is not None:
                seconds[name] = time.monotonic() - begun[name]
                del running[name]
                if process.returncode:
                    sys.exit(f"{name} could not be trained")
    return seconds


def rows_of(folder: Path, split: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]


def by_length(sources: list[str], written: list[str], expected: list[str]) -> list[dict[str, Any]]:
    """BLEU of the shortest fifth of the sentences to the longest."""
    order = np.argsort([len(source.split()) for source in sources], kind="stable")
    buckets = []
    for part in np.array_split(order, BUCKETS):
        words = [len(sources[row].split()) for row in part]
        scores = translation_scores([written[row] for row in part], [expected[row] for row in part])
        buckets.append({"words": [min(words), max(words)], "bleu": scores["bleu"]})
    return buckets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    local = "train.learning_rate=2e-2 train.warmup_steps=60"
    parser.add_argument("--rnn", default=local, help="the LSTM's own settings")
    parser.add_argument("--timed", type=int, nargs=2, default=(10, 50), help="steps not, and timed")
    options = parser.parse_intermixed_args()
    inputs = [options.recipe, *options.settings]
    dim = width_like(options.recipe, options.settings)
    models = {
        "transformer": inputs,
        "rnn": [*inputs, "model=rnn", f"model.dim={dim}", *options.rnn.split()],
    }
    torch.set_num_threads(1)
    paces = {name: pace(local, *options.timed, options.device) for name, local in models.items()}
    steps = {name: int(options.seconds / pace) for name, pace in paces.items()}
    timed = {name: [*local, f"train.steps={steps[name]}"] for name, local in models.items()}
    seconds = train(timed, options.out, options.device)
    report: dict[str, Any] = {"command": " ".join(sys.argv), "seconds": options.seconds}
    lines = {}
    for name in models:
        opened = load_torch_run(options.out / name, options.device)
        done = evaluate_translation(opened.translator(), opened.run.data, "test")
        parts = by_length(done.corpus.sources, done.translations, done.corpus.targets)
        speeds = [row["tokens_per_second"] for row in rows_of(options.out / name, "train")]
        report[name] = {
            "parameters": summarize(opened.run.model).parameters,
            "steps": steps[name],
            "seconds": seconds[name],
            "tokens_per_second": float(np.median(speeds)),
            **{key: value for key, value in done.scores.items() if "by_head" not in key},
            "by_length": parts,
        }
        lines[name] = [(part["words"][1], part["bleu"]) for part in parts]
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    across = "words of the longest source of each fifth"
    path = options.out / "by_length.png"
    curves(lines, "BLEU by the length of the source", "BLEU", path, across)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
