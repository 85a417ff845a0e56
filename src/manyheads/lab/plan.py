"""The cost of a training on many devices, computed before there are any: memory, traffic, time.

Counts of parameters, FLOPs and saved activations are those of `manyheads.summary`. Per step:

    compute  = FLOPs / (products · peak) + activation and optimizer traffic / memory bandwidth
    exposed  = max(0, communication − OVERLAP · compute)
    time     = compute + exposed

FLOPs include those that activation checkpointing repeats, and half of the scores of causal
attention, since fused kernels skip the masked half. MFU, as published, counts neither: it is three
dense forward passes per token, over the peak. Collectives are rings: over k devices an all-gather
or a reduce-scatter of n bytes sends n (k − 1) / k from each, an all-reduce twice that. Rings over
several nodes use the network link of every device of a node.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from manyheads.config import nearest
from manyheads.errors import UserError, check_at_least
from manyheads.lab.figures.plots import growth
from manyheads.lab.training_cost import DEVICES, HOUR
from manyheads.loading import read_model
from manyheads.models.gpt import GptConfig
from manyheads.presets import PRESETS, ModelConfig
from manyheads.recipes import read_recipe, recipes
from manyheads.summary import BACKWARD, ModelSummary, human, human_bytes, summarize

OVERLAP = 0.9  # communication is hidden behind this part of the compute time
LINK = 0.8  # large collectives reach this part of a bandwidth
RESERVE = 0.06  # CUDA context and fragments take this part of the memory
PASSES = 4  # a saved activation is written, read twice, and has a gradient
UPDATE_BYTES = 28  # per parameter: AdamW reads four float32 values and writes three
STATE_BYTES = 12  # per parameter, of a checkpoint: the weight and two moments
STORAGE = 2e9  # bytes a second to the file system

Layout = Literal["ddp", "fsdp", "hsdp"]


@dataclass(frozen=True)
class Links:
    """Bytes a second of a device: of memory, to devices of its node, to other nodes.

    `products` is the fraction of the peak that large matrix products reach. It is calibrated on
    one published run (docs/scale.md) and assumed where there is none.
    """

    memory: float
    node: float
    network: float
    products: float


LINKS = {
    "a100": Links(2.04e12, 300e9, 25e9, 0.59),
    "h100": Links(3.35e12, 450e9, 50e9, 0.43),
    "h200": Links(4.8e12, 450e9, 50e9, 0.55),
    "rtx4090": Links(1.01e12, 25e9, 3e9, 0.5),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model is trained. `shard` devices share a copy of the weights.

    `checkpointed` is the fraction of blocks with activation checkpointing. `logit_bytes` are held
    per logit: none where the loss is computed in chunks, as ours. `residual_bytes` is the size of
    a value between blocks: bfloat16, as in compiled blocks. Weights are sent as `gather_bytes`,
    gradients as `reduce_bytes`.
    """

    device_kind: str = "h100"
    devices: int = 1
    per_node: int = 8
    layout: str = "fsdp"
    shard: int | None = None
    length: int | None = None
    micro_batch: int = 1
    accumulate: int = 1
    checkpointed: float = 0.0
    logit_bytes: int = 0
    residual_bytes: int = 2
    gather_bytes: int = 4
    reduce_bytes: int = 4

    def __post_init__(self) -> None:
        if self.device_kind not in LINKS:
            raise UserError(f"--device-kind {self.device_kind}: {nearest(self.device_kind, LINKS)}")
        for name in ("devices", "per_node", "micro_batch", "accumulate"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        if self.layout not in ("ddp", "fsdp", "hsdp"):
            raise UserError(f"--parallel {self.layout} must be ddp, fsdp or hsdp")
        if self.devices % self.shards:
            raise UserError(
                f"--devices {self.devices} must be a multiple of --shard {self.shards}: change one"
            )

    @property
    def shards(self) -> int:
        """Devices that share a copy: all (fsdp), those of a node (hsdp), or one (ddp)."""
        default = {"ddp": 1, "fsdp": self.devices, "hsdp": min(self.devices, self.per_node)}
        return self.shard or default[self.layout]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Per device: bytes of memory by part, bytes sent and seconds of a step; and totals."""

    setup: Setup
    parameters: int
    length: int
    memory: dict[str, int]
    capacity: int
    largest_micro_batch: int
    step_tokens: int
    step_flops: float
    sent: dict[str, int]
    seconds: dict[str, float]
    checkpoint_bytes: int

    @property
    def step_seconds(self) -> float:
        return self.seconds["compute"] + self.seconds["exposed communication"]

    @property
    def tokens_per_device(self) -> float:
        """Tokens a second."""
        return self.step_tokens / self.step_seconds / self.setup.devices

    @property
    def mfu(self) -> float:
        peak = DEVICES[self.setup.device_kind].peak * self.setup.devices
        return self.step_flops / self.step_seconds / peak

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.capacity

    def budget(self, tokens: float) -> dict[str, float]:
        """Steps, FLOPs, hours and device hours for so many tokens."""
        steps = math.ceil(tokens / self.step_tokens)
        hours = steps * self.step_seconds / HOUR
        return {
            "tokens": tokens,
            "steps": steps,
            "flops": steps * self.step_flops,
            "hours": hours,
            "device_hours": hours * self.setup.devices,
        }

    def as_dict(self, tokens: float | None = None) -> dict[str, Any]:
        return {
            **asdict(self),
            "memory_total": sum(self.memory.values()),
            "fits": self.fits,
            "step_seconds": self.step_seconds,
            "tokens_per_second_per_device": self.tokens_per_device,
            "mfu": self.mfu,
            "checkpoint_seconds": self.checkpoint_bytes / STORAGE,
            "budget": None if tokens is None else self.budget(tokens),
        }

    def text(self, tokens: float | None = None) -> str:
        setup, total = self.setup, sum(self.memory.values())
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in self.memory.items())
        sent = ", ".join(f"{name} {human_bytes(size)}" for name, size in self.sent.items())
        time = ", ".join(f"{name} {1000 * value:,.0f} ms" for name, value in self.seconds.items())
        fits = "fits" if self.fits else "does not fit: shard, checkpoint, or lower the micro-batch"
        rows = {
            "model": f"{human(self.parameters)} parameters, sequences of {self.length}",
            "devices": f"{setup.devices} × {setup.device_kind}, {setup.layout}, "
            f"{setup.shards} shards × {setup.devices // setup.shards} copies",
            "memory": f"{human_bytes(total)} of {human_bytes(self.capacity)} per device, {fits}",
            "": parts,
            "micro-batch": f"{setup.micro_batch} sequences; {self.largest_micro_batch} fit",
            "step": f"{human(self.step_tokens)} tokens, {self.step_flops:.3g} FLOPs",
            "sent": f"{sent or 'nothing'} per device and step",
            "time": f"{self.step_seconds:.3g} s a step ({time})",
            "speed": f"{self.tokens_per_device:,.0f} tokens/s per device, MFU {self.mfu:.0%}",
            "checkpoint": f"{human_bytes(self.checkpoint_bytes)}, "
            f"{self.checkpoint_bytes / STORAGE:,.0f} s at {STORAGE / 1e9:g} GB/s",
        }
        if tokens is not None:
            budget = self.budget(tokens)
            rows["training"] = (
                f"{human(int(tokens))} tokens, {int(budget['steps']):,} steps, "
                f"{budget['flops']:.3g} FLOPs, {budget['hours']:,.1f} h, "
                f"{budget['device_hours']:,.0f} device hours"
            )
        return "".join(f"{name:<12}  {value}\n" for name, value in rows.items())


def plan_training(config: ModelConfig, setup: Setup) -> Plan:
    """The plan of one setup; raises nothing if it does not fit."""
    summary = summarize(config, setup.length)
    fixed, per_row = _memory(config, summary, setup)
    device = DEVICES[setup.device_kind]
    capacity = int(device.memory * (1 - RESERVE))
    rows = setup.micro_batch * setup.accumulate * setup.devices
    sent, communication = _communication(summary, setup)
    compute = _compute(config, summary, setup)
    hidden = min(communication, OVERLAP * compute)
    return Plan(
        setup=setup,
        parameters=summary.parameters,
        length=summary.length,
        memory={**fixed, "activations": setup.micro_batch * per_row},
        capacity=capacity,
        largest_micro_batch=max(0, (capacity - sum(fixed.values())) // per_row),
        step_tokens=rows * sum(summary.tokens.values()),
        step_flops=float(rows * (1 + BACKWARD) * summary.sequence_flops),
        sent=sent,
        seconds={
            "compute": compute,
            "communication": communication,
            "exposed communication": communication - hidden,
        },
        checkpoint_bytes=STATE_BYTES * summary.parameters,
    )


def model_of(name: str, overrides: Sequence[str]) -> tuple[ModelConfig, bool]:
    """The model of a preset, recipe or folder, and whether a recipe checkpoints activations."""
    if name in PRESETS or (name not in recipes() and not Path(name).is_file()):
        return read_model(name, overrides), False
    run = read_recipe(name, overrides)
    vocab_size = run.model.vocab_size or getattr(run.tokens, "vocab_size", None) or 1000
    model: Any = run.model
    return replace(model, vocab_size=vocab_size), run.train.activation_checkpointing


def plot_devices(config: ModelConfig, setup: Setup, path: Path) -> None:
    """Memory and speed of a device by the number of devices, a line for each layout."""
    counts = [2**power for power in range(max(6, setup.devices.bit_length() - 1) + 1)]
    memory: dict[str, list[tuple[int, float]]] = {}
    speed: dict[str, list[tuple[int, float]]] = {}
    for plan in compare_devices(config, setup, counts):
        layout, devices = plan.setup.layout, plan.setup.devices
        memory.setdefault(layout, []).append((devices, sum(plan.memory.values()) / 2**30))
        speed.setdefault(layout, []).append((devices, plan.tokens_per_device))
    growth({"GiB per device": memory, "tokens a second per device": speed}, "devices", path)


def compare_devices(config: ModelConfig, setup: Setup, counts: Sequence[int]) -> list[Plan]:
    """DDP, FSDP and HSDP at several numbers of devices, for a chart."""
    layouts: tuple[Layout, ...] = ("ddp", "fsdp", "hsdp")
    setups = [
        replace(setup, devices=count, layout=layout, shard=None)
        for layout in layouts
        for count in counts
    ]
    return [plan_training(config, each) for each in setups if each.devices % each.shards == 0]


def _layers(config: Any) -> int:
    sides = [getattr(config, side, None) for side in ("encoder", "decoder")]
    layers = [getattr(side, "layers", None) or config.layers for side in sides if side is not None]
    return sum(layers) or int(config.layers)


def _memory(config: Any, summary: ModelSummary, setup: Setup) -> tuple[dict[str, int], int]:
    """Bytes by part, whatever the micro-batch; and of the activations of one sequence."""
    parameters, layers = summary.parameters, _layers(config)
    local = -(-parameters // setup.shards)
    block = summary.block_parameters // layers
    root = parameters - summary.block_parameters  # embeddings and head
    if setup.shards > 1:
        # Two blocks (one is prefetched), gradients of one, and both of the rest.
        gather, reduce = setup.gather_bytes, setup.reduce_bytes
        buffers = (2 * gather + reduce) * block + (gather + reduce) * root
    else:
        # Autocast's copies of the weights; DDP's buckets.
        buffers = 2 * parameters + (4 * parameters if setup.devices > 1 else 0)
    values = sum(
        count * summary.training.activations_per_token[kind] // 4
        for kind, count in summary.tokens.items()
    )
    logits = _logits(config, summary)
    residual = config.dim * sum(summary.tokens.values())
    # Half precision, but for the inputs of norms, two of each block.
    saved = 2 * (values - logits) + 2 * layers * residual * (setup.residual_bytes - 2)
    inputs = setup.checkpointed * layers * residual * setup.residual_bytes
    running = saved // layers if setup.checkpointed else 0  # a block that is computed again
    activations = (1 - setup.checkpointed) * saved + inputs + running + setup.logit_bytes * logits
    fixed = {"weights": 4 * local, "gradients": 4 * local, "moments": 8 * local, "buffers": buffers}
    return fixed, int(activations)


def _logits(config: Any, summary: ModelSummary) -> int:
    """Logits of a sequence that the summary counts as saved."""
    vocab_size = getattr(config, "vocab_size", None) or 0
    least = 2 * vocab_size * config.dim
    counts = summary.tokens.items()
    return sum(n * vocab_size for kind, n in counts if summary.flops[kind].get("head", 0) >= least)


def _compute(config: ModelConfig, summary: ModelSummary, setup: Setup) -> float:
    """Seconds of a step on one device, without communication."""
    rows = setup.micro_batch * setup.accumulate
    skipped = 0.5 if isinstance(config, GptConfig) else 0.0  # of causal attention
    forward = sum(
        count * flops * (1 - skipped * part.endswith((" scores", " mixing")))
        for kind, count in summary.tokens.items()
        for part, flops in summary.flops[kind].items()
    )
    passes = 1 + BACKWARD + setup.checkpointed
    device, links = DEVICES[setup.device_kind], LINKS[setup.device_kind]
    _, per_row = _memory(config, summary, replace(setup, checkpointed=0.0))
    traffic = rows * per_row * PASSES * passes / (1 + BACKWARD)
    update = UPDATE_BYTES * summary.parameters / setup.shards
    products = rows * passes * forward / (links.products * device.peak)
    return float(products + (traffic + update) / links.memory)


def _communication(summary: ModelSummary, setup: Setup) -> tuple[dict[str, int], float]:
    """Bytes that a device sends in a step, by collective, and the seconds of all."""
    links, parameters = LINKS[setup.device_kind], summary.parameters
    block, root = summary.block_parameters, parameters - summary.block_parameters
    shards, copies = setup.shards, setup.devices // setup.shards
    sent: dict[str, int] = {}
    seconds = 0.0

    def add(name: str, size: int | float, members: int, spread: int) -> None:
        nonlocal seconds
        if members > 1:
            sent[name] = int(size * (members - 1) / members)
            across = setup.per_node * links.network
            bandwidth = links.node if spread <= setup.per_node else min(links.node, across)
            seconds += sent[name] / (LINK * bandwidth)

    # Blocks are gathered for the forward and for the backward pass, the rest once; FSDP reduces
    # gradients after each micro-batch.
    rounds = setup.accumulate
    add("all-gather", rounds * setup.gather_bytes * (2 * block + root), shards, shards)
    add("reduce-scatter", rounds * setup.reduce_bytes * parameters, shards, shards)
    add("all-reduce", 2 * setup.reduce_bytes * parameters / shards, copies, setup.devices)
    return sent, seconds
