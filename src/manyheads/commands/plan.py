"""The cost of a training before it starts: size, steps, measured time, memory."""

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyheads.run import Run
from manyheads.run import make_trainer as prepare_training
from manyheads.summary import count_parameters, human_bytes, summarize

MEASURED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cost of a run. `step_seconds` is measured; `memory` is that of training."""

    run: Run
    device: torch.device
    parameters: int
    step_tokens: int
    steps: int
    steps_per_epoch: int
    step_seconds: float
    memory: int
    is_measured: bool  # the memory: measured on a GPU, else estimated

    def text(self) -> str:
        tokens = self.step_tokens * self.steps
        how = "peak" if self.is_measured else "weights, gradients, Adam, activations"
        rows = {
            "parameters": f"{self.parameters:,}",
            "tokens per step": f"{self.step_tokens:,}",
            "steps": f"{self.steps:,} ({self.steps / self.steps_per_epoch:.1f} epochs)",
            "tokens": f"{tokens:,}",
            "device": f"{self.device}, {self.step_tokens / self.step_seconds:,.0f} tokens/s",
            "time": f"about {report_time(self.seconds_of([self.run]))} without validation",
            "memory": f"about {human_bytes(self.memory)} ({how})",
        }
        return "".join(f"{name:<15}  {value}\n" for name, value in rows.items())

    def seconds_of(self, runs: Sequence[Run]) -> float:
        """The training time of runs like this one, in proportion to parameters and tokens."""
        work = _work(self.run)
        return self.step_seconds * self.steps * sum(_work(run) / work for run in runs)


def _work(run: Run) -> float:
    model: Any = dataclasses.replace(run.model, vocab_size=_vocab_size(run))
    length = run.train.epochs or run.train.steps
    return float(count_parameters(model) * length * run.train.batch_tokens * run.train.accumulate)


def _vocab_size(run: Run) -> int:
    return run.model.vocab_size or getattr(run.tokens, "vocab_size", None) or 1000


def measure(run: Run, device: torch.device) -> Plan:
    """Prepare the run in a temporary folder and time a few steps; nothing is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = prepare_training(run, Path(folder) / "run", device)
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            tokens = [trainer.step(0).tokens]  # the first step allocates and compiles
            begun = _now(device)
            steps = min(MEASURED_STEPS, max(1, trainer.train.steps - 1))
            for step in range(1, steps + 1):
                tokens.append(trainer.step(step % trainer.train.steps).tokens)
            step_seconds = (_now(device) - begun) / steps
            if device.type == "cuda":
                memory = torch.cuda.max_memory_allocated(device)
            else:
                memory = _estimated_memory(trainer)
            return Plan(
                run=run,
                device=device,
                parameters=sum(p.numel() for p in trainer.model.parameters()),
                step_tokens=round(sum(tokens) / len(tokens)),
                steps=trainer.train.steps,
                steps_per_epoch=trainer.task.per_epoch,
                step_seconds=step_seconds,
                memory=memory,
                is_measured=device.type == "cuda",
            )
        finally:
            trainer.close()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _estimated_memory(trainer: Any) -> int:
    """Weights, gradients and moments, and the activations of a micro-batch."""
    config = trainer.saved_model.config
    batch = trainer.train.batch_rows
    length = getattr(config, "positions", config.max_length)
    rows = batch or max(1, trainer.train.batch_tokens // length)
    return summarize(config, batch=rows).training.total


def report_time(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "1 s"
