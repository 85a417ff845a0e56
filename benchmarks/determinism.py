"""Which training runs are the same bit by bit, and what `train.deterministic=true` costs.

    python benchmarks/determinism.py --device cuda                    # 4 models, about 8 minutes
    python benchmarks/determinism.py --device cpu --steps 12 --tiny   # the program itself

For each model and each value of the setting, three trainings in processes of their own: two
complete ones, and one that gets SIGKILL after half of its steps and is started again. Compared are
all weights and Adam moments at the end. One JSON object a line:

    repeated            True if both complete runs have the same bits
    resumed             True if the killed run has the same bits as the first
    different           tensors that differ between the first run and the resumed one, if any do
    tokens_per_second   median over the second half of the first run's lines of metrics.jsonl
    ratio               of that speed to the speed with the setting off
"""

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from manyheads.phrasebook import sentences

LINES = 10  # of metrics.jsonl
SIZES = ("model.dim=256", "model.heads=4", "model.layers=4", "model.dropout=0.1")
TINY = ("model.dim=16", "model.heads=2", "model.layers=1", "train.batch_tokens=512")
# Long sequences use PyTorch's attention, short ones our kernel; documents and padding have a mask.
MODELS = {
    "gpt": ("language", "model.max_length=256"),
    "gpt, documents": ("language", "model.max_length=256", "objective.packing=documents"),
    "bert": ("bert-mini", "model.max_length=256"),
    "translator": ("phrasebook", "decode.bleu_sentences=0"),
}


def write_documents(path: Path) -> None:
    """Documents of eight sentences of the phrasebook."""
    lines = [pair.source for pair in sentences("en-de", "train", 20_000)]
    documents = ["\n".join(lines[at : at + 8]) for at in range(0, len(lines), 8)]
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def command(name: str, texts: Path, out: Path, settings: list[str], device: str) -> list[str]:
    recipe, *overrides = MODELS[name]
    data = [] if recipe == "phrasebook" else [f"data.folder={texts}", "tokens.vocab_size=2000"]
    train = [sys.executable, "-m", "manyheads", "train", recipe, *data, *overrides, *settings]
    return [*train, "--out", str(out), "--device", device]


def run(line: list[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])


def kill_at(step: int, line: list[str], out: Path) -> None:
    """Start a run and kill it once metrics.jsonl has this step."""
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and last_step(out) < step:
        time.sleep(0.002)
    process.kill()
    process.wait()
    if process.returncode != -signal.SIGKILL:
        sys.exit(f"{out} ended before step {step} was seen: raise --steps")


def records(out: Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if line.endswith("}") and (record := json.loads(line))]


def last_step(out: Path) -> float:
    return max((record["step"] for record in records(out)), default=0)


def tensors(out: Path) -> dict[str, Tensor]:
    """All weights and moments of a run."""
    files = [out / "model.safetensors", out / "state/last.safetensors"]
    return {f"{file.name} {key}": value for file in files for key, value in load_file(file).items()}


def differing(first: Path, second: Path) -> list[str]:
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def tokens_per_second(out: Path) -> float:
    rates = [r["tokens_per_second"] for r in records(out) if "tokens_per_second" in r]
    return statistics.median(rates[len(rates) // 2 :])


def measured(
    name: str, texts: Path, folder: Path, settings: list[str], steps: int, device: str
) -> dict[str, Any]:
    """The figures of one model with one value of the setting."""
    outs = [folder / kind for kind in ("first", "second", "killed")]
    lines = [command(name, texts, out, settings, device) for out in outs]
    run(lines[0])
    run(lines[1])
    kill_at(steps // 2, lines[2], outs[2])
    run(lines[2])
    different = differing(outs[0], outs[2])
    return {
        "repeated": not differing(outs[0], outs[1]),
        "resumed": not different,
        "different": len(different),
        "tokens_per_second": round(tokens_per_second(outs[0])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tiny", action="store_true", help="small models: the program itself")
    parser.add_argument("--only", choices=MODELS, action="append")
    options = parser.parse_args()
    steps = options.steps
    cadence = [f"train.{name}_every={max(1, steps // LINES)}" for name in ("log", "save")]
    shared = [*(TINY if options.tiny else SIZES), f"train.steps={steps}", "train.epochs=none"]
    shared += [*cadence, f"train.validate_every={steps}", "train.warmup_steps=10"]
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    for name in options.only or MODELS:
        speed = 0.0
        for setting in ("false", "true"):
            with tempfile.TemporaryDirectory() as place:
                texts = Path(place, "texts")
                texts.mkdir()
                write_documents(texts / "train.txt")
                settings = [*shared, f"train.deterministic={setting}"]
                row = measured(name, texts, Path(place), settings, steps, options.device)
            speed = speed or row["tokens_per_second"]
            row = {"model": name, "deterministic": setting == "true", "steps": steps, **row}
            row |= {"ratio": round(row["tokens_per_second"] / speed, 3)}
            row |= {"machine": machine, "torch": torch.__version__}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
