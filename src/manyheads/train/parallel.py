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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from manyheads.errors import UserError
from manyheads.nn.block import Block
from manyheads.train.checkpoint import Checkpointer
from manyheads.train.step import (
    Batches,
    ForwardBackward,
    StepStats,
    Task,
    World,
    weighted_sum,
)

B = TypeVar("B")
Parallel = Literal["ddp", "fsdp"]

# The main process may validate, or train a tokenizer, for hours while the others wait for it.
# torchrun detects a process that has died.
TIMEOUT = timedelta(hours=24)
# How long another process waits for the main one to report an error before it does so itself.
REPORT_TIMEOUT = timedelta(seconds=20)
REPORTED = "reported"


@dataclass(frozen=True)
class Processes(World):
    """Several processes: this one is `rank` of `size`, and `local_rank` on its machine."""

    rank: int
    size: int
    local_rank: int = 0

    @staticmethod
    def of_environment() -> "Processes":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        values = [os.environ.get(name, "0") for name in names]
        problem = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        try:
            rank, size, local_rank = map(int, values)
        except ValueError:
            raise UserError(f"{problem} are not numbers: start with torchrun") from None
        if not 0 <= rank < size or local_rank < 0:
            raise UserError(f"{problem} is not a process: start with torchrun")
        return Processes(rank, size, local_rank)

    def device(self, device: torch.device) -> torch.device:
        """A GPU for each process of a machine."""
        if device.type != "cuda":
            return device
        if device.index is not None:
            raise UserError(f"each process has a GPU of its own: use --device cuda, not {device}")
        gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if max(processes, self.local_rank + 1) > gpus:
            raise UserError(
                f"{processes} processes and {gpus} GPUs here: start torchrun with "
                f"--nproc-per-node {gpus}, or train with --device cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def connected(self, report: Callable[[str], None]) -> Iterator[None]:
        """A process group; an error that all processes raise is reported once."""
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(f"RANK is set and {missing[0]} is not: start with torchrun")
        shared, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
        # After a restart torchrun keeps the store, with the addresses of processes that died.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), shared)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        try:
            yield
        except Exception as error:
            code = getattr(error, "exit_code", None)
            if code is None:  # the others may not have it, and wait: torchrun ends them
                raise
            # torchrun ends all as soon as one has ended: the main one reports before that.
            if isinstance(error, UserError) and (self.is_main or not _is_reported(store)):
                report(f"manyheads: {error}")
                store.set(REPORTED, "")
            dist.destroy_process_group()
            self.exit(code)
        dist.destroy_process_group()

    def exit(self, code: int = 0) -> None:
        """End this process at once.

        Threads of a process group sometimes abort a process that ends the usual way, after its
        work is done; torchrun would take that for a failure.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def wait(self) -> None:
        self.all_max(0)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()
        self.wait()

    def all_max(self, number: int) -> int:
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def broadcast(self, scores: dict[str, float]) -> dict[str, float]:
        objects = [scores]
        dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
        return objects[0]

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        gathered = {}
        for name, tensor in tensors.items():
            full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.is_main:
                gathered[name] = full.cpu()
        return gathered

    def local_batches(self, batches: list[B]) -> list[tuple[B, bool]]:
        """The micro-batches of this process, and whether each is counted.

        All processes compute equally many, since all take part in every exchange of gradients.
        One that has too few computes the first micro-batch of the step, with weight 0.
        """
        local = [(batch, True) for batch in batches[self.rank :: self.size]]
        rounds = -(-len(batches) // self.size)
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
        self,
        objective: nn.Module,
        dtype: torch.dtype,
        batches: Batches,
        parallel: Parallel,
        world: Processes,
    ) -> None:
        super().__init__(objective, dtype)
        self.world = world
        if parallel == "fsdp":
            self._shard()
        else:
            self._replicate(batches(0)[0])

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world.size,))
        for part in list(self.objective.modules()):
            if isinstance(part, Block):
                fully_shard(part, mesh=mesh)
        fully_shard(self.objective, mesh=mesh)

    def _replicate(self, example: Any) -> None:
        devices = [self.device] if self.device.type == "cuda" else None
        has_unused = not self._reaches_all(example)
        self.objective = DistributedDataParallel(
            self.objective, devices, find_unused_parameters=has_unused
        )
        # After its first pass DDP reorders its buckets for good, by the order in which gradients
        # came. Else a resumed run would sum its first step in another order than before.
        self._reaches_all(example)

    def __call__(self, batches: list[Any], stats: StepStats) -> None:
        local = self.world.local_batches(batches)
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

    def _reaches_all(self, example: Any) -> bool:
        """True if all parameters get a gradient (a pooler for fine-tuning may not).

        A pass over a batch whose gradients are discarded.
        """
        self.objective.train()
        losses, _ = self.losses(example)
        torch.stack([loss.objective for loss in losses.values()]).sum().backward()
        gradients = [p.grad for p in self.objective.parameters() if p.requires_grad]
        self.zero_grad()
        return all(gradient is not None for gradient in gradients)


def _sum_over_processes(stats: StepStats) -> None:
    values = [*stats.sums.values(), *(number for pair in stats.extra.values() for number in pair)]
    device = values[0].device
    row = torch.stack([torch.as_tensor(value, device=device).double() for value in values])
    dist.all_reduce(row)
    totals = iter(row)
    stats.sums = {name: next(totals) for name in stats.sums}
    stats.extra = {name: (next(totals), next(totals)) for name in stats.extra}


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


class ShardedCheckpointer(Checkpointer):
    """For FSDP. `replica`, on the main process, is a copy of the model from before sharding."""

    def __init__(self, *parts: Any, replica: nn.Module | None) -> None:
        super().__init__(*parts)
        self.replica = replica

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        weights = self.world.gather(self.model.state_dict())
        if self.replica is None:
            yield self.model
            return
        self.replica.load_state_dict(weights)
        yield self.replica.to(next(self.model.parameters()).device)
        self.replica.cpu()
