"""Dynamic batching: what is asked while the model computes is computed together, next.

One thread has the model. It takes the request that waits longest and with it all that fit beside
it, so that a batch is as large as the load. Who has just been answered may ask again: as many are
waited for, but no longer than a share of the time that the last batch took. Else those who ask in
turns would fall into two halves, each computed while the other one is answered. A client alone
never waits.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

from manyheads.errors import check_at_least
from manyheads.web.responses import Problem

A = TypeVar("A")
LINGER_SHARE = 0.25  # of the last batch's time
MOST_LINGER = 0.03  # seconds


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much is computed at once (rows, and tokens in them), and how many requests may wait."""

    rows: int = 64
    tokens: int = 4096
    waiting: int = 256

    def __post_init__(self) -> None:
        check_at_least("rows", self.rows, 1)
        check_at_least("tokens", self.tokens, 1)
        check_at_least("waiting", self.waiting, 0)


@dataclass(frozen=True)
class _End:
    error: Exception | None = None


class Job(Generic[A]):
    """What one request asks, and the way of the answer from the model's thread back to it."""

    def __init__(self, ask: A) -> None:
        self.ask, self.gone, self.ended = ask, False, False
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[Any] = asyncio.Queue()

    def tell(self, news: Any) -> None:
        if not self.gone:
            with contextlib.suppress(RuntimeError):  # the server has been stopped by force
                self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    def end(self, error: Exception | None = None) -> None:
        """From the model's thread: there is no more of it. Only the first end counts."""
        if not self.ended:
            self.ended = True
            self.tell(_End(error))

    async def news(self) -> AsyncIterator[Any]:
        """The parts of the answer as they come; what went wrong is raised here."""
        while not isinstance(part := await self._news.get(), _End):
            yield part
        if part.error is not None:
            raise part.error


class Work(Generic[A]):
    def fits(self, asks: Sequence[A]) -> bool:
        raise NotImplementedError

    def compute(self, jobs: Sequence[Job[A]]) -> None:
        """Answer them; those that are not ended then, end."""
        raise NotImplementedError


class Batcher(Generic[A]):
    """A queue with a bound, and the thread that empties it batch by batch."""

    def __init__(self, work: Work[A], waiting: int) -> None:
        self.work, self.most = work, waiting
        self.computed = 0
        self._waiting: deque[Job[A]] = deque()
        self._changed = Condition()
        self._closing = False
        self._thread: Thread | None = None
        self._expected, self._until = 0, 0.0  # who may ask again, and how long that is waited for

    def submit(self, ask: A) -> Job[A]:
        job = Job(ask)
        with self._changed:
            if self._closing:
                raise Problem(503, "the server is stopping: ask elsewhere, or later", "stopping")
            if len(self._waiting) >= self.most:
                raise Problem(503, "too many requests are waiting: try again", "busy")
            if self._thread is None:
                self._thread = Thread(target=self._run, name="model", daemon=True)
                self._thread.start()
            self._waiting.append(job)
            self._changed.notify()
        return job

    def drop(self, job: Job[A]) -> None:
        """Nobody waits for this one any more: out of the queue, if it is still there."""
        with self._changed:
            job.gone = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(job)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _run(self) -> None:
        while batch := self._next():
            self.computed += 1
            begun = time.monotonic()
            error: Exception | None = None
            try:
                self.work.compute(batch)
            except Exception as failure:  # whatever it is, the thread goes on to the next batch
                error = failure
            for job in batch:
                job.end(error)
            ended = time.monotonic()
            self._expected = len(batch) + self.waiting
            self._until = ended + min(MOST_LINGER, LINGER_SHARE * (ended - begun))
            del batch, job  # an answer must not be held while nothing is asked

    def _next(self) -> list[Job[A]]:
        """The longest waiting request and those that fit beside it; nothing once it is closed."""
        with self._changed:
            while not self._waiting:
                if self._closing:
                    return []
                self._changed.wait()
            while len(self._waiting) < self._expected and not self._closing:
                if (remaining := self._until - time.monotonic()) <= 0:
                    break
                self._changed.wait(remaining)
            batch, left = [self._waiting.popleft()], deque[Job[A]]()
            for job in self._waiting:
                together = self.work.fits([*(other.ask for other in batch), job.ask])
                (batch if together else left).append(job)
            self._waiting = left
            return batch
