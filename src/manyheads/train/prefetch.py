"""Batches of the next step, made and copied to the GPU while it computes this one.

Also what has to exclude such copies: the capture of a CUDA graph.
"""

import gc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from manyheads.train.step import Task

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
