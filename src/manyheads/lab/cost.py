"""Benchmark of attention implementations: time and peak memory against the length.

An implementation (core) is called outside of a model, on random queries, keys and values that
require gradients, with a scaled dot product and no position. Backward is that of the sum of its
output times a fixed random direction. It is built again for each length, as the second layer of a
model: where layers alternate (memory-compressed attention begins with a local one), the second
kind is measured.

Time is the median over rounds that are interleaved over the implementations, after a warm-up call.
Memory is the peak beyond the inputs and the implementation's weights: outputs, gradients, masks,
tensors saved for backward, and workspaces of kernels.
"""

import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, runtime_checkable

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor, nn

from manyheads.config import parse
from manyheads.errors import UserError, check_at_least
from manyheads.lab.device_memory import free_memory, peak_memory
from manyheads.lab.figures.plots import growth
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import (
    AttentionFunction,
    AttentionInputs,
    AttentionSizes,
    check_combination,
)
from manyheads.nn.linformer import Linformer
from manyheads.nn.local import LocalAttention
from manyheads.nn.masks import causal, full, make_mask
from manyheads.nn.positions import Position
from manyheads.nn.scores import ScaledDot
from manyheads.summary import human_bytes
from manyheads.train.metrics import Bar

OUT_OF_MEMORY = "out of memory"
LONGEST_STEP = 4  # largest ratio of successive lengths; memory is extrapolated from shorter ones
SHORTEST = 128
SHARE_OF_MEMORY = 0.9
SECONDS_A_ROUND = 0.02
REFERENCE = "fused"
Crossover = int | Literal["always", "never here"]

T = TypeVar("T")


@runtime_checkable
class CoreSettings(Protocol):
    """Settings that build an implementation; `exact` is true for exact softmax attention."""

    exact: ClassVar[bool]

    def build(self, sizes: AttentionSizes) -> AttentionFunction: ...


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that all implementations and lengths share."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    causal: bool = False
    heads: int = 2
    head_dim: int = 64
    batch: int = 1
    rounds: int = 3
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "batch", "rounds"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class Point:
    """An implementation at one length: seconds, and peak bytes of forward and of both passes."""

    length: int
    forward: float
    backward: float
    forward_memory: int
    memory: int

    @property
    def time(self) -> float:
        return self.forward + self.backward


@dataclass(kw_only=True)
class Cost:
    """An implementation at every measured length, and why it stopped.

    Up to `reach` positions a local one computes exact attention, so exponents use longer lengths.
    """

    core: str
    exact: bool
    points: list[Point] = field(default_factory=list)
    stopped: str | None = None
    reach: int = 0

    @property
    def growing(self) -> list[Point]:
        return [point for point in self.points if point.length > self.reach]

    @property
    def time_exponent(self) -> float | None:
        return exponent([(point.length, point.time) for point in self.growing])

    @property
    def memory_exponent(self) -> float | None:
        return exponent([(point.length, point.memory) for point in self.growing])


def read_cores(text: str | None) -> dict[str, Any]:
    """Parse implementations as in "dense,tiled block=256"; None selects all."""
    if text is None:
        return {option.kind: option() for option in get_args(AttentionFunctionConfig)}
    cores = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        kind, *settings = name.split()
        for setting in settings:
            if "=" not in setting:
                raise UserError(
                    f"--cores: '{setting}' is not a setting of {kind}: write it as name=value, "
                    "and a comma before another core"
                )
        table = dict(setting.split("=", 1) for setting in settings)
        cores[name] = parse(AttentionFunctionConfig, {**table, "kind": kind}, "core")
    if not cores:
        raise UserError("--cores names none: write for example --cores dense,fused")
    return cores


def read_lengths(text: str) -> list[int]:
    """Parse lengths as in "512,1024" and sort them."""
    lengths = sorted(set(parse(tuple[int, ...], text, "--lengths")))
    if not lengths:
        raise UserError("--lengths names none: write for example --lengths 512,1024,2048")
    check_at_least("--lengths", lengths[0], 1)
    return lengths


# --- exponents ---


def exponent(points: Sequence[tuple[int, float | int]]) -> float | None:
    """The p of y ∝ n^p: the slope of log y on log n by least squares, None for one point."""
    if len(points) < 2:
        return None
    x, y = zip(*((math.log(n), math.log(value)) for n, value in points), strict=True)
    return statistics.linear_regression(x, y).slope


