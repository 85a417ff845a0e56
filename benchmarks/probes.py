"""The cost of probes during a training: seconds of a probe and of a step, and bytes.

    python benchmarks/probes.py phrasebook
    python benchmarks/probes.py images data.folder=mnist

On one CPU core; prints one JSON object.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from manyheads.recipes import read_recipe
from manyheads.run import make_trainer

STEPS, PROBES = 15, 4


def seconds(act: Callable[[int], Any], times: int) -> float:
    taken = []
    for number in range(times):
        begun = time.process_time()
        act(number)
        taken.append(time.process_time() - begun)
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        run = read_recipe(options.recipe, options.settings)
        trainer = make_trainer(run, folder, torch.device("cpu"))
        probe: Any = trainer.probe
        probe.resume(0)
        fixed = sum(path.stat().st_size for path in probe.folder.iterdir())
        per_probe = seconds(lambda step: probe.record(trainer.saved_model, step), PROBES)
        grown = sum(path.stat().st_size for path in probe.folder.iterdir()) - fixed
        trainer.model.train()
        per_step = seconds(trainer.step, STEPS)
        steps, probes = trainer.train.steps, len(probe.steps)
    result = {
        "recipe": options.recipe,
        "steps": steps,
        "probes": probes,
        "seconds_per_step": round(per_step, 4),
        "seconds_per_probe": round(per_probe, 4),
        "share": round(probes * per_probe / (steps * per_step), 4),
        "bytes": round(fixed + grown / PROBES * probes),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
