"""Adam, and learning rates as pure functions of the step."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from manyheads.errors import UserError, check_above_zero, check_at_least, check_share

TooLong = Literal["refuse", "skip", "cut"]  # what becomes of a text longer than the model reads


@dataclass(frozen=True, kw_only=True)
class Train:
    """How a run is trained. A step is one update of `accumulate` × `batch_tokens` tokens.

    Where they are given, `epochs` decides the steps (and each ends with a validation and a save at
    the latest), `warmup_share` of them the warm-up, and
    `batch_rows` how many texts a batch has. `keep` says which weights are the model to use: those
    of the best validation loss, or the last. `agreement` is how much two readings of a batch, each
    with other dropout, have to agree (R-Drop's α). `segmentations` is in how many ways the corpus
    is cut into pieces, from the second on with that share of the merges left out (BPE-dropout).
    `parallel` says whether each of several
    processes has all of the weights ("ddp") or a part of every one ("fsdp"). `compile` has PyTorch
    compile the blocks of the model: unless told, on a GPU where the run is long enough to gain by
    it. `recompute` keeps the input of each block alone for the backward pass and computes the rest
    again (activation checkpointing): less memory, a third more work.
    """

    steps: int = 10_000
    epochs: float | None = None
    batch_tokens: int = 4096
    batch_rows: int | None = None
    accumulate: int = 1
    schedule: Literal["transformer", "cosine", "linear", "constant"] = "transformer"
    learning_rate: float | None = None
    warmup_steps: int = 4000
    warmup_share: float | None = None
    final_share: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip: float | None = 1.0
    label_smoothing: float = 0.1
    agreement: float = 0.0
    segmentations: int = 1
    merge_dropout: float = 0.1
    too_long: TooLong = "refuse"
    validate_every: int = 1000
    save_every: int = 1000
    average: int = 1
    keep: Literal["best", "last"] = "best"
    log_every: int = 50
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "yes", "no"] = "auto"
    recompute: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"

    def __post_init__(self) -> None:
        for name in (
            *("steps", "batch_tokens", "accumulate", "validate_every"),
            *("save_every", "average", "log_every", "batch_rows", "segmentations"),
        ):
            check_at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("label_smoothing", "beta1", "beta2", "warmup_share", "merge_dropout"):
            check_share(f"train.{name}", getattr(self, name))
        if not 0 <= self.final_share <= 1:
            raise UserError(f"train.final_share={self.final_share} must be in [0, 1]")
        for name in ("warmup_steps", "weight_decay", "eps", "agreement"):
            check_at_least(f"train.{name}", getattr(self, name), 0)
        for name in ("learning_rate", "clip", "epochs"):
            check_above_zero(f"train.{name}", getattr(self, name))
        if self.learning_rate is None and self.schedule != "transformer":
            raise UserError(f"train.schedule={self.schedule} needs a train.learning_rate")

    def settled(self, per_epoch: int) -> "Train":
        """The same with the steps and the warm-up as numbers, for data of so many steps."""
        steps = self.steps if self.epochs is None else max(1, round(self.epochs * per_epoch))
        share = self.warmup_share
        warmup = self.warmup_steps if share is None else round(share * steps)
        if self.epochs is None:
            return replace(self, steps=steps, warmup_steps=warmup)
        often = {
            name: min(getattr(self, name), per_epoch) for name in ("validate_every", "save_every")
        }
        return replace(self, steps=steps, warmup_steps=warmup, **often)


def learning_rate(train: Train, dim: int, step: int) -> float:
    """The learning rate of update number `step`, counted from 1.

    transformer: d^−½ · min(step^−½, step · warmup^−3/2), the lectures' formula; where a
    learning_rate is given, the same curve with that peak. The others rise in a straight line to
    learning_rate and then fall by a cosine, in a straight line, or not at all, to final_share.
    """
    warmup = max(1, train.warmup_steps)
    if train.schedule == "transformer":
        curve = min(step**-0.5, step * warmup**-1.5)
        peak = dim**-0.5 if train.learning_rate is None else train.learning_rate * warmup**0.5
        return peak * curve
    assert train.learning_rate is not None
    if step < train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    # Updates that are done already: the first has the whole rate, the last still some of it.
    done = max(0, step - 1 - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, done))),
        "linear": max(0.0, 1 - done),
        "constant": 1.0,
    }[train.schedule]
    return train.learning_rate * (train.final_share + (1 - train.final_share) * left)


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """Adam with decoupled decay on the matrices; norms, biases and vectors do not decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )
