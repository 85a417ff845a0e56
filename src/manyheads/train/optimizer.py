"""Optimizers, learning rates as pure functions of the step, and averages of the weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from manyheads.config import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Probability,
    Renamed,
)
from manyheads.errors import UserError
from manyheads.train.muon import MuonAdamW, split_matrices

TooLong = Annotated[Literal["refuse", "skip", "truncate"], Renamed(cut="truncate")]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Settings of training. A step is one update of the weights."""

    steps: Annotated[Count, "Updates of the weights"] = 10_000
    epochs: Annotated[Positive | None, "Passes over the data; sets the number of steps"] = None
    batch_tokens: Annotated[Count, "Tokens in a micro-batch"] = 4096
    batch_rows: Annotated[Count | None, "Texts in a micro-batch, in place of batch_tokens"] = None
    accumulate: Annotated[Count, "Micro-batches in a step (gradient accumulation)"] = 1
    optimizer: Annotated[
        Literal["adamw", "muon"], "muon: Muon for matrices of blocks, AdamW for the rest"
    ] = "adamw"
    schedule: Annotated[
        Literal["transformer", "cosine", "linear", "constant", "wsd"],
        "Learning-rate schedule; transformer: d^-0.5 · min(step^-0.5, step · warmup^-1.5)",
    ] = "transformer"
    learning_rate: Annotated[Positive | None, "Peak learning rate"] = None
    muon_learning_rate: Annotated[
        Positive | None, "Muon: peak learning rate of its matrices; none: learning_rate"
    ] = None
    warmup_steps: Annotated[Natural, "Steps in which the learning rate rises"] = 4000
    warmup_ratio: Annotated[Probability | None, "The same as a fraction of all steps"] = None
    decay_ratio: Annotated[
        Fraction, "wsd (warm-up, stable, decay): fraction of all steps in which the rate falls"
    ] = 0.2
    min_lr_ratio: Annotated[Fraction, "Final learning rate as a fraction of the peak"] = 0.0
    beta1: Annotated[Probability, "Adam: decay of the first moment"] = 0.9
    beta2: Annotated[Probability, "Adam: decay of the second moment"] = 0.98
    eps: Annotated[NonNegative, "Adam: added to the denominator"] = 1e-9
    weight_decay: Annotated[NonNegative, "Decoupled weight decay of matrices"] = 0.0
    clip: Annotated[Positive | None, "Largest norm of the gradient (gradient clipping)"] = 1.0
    ema_decay: Annotated[
        Probability, "EMA of the weights: its decay; validation and saved model use it; 0 is off"
    ] = 0.0
    label_smoothing: Annotated[Probability, "Label smoothing of the cross-entropy"] = 0.1
    rdrop_alpha: Annotated[NonNegative, "R-Drop: weight of the KL divergence; 0 is off"] = 0.0
    simcut_alpha: Annotated[NonNegative, "SimCut: weight of the KL divergence; 0 is off"] = 0.0
    simcut_p: Annotated[Probability, "SimCut: probability that a token vector is zero"] = 0.05
    guided_alignment: Annotated[
        NonNegative, "Guided alignment: weight of the loss of one cross-attention head; 0 is off"
    ] = 0.0
    bpe_dropout_copies: Annotated[Count, "BPE-dropout: segmentations of the corpus; 1 is off"] = 1
    bpe_dropout: Annotated[Probability, "BPE-dropout: probability of dropping a merge"] = 0.1
    too_long: Annotated[TooLong, "Texts longer than model.max_length"] = "refuse"
    validate_every: Annotated[Count, "Steps between validations"] = 1000
    patience: Annotated[
        Count | None, "Early stopping: end after so many validations without a better loss"
    ] = None
    save_every: Annotated[Count, "Steps between checkpoints"] = 1000
    average_checkpoints: Annotated[Count, "Checkpoints to average at the end; 1 is off"] = 1
    checkpoint: Annotated[
        Literal["best", "last"], "Weights to use: best validation loss, or last step"
    ] = "best"
    probes: Annotated[Natural, "Steps recorded for the Watch page (shorter runs: none)"] = 40
    probe_weights: Annotated[bool, "Keep the weights of each probe, in half precision"] = False
    log_every: Annotated[Count, "Steps between lines of metrics.jsonl"] = 50
    log_to: Annotated[
        Literal["tensorboard", "wandb", "trackio"] | None, "Send metrics to this library as well"
    ] = None
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        "Mixed precision; auto: bfloat16 on a GPU that supports it",
    ] = "auto"
    compile: Annotated[
        Literal["auto", "yes", "no"], "torch.compile; auto: on a GPU, if the run is long enough"
    ] = "auto"
    activation_checkpointing: Annotated[
        bool, "Recompute activations in the backward pass: less memory, a third more computation"
    ] = False
    deterministic: Annotated[
        bool, "Same bits in every run on a GPU: sum in a fixed order, do not compile; slower"
    ] = False
    parallel: Annotated[
        Literal["ddp", "fsdp"], "Several processes: replicate the weights, or shard them"
    ] = "ddp"
    shard: Annotated[Count | None, "FSDP: processes that share one copy of the weights"] = None
    replicate: Annotated[Count | None, "FSDP: copies of the weights (HSDP); none: one"] = None

    RENAMED: ClassVar[dict[str, str]] = {
        "warmup_share": "warmup_ratio",
        "final_share": "min_lr_ratio",
        "agreement": "rdrop_alpha",
        "segmentations": "bpe_dropout_copies",
        "merge_dropout": "bpe_dropout",
        "average": "average_checkpoints",
        "keep": "checkpoint",
        "recompute": "activation_checkpointing",
    }

    def __post_init__(self) -> None:
        if self.learning_rate is None and self.schedule != "transformer":
            raise UserError(f"train.schedule={self.schedule} needs a train.learning_rate")
        if self.deterministic and self.compile == "yes":
            raise UserError("train.compile=yes is not deterministic: remove it")
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise UserError("train.optimizer=muon needs whole matrices: set train.parallel=ddp")
        if (self.shard or self.replicate) and self.parallel != "fsdp":
            raise UserError("train.shard and train.replicate need train.parallel=fsdp: add it")
        if self.rdrop_alpha and self.simcut_alpha:
            raise UserError("train.rdrop_alpha and train.simcut_alpha exclude each other: set one")
        if self.ema_decay and self.average_checkpoints > 1:
            raise UserError(
                f"train.ema_decay={self.ema_decay} averages the weights already: "
                "remove train.average_checkpoints"
            )
        if self.muon_learning_rate is not None and self.learning_rate is None:
            raise UserError("train.muon_learning_rate needs a train.learning_rate")

    def settled(self, per_epoch: int) -> "Train":
        """With steps and warm-up as numbers, given the steps of an epoch."""
        steps = self.steps if self.epochs is None else max(1, round(self.epochs * per_epoch))
        ratio = self.warmup_ratio
        warmup = self.warmup_steps if ratio is None else round(ratio * steps)
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
    then decay by a cosine, linearly, or not at all, to min_lr_ratio of it; wsd decays linearly in
    the last decay_ratio of all steps.
    """
    warmup = max(1, train.warmup_steps)
    if train.schedule == "transformer":
        curve = min(step**-0.5, step * warmup**-1.5)
        peak = dim**-0.5 if train.learning_rate is None else train.learning_rate * warmup**0.5
        return peak * curve
    assert train.learning_rate is not None
    if step < train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    # Completed updates: the first has the full rate, the last still more than min_lr_ratio.
    done = max(0, step - 1 - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, done))),
        "linear": max(0.0, 1 - done),
        "constant": 1.0,
        "wsd": min(1.0, max(0, train.steps + 1 - step) / max(1, train.decay_ratio * train.steps)),
    }[train.schedule]
    return train.learning_rate * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """AdamW, fused, with weight decay on matrices, not on norms, biases and vectors.

    With train.optimizer=muon, Muon for the matrices of blocks (train/muon.py). A group's learning
    rate is `lr_scale` of the schedule's.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    muon = split_matrices(model) if train.optimizer == "muon" else {}
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trained if p.ndim >= 2 and p not in muon],
            "weight_decay": train.weight_decay,
        },
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if train.optimizer == "muon":
        if not muon:
            raise UserError("train.optimizer=muon needs a model with Transformer blocks: remove it")
        rates = train.muon_learning_rate, train.learning_rate
        groups.append(
            {
                "params": list(muon),
                "rows": list(muon.values()),
                "weight_decay": train.weight_decay,
                "lr_scale": rates[0] / rates[1] if rates[0] and rates[1] else 1.0,
            }
        )
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(map(id, trained)), "a parameter is not in exactly one group"
    return (MuonAdamW if muon else torch.optim.AdamW)(
        groups, lr=0.0, betas=(train.beta1, train.beta2), eps=train.eps, fused=True
    )


class Ema:
    """Exponential moving average of a model's parameters, by name.

        θ̄ ← d θ̄ + (1 − d) θ,   d = min(decay, (1 + t) / (10 + t)) after update t

    The smaller d of the first updates forgets the initial weights. Validation and the saved model
    use the average: `swapped` exchanges the two in place.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After update number `step`, counted from 1."""
        average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        average(list(self.averages.values()), list(self.parameters.values()), 0)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the averages in this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            current = parameter.clone()
            parameter.copy_(self.averages[name])
            self.averages[name].copy_(current)
