"""The cost of a run in the tables of `tables.py`, and one run of a translation system."""

import json
import shlex
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyheads.baselines.elmo import ElmoConfig
from manyheads.loading import load_torch_run
from manyheads.nn.experts import ExpertFeedForward
from manyheads.presets import ModelConfig
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer
from manyheads.summary import BACKWARD, summarize
from manyheads.tasks.translation import evaluate_translation
from manyheads.train.loop import Trainer

Row = dict[str, Any]

PAIRS = """data.source=en data.target=de train.batch_tokens=8000 train.warmup_ratio=0.1
    train.save_every=100000 train.compile=no decode.bleu_sentences=0 model.max_length=256
    model.dropout=0.3"""
# The best of three rates each, by the validation loss of short runs (docs/tables.md).
SYSTEMS = {
    "transformer": "train.learning_rate=5e-3",
    "rnn": "train.learning_rate=5e-3 model=rnn model.dim=168",
    "gnmt": "train.learning_rate=1e-2 model=gnmt model.dim=130",
    "convs2s": "train.learning_rate=1e-2 model=convs2s model.dim=128 model.layers=5",
    "bytenet": "train.learning_rate=1e-2 model=bytenet model.dim=164 model.layers=10",
    "moe": "train.learning_rate=5e-3 model.feedforward=experts model.feedforward.experts=8",
}


@dataclass(frozen=True)
class Asked:
    """The command-line arguments that all runs share."""

    folder: str
    device: str
    steps: int
    more: list[str]
    text: str = ""
    keep: Path = Path()


def fitted(trainer: Trainer) -> Row:
    """Train to the end; how long it took, and how fast a step was."""
    try:
        begun = time.monotonic()
        trainer.run()
        seconds = time.monotonic() - begun
    finally:
        trainer.close()
    lines = map(json.loads, (trainer.folder / "metrics.jsonl").read_text("utf-8").splitlines())
    speeds = [row["tokens_per_second"] for row in lines if row["split"] == "train"]
    return {
        "steps": trainer.train.steps,
        "seconds": seconds,
        "tokens_per_second": statistics.median(speeds),
        "valid_loss": trainer.progress.best,
    }


def sizes(config: ModelConfig) -> Row:
    """All parameters, and those that a token meets: of experts, its own."""
    with torch.device("meta"):
        model = config.build()
    every, idle = sum(weight.numel() for weight in model.parameters()), 0
    for part in model.modules():
        if isinstance(part, ExpertFeedForward):
            of_all = [*part.inner.parameters(), *part.outer.parameters()]
            item = sum(weight.numel() for weight in of_all) // part.config.experts
            idle += (part.config.experts - part.config.top) * item
    return {"parameters": every, "met": every - idle}


def lengths_seen(order: Any, steps: int, sides: dict[str, Any]) -> dict[str, Any]:
    """Of each kind of token, the lengths of all texts that the steps have read."""
    rows = np.concatenate([order.rows(step) for step in range(steps)])
    return {kind: side.lengths[rows].astype(np.float64) for kind, side in sides.items()}


def training_flops(config: ModelConfig, texts: dict[str, Any]) -> float:
    """Forward and backward over all tokens of these texts, whose lengths are given by kind."""
    every = np.concatenate(list(texts.values()))
    length = max(1, round((every**2).sum() / every.sum()))
    counted = summarize(config, length)
    forward = counted.forward_flops
    flops = {kind: (1 + BACKWARD) * item for kind, item in forward.items()}
    if isinstance(config, ElmoConfig) and config.frozen:
        with torch.device("meta"):
            reader = config.build().head.reader
        top = 2 * sum(weight.numel() for weight in reader.parameters() if weight.ndim == 2)
        flops["token"] = forward["token"] + BACKWARD * top
    # ByteNet has more places than a source has tokens.
    places = {kind: counted.tokens[kind] / length for kind in texts}
    return sum(float(text.sum()) * places[kind] * flops[kind] for kind, text in texts.items())


def translate(requested: Asked, system: str, seed: int, rate: str = "") -> Row:
    """Train a system and score its translations; with a rate, only its validation loss."""
    settings = [*PAIRS.split(), *SYSTEMS[system].split(), f"data.folder={requested.folder}"]
    settings += [
        f"train.steps={requested.steps}",
        f"train.validate_every={max(1, requested.steps // 10)}",
    ]
    settings += [
        *([f"train.learning_rate={rate}"] if rate else []),
        *requested.more,
        f"seed={seed}",
    ]
    run = read_recipe("translation", settings)
    named = {"table": "bleu", "system": system, "seed": seed}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(run, Path(scratch), torch.device(requested.device))
        cost = fitted(trainer)
        if rate:
            return {**named, "table": "rates", "rate": rate, **cost}
        task: Any = trainer.task
        sides = {"source": task.data.sources, "target": task.data.targets}
        texts = lengths_seen(task.order, trainer.train.steps, sides)
        opened = load_torch_run(Path(scratch), requested.device)
        data: Any = run.data
        scores = evaluate_translation(opened.translator(), data, "test").scores
        flops = training_flops(opened.run.model, texts)
    reported = {key: scores[key] for key in ("bleu", "chrf", "loss", "signature")}
    command = shlex.join(["manyheads", "train", "translation", *settings])
    return {
        **named,
        **sizes(opened.run.model),
        "flops": flops,
        **cost,
        **reported,
        "command": command,
    }
