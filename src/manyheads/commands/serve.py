"""Commands that listen: view (the web page) and serve (the HTTP API)."""

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from manyheads.commands import options
from manyheads.commands.options import argument, option
from manyheads.commands.shared import Compute, Decoding, say, write
from manyheads.errors import UserError, check_at_least

_TOKEN = "Token that clients must send; generated off loopback"
Host = Annotated[
    str, option("Address; off loopback a token is needed", metavar="NAME", panel="Network")
]
Port = Annotated[int, option("Port; 0 takes a free one", panel="Network")]
Token = Annotated[
    str | None, option(_TOKEN, metavar="TEXT", panel="Network", envvar="MANYHEADS_TOKEN")
]
TokenFile = Annotated[
    Path | None, option("Read the token from a file", metavar="FILE", panel="Network")
]


def _check_address(port: int, token: str | None, token_file: Path | None) -> str | None:
    """Refuse what cannot listen; the token, if there is one."""
    from manyheads.data.files import stream_lines

    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UserError("this needs starlette and uvicorn: pip install 'manyheads[web]'")
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port} must be from 0 to {2**16 - 1}")
    if token_file is not None:
        if not token_file.is_file():
            raise UserError(f"--token-file {token_file} is not a file")
        token = "".join(stream_lines(token_file)).strip()
    if token is not None and not token:
        raise UserError("--token is empty: set one, or leave it out")
    return token


def _has_browser() -> bool:
    """True on an interactive terminal with a screen: a text browser would take the terminal."""
    on_terminal = sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty()
    has_screen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return on_terminal and (has_screen or sys.platform in ("darwin", "win32"))


def view(
    folder: Annotated[Path, argument("FOLDER", "A run, or a folder with runs in it")],
    host: Host = "127.0.0.1",
    port: Port = 8421,
    token: Token = None,
    token_file: TokenFile = None,
    open_browser: Annotated[
        bool | None, option("Open a browser [default: on a terminal]", "--open/--no-open")
    ] = None,
    export: Annotated[
        Path | None,
        option("Write a static copy of the page to this folder instead", metavar="FOLDER"),
    ] = None,
    threads: options.Threads = None,
) -> None:
    """Look inside a trained model in the browser, until Ctrl-C.

    Examples
      $ manyheads view runs/demo
      $ manyheads view runs --no-open --port 0
      $ manyheads view runs/demo --export site
    """
    token = _check_address(port, token, token_file)
    from manyheads.web.app import serve

    Compute("cpu", threads).choose()
    if export is not None:
        from manyheads.web.export import export as write_copy

        write(f"{write_copy(folder, export)}\n")
        return

    def ready(address: str) -> None:
        write(f"{address}\n")
        say("Ctrl-C stops it")
        if _has_browser() if open_browser is None else open_browser:
            import webbrowser

            webbrowser.open(address)

    serve(folder, host, port, token, ready)


def serve(
    run: options.RunFolder,
    host: Host = "127.0.0.1",
    port: Port = 8422,
    token: Token = None,
    token_file: TokenFile = None,
    source: Annotated[
        str | None, option("Source language, if the run does not name it", metavar="LANG")
    ] = None,
    target: Annotated[
        str | None, option("Target language, if the run does not name it", metavar="LANG")
    ] = None,
    beam: Annotated[int | None, option("Translators: beam width; 1 is greedy")] = None,
    rows: Annotated[int, option("Texts in a batch", "--max-batch-size", panel="Batching")] = 64,
    batch_tokens: Annotated[int, option("Tokens in a batch", panel="Batching")] = 4096,
    waiting: Annotated[
        int,
        option("Requests that may wait; more are refused", "--max-queue", panel="Batching"),
    ] = 256,
    decoding: Decoding = Decoding(),
) -> None:
    """Serve a run over HTTP until SIGTERM or Ctrl-C.

    Examples
      $ manyheads serve runs/demo
      $ MANYHEADS_TOKEN=secret manyheads serve runs/lm --host 0.0.0.0

    A translator has the API of LibreTranslate (/translate) and DeepL (/v2/translate),
    a language model that of OpenAI (/v1/completions), an encoder /v1/embeddings and
    /classify. See "Serve over HTTP" in the documentation.
    """
    token = _check_address(port, token, token_file)
    from manyheads.serve.app import serve as answer
    from manyheads.serve.app import work_of
    from manyheads.serve.scheduler import Bounds

    limits = {
        "beam": beam,
        "max-batch-size": rows,
        "batch-tokens": batch_tokens,
        "max-queue": waiting,
    }
    for name, limit in limits.items():
        check_at_least(f"--{name}", limit, 1)
    loaded = decoding.open(run, cache(say))
    bounds = Bounds(rows=rows, tokens=batch_tokens, waiting=waiting)

    def ready(address: str, needed: str | None) -> None:
        write(f"{address}\n")
        if needed is not None and needed != token:
            say(f"token: {needed}")
        say("Ctrl-C or SIGTERM stops it")

    answer(loaded, work_of(loaded, bounds, source, target, beam), bounds, host, port, token, ready)
