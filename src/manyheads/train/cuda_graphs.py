"""Forward and backward passes as CUDA graphs: captured once per batch shape, then replayed.

A step of a small model is hundreds of kernels of a few microseconds each; the host takes longer to
launch them than the device to compute them. A graph is one launch. It reads copies of the batch at
fixed addresses and writes to fixed addresses.

If a step is one pass, a graph overwrites gradients of its own: nothing to zero, nothing to add.
These take as much memory as the weights for every shape. So after OWN_GRADIENT_BYTES, and if a
step has several passes, graphs add to gradients that all of them share.

A prefetcher makes the batches of the next step, and copies them to the GPU, while it computes this
one; a lock keeps such copies out of a capture.
"""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.train.step import ForwardBackward, Result, StepStats, Task

DEVICE_LOCK = Lock()  # a copy to the device during a capture would break the capture


@contextmanager
def no_gc() -> Iterator[None]:
    """Without garbage collection, which would free device memory of earlier objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any, *, mode: str) -> Iterator[None]:
    """Capture the kernels launched in this context into a CUDA graph.

    No garbage collection: it may free an older graph, which breaks a capture. cuBLAS workspaces
    are cleared before and after, so that the graph has its own, from its pool: another capture
    (`torch.compile` makes some) may free those of before.
    """
    with DEVICE_LOCK, no_gc():
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """The tensor fields of a batch by name."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class Prefetcher:
    """Returns the batches of a step and starts a thread that makes those of the next.

    Copies use a stream of their own, so that they do not wait for the computation. Batches are
    pure functions of the step, so it does not matter when they are made.
    """

    def __init__(self, task: Task[Any], last_step: int) -> None:
        self.task, self.last_step = task, last_step
        self.stream = torch.cuda.Stream()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.pending: tuple[int, Future[tuple[list[Any], torch.cuda.Event]]] | None = None

    def __call__(self, step: int) -> list[Any]:
        if self.pending is None or self.pending[0] != step:
            self._submit(step)
        assert self.pending is not None
        batches, copied = self.pending[1].result()
        self.pending = None
        if step < self.last_step:
            self._submit(step + 1)
        stream = torch.cuda.current_stream()
        stream.wait_event(copied)
        for batch in batches:
            for tensor in tensors_of(batch).values():
                tensor.record_stream(stream)  # else its memory may be reused too early
        return batches

    def _submit(self, step: int) -> None:
        self.pending = (step, self.thread.submit(self._make, step))

    def _make(self, step: int) -> tuple[list[Any], torch.cuda.Event]:
        with DEVICE_LOCK, torch.cuda.stream(self.stream):
            batches = self.task.batches(step)
            copied = torch.cuda.Event()
            copied.record()
        return batches, copied

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


Divisors = dict[str, Tensor]  # the number of predictions of each loss term in the step
Pass = Callable[[Any, Divisors], Result]  # forward and backward over a micro-batch
Gradients = list[Tensor | None]  # by parameter; None where no loss reaches

WARMUP = 2  # eager passes of a shape before its capture: kernels are chosen and compiled in them
MAX_GRAPHS = 128  # rarer shapes stay eager
OWN_GRADIENT_BYTES = 2 * 2**30  # of graphs with gradients of their own; the first always has them


class GraphedPass:
    """A pass over batches of one shape. Fields of a batch that are no tensors do not change it.

    `gradients` are those that a replay overwrites; None if it adds to the shared ones.
    """

    def __init__(
        self,
        run: Pass,
        batch: Any,
        divisors: Divisors,
        pool: Any,
        parameters: list[nn.Parameter] | None,
    ) -> None:
        self.batch = {name: tensor.clone() for name, tensor in tensors_of(batch).items()}
        self.divisors = {name: divisor.clone() for name, divisor in divisors.items()}
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with capture_graph(self.graph, pool, mode="global"):
            self.result = run(replace(batch, **self.batch), self.divisors)
        self.gradients: Gradients | None = None
        if parameters is not None:
            self.gradients = [parameter.grad for parameter in parameters]

    def __call__(self, batch: Any, divisors: Divisors) -> Result:
        tensors = tensors_of(batch)
        inputs = [*self.batch.values(), *self.divisors.values()]
        values = [tensors[name] for name in self.batch] + [divisors[name] for name in self.divisors]
        torch._foreach_copy_(inputs, values, non_blocking=True)
        self.graph.replay()
        losses, routing = self.result  # cloned: the next replay overwrites them
        copies = {name: replace(loss, nll=loss.nll.clone()) for name, loss in losses.items()}
        return copies, [replace(layer, dropped=layer.dropped.clone()) for layer in routing]


class CudaGraphs(ForwardBackward):
    """Replays a CUDA graph of each pass, from the third pass over a batch shape on.

    `single_pass`: every step is one micro-batch.
    """

    def __init__(self, objective: nn.Module, dtype: torch.dtype, *, single_pass: bool) -> None:
        super().__init__(objective, dtype)
        self.single_pass = single_pass
        self.parameters = list(objective.parameters())
        self.seen: Counter[Hashable] = Counter()
        self.graphs: dict[Hashable, GraphedPass] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.shared: Gradients | None = None
        self.adds, self.own_bytes = not single_pass, 0

    def __call__(self, batches: list[Any], stats: StepStats) -> None:
        counts = stats.divisors()
        row = torch.tensor([float(count) for count in counts.values()])
        divisors = dict(zip(counts, row.to(self.device, non_blocking=True), strict=True))
        for batch in batches:
            stats.add(*self.replay(batch, divisors))

    def replay(self, batch: Any, divisors: Divisors) -> Result:
        tensors = tensors_of(batch).items()
        shape = (*((name, tuple(x.shape), x.dtype) for name, x in tensors), *divisors)
        if shape not in self.graphs:
            self.seen[shape] += 1
            if self.seen[shape] <= WARMUP or len(self.graphs) == MAX_GRAPHS:
                return self.micro_batch(batch, divisors)
            self.graphs[shape] = self._capture(batch, divisors)
        graph = self.graphs[shape]
        result = graph(batch, divisors)
        if self.single_pass:
            self.adds = graph.gradients is None
            self._set_gradients(graph.gradients or self.shared)
        return result

    def zero_grad(self) -> None:
        if self.adds:
            torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
        if self.single_pass:
            self.adds = False
            self._set_gradients([None] * len(self.parameters))

    def _capture(self, batch: Any, divisors: Divisors) -> GraphedPass:
        size = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)
        owns = self.single_pass and (not self.graphs or self.own_bytes + size <= OWN_GRADIENT_BYTES)
        if owns:
            self.own_bytes += size
        elif self.single_pass:
            self.shared = self.shared or self._zero_gradients()
            self._set_gradients(self.shared)
        owners = self.parameters if owns else None
        return GraphedPass(self.micro_batch, batch, divisors, self.pool, owners)

    def _zero_gradients(self) -> Gradients:
        """For the parameters that a loss reaches, as the first graph shows."""
        first = next(iter(self.graphs.values())).gradients or []
        return [None if gradient is None else torch.zeros_like(gradient) for gradient in first]

    def _set_gradients(self, gradients: Gradients | None) -> None:
        assert gradients is not None
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
