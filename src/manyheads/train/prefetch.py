"""The next step's batches, made and moved while the device computes this one's."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from manyheads.train.device_memory import nothing_collected

Batches = list[Any]
# A copy to the device and the recording of a graph must not meet: who does either holds this.
DEVICE = Lock()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, *, mode: str) -> Iterator[None]:
    """What the device is asked to do in here is written into the graph, and not done.

    An older graph that the collector finds meanwhile would be freed, which breaks a recording. And
    the scratch memory that matrix products keep between calls may be freed by anyone who records
    after us (`torch.compile` does): a recording takes its own, from its pool.
    """
    with DEVICE, nothing_collected():
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()


@runtime_checkable
class Maker(Protocol):
    """What makes the batches of a step: a pure function of it."""

    def batches(self, step: int) -> Batches: ...


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by their fields."""
    named = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


class Ahead:
    """Gives the batches of a step, and has those of the next one made in a thread.

    They come by a stream of their own, so that no copy waits for what is being computed. Batches
    are pure functions of the step: it does not matter when they are made.
    """

    def __init__(self, maker: Maker, last: int) -> None:
        self.maker, self.last = maker, last
        self.stream = torch.cuda.Stream()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.coming: tuple[int, Future[tuple[Batches, torch.cuda.Event]]] | None = None

    def __call__(self, step: int) -> Batches:
        if self.coming is None or self.coming[0] != step:
            self.coming = (step, self.thread.submit(self._make, step))
        found, ready = self.coming[1].result()
        self.coming = None
        if step < self.last:
            self.coming = (step + 1, self.thread.submit(self._make, step + 1))
        here = torch.cuda.current_stream()
        here.wait_event(ready)
        for batch in found:
            for tensor in tensors_of(batch).values():
                tensor.record_stream(here)  # or its memory might be given away too early
        return found

    def _make(self, step: int) -> tuple[Batches, torch.cuda.Event]:
        with DEVICE, torch.cuda.stream(self.stream):
            found = self.maker.batches(step)
            ready = torch.cuda.Event()
            ready.record()
        return found, ready

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
