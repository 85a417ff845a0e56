"""Data-parallel training by several processes that `torchrun` starts.

A step has the same batch whatever the number of processes: it is split into micro-batches, of
which process r of n computes every n-th, from the r-th on, each divided by the counts of the step.
The sum over the processes is the gradient of one process, up to rounding:

    ∇L = Σ_r Σ_{b of r} ∇l_b / count
"""

import copy
import dataclasses
import math
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.errors import UserError
from manyheads.nn.block import Block
from manyheads.train.optimizer import Train
from manyheads.train.step import ForwardBackward, StepStats, Task, World, weighted_sum

B = TypeVar("B")

# The main process may validate, or train a tokenizer, for hours while the others wait for it.
# torchrun detects a process that has died.
TIMEOUT = 24 * 3600.0  # seconds; the variable MANYHEADS_TIMEOUT overrides it
# How long another process waits for the main one to report an error before it does so itself.
REPORT_TIMEOUT = timedelta(seconds=20)
REPORTED = "reported"


@contextmanager
def connected(report: Callable[[str], None]) -> Iterator[World]:
    """The processes that torchrun has started, as a process group; this one ends with it.

    An error that all of them raise is reported once.
    """
    world, host = _of_environment(), socket.gethostname()
    timeout = timedelta(seconds=float(os.environ.get("MANYHEADS_TIMEOUT", TIMEOUT)))
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # After a restart torchrun keeps this store, with the addresses of processes that died.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if world.is_main:
        nodes, address = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ["MASTER_ADDR"]
        report(
            f"process group: {size} processes, {nodes} nodes, {backend}, main {host} ({address})"
        )
    code = 0
    try:
        yield world
    except Exception as error:
        if hasattr(error, "exit_code"):
            code = error.exit_code
            # torchrun ends all as soon as one has ended: the main one reports before that.
            if isinstance(error, UserError) and (world.is_main or not _is_reported(store)):
                report(f"manyheads: {error}")
                store.set(REPORTED, "")
        elif isinstance(error, dist.DistError) or "gloo" in str(error):
            code = 1
            problem = str(error).splitlines()[0].rpartition("] ")[2]
            report(f"manyheads: rank {rank} of {size} on {host} lost the others: {problem}")
        else:  # the others may not have it, and wait
            raise
    dist.destroy_process_group()
    # Threads of a process group sometimes abort a process that ends the usual way, after its work
    # is done; torchrun would take that for a failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def shared_rows(world: World, name: str, *owners: type) -> Iterator[None]:
    """Within this context every process computes a part of the rows of a method, and gets all.

    A row of its result may depend on that row of its first argument only. If the method of one
    owner calls that of another, it computes the rows that it gets.
    """
    is_divided = False

    def divide(method: Any) -> Callable[..., list[Any]]:
        def share(self: Any, rows: Any, *arguments: Any, **named: Any) -> list[Any]:
            nonlocal is_divided
            if is_divided:
                return list(method(self, rows, *arguments, **named))
            local, is_divided = rows[world.rank :: world.size], True
            try:
                results = list(method(self, local, *arguments, **named)) if len(local) else []
            finally:
                is_divided = False
            parts: list[Any] = [None] * world.size
            dist.all_gather_object(parts, results)
            return [parts[row % world.size][row // world.size] for row in range(len(rows))]

        return share

    with ExitStack() as patches:
        for owner in owners:
            divided = patch.object(owner, name, divide(getattr(owner, name)))
            patches.enter_context(divided)
        yield


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


def shard_sizes(train: Train, world: World) -> tuple[int, int]:
    """Copies of the weights, and processes that share each: (1, world.size) unless set (HSDP)."""
    shard = train.shard or world.size // (train.replicate or 1)
    replicate = train.replicate or world.size // shard
    if shard * replicate != world.size:
        raise UserError(
            f"train.shard={shard} × train.replicate={replicate} is not the number of processes, "
            f"{world.size}: change one of them"
        )
    return replicate, shard


class ShardedBuild(TorchDispatchMode):
    """A context in which a model is built that FSDP shards: each process stores its rows only.

    A parameter goes to the meta device as soon as a module registers it. Later fills (`normal_`,
    `uniform_`) run on the CPU, for one tensor at a time, and rows of other processes are dropped:
    random numbers, and so weights, have the bits of one process. Buffers are complete.
    """

    FILLS = ("aten::normal_", "aten::uniform_", "aten::fill_", "aten::zero_", "aten::copy_")

    def __init__(self, train: Train, world: World, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.size = device, shard_sizes(train, world)[1]
        self.rank = world.rank % self.size
        self.shards: dict[int, tuple[nn.Parameter, int, Tensor]] = {}  # by storage: first, values

    def __enter__(self) -> "ShardedBuild":
        register, to_meta = nn.Module.register_parameter, self._to_meta
        self.patch = patch.object(
            nn.Module,
            "register_parameter",
            lambda module, name, parameter: register(module, name, to_meta(parameter)),
        )
        self.patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.patch.stop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _to_meta(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        width = math.prod(parameter.shape[1:])
        first = min(self.rank * -(-len(parameter) // self.size), len(parameter)) * width
        rows = parameter.detach().chunk(self.size)
        values = rows[self.rank].flatten() if self.rank < len(rows) else parameter.new_empty(0)
        meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        self.shards[meta.untyped_storage()._cdata] = meta, first, values.detach().clone()
        return meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target, kwargs = args[0] if args else None, kwargs or {}
        if not (isinstance(target, Tensor) and target.is_meta and func._schema.is_mutable):
            return func(*args, **kwargs)
        if func._schema.name not in self.FILLS or not target.is_contiguous():
            raise TypeError(f"{func} cannot initialise a sharded parameter: fill its rows instead")
        full = torch.empty(target.shape, dtype=target.dtype)
        func(full, *args[1:], **kwargs)
        _, first, values = self.shards[target.untyped_storage()._cdata]
        begin = target.storage_offset() - first  # may be before the shard, or after it
        start, stop = max(begin, 0), min(begin + full.numel(), values.numel())
        if start < stop:
            values[start:stop] = full.flatten()[start - begin : stop - begin]
        return target

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """The values of this process, by the name of the parameter."""
        parameters = model.named_parameters()
        return {n: self.shards[p.untyped_storage()._cdata][2] for n, p in parameters}


def make_mesh(train: Train, world: World, device: torch.device) -> DeviceMesh:
    """The processes as one row of shards or, with HSDP, a row of shards for each copy."""
    sizes, names = shard_sizes(train, world), ("replicate", "shard")
    first = int(sizes[0] == 1)
    return init_device_mesh(device.type, sizes[first:], mesh_dim_names=names[first:])


@torch.no_grad()
def shard_model(model: nn.Module, mesh: DeviceMesh, shards: ShardedBuild | None = None) -> None:
    """FSDP, block by block, in place; a model from `ShardedBuild` gets its weights here."""
    from torch.distributed.fsdp import fully_shard

    values = shards.named(model) if shards else {}
    buffers = dict(model.named_buffers())
    for part in (*[part for part in model.modules() if isinstance(part, Block)], model):
        fully_shard(part, mesh=mesh)
    if shards is None:
        return
    model.to_empty(device=shards.device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in model.named_parameters():
        local: Tensor = parameter.to_local()  # type: ignore[attr-defined]
        local.copy_(values.pop(name).view(local.shape))


class Distributed(ForwardBackward):
    """Gradients summed over processes, with DDP (replicated weights) or FSDP (sharded ones)."""

    def __init__(
        self,
        objective: nn.Module,
        dtype: torch.dtype,
        train: Train,
        world: World,
        shards: ShardedBuild | None = None,
    ) -> None:
        self.world, self.is_sharded = world, train.parallel == "fsdp"
        if self.is_sharded:
            device = shards.device if shards else next(objective.parameters()).device
            shard_model(objective, make_mesh(train, world, device), shards)
        super().__init__(objective, dtype)
        if not self.is_sharded:
            # Some parameters may be unused, as a pooler for fine-tuning. Then DDP also keeps its
            # buckets: else it reorders them after the first pass, and a resumed run would sum its
            # first step in another order than before.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            self.objective = DistributedDataParallel(objective, find_unused_parameters=True)

    @contextmanager
    def validation(self) -> Iterator[bool]:
        """DDP: the main process. FSDP: all, each with all data, and blocks gathered in turn."""
        if not self.is_sharded:
            yield self.world.is_main
            return
        objective: Any = self.objective
        objective.unshard()  # embeddings and head: the forward of the objective is not called
        yield True
        objective.reshard()

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
