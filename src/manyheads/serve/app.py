"""The HTTP server: routes, start, and shutdown that finishes running requests."""

import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from manyheads.errors import UserError
from manyheads.loading import LoadedRun
from manyheads.serve import completions, encoders, translations
from manyheads.serve.continuous import Completions
from manyheads.serve.encoders import Encodings, ImageLabels
from manyheads.serve.metrics import Metrics, metrics
from manyheads.serve.requests import API_STYLE, refuse, wrong_path
from manyheads.serve.scheduler import Bounds, Scheduler, Work
from manyheads.serve.translations import Translations, languages_of
from manyheads.web.app import listen
from manyheads.web.guard import AccessPolicy, Guard, Limits
from manyheads.web.responses import Problem

BODY_BYTES = 256 * 2**10
GRACE_SECONDS = 60  # for running requests at shutdown


async def health(request: Request) -> Response:
    state = request.app.state
    return JSONResponse({"status": "ok", "model": state.name, "waiting": state.scheduler.waiting})


async def failed(request: Request, error: Exception) -> Response:
    is_unknown = isinstance(error, HTTPException) and error.status_code == 404
    return refuse(request.url.path, wrong_path(request) if is_unknown else error)


def work_of(
    loaded: LoadedRun, bounds: Bounds, source: str | None, target: str | None, beam: int | None
) -> Work[Any]:
    served_as = loaded.run.spec.served_as
    if served_as == "translations":
        languages = languages_of(loaded.run, source, target)
        return Translations(loaded, languages, bounds, beam)
    for name, value in (("source", source), ("target", target), ("beam", beam)):
        if value is not None:
            raise UserError(f"--{name} works only with translators: leave it out")
    kinds: dict[str, Any] = {
        "completions": Completions,
        "encodings": Encodings,
        "images": ImageLabels,
    }
    if served_as not in kinds:
        raise loaded.unsupported("is served", "a translator, a language model or an encoder")
    work: Work[Any] = kinds[served_as](loaded, bounds)
    return work


def build_app(
    name: str, work: Work[Any], bounds: Bounds | None = None, door: AccessPolicy | None = None
) -> ASGIApp:
    door, bounds = door or AccessPolicy(), bounds or Bounds()
    scheduler = Scheduler(work, bounds.waiting)

    @asynccontextmanager
    async def close_at_shutdown(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(scheduler.close)

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        *(*translations.ROUTES, *completions.ROUTES, *encoders.ROUTES),
    ]
    expected = (Problem, UserError, HTTPException, OSError)
    app = Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys(expected, failed) | {Exception: failed},
        lifespan=close_at_shutdown,
    )
    app.state.scheduler, app.state.door = scheduler, door
    app.state.metrics = Metrics(scheduler, [route.path for route in routes])
    app.state.name, app.state.started = name, int(time.time())
    # One more than may wait and be computed, so that the queue refuses first.
    limits = Limits(body_bytes=BODY_BYTES, requests=bounds.waiting + bounds.rows + 1)
    return Guard(app, door, limits, API_STYLE, app.state.metrics.observe)


def serve(
    loaded: LoadedRun,
    work: Work[Any],
    bounds: Bounds,
    host: str,
    port: int,
    token: str | None,
    ready: Callable[[str, str | None], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C; then refuse new requests and finish the others.

    `ready` gets the address and the token, if one is needed.
    """
    import uvicorn

    from manyheads.web.connections import BACKLOG, LimitedServer, limited_protocol

    door = AccessPolicy.at(host, token)
    listening = listen(host.strip("[]"), port)
    name = f"[{host.strip('[]')}]" if ":" in host else host
    config = uvicorn.Config(
        build_app(loaded.folder.resolve().name or "model", work, bounds, door),
        log_level="warning",
        access_log=False,
        server_header=False,
        http=limited_protocol(),
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = LimitedServer(config)

    def stop(*signal_arguments: object) -> None:
        server.should_exit = True

    # SIGTERM may arrive before uvicorn handles it, and uvicorn raises it again at its end.
    previous = signal.signal(signal.SIGTERM, stop)
    listening.listen(BACKLOG)  # before the address is printed
    ready(f"http://{name}:{listening.getsockname()[1]}", door.token)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)
        listening.close()
