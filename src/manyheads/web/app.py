"""The server: routes, static files and start-up.

Each page is a JavaScript module in page/pages/; a Python module in this folder answers its requests
and lists its endpoints in `ROUTES`.
"""

import ctypes
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Thread

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from manyheads.errors import UserError
from manyheads.web import (
    attention,
    decoding,
    fill,
    flow,
    image,
    lens,
    music,
    positions,
    quizzes,
    runs,
    tokens,
    training,
    translating,
    watch,
)
from manyheads.web.guard import AccessPolicy, Guard, Limits
from manyheads.web.library import Library
from manyheads.web.responses import Problem, answer_of
from manyheads.web.traces import Traces

PAGE = Path(__file__).parent / "page"
HOME = "runs"  # the page at /
# Options of glibc's mallopt: take blocks up to 64 MiB from the heap (M_MMAP_THRESHOLD), keep up to
# 256 MiB of freed memory (M_TRIM_THRESHOLD), share one arena among all threads (M_ARENA_MAX).
MEMORY = {-3: 2**26, -1: 2**28, -8: 1}


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def page(request: Request) -> Response:
    """The HTML document of every page; the page's module renders the state in the URL."""
    name = request.path_params.get("page", HOME)
    if name not in {path.stem for path in (PAGE / "pages").glob("*.js")}:
        raise HTTPException(404, "page not found")
    return FileResponse(PAGE / "index.html")


async def failed(request: Request, error: Exception) -> Response:
    """An error as JSON; a browser at an unknown address gets the page, which says so."""
    opens_page = "text/html" in request.headers.get("accept", "")
    if isinstance(error, HTTPException) and error.status_code == 404 and opens_page:
        return FileResponse(PAGE / "index.html", 404)
    return answer_of(error)


@asynccontextmanager
async def _stop_training(app: Starlette) -> AsyncIterator[None]:
    """A training that was started from the page ends with the server."""
    yield
    app.state.training.stop()


def build_app(
    folder: Path, policy: AccessPolicy | None = None, limits: Limits | None = None
) -> ASGIApp:
    """The web application for a run or a folder of runs."""
    policy, limits = policy or AccessPolicy(), limits or Limits()
    expected = (Problem, UserError, HTTPException, OSError, RecursionError)
    app = Starlette(
        routes=[
            Route("/health", health),
            *runs.ROUTES,
            *attention.ROUTES,
            *flow.ROUTES,
            *tokens.ROUTES,
            *positions.ROUTES,
            *lens.ROUTES,
            *fill.ROUTES,
            *image.ROUTES,
            *music.ROUTES,
            *translating.ROUTES,
            *decoding.ROUTES,
            *watch.ROUTES,
            *quizzes.ROUTES,
            *training.ROUTES,
            Mount("/page", StaticFiles(directory=PAGE)),
            Route("/", page),
            Route("/{page}", page),
        ],
        exception_handlers=dict.fromkeys(expected, failed) | {Exception: failed},
        lifespan=_stop_training,
    )
    app.state.library, app.state.limits = Library(folder), limits
    app.state.training = training.DemoTraining(folder, is_local=policy.is_local)
    app.state.traces = Traces(limits.trace_bytes, limits.traces)
    return Guard(app, policy, limits)


def check_folder(folder: Path) -> None:
    """Raise before start-up if the folder is missing or holds no run."""
    if not folder.is_dir():
        raise UserError(f"folder {folder} not found: train a run, or pass the folder of one")
    if not Library(folder).folders():
        raise UserError(f"{folder} holds no run: train one with `manyheads train RECIPE --out RUN`")


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 chooses a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Explicit IPPROTO_TCP: without it asyncio leaves Nagle's algorithm on, which adds 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host}:{port} cannot be used ({reason}): choose another --host or --port"
        ) from None
    return listening


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory instead of returning it to the system.

    The maps of a layer take tens of megabytes. By default glibc unmaps such blocks when they are
    freed and maps them again for the next operation. The page faults took half of the time for
    maps of 1,024 tokens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return
    for option, value in MEMORY.items():
        mallopt(option, value)


def serve(
    folder: Path, host: str, port: int, token: str | None, ready: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C; `ready` is called with the URL to open."""
    import uvicorn

    from manyheads.web.connections import BACKLOG, LimitedServer, limited_protocol

    check_folder(folder)
    policy = AccessPolicy.at(host, token)
    listening = listen(host.strip("[]"), port)
    name = f"[{host.strip('[]')}]" if ":" in host else host
    secret = "" if policy.token is None else f"?token={policy.token}"
    keep_freed_memory()
    app = build_app(folder, policy)
    phrasebooks = Thread(target=translating.load_phrasebooks, args=(Library(folder),), daemon=True)
    phrasebooks.start()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        http=limited_protocol(),
    )
    listening.listen(BACKLOG)  # before `ready`: a client may connect as soon as it knows the URL
    ready(f"http://{name}:{listening.getsockname()[1]}/{secret}")
    try:
        LimitedServer(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
