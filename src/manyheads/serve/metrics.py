"""Numbers of a server at /metrics, in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from manyheads.serve.scheduler import Scheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # upper bounds


class Metrics:
    """Requests by path and status, seconds to the first byte, and the state of the queue."""

    def __init__(self, scheduler: Scheduler[Any], paths: Iterable[str]) -> None:
        self.scheduler, self.paths = scheduler, frozenset(paths)
        self.requests: Counter[tuple[str, int]] = Counter()
        self.durations = [0] * (len(SECONDS) + 1)
        self.seconds = 0.0

    def observe(self, path: str, status: int, seconds: float) -> None:
        """A response begins, so many seconds after its request."""
        # A client may invent any number of paths.
        self.requests[path if path in self.paths else "other", status] += 1
        self.durations[bisect_left(SECONDS, seconds)] += 1
        self.seconds += seconds

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield "# TYPE manyheads_requests_total counter"
        for (path, status), count in sorted(self.requests.items()):
            yield f'manyheads_requests_total{{path="{path}",status="{status}"}} {count}'
        yield "# TYPE manyheads_request_seconds histogram"
        bounds = [*map(str, SECONDS), "+Inf"]
        for bound, count in zip(bounds, accumulate(self.durations), strict=True):
            yield f'manyheads_request_seconds_bucket{{le="{bound}"}} {count}'
        yield f"manyheads_request_seconds_sum {self.seconds:.6f}"
        yield f"manyheads_request_seconds_count {sum(self.durations)}"
        scheduler = self.scheduler
        for name, kind, value in (
            ("manyheads_batches_total", "counter", scheduler.computed),
            ("manyheads_jobs_running", "gauge", scheduler.running),
            ("manyheads_jobs_waiting", "gauge", scheduler.waiting),
        ):
            yield f"# TYPE {name} {kind}"
            yield f"{name} {value}"


async def metrics(request: Request) -> Response:
    """GET: counters since the start."""
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return PlainTextResponse(request.app.state.metrics.text(), media_type=kind)
