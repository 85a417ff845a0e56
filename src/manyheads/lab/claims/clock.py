"""Seconds of several things side by side, on a machine that may have others to serve.

On a CPU they are those in which the calling thread was at work: what waits for a turn costs
nothing, and of what several threads share, its part counts. `wall` asks for the clock on the wall
instead: all that somebody would wait for.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

SECONDS_A_ROUND = 0.02  # so many calls of what is short that one that was disturbed does not count


def side_by_side(
    acts: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    *,
    wall: bool = False,
) -> dict[str, float]:
    """The median of all calls, after one that warms up, in rounds in which each has its turn."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for act in acts.values():
        act()
    for _ in range(rounds):
        for name, act in acts.items():
            ends = _now(device, wall) + SECONDS_A_ROUND
            while True:
                begun = _now(device, wall)
                act()
                ended = _now(device, wall)
                times[name].append(ended - begun)
                if ended >= ends:
                    break
    return {name: median(each) for name, each in times.items()}


def _now(device: torch.device, wall: bool) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.perf_counter() if wall else time.thread_time()
