"""The peak memory of a call, and the free memory of a device."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import profiler

from manyheads.train.cuda_graphs import no_gc


def peak_memory(act: Callable[[], object], device: torch.device) -> int:
    """The peak of bytes allocated during a call, beyond those allocated before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with no_gc():
            act()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to stderr otherwise
    with no_gc(), profiler.profile(use_kineto=True, profile_memory=True) as records:
        act()
    # Every allocation and, with negative sizes, every release.
    events = [event for event in records.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def free_memory(device: torch.device) -> int | None:
    """Free bytes; None if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
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
