"""The scheduler: requests wait in a queue, and worker threads run the model.

A worker that is free takes the oldest request and all others that fit into its batch, at most its
share of the queue. Work that can (continuous batching) takes further requests between two steps.
Nothing waits for a batch to fill: the queue fills while the workers are busy.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch

from manyheads.web.responses import Problem

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits: texts (rows) and tokens in a batch, requests in the queue."""

    rows: int = 64
    tokens: int = 4096
    waiting: int = 256


@dataclass(frozen=True)
class _End:
    error: Exception | None


class Job(Generic[R]):
    """A request, and the queue that brings parts of its answer from a worker."""

    def __init__(self, request: R) -> None:
        self.request, self.cancelled, self.ended = request, False, False
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, part: Any) -> None:
        """Called by a worker."""
        if not self.cancelled:
            with contextlib.suppress(RuntimeError):  # the event loop was stopped by force
                self._loop.call_soon_threadsafe(self._parts.put_nowait, part)

    def end(self, error: Exception | None = None) -> None:
        """Called by a worker; only the first call counts."""
        if not self.ended:
            self.ended = True
            self.send(_End(error))

    async def parts(self) -> AsyncIterator[Any]:
        """Parts of the answer as they arrive; raises the error of the computation."""
        while not isinstance(part := await self._parts.get(), _End):
            yield part
        if part.error is not None:
            raise part.error


Fits = Callable[[Sequence[R]], bool]
Take = Callable[[Fits[R]], list[Job[R]]]  # waiting jobs that fit into the running batch


def take_none(fits: Fits[Any]) -> list[Job[Any]]:
    """A batch that no further request joins."""
    return []


class Work(Generic[R]):
    """The computation of the model for requests of one kind, and the paths of their API."""

    paths: ClassVar[str] = ""
    workers: int = 1  # threads that compute batches

    def fits(self, requests: Sequence[R]) -> bool:
        """True if these requests may share a batch."""
        raise NotImplementedError

    def compute(self, jobs: Sequence[Job[R]], take: Take[R] = take_none) -> None:
        """Send the answers of a batch and of the jobs taken; jobs that are not ended then, end."""
        raise NotImplementedError


@runtime_checkable
class RunningBatch(Protocol):
    """Rows that are computed together, step by step."""

    rows: list[Any]

    def join(self, rows: list[Any]) -> None:
        """Add rows, each at its own first step."""

    def step(self) -> None:
        """One step of all rows; those that are done, or whose client is gone, leave."""


@torch.no_grad()
def run_batch(
    batch: RunningBatch, rows: list[Any], more: Callable[[list[Any]], list[Any]] = lambda _: []
) -> None:
    """Continuous batching: `more` returns rows that join the running ones between two steps."""
    batch.join(rows)
    while batch.rows:
        batch.step()
        if joining := more(batch.rows):
            batch.join(joining)


class Scheduler(Generic[R]):
    """A bounded queue, and the workers that compute it."""

    def __init__(self, work: Work[R], waiting: int) -> None:
        self.work, self.max_queue = work, waiting
        self.computed = 0
        self._queue: deque[Job[R]] = deque()
        self._batches: list[list[Job[R]]] = []  # computed now
        self._changed = Condition()
        self._closing = False
        self._threads: list[Thread] = []

    def submit(self, request: R) -> Job[R]:
        job = Job(request)
        with self._changed:
            if self._closing:
                raise Problem(503, "the server is stopping: try again later", "stopping")
            if len(self._queue) >= self.max_queue:
                raise Problem(503, "too many requests are waiting: try again", "busy")
            while len(self._threads) < self.work.workers:
                self._threads.append(Thread(target=self._run, name="model", daemon=True))
                self._threads[-1].start()
            self._queue.append(job)
            self._changed.notify()
        return job

    def drop(self, job: Job[R]) -> None:
        """Cancel a job: the client has disconnected or has its answer."""
        with self._changed:
            job.cancelled = True
            with contextlib.suppress(ValueError):
                self._queue.remove(job)

    def close(self) -> None:
        """Refuse new requests and finish those in the queue."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        """The number of jobs that are computed now."""
        return sum(not job.ended for batch in list(self._batches) for job in batch)

    def _run(self) -> None:
        while batch := self._next_batch():
            error: Exception | None = None
            try:
                self.work.compute(list(batch), partial(self._take, batch))
            except Exception as failure:  # the thread must survive for the next batch
                error = failure
            for job in batch:
                job.end(error)
            with self._changed:
                self._batches.remove(batch)
            del batch, job, error  # free the answers while the queue is empty

    def _take(self, batch: list[Job[R]], fits: Fits[R]) -> list[Job[R]]:
        """Waiting jobs that fit into the running batch; none overtakes an older one."""
        with self._changed:
            taken: list[Job[R]] = []
            while self._queue and fits([*(job.request for job in taken), self._queue[0].request]):
                taken.append(self._queue.popleft())
            if taken:
                batch[:] = [job for job in batch if not job.ended] + taken
            return taken

    def _next_batch(self) -> list[Job[R]]:
        """The oldest request and those that fit into its batch; empty once closed."""
        with self._changed:
            while not self._queue:
                if self._closing:
                    return []
                self._changed.wait()
            share = -(-len(self._queue) // self.work.workers)
            batch, rest = [self._queue.popleft()], deque[Job[R]]()
            for job in self._queue:
                requests = [*(other.request for other in batch), job.request]
                is_taken = len(batch) < share and self.work.fits(requests)
                (batch if is_taken else rest).append(job)
            self._queue = rest
            self._batches.append(batch)
            self.computed += 1
            return batch
