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

from manyheads.errors import UserError
from manyheads.nn.block import Block
from manyheads.nn.performer import PerformerAttention
from manyheads.train.step import Batches, ForwardBackward, StepStats, Task, weighted_sum

B = TypeVar("B")
Parallel = Literal["ddp", "fsdp"]

# The main process may validate, or train a tokenizer, for hours while the others wait for it.
# torchrun detects a process that has died.
TIMEOUT = timedelta(hours=24)
# How long another process waits for the main one to report an error before it does so itself.
REPORT_TIMEOUT = timedelta(seconds=20)
REPORTED = "reported"


@dataclass(frozen=True)
class World:
    """The processes of a training: `rank` of `size`, `local_rank` on this machine.

    The main process, of rank 0, writes the run folder and the messages.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or self.local_rank < 0:
            raise UserError(
                f"RANK={self.rank} WORLD_SIZE={self.size} LOCAL_RANK={self.local_rank} name no "
                "process: start with torchrun"
            )

    @staticmethod
    def of_environment() -> "World":
        """From the variables that torchrun sets; one process without them."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        values = [os.environ.get(name) for name in names]
        if values[0] is None or values[1] is None:
            return ALONE
        try:
            rank, size, local_rank = (int(value or 0) for value in values)
        except ValueError:
            pairs = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
            raise UserError(f"{pairs} in the environment are no numbers: use torchrun") from None
        return World(rank, size, local_rank)

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """A GPU for each process of a machine."""
        if not self.is_distributed or device.type != "cuda":
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
        if not self.is_distributed:
            yield
            return
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
        """End this process of several at once.

        Threads of a process group sometimes abort a process that ends the usual way, after its
        work is done; torchrun would take that for a failure.
        """
        if self.is_distributed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> None:
        """Barrier."""
        self.all_max(0)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process, then the others; none continues before all are done."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()
        self.wait()

    def all_max(self, number: int) -> int:
        if not self.is_distributed:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def all_sum(self, numbers: Tensor) -> Tensor:
        if self.is_distributed:
            dist.all_reduce(numbers)
        return numbers

    def broadcast(self, scores: dict[str, float]) -> dict[str, float]:
        """The scores of the main process."""
        if not self.is_distributed:
            return scores
        objects = [scores]
        dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
        return objects[0]

    def sync(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with those of the main process."""
        for tensor in tensors if self.is_distributed else []:
            dist.broadcast(tensor, src=0)

    def local_batches(self, batches: list[B]) -> list[tuple[B, bool]]:
        """The micro-batches of this process, and whether each is counted.

        All processes compute equally many, since all take part in every exchange of gradients.
        One that has too few computes the first micro-batch of the step, with weight 0.
        """
        local = [(batch, True) for batch in batches[self.rank :: self.size]]
        rounds = -(-len(batches) // self.size)
        return local + [(batches[0], False)] * (rounds - len(local))


ALONE = World()


def _is_reported(store: Any) -> bool:
    try:
        store.wait([REPORTED], REPORT_TIMEOUT)
    except RuntimeError:  # raised on time-out
        return False
    return True


class Distributed(ForwardBackward):
    """Gradients summed over processes, with DDP or FSDP."""

    def __init__(
        self,
        objective: nn.Module,
        dtype: torch.dtype,
        batches: Batches,
        parallel: Parallel,
        world: World,
    ) -> None:
        super().__init__(objective, dtype)
        self.world = world
        self.random_features = random_feature_buffers(objective)
        if parallel == "fsdp":
            self.objective = wrap_ddp_or_fsdp(objective, "fsdp", self.device)
            return
        example = batches(0)[0]
        has_unused = not self._reaches_all(example)
        self.objective = wrap_ddp_or_fsdp(objective, "ddp", self.device, has_unused=has_unused)
        # After its first pass DDP reorders its buckets for good, by the order in which gradients
        # came. Else a resumed run would sum its first step in another order than before.
        self._reaches_all(example)

    def __call__(self, batches: list[Any], stats: StepStats) -> None:
        local = self.world.local_batches(batches)
        for number, (batch, counted) in enumerate(local, start=1):
            self.world.sync(self.random_features)
            with self._gradient_sync(number == len(local)):
                losses, routing = self.losses(batch)
                # DDP and FSDP average over the processes; the gradient of the step is the sum.
                scale = self.world.size if counted else 0
                (weighted_sum(losses, stats.divisors()) * scale).backward()
            stats.add(losses, routing, counted=counted)
        stats.all_reduce(self.world.all_sum)

    def _gradient_sync(self, is_last: bool) -> Any:
        """DDP exchanges gradients after the last micro-batch only, FSDP after each."""
        no_sync = getattr(self.objective, "no_sync", None)
        return nullcontext() if is_last or no_sync is None else no_sync()

    def _reaches_all(self, example: Any) -> bool:
        """Whether all parameters get a gradient (a pooler for fine-tuning may not).

        A pass over a batch whose gradients, and new random features, are discarded.
        """
        before = [buffer.clone() for buffer in self.random_features]
        self.objective.train()
        losses, _ = self.losses(example)
        torch.stack([loss.objective for loss in losses.values()]).sum().backward()
        gradients = [p.grad for p in self.objective.parameters() if p.requires_grad]
        self.zero_grad()
        for buffer, old in zip(self.random_features, before, strict=True):
            buffer.copy_(old)
        return all(gradient is not None for gradient in gradients)


def split_microbatches(task: Task[Any], ways: int) -> Task[Any]:
    """The same task with every micro-batch of a step split into so many.

    A task fixes the rows of a step when it is made, and splits them by `train.accumulate`.
    """
    if not hasattr(task, "train"):
        raise UserError(f"{type(task).__name__} cannot be divided among processes: train with one")
    split: Any = copy.copy(task)
    split.train = dataclasses.replace(split.train, accumulate=split.train.accumulate * ways)
    result: Task[Any] = split
    return result


def wrap_ddp_or_fsdp(
    objective: nn.Module, parallel: Parallel, device: torch.device, *, has_unused: bool = False
) -> nn.Module:
    """A module that each process holds completely ("ddp"), or a part of each weight ("fsdp").

    Both average gradients over the processes. `has_unused`: some parameters get no gradient.
    """
    if parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(objective, devices, find_unused_parameters=has_unused)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in list(objective.modules()):
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def gather_full(module: nn.Module) -> dict[str, Tensor]:
    """The complete state of a sharded module, on the main process's CPU; empty on the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(module, options=options)
    return state


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def random_feature_buffers(model: nn.Module) -> list[Tensor]:
    """Random features that are resampled during training: all processes have to use the same."""
    return [
        buffer
        for part in model.modules()
        if isinstance(part, PerformerAttention) and part.settings.redraw is not None
        for buffer in part.buffers(recurse=False)
    ]
