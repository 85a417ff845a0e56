"""The cost of a training before it starts: size, steps, measured time, memory."""

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyheads.run import Run, make_trainer
from manyheads.summary import count_parameters, human_bytes, summarize
from manyheads.train.loop import Trainer

MEASURED_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """The cost of a run: its training time, measured over a few steps, and a table of the rest."""

    run: Run
    seconds: float
    rows: dict[str, str]
    notes: list[str]  # remarks on the data and the settings, as training reports them

    def text(self) -> str:
        return "".join(f"{name:<15}  {value}\n" for name, value in self.rows.items())

    def seconds_of(self, run: Run) -> float:
        """The training time of a run like this one, in proportion to parameters and tokens."""
        return self.seconds * _work(run) / _work(self.run)


def _work(run: Run) -> float:
    vocab_size = run.model.vocab_size or getattr(run.tokens, "vocab_size", None) or 1000
    model: Any = dataclasses.replace(run.model, vocab_size=vocab_size)
    length = run.train.epochs or run.train.steps
    return float(count_parameters(model) * length * run.train.batch_tokens * run.train.accumulate)


def measure(run: Run, device: torch.device) -> Plan:
    """Prepare the run in a temporary folder and time a few steps; nothing is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(run, Path(folder) / "run", device)
        try:
            trainer.step(0)  # allocates and compiles
            begun, tokens = _now(device), 0
            for step in range(1, MEASURED_STEPS + 1):
                tokens += trainer.step(step).tokens
            step_seconds = (_now(device) - begun) / MEASURED_STEPS
            memory = _memory(trainer)
        finally:
            trainer.close()
    steps, step_tokens = trainer.train.steps, round(tokens / MEASURED_STEPS)
    seconds = step_seconds * steps
    rows = {
        "parameters": f"{sum(p.numel() for p in trainer.model.parameters()):,}",
        "tokens per step": f"{step_tokens:,}",
        "steps": f"{steps:,} ({steps / trainer.task.per_epoch:.1f} epochs)",
        "tokens": f"{step_tokens * steps:,}",
        "device": f"{device}, {step_tokens / step_seconds:,.0f} tokens/s",
        "time": f"about {report_time(seconds)} without validation",
        "memory": memory,
    }
    return Plan(run, seconds, rows, trainer.task.notes)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _memory(trainer: Trainer) -> str:
    """Measured on a GPU; else that of weights, gradients, moments and activations."""
    if trainer.device.type == "cuda":
        return f"about {human_bytes(torch.cuda.max_memory_allocated(trainer.device))} (peak)"
    config: Any = trainer.saved_model.config
    length = getattr(config, "positions", config.max_length)
    rows = trainer.train.batch_rows or max(1, trainer.train.batch_tokens // length)
    total = summarize(config, batch=rows).training.total
    return f"about {human_bytes(total)} (weights, gradients, Adam, activations)"


def report_time(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "1 s"
