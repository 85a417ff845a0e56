"""What cores cost, for people: tables of time and memory, and the same as plain values."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Group
from rich.table import Table

from manyheads.lab.cost import OUT_OF_MEMORY, CoreSettings, Cost, Point, Setup
from manyheads.nn.flex import NARROWEST, Flex
from manyheads.nn.packed import Packed
from manyheads.summary import human_bytes

REFERENCE = "fused"
Crossover = int | Literal["always", "never here"]


def machine(setup: Setup) -> dict[str, Any]:
    """The kind of machine that the numbers are of."""
    name = platform.processor() or platform.machine()
    if setup.device.type == "cuda":
        name = torch.cuda.get_device_name(setup.device)
    elif (told := Path("/proc/cpuinfo")).is_file():
        lines = told.read_text(encoding="utf-8").splitlines()
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
    """The length from which on a core takes less time, straight lines between logarithms."""
    other = {point.length: point.time for point in reference}
    # Below 0 where the core is faster; both curves are straight between two lengths, and so is it.
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
    """From which length on each core that is not exact is faster than the fused one."""
    fused = [cost.points for cost in costs if cost.core == REFERENCE and cost.points]
    inexact = [cost for cost in costs if fused and not cost.exact and cost.points]
    return {cost.core: crossover(cost.points, fused[0]) for cost in inexact}


def notes(cores: Mapping[str, CoreSettings], costs: Sequence[Cost], setup: Setup) -> list[str]:
    """Where a number is of another algorithm than its name says."""
    said = []
    for cost in (cost for cost in costs if cost.points):
        core = cores[cost.core]
        if isinstance(core, Flex) and setup.device.type != "cuda":
            said.append(f"{cost.core} is the fused core here: FlexAttention is for a GPU")
        elif isinstance(core, Flex) and setup.head_dim < NARROWEST:
            wider = f"--head-dim {NARROWEST} or more"
            said.append(f"{cost.core} is the fused core here: FlexAttention takes {wider}")
        if isinstance(core, Packed):
            said.append(f"{cost.core} is the fused core here: there is no padding to leave out")
        if len(cost.growing) < len(cost.points):
            said.append(
                f"{cost.core} is exact attention up to {cost.reach} positions, where nothing is "
                "far: its exponents are those of longer lengths"
            )
    return said


def as_rows(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """One a core, in plain values."""
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
    """One line a core, one column a length: a table of time, then one of memory."""
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
