"""The cost of a whole training: FLOPs, hours of a device, memory; and the lectures' own accounts.

FLOPs are three forward passes (`manyheads.summary`) for every token. Hours are
FLOPs / (peak · utilization). The published accounts count in other ways, so each names its own.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from manyheads.config import nearest
from manyheads.errors import UserError, check_above_zero, check_at_least
from manyheads.presets import ModelConfig, preset
from manyheads.summary import BACKWARD, ModelSummary, summarize

HOUR = 3_600


@dataclass(frozen=True)
class Device:
    """Peak FLOPs a second of dense matrix products, bytes of memory, and what the peak is of."""

    peak: float
    memory: float
    precision: str


DEVICES = {
    "p100": Device(9.5e12, 16e9, "float32, the value that Vaswani et al. 2017 use"),
    "v100": Device(125e12, 32e9, "float16"),
    "a100": Device(312e12, 80e9, "bfloat16"),
    "h100": Device(989e12, 80e9, "bfloat16"),
    "h200": Device(989e12, 141e9, "bfloat16"),
    "rtx4090": Device(165e12, 24e9, "bfloat16"),
    "tpu-v2": Device(45e12, 16e9, "bfloat16, one chip of two cores"),
    "tpu-v3": Device(123e12, 32e9, "bfloat16, one chip of two cores"),
}


@dataclass(frozen=True, kw_only=True)
class Account:
    """A training that the lectures name: as published, and as counted here."""

    name: str
    preset: str
    length: int
    tokens: float | int
    head_rate: float = 1.0
    published: float
    how: str
    reason: str

    @property
    def counted(self) -> float:
        summary = summarize(preset(self.preset), self.length)
        tokens = dict.fromkeys(summary.tokens, self.tokens)
        return training_flops(summary, tokens, self.head_rate)


def _hours(devices: int, hours: int, kind: str) -> float:
    return devices * hours * HOUR * DEVICES[kind].peak


ACCOUNTS = (
    Account(
        name="Transformer base (Sydney, Princeton L9: 3.3e18)",
        preset="transformer-base",
        length=25,
        tokens=100_000 * 25_000,
        published=_hours(8, 12, "p100"),
        how="12 hours · 8 P100 · 9.5e12 FLOPs a second",
        reason="the paper multiplies time, devices and speed, so idle units count as work",
    ),
    Account(
        name="Transformer big (Sydney, Princeton L9: 2.3e19)",
        preset="transformer-big",
        length=25,
        tokens=300_000 * 25_000,
        published=_hours(8, 84, "p100"),
        how="3.5 days · 8 P100 · 9.5e12 FLOPs a second",
        reason="the same",
    ),
    Account(
        name="BERT-large (Aalborg: 64 TPU chips, 4 days)",
        preset="bert-large",
        length=512,
        tokens=1_000_000 * 128_000,
        head_rate=0.15,
        published=_hours(64, 96, "tpu-v2"),
        how="4 days · 64 chips · 45e12 FLOPs a second (TPU v2)",
        reason="the lecture names no model: 64 chips are BERT-large's, BERT-base had 16; nine "
        "tenths of the steps had 128 tokens, here all have 512",
    ),
    Account(
        name="GPT-3 175B (Brown et al. 2020: 3.14e23)",
        preset="gpt3-175b",
        length=2048,
        tokens=300e9,
        published=6 * 174.6e9 * 300e9,
        how="6 · parameters · tokens",
        reason="the paper leaves out the scores of attention; here every key is scored",
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """The cost of a training; memory is that of one device with the batch of a step, unsharded."""

    steps: int
    batch_tokens: int
    length: int
    tokens: dict[str, float]
    flops: float
    device_kind: str
    utilization: float
    device_hours: float
    memory: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        accounts = [
            {"name": a.name, "published": a.published, "how": a.how, "counted": a.counted}
            for a in ACCOUNTS
        ]
        return {**asdict(self), "accounts": accounts}

    def text(self) -> str:
        device = DEVICES[self.device_kind]
        total = sum(self.memory.values())
        parts = ", ".join(f"{name} {_bytes(size)}" for name, size in self.memory.items())
        tokens = ", ".join(f"{count:.3g} {kind}" for kind, count in self.tokens.items())
        fits = "fits" if total <= device.memory else "does not fit: shard it, or accumulate"
        lines = [
            f"training of {self.steps:,} steps of {self.batch_tokens:,} tokens (texts of "
            f"{self.length})",
            f"  tokens        {tokens}",
            f"  FLOPs         {self.flops:.3g}",
            f"  device hours  {self.device_hours:,.3g} on one {self.device_kind} "
            f"({device.peak:.3g} FLOPs a second, {device.precision}) at {self.utilization:.0%}",
            f"  memory        {_bytes(total)} for a step at once ({parts}); one "
            f"{self.device_kind} has {_bytes(device.memory)}: {fits}",
            "trainings that the lectures name",
        ]
        for account in ACCOUNTS:
            lines += [
                f"  {account.name}",
                f"    published {account.published:.3g} = {account.how}",
                f"    counted   {account.counted:.3g}, {account.counted / account.published:.0%} "
                f"of it: {account.reason}",
            ]
        return "\n".join(lines) + "\n"


def _bytes(count: float | int) -> str:
    return f"{count / 1e9:,.1f} GB"


def training_flops(
    summary: ModelSummary, tokens: Mapping[str, float | int], head_rate: float = 1.0
) -> float:
    """Forward and backward over so many tokens of each kind.

    `head_rate` is the share of positions at which the output layer is computed: the masked ones
    of a masked language model. ByteNet's source has more positions than tokens.
    """
    flops = 0.0
    for kind, count in tokens.items():
        idle = (1 - head_rate) * summary.flops[kind].get("head", 0)
        positions = count * summary.tokens[kind] / summary.length
        flops += positions * (1 + BACKWARD) * (summary.forward_flops[kind] - idle)
    return flops


def training_cost(
    config: ModelConfig,
    steps: int | None,
    batch_tokens: int | None,
    length: int | None = None,
    device_kind: str = "h200",
    utilization: float = 0.4,
) -> TrainingCost:
    """The cost of steps of `batch_tokens` tokens; an encoder–decoder has as many of each side."""
    if steps is None or batch_tokens is None:
        raise UserError("the cost of a training needs --steps and --batch-tokens")
    check_at_least("--steps", steps, 1)
    check_at_least("--batch-tokens", batch_tokens, 1)
    check_above_zero("--utilization", utilization)
    if utilization > 1:
        raise UserError(f"--utilization {utilization} must be at most 1")
    if device_kind not in DEVICES:
        raise UserError(f"--device-kind {device_kind}: {nearest(device_kind, DEVICES)}")
    summary = summarize(config, length)
    batch = max(1, round(batch_tokens / summary.length))
    training = summarize(config, length, batch).training
    tokens = dict.fromkeys(summary.tokens, float(steps * batch_tokens))
    flops = training_flops(summary, tokens)
    return TrainingCost(
        steps=steps,
        batch_tokens=batch_tokens,
        length=summary.length,
        tokens=tokens,
        flops=flops,
        device_kind=device_kind,
        utilization=utilization,
        device_hours=flops / (DEVICES[device_kind].peak * utilization) / HOUR,
        memory={
            "weights": training.weights,
            "gradients": training.gradients,
            "moments": training.moments,
            "activations": training.activations,
        },
    )
