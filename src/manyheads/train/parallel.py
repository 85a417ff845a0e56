"""Data-parallel training by several processes that `torchrun` starts.

A step has the same batch whatever the number of processes: it is split into micro-batches, of
which process r of n computes every n-th, from the r-th on, each divided by the counts of the step.
The sum over the processes is the gradient of one process, up to rounding:

    ∇L = Σ_r Σ_{b of r} ∇l_b / count
"""

import copy
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from manyheads.errors import UserError
from manyheads.nn.block import Block
from manyheads.train.step import ForwardBackward, StepStats, Task, World, weighted_sum

B = TypeVar("B")
Parallel = Literal["ddp", "fsdp"]

# The main process may validate, or train a tokenizer, for hours while the others wait for it.
# torchrun detects a process that has died.
TIMEOUT = timedelta(hours=24)
# How long another process waits for the main one to report an error before it does so itself.
REPORT_TIMEOUT = timedelta(seconds=20)
REPORTED = "reported"


@contextmanager
def connected(report: Callable[[str], None]) -> Iterator[World]:
    """The processes that torchrun has started, as a process group; this one ends with it.

    An error that all of them raise is reported once.
    """
    world = _of_environment()
    shared, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    # After a restart torchrun keeps the store, with the addresses of processes that died.
    store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), shared)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    code = 0
    try:
        yield world
    except Exception as error:
        if not hasattr(error, "exit_code"):  # the others may not have it, and wait
            raise
        code = error.exit_code
        # torchrun ends all as soon as one has ended: the main one reports before that.
        if isinstance(error, UserError) and (world.is_main or not _is_reported(store)):
            report(f"manyheads: {error}")
            store.set(REPORTED, "")
    dist.destroy_process_group()
    # Threads of a process group sometimes abort a process that ends the usual way, after its work
    # is done; torchrun would take that for a failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _of_environment() -> World:
    """From the variables that torchrun sets."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    try:
        rank, size, local_rank, _, _ = (os.environ[name] for name in names)
        return World(int(rank), int(size), int(local_rank))
    except (KeyError, ValueError):
        values = " ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        raise UserError(f"{values} is not a process of torchrun: start with torchrun") from None


def device_of(world: World, device: torch.device) -> torch.device:
    """A GPU for each process of a machine."""
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise UserError(f"each process has a GPU of its own: use --device cuda, not {device}")
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if max(processes, world.local_rank + 1) > gpus:
        raise UserError(
            f"{processes} processes and {gpus} GPUs here: start torchrun with "
            f"--nproc-per-node {gpus}, or train with --device cpu"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def local_batches(world: World, batches: list[B]) -> list[tuple[B, bool]]:
    """The micro-batches of this process, and whether each is counted.

    All processes compute equally many, since all take part in every exchange of gradients. One
    that has too few computes the first micro-batch of the step, with weight 0.
    """
    local = [(batch, True) for batch in batches[world.rank :: world.size]]
    rounds = -(-len(batches) // world.size)
    return local + [(batches[0], False)] * (rounds - len(local))


def _is_reported(store: Any) -> bool:
    try:
        store.wait([REPORTED], REPORT_TIMEOUT)
    except RuntimeError:  # raised on time-out
        return False
    return True


class Distributed(ForwardBackward):
    """Gradients summed over processes, with DDP (replicated weights) or FSDP (sharded ones)."""

    def __init__(
        self, objective: nn.Module, dtype: torch.dtype, parallel: Parallel, world: World
    ) -> None:
        super().__init__(objective, dtype)
        self.world = world
        if parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (world.size,))
            blocks = [part for part in objective.modules() if isinstance(part, Block)]
            for part in (*blocks, objective):
                fully_shard(part, mesh=mesh)
        else:
            # Some parameters may be unused, as a pooler for fine-tuning. Then DDP also keeps its
            # buckets: else it reorders them after the first pass, and a resumed run would sum its
            # first step in another order than before.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            self.objective = DistributedDataParallel(objective, find_unused_parameters=True)

    def __call__(self, batches: list[Any], stats: StepStats) -> None:
        local = local_batches(self.world, batches)
        for number, (batch, counted) in enumerate(local, start=1):
            with self._gradient_sync(number == len(local)):
                losses, routing = self.losses(batch)
                # DDP and FSDP average over the processes; the gradient of the step is the sum.
                scale = self.world.size if counted else 0
                (weighted_sum(losses, stats.divisors()) * scale).backward()
            stats.add(losses, routing, counted=counted)
        _sum_over_processes(stats)

    def _gradient_sync(self, is_last: bool) -> Any:
        """DDP exchanges gradients after the last micro-batch only, FSDP after each."""
        no_sync = getattr(self.objective, "no_sync", None)
        return nullcontext() if is_last or no_sync is None else no_sync()


def _sum_over_processes(stats: StepStats) -> None:
    values = [*stats.sums.values(), stats.dropped, stats.routed]
    device = next(iter(stats.sums.values())).device
    row = torch.stack([torch.as_tensor(value, device=device).double() for value in values])
    dist.all_reduce(row)
    *sums, stats.dropped, stats.routed = row
    stats.sums = dict(zip(stats.sums, sums, strict=True))


def split_microbatches(task: Any, ways: int) -> Task[Any]:
    """The same task with every micro-batch of a step split into so many.

    A task fixes the rows of a step when it is made, and splits them by `train.accumulate`.
    """
    if not hasattr(task, "train"):
        raise UserError(f"{type(task).__name__} cannot be divided among processes: train with one")
    split: Any = copy.copy(task)
    split.train = dataclasses.replace(split.train, accumulate=split.train.accumulate * ways)
    result: Task[Any] = split
    return result