# --- measuring ---


class Trial:
    """An implementation at one length, ready to be called repeatedly."""

    def __init__(self, settings: CoreSettings, setup: Setup, inputs: tuple[Tensor, ...]) -> None:
        self.setup, self.length = setup, inputs[0].shape[2]
        *self.inputs, self.direction = inputs
        self.score = ScaledDot().build(setup.heads, setup.head_dim)
        self.position = Position()
        refuse(settings, setup, self.length)
        torch.manual_seed(setup.seed)
        self.core = settings.build(
            AttentionSizes(
                heads=setup.heads,
                kv_heads=setup.heads,
                head_dim=setup.head_dim,
                key_dim=setup.head_dim,
                max_length=self.length,
                causal=setup.causal,
                layer=1,
            )
        )
        self.differentiated = list(self.inputs)
        if isinstance(self.core, nn.Module):
            self.core.to(setup.device)
            self.differentiated += [
                weight for weight in self.core.parameters() if weight.requires_grad
            ]
        check_combination(self.core, self.score, self.position)

    def forward(self) -> Tensor:
        """Forward pass, with autocast in half precision as in training."""
        device, dtype = self.setup.device, self.setup.dtype
        # A new one for each call: an AttentionMask caches the mask that it computes.
        sight = make_mask(causal if self.setup.causal else full, self.length, device=device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            q, k, v = self.inputs
            return self.core(AttentionInputs(q, k, v, sight, self.score, self.position))

    def backward(self, mixed: Tensor) -> tuple[Tensor | None, ...]:
        direction = self.direction.to(mixed.dtype)
        return torch.autograd.grad(mixed, self.differentiated, direction, allow_unused=True)

    def memory(self) -> tuple[int, int]:
        """Peak bytes of forward, and of forward and backward together."""
        device = self.setup.device
        forward = peak_memory(self.forward, device)
        return forward, peak_memory(lambda: self.backward(self.forward()), device)

    def round(self) -> list[tuple[float, float]]:
        """Seconds of one call, or of as many short calls as fit into SECONDS_A_ROUND."""
        began, calls = self._now(), [self.seconds()]
        while self._now() - began < SECONDS_A_ROUND:
            calls.append(self.seconds())
        return calls

    def seconds(self) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        began = self._now()
        mixed = self.forward()
        between = self._now()
        gradients = self.backward(mixed)
        ended = self._now()
        del gradients  # after the clock, so that freeing them is not timed
        return between - began, ended - between

    def _now(self) -> float:
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)
        return time.perf_counter()


def draw(setup: Setup, length: int) -> tuple[Tensor, ...]:
    """Queries, keys, values and the direction of backward, the same for every core."""
    generator = torch.Generator().manual_seed(setup.seed)
    shape = (setup.batch, setup.heads, length, setup.head_dim)
    drawn = [torch.randn(shape, generator=generator).to(setup.device, setup.dtype) for _ in "qkvy"]
    return *(x.requires_grad_() for x in drawn[:3]), drawn[3]


