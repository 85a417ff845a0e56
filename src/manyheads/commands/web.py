"""The command that opens the page: view."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from manyheads.commands.shared import Threads, choose, say, write
from manyheads.errors import UserError

PORT = 8421


def view(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run, or a folder with runs in it")
    ],
    host: Annotated[str, typer.Option(help="Where to listen; off loopback a token is needed")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one")] = PORT,
    token: Annotated[
        str | None, typer.Option(help="What a reader must know; made off loopback if not given")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser")] = False,
    threads: Threads = None,
) -> None:
    """Look inside a trained model: a page on this machine alone, until Ctrl-C.

    manyheads view runs/demo
    """
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UserError(
            "the page needs starlette and uvicorn: install them with pip install 'manyheads[web]'"
        )
    from manyheads.web.app import serve

    if not 0 <= port < 2**16:
        raise UserError(f"--port {port} must be from 0 to {2**16 - 1}")
    if token is not None and not token:
        raise UserError("--token is empty: give one, or leave it out")
    choose("cpu", threads)

    def ready(address: str) -> None:
        write(f"{address}\n")
        say("Ctrl-C ends it")
        if open_browser:
            import webbrowser

            webbrowser.open(address)

    serve(folder, host, port, token, ready)
