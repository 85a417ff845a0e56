"""Small trainings for experiments: a recipe trained in memory, or a model with a custom loss.

Only a tokenizer is written, to a temporary folder. There is no checkpoint selection by validation:
the result has the weights of the last step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import nn

from manyheads.loading import LoadedRun
from manyheads.nn.block import Model
from manyheads.recipes import read_recipe
from manyheads.run import TOKENIZER, make_trainer, read_run
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.loop import Trainer


@dataclass(frozen=True)
class Trial:
    """The result of a training: the model as a loaded run, and the training loss.

    `losses` has the mean of each step, in nats.
    """

    opened: LoadedRun
    losses: list[float]


def trained(recipe: str, *changes: str, seed: int, device: torch.device) -> Trial:
    """Train a recipe with these overrides; nothing is cached, so claims are independent."""
    settings = read_recipe(recipe, [*changes, f"seed={seed}"])
    with TemporaryDirectory() as name:
        folder = Path(name)
        trainer = make_trainer(settings, folder, device)
        run = read_run(folder)
        tokenizer_file = folder / TOKENIZER
        tokenizer = Tokenizer.load(tokenizer_file) if tokenizer_file.exists() else None
        losses = _losses(trainer)
    model = cast(Model, trainer.saved_model).eval()
    opened = LoadedRun(Path(recipe), run, tokenizer, device, model)
    return Trial(opened, losses)


def _losses(trainer: Trainer) -> list[float]:
    """Run all steps and give the loss of each."""
    losses = []
    for step in range(trainer.train.steps):
        done = trainer.step(step)
        losses.append(done.nll() / max(1, sum(done.counts.values())))
    trainer.close()
    return losses


def learn(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    *,
    steps: int,
    rate: float,
    warmup: int = 0,
) -> list[float]:
    """Adam on a loss that is a function of the step; gives each step's loss.

    The rate climbs for `warmup` steps and then stays. Gradients are clipped to a norm of 1.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    losses = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / (warmup + 1))
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


def stretches(losses: list[float], count: int = 20) -> list[tuple[int, float]]:
    """A line to plot: means over `count` windows of steps, each at its last step."""
    width = max(1, len(losses) // count)
    ends = range(width, len(losses) + 1, width)
    return [(end, fmean(losses[end - width : end])) for end in ends]
