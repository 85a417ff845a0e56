"""How much memory a call takes at its peak, and how much there is."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd import profiler


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage of before is given back meanwhile: it would be counted, or recorded, as of now."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def peak_memory(act: Callable[[], object], device: torch.device) -> int:
    """The most bytes that were held at once during a call, beyond those held before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with nothing_collected():
            act()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to stderr otherwise
    with nothing_collected(), profiler.profile(use_kineto=True, profile_memory=True) as records:
        act()
    # Every block that the allocator gives out and, below 0, takes back.
    events = [event for event in records.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had, None where nothing tells."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    left = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        left += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
        group = Path("/sys/fs/cgroup")
        most, now = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        left += [int(most) - int(now)] if most.strip() != "max" else []
    except OSError:  # another system than Linux, or a group without a limit
        pass
    return min(left, default=None)
