"""The server: its routes, its files, and how it is started.

A page is a module in page/pages/; what it asks is answered by a module beside this one, with its
`ROUTES`.
"""

import ctypes
import socket
from collections.abc import Callable
from pathlib import Path

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
    runs,
    tokens,
    translating,
)
from manyheads.web.guard import Door, Guard, Limits
from manyheads.web.library import Library
from manyheads.web.responses import Problem, answer_of
from manyheads.web.traces import Traces

PAGE = Path(__file__).parent / "page"
HOME = "runs"  # the page at /
# For glibc's mallopt: blocks up to so many bytes come from the heap (M_MMAP_THRESHOLD), of which so
# many free ones are kept (M_TRIM_THRESHOLD), and all threads share it (M_ARENA_MAX).
MEMORY = {-3: 2**26, -1: 2**28, -8: 1}


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def page(request: Request) -> Response:
    """One document for every page: its own module draws what the address says."""
    name = request.path_params.get("page", HOME)
    if name not in {path.stem for path in (PAGE / "pages").glob("*.js")}:
        raise Problem(404, "there is no such page here")
    return FileResponse(PAGE / "index.html")


async def failed(request: Request, error: Exception) -> Response:
    return answer_of(error)


def build_app(folder: Path, door: Door | None = None, limits: Limits | None = None) -> ASGIApp:
    """The page over a run or a folder of runs."""
    door, limits = door or Door(), limits or Limits()
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
            Mount("/page", StaticFiles(directory=PAGE)),
            Route("/", page),
            Route("/{page}", page),
        ],
        exception_handlers=dict.fromkeys(expected, failed) | {Exception: failed},
    )
    app.state.library, app.state.limits = Library(folder), limits
    app.state.traces = Traces(limits.trace_bytes, limits.traces)
    return Guard(app, door, limits)


def check_folder(folder: Path) -> None:
    """Refuse at the start what could show nothing."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: train a run, or give the folder of one")
    if not Library(folder).folders():
        raise UserError(f"{folder} holds no run: train one with `manyheads train RECIPE --out RUN`")


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address; port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP: else asyncio leaves Nagle's algorithm on, and answers wait 40 ms for an ACK.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host}:{port} cannot be used ({reason}): choose another --host or --port"
        ) from None
    return found


def keep_freed_memory() -> None:
    """Let the process use freed memory again at once, where its C library is glibc.

    The maps of a layer are tens of megabytes. glibc gives such blocks back to the system as soon
    as they are free and asks for them anew at the next operation, which then pays for every page:
    half of the time that maps of 1,024 tokens took.
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
    """Answer until Ctrl-C; `ready` gets the address that a person opens."""
    import uvicorn

    from manyheads.web.connections import limited_protocol

    check_folder(folder)
    door = Door.at(host, token)
    listening = listen(host.strip("[]"), port)
    name = f"[{host.strip('[]')}]" if ":" in host else host
    secret = "" if door.token is None else f"?token={door.token}"
    keep_freed_memory()
    app = build_app(folder, door)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        http=limited_protocol(),
    )
    listening.listen()  # whoever reads the address may ask at once
    ready(f"http://{name}:{listening.getsockname()[1]}/{secret}")
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
