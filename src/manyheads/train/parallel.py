"""Training by several processes that `torchrun` starts, which together do what one would do.

A step has the same batch whatever their number: it is parted into micro-batches, of which process
r of n computes every n-th from the r-th on, each divided by the counts of the whole step. So what
the processes add up is the gradient of one process, but for rounding:

    ∇L = Σ_r Σ_{b of r} ∇l_b / count
"""

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from manyheads.nn.performer import PerformerCore

B = TypeVar("B")
Parallel = Literal["ddp", "fsdp"]

# The first process may validate, or learn a vocabulary, for long while the others wait for it; it
# is torchrun that notices a process which has died.
PATIENCE = timedelta(hours=24)
# How long another process waits for the first to say what is wrong before it does so itself.
TURN = timedelta(seconds=20)
SAID = "said"


@dataclass(frozen=True)
class World:
    """Which of how many processes this is: the `rank`-th of all, the `local_rank`-th here."""

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
        """As torchrun tells its processes; alone where nothing is told."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        told = [os.environ.get(name) for name in names]
        if told[0] is None or told[1] is None:
            return ALONE
        try:
            return World(*(int(one or 0) for one in told))
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            said = " ".join(f"{name}={one}" for name, one in zip(names, told, strict=True))
            raise UserError(f"{said} in the environment are no numbers: use torchrun") from None

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def first(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    def device(self, chosen: torch.device) -> torch.device:
        """A GPU for each process of a machine."""
        if not self.several or chosen.type != "cuda":
            return chosen
        if chosen.index is not None:
            raise UserError(f"each process has a GPU of its own: use --device cuda, not {chosen}")
        here, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if max(processes, self.local_rank + 1) > here:
            raise UserError(
                f"{processes} processes and {here} GPUs here: start torchrun with "
                f"--nproc-per-node {here}, or train with --device cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def begun(self, say: Callable[[str], None]) -> Iterator[None]:
        """Bound together while it is open; a mistake that all of them find is said once."""
        if not self.several:
            yield
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(f"RANK is set and {missing[0]} is not: start with torchrun")
        found, rank, size = next(iter(rendezvous("env://", timeout=PATIENCE)))
        # torchrun keeps the store when it starts all again, with the addresses of those who died.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), found)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
        try:
            yield
        except Exception as error:
            code = getattr(error, "exit_code", None)
            if code is None:  # of which the others may know nothing, and wait: torchrun ends them
                raise
            # torchrun ends all as soon as one has ended: the first has to have spoken by then.
            if isinstance(error, UserError) and (self.first or not _is_said(store)):
                say(f"manyheads: {error}")
                store.set(SAID, "")
            dist.destroy_process_group()
            self.leave(code)
        dist.destroy_process_group()

    def leave(self, code: int = 0) -> None:
        """End this process of several at once.

        What is left of their groups has threads of its own, which now and then abort a process
        that ends the usual way, with all its work done; torchrun would take that for a failure.
        """
        if self.several:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> None:
        """Until all have come here."""
        self.agreed(0)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first process alone, then the others; none goes on before all are done."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()
        self.wait()

    def agreed(self, number: int) -> int:
        """The greatest of the numbers that the processes bring."""
        if not self.several:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of what the processes bring."""
        if self.several:
            dist.all_reduce(numbers)
        return numbers

    def told(self, scores: dict[str, float]) -> dict[str, float]:
        """What the first process has found."""
        if not self.several:
            return scores
        one = [scores]
        dist.broadcast_object_list(one, src=0, device=torch.device("cpu"))
        return one[0]

    def alike(self, tensors: list[Tensor]) -> None:
        """Make them what they are in the first process."""
        for tensor in tensors if self.several else []:
            dist.broadcast(tensor, src=0)

    def own(self, parts: list[B]) -> list[tuple[B, bool]]:
        """The micro-batches that this process computes, and whether each counts.

        All compute equally many, as all take part in every exchange of gradients: one for which
        nothing is left computes the first again, for nothing.
        """
        mine = [(part, True) for part in parts[self.rank :: self.size]]
        rounds = -(-len(parts) // self.size)
        return mine + [(parts[0], False)] * (rounds - len(mine))


ALONE = World()


def _is_said(store: Any) -> bool:
    try:
        store.wait([SAID], TURN)
    except RuntimeError:  # what it raises when time is over
        return False
    return True


def divided(task: Any, ways: int) -> Any:
    """The same task with every micro-batch of a step in so many.

    A task settles the rows of a step when it is made, and parts them by `train.accumulate`.
    """
    if not hasattr(task, "train"):
        raise UserError(f"{type(task).__name__} cannot be divided among processes: train with one")
    parted = copy.copy(task)
    parted.train = dataclasses.replace(task.train, accumulate=task.train.accumulate * ways)
    return parted


def spread(
    objective: nn.Module, parallel: Parallel, device: torch.device, *, unreached: bool
) -> nn.Module:
    """A module of which each process has a copy ("ddp") or a part of every weight ("fsdp").

    Both give every process the mean of the gradients of all. `unreached` says that there are
    weights without a gradient, which the others must not wait for.
    """
    if parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(objective, devices, find_unused_parameters=unreached)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in list(objective.modules()):
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def whole(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Sharded tensors in one piece, for the first process alone: one after the other."""
    from torch.distributed.tensor import DTensor

    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.first:
            found[name] = full.detach().cpu()
    return found


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def redrawn(model: nn.Module) -> list[Tensor]:
    """Random features that a model draws anew while it is trained: all have to use the same."""
    return [
        buffer
        for part in model.modules()
        if isinstance(part, PerformerCore) and part.settings.redraw is not None
        for buffer in part.buffers(recurse=False)
    ]
