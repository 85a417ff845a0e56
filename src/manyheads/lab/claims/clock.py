"""Interleaved timing of several functions, on a machine that may run other processes.

On a CPU this is the CPU time of the calling thread: waiting for a core costs nothing, and work
shared between threads counts only with this thread's part. `wall=True` takes wall-clock time.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

SECONDS_A_ROUND = 0.02  # repeat short calls for this long, so that the median ignores outliers


def side_by_side(
    acts: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    *,
    wall: bool = False,
) -> dict[str, float]:
    """The median seconds of a call of each, after a warm-up call; rounds alternate between them."""
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
