"""The scheduler: requests wait in a queue, and one thread runs the model batch by batch.

It takes the oldest request and all others that fit into its batch, so that the batch grows with the
load. Work that can (continuous batching) takes further requests between its steps; other requests
form the next batch (dynamic batching). After a batch the thread waits for as many requests as it
has just answered, but at most a fraction of that batch's time: clients that send in turns would
otherwise split into two halves. A single client never waits.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any, ClassVar, Generic, TypeVar

from manyheads.web.responses import Problem

R = TypeVar("R")
LINGER_FRACTION = 0.25  # relative to the time that the last batch took
MAX_LINGER = 0.03  # seconds


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
    """A request, and the queue that brings parts of its answer from the model's thread."""

    def __init__(self, request: R) -> None:
        self.request, self.cancelled, self.ended = request, False, False
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, part: Any) -> None:
        """Called by the model's thread."""
        if not self.cancelled:
            with contextlib.suppress(RuntimeError):  # the event loop was stopped by force
                self._loop.call_soon_threadsafe(self._parts.put_nowait, part)

    def end(self, error: Exception | None = None) -> None:
        """Called by the model's thread; only the first call counts."""
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

    def fits(self, requests: Sequence[R]) -> bool:
        """True if these requests may share a batch."""
        raise NotImplementedError

    def compute(self, jobs: Sequence[Job[R]], take: Take[R] = take_none) -> None:
        """Send the answers of a batch and of the jobs taken; jobs that are not ended then, end."""
        raise NotImplementedError


class Batcher(Generic[R]):
    """A bounded queue, and the thread that computes it batch by batch."""

    def __init__(self, work: Work[R], waiting: int) -> None:
        self.work, self.max_queue = work, waiting
        self.computed = 0
        self._queue: deque[Job[R]] = deque()
        self._batch: list[Job[R]] = []  # computed now
        self._changed = Condition()
        self._closing = False
        self._thread: Thread | None = None
        # After a batch: how many requests to wait for, and until when.
        self._expected, self._deadline = 0, 0.0

    def submit(self, request: R) -> Job[R]:
        job = Job(request)
        with self._changed:
            if self._closing:
                raise Problem(503, "the server is stopping: try again later", "stopping")
            if len(self._queue) >= self.max_queue:
                raise Problem(503, "too many requests are waiting: try again", "busy")
            if self._thread is None:
                self._thread = Thread(target=self._run, name="model", daemon=True)
                self._thread.start()
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
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        """The number of jobs that are computed now."""
        return sum(not job.ended for job in self._batch)

    def _run(self) -> None:
        while batch := self._next_batch():
            self.computed += 1
            self._batch = batch
            start = time.monotonic()
            error: Exception | None = None
            try:
                self.work.compute(batch, self._take)
            except Exception as failure:  # the thread must survive for the next batch
                error = failure
            for job in self._batch:
                job.end(error)
            end = time.monotonic()
            self._expected = len(self._batch) + self.waiting
            self._deadline = end + min(MAX_LINGER, LINGER_FRACTION * (end - start))
            self._batch.clear()
            del batch, job  # free the answers while the queue is empty

    def _take(self, fits: Fits[R]) -> list[Job[R]]:
        """Waiting jobs that fit into the running batch; none overtakes an older one."""
        with self._changed:
            taken: list[Job[R]] = []
            while self._queue and fits([*(job.request for job in taken), self._queue[0].request]):
                taken.append(self._queue.popleft())
            if taken:
                self._batch = [job for job in self._batch if not job.ended] + taken
            return taken

    def _next_batch(self) -> list[Job[R]]:
        """The oldest request and those that fit into its batch; empty once closed."""
        with self._changed:
            while not self._queue:
                if self._closing:
                    return []
                self._changed.wait()
            while len(self._queue) < self._expected and not self._closing:
                if (remaining := self._deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(remaining)
            batch, rest = [self._queue.popleft()], deque[Job[R]]()
            for job in self._queue:
                fits = self.work.fits([*(other.request for other in batch), job.request])
                (batch if fits else rest).append(job)
            self._queue = rest
            return batch
