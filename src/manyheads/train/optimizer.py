"""Adam, and learning rates as pure functions of the step."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from manyheads.errors import UserError, check_above_zero, check_at_least, check_share

TooLong = Literal["refuse", "skip", "cut"]  # a text longer than max_length


@dataclass(frozen=True, kw_only=True)
class Train:
    """Settings of training. A step is one update from `accumulate` × `batch_tokens` tokens.

    If set, `epochs` determines the steps (with a validation and a checkpoint at least once an
    epoch), `warmup_share` the warm-up steps, and `batch_rows` the number of texts in a batch.
    `keep`: the model to use is that of the best validation loss, or the last. `agreement` is α of
    R-Drop. `segmentations` is the number of BPE-dropout copies of the corpus, all but the first
    with merges dropped at rate `merge_dropout`. `parallel`: each process holds all weights
    ("ddp") or a part of each ("fsdp"). `compile`: torch.compile of the blocks; "auto" does so on a
    GPU if the run is long enough. `recompute` is activation checkpointing of each block: less
    memory, a third more computation.
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
        """With steps and warm-up as numbers, given the steps of an epoch."""
        steps = self.steps if self.epochs is None else max(1, round(self.epochs * per_epoch))
        share = self.warmup_share
        warmup = self.warmup_steps if share is None else round(share * steps)
        if self.epochs is None:
            return replace(self, steps=steps, warmup_steps=warmup)
        return replace(
            self,
            steps=steps,
            warmup_steps=warmup,
            validate_every=min(self.validate_every, per_epoch),
            save_every=min(self.save_every, per_epoch),
        )


def learning_rate(train: Train, dim: int, step: int) -> float:
    """The learning rate of update number `step`, counted from 1.

    transformer: d^−½ · min(step^−½, step · warmup^−3/2) (Vaswani et al. 2017); with a
    learning_rate, the same curve with that peak. The others rise linearly to learning_rate and
    then decay by a cosine, linearly, or not at all, to final_share of it.
    """
    warmup = max(1, train.warmup_steps)
    if train.schedule == "transformer":
        curve = min(step**-0.5, step * warmup**-1.5)
        peak = dim**-0.5 if train.learning_rate is None else train.learning_rate * warmup**0.5
        return peak * curve
    assert train.learning_rate is not None
    if step < train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    # Completed updates: the first has the full rate, the last still more than final_share.
    done = max(0, step - 1 - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, done))),
        "linear": max(0.0, 1 - done),
        "constant": 1.0,
    }[train.schedule]
    return train.learning_rate * (train.final_share + (1 - train.final_share) * left)


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """AdamW, fused, with weight decay on matrices, not on norms, biases and vectors."""
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