def refuse(settings: CoreSettings, setup: Setup, length: int) -> None:
    """Raise UserError, with this command's options, for what an implementation cannot do."""
    if not isinstance(settings, Linformer):
        return
    if setup.causal:
        raise UserError("it mixes all positions, also later ones: leave out --causal, or this core")
    if settings.rank > length:
        smaller = max(1, min(64, length // 2))
        raise UserError(
            f"rank={settings.rank} does not reduce {length} positions: choose a smaller one, "
            f'--cores "linformer rank={smaller}"'
        )


def attempt(act: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or None and the reason of the failure."""
    try:
        return act(), ""
    except (UserError, NotImplementedError) as refusal:
        return None, str(refusal).partition("\n")[0]
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # the message of the CPU's allocator
            raise
    # Outside of the handlers, where no traceback references tensors.
    gc.collect()
    torch.cuda.empty_cache()
    return None, OUT_OF_MEMORY


def needed(known: Sequence[tuple[int, int]], length: int) -> float:
    """Extrapolate the bytes at another length from the last two: between n and n²."""
    if not known:
        return 0.0
    power = exponent(known[-2:])
    last, held = known[-1]
    return held * (length / last) ** (2.0 if power is None else min(max(power, 1.0), 2.0))


def rungs(lengths: Sequence[int]) -> list[int]:
    """The lengths, with intermediate ones where the ratio of successive lengths is too large."""
    ladder: list[int] = []
    last = SHORTEST
    for length in lengths:
        while last * LONGEST_STEP < length:
            last *= LONGEST_STEP
            ladder.append(last)
        ladder.append(length)
        last = max(last, length)
    return ladder


class Measurement:
    """Measures all implementations, from the shortest length to the longest."""

    def __init__(
        self, cores: Mapping[str, CoreSettings], lengths: Sequence[int], setup: Setup
    ) -> None:
        self.cores, self.lengths, self.setup = cores, lengths, setup
        self.costs = {name: Cost(core=name, exact=cores[name].exact) for name in cores}
        self.peaks: dict[str, list[tuple[int, int]]] = {name: [] for name in cores}
        self.refused: dict[str, dict[int, str]] = {name: {} for name in cores}
        self.done = 0
        self.bar = Bar("cost", len(cores) * (len(rungs(lengths)) + setup.rounds * len(lengths)))

    def run(self) -> list[Cost]:
        with self.bar:
            for length in rungs(self.lengths):
                self._measure(length)
        if not any(cost.points for cost in self.costs.values()):
            name, cost = next(iter(self.costs.items()))
            raise UserError(f"no core can be measured: {name}: {cost.stopped}")
        for line in self._left_out():
            self.bar.say(line)
        return list(self.costs.values())

    def _measure(self, length: int) -> None:
        """Measure memory first, which shows what fits into the machine; then time."""
        inputs = draw(self.setup, length)
        trials, memory = {}, {}
        for name in self.cores:
            self._step(f"{name}, memory at {length}")
            # A refused length may be followed by an accepted one; out of memory is final.
            if not self._full(name) and (prepared := self._prepare(name, length, inputs)):
                trials[name], memory[name] = prepared
        if length not in self.lengths:
            return
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in trials}
        for number in range(self.setup.rounds):
            for name in self.cores:
                self._step(f"{name}, round {number + 1} at {length}")
                if name in trials:
                    rounds[name] += trials[name].round()
        for name, times in rounds.items():
            forward, backward = (statistics.median(each) for each in zip(*times, strict=True))
            self.costs[name].points.append(
                Point(
                    length=length,
                    forward=forward,
                    backward=backward,
                    forward_memory=memory[name][0],
                    memory=memory[name][1],
                )
            )

    def _prepare(
        self, name: str, length: int, inputs: tuple[Tensor, ...]
    ) -> tuple[Trial, tuple[int, int]] | None:
        """A warmed-up trial and its memory; None if it is refused or does not fit."""
        estimate, free = needed(self.peaks[name], length), free_memory(self.setup.device)
        if free is not None and estimate > SHARE_OF_MEMORY * free:
            required, available = human_bytes(int(estimate)), human_bytes(free)
            self._stop(
                name, length, f"{OUT_OF_MEMORY}: needs about {required}, {available} are free"
            )
            return None

        def prepared() -> tuple[Trial, tuple[int, int]]:
            trial = Trial(self.cores[name], self.setup, inputs)
            trial.seconds()
            return trial, trial.memory()

        result, reason = attempt(prepared)
        if result is None:
            self._stop(name, length, reason)
            return None
        core = result[0].core
        self.costs[name].stopped = None
        self.costs[name].reach = core.reach if isinstance(core, LocalAttention) else 0
        self.peaks[name].append((length, result[1][1]))
        return result

    def _full(self, name: str) -> bool:
        return (self.costs[name].stopped or "").startswith(OUT_OF_MEMORY)

    def _stop(self, name: str, length: int, reason: str) -> None:
        """Report out of memory at once, and collect refusals with their lengths."""
        self.costs[name].stopped = reason
        if self._full(name):
            self.bar.say(f"{name} is left out from {length} on: {reason}")
        elif length in self.lengths:
            self.refused[name][length] = reason

    def _left_out(self) -> list[str]:
        """One line for each refused implementation: its lengths and the reason."""
        lines = []
        for name, reasons in self.refused.items():
            some = len(reasons) < len(self.lengths)
            where = f" at {', '.join(map(str, reasons))}" if some else ""
            lines += [f"{name} is left out{where}: {why}" for why in [*reasons.values()][:1]]
        return lines

    def _step(self, note: str) -> None:
        self.done += 1
        self.bar.update(self.done, note)


# --- tables ---


def machine(setup: Setup) -> dict[str, Any]:
    """The machine on which the numbers were measured."""
    name = platform.processor() or platform.machine()
    if setup.device.type == "cuda":
        name = torch.cuda.get_device_name(setup.device)
    elif (cpuinfo := Path("/proc/cpuinfo")).is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return {
        "device": setup.device.type,
        "name": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": str(setup.dtype).removeprefix("torch."),
    }


def crossover(core: Sequence[Point], reference: Sequence[Point]) -> Crossover | None:
    """The length from which on an implementation is faster, by log-log interpolation."""
    other = {point.length: point.time for point in reference}
    # Negative where it is faster; the difference of two piecewise linear curves is linear too.
    ahead = [
        (math.log(point.length), math.log(point.time / other[point.length]))
        for point in core
        if point.length in other
    ]
    if not ahead:
        return None
    slower = [place for place, (_, distance) in enumerate(ahead) if distance >= 0]
    if not slower:
        return "always"
    if slower[-1] == len(ahead) - 1:
        return "never here"
    (n, high), (m, low) = ahead[slower[-1]], ahead[slower[-1] + 1]
    return math.ceil(math.exp(n + (m - n) * high / (high - low)))


def crossovers(costs: Sequence[Cost]) -> dict[str, Crossover | None]:
    """The length from which on each inexact implementation is faster than the fused one."""
    fused = [cost.points for cost in costs if cost.core == REFERENCE and cost.points]
    inexact = [cost for cost in costs if fused and not cost.exact and cost.points]
    return {cost.core: crossover(cost.points, fused[0]) for cost in inexact}


def notes(costs: Sequence[Cost]) -> list[str]:
    """Remarks where an implementation computes exact attention at short lengths."""
    return [
        f"{cost.core} computes exact attention up to {cost.reach} positions: its exponents "
        "use longer lengths"
        for cost in costs
        if len(cost.growing) < len(cost.points)
    ]


def as_rows(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """One row per implementation, in plain values for JSON."""
    crossed = crossovers(costs)
    return [
        {
            **asdict(cost),
            "time_exponent": cost.time_exponent,
            "memory_exponent": cost.memory_exponent,
            "faster_than_fused_from": crossed.get(cost.core),
        }
        for cost in costs
    ]


def table_of(costs: Sequence[Cost], lengths: Sequence[int]) -> Group:
    """A table of time and one of memory: a row per implementation, a column per length."""
    crossed = crossovers(costs)
    columns = [*map(str, lengths), "exponent"]
    time = _table("milliseconds, forward + backward", columns)
    memory = _table("peak memory, forward / forward and backward", columns)
    if crossed:
        time.add_column("faster than fused from", justify="right")
    for cost in (cost for cost in costs if cost.points):
        points = {point.length: point for point in cost.points}
        full = (cost.stopped or "").startswith(OUT_OF_MEMORY)
        times = dict.fromkeys(lengths, OUT_OF_MEMORY if full else "refused")
        held = dict(times)
        for length, point in points.items():
            times[length] = f"{_milliseconds(point.forward)} + {_milliseconds(point.backward)}"
            held[length] = f"{human_bytes(point.forward_memory)} / {human_bytes(point.memory)}"
        last = [str(crossed.get(cost.core) or "")] if crossed else []
        time.add_row(cost.core, *times.values(), _power(cost.time_exponent), *last)
        memory.add_row(cost.core, *held.values(), _power(cost.memory_exponent))
    return Group(time, memory)


def plot(costs: Sequence[Cost], path: Path) -> None:
    """Time and memory by length."""
    shown = [cost for cost in costs if cost.points]
    times = {cost.core: [(p.length, 1000 * p.time) for p in cost.points] for cost in shown}
    memory = {cost.core: [(p.length, p.memory / 2**20) for p in cost.points] for cost in shown}
    panels = {"milliseconds, forward and backward": times, "MiB at the peak": memory}
    growth(panels, "length", path)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("core", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: float) -> str:
    number = 1000 * seconds
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}".rstrip(".")


def _power(exponent: float | None) -> str:
    return "" if exponent is None else f"{exponent:.2f}"
