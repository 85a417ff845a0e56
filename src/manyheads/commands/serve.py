"""Commands that listen: view (the page) and serve (for programs)."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from manyheads.commands.shared import Device, RunFolder, Threads, choose, say, write
from manyheads.errors import UserError, check_at_least

Host = Annotated[str, typer.Option(help="Where to listen; off loopback a token is needed")]
Port = Annotated[int, typer.Option(help="The port; 0 takes a free one")]


def _check_address(port: int, token: str | None) -> None:
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UserError("this needs starlette and uvicorn: pip install 'manyheads[web]'")
    if not 0 <= port < 2**16:
        raise UserError(f"--port {port} must be from 0 to {2**16 - 1}")
    if token is not None and not token:
        raise UserError("--token is empty: give one, or leave it out")


def view(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run, or a folder with runs in it")
    ],
    host: Host = "127.0.0.1",
    port: Port = 8421,
    token: Annotated[
        str | None, typer.Option(help="What a reader must know; made off loopback if not given")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser")] = False,
    threads: Threads = None,
) -> None:
    """Look inside a trained model: a page on this machine alone, until Ctrl-C.

    manyheads view runs/demo
    """
    _check_address(port, token)
    from manyheads.web.app import serve

    choose("cpu", threads)

    def ready(address: str) -> None:
        write(f"{address}\n")
        say("Ctrl-C ends it")
        if open_browser:
            import webbrowser

            webbrowser.open(address)

    serve(folder, host, port, token, ready)


def serve(
    run: RunFolder,
    host: Host = "127.0.0.1",
    port: Port = 8422,
    token: Annotated[
        str | None, typer.Option(help="What a client must send; made off loopback if not given")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="The language that is read, if the run does not say it")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The language that is written, if the run does not say it")
    ] = None,
    beam: Annotated[int | None, typer.Option(help="Of a translator; 1 is greedy")] = None,
    rows: Annotated[int, typer.Option(help="The most texts that are computed at once")] = 64,
    batch_tokens: Annotated[int, typer.Option(help="The most tokens in them")] = 4096,
    waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused")] = 256,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Answer programs until SIGTERM or Ctrl-C, many at once.

    manyheads serve runs/demo

    A translator speaks LibreTranslate (/translate) and DeepL (/v2/translate),
    a language model OpenAI (/v1/completions): docs/serving.md.
    """
    _check_address(port, token)
    from manyheads.loading import load_run
    from manyheads.serve.app import serve as answer
    from manyheads.serve.app import work_of
    from manyheads.serve.batching import Bounds

    limits = {"beam": beam, "rows": rows, "batch-tokens": batch_tokens, "waiting": waiting}
    for name, limit in limits.items():
        check_at_least(f"--{name}", limit, 1)
    choose(device, threads)
    opened = load_run(run, device, say)
    bounds = Bounds(rows=rows, tokens=batch_tokens, waiting=waiting)

    def ready(address: str, needed: str | None) -> None:
        write(f"{address}\n")
        if needed is not None and needed != token:
            say(f"token: {needed}")
        say("Ctrl-C or SIGTERM ends it")

    answer(opened, work_of(opened, bounds, source, target, beam), bounds, host, port, token, ready)
