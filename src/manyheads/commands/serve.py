"""The command that answers programs: serve."""

from importlib.util import find_spec
from typing import Annotated

import typer

from manyheads.commands.shared import Device, RunFolder, Threads, choose, say, write
from manyheads.errors import UserError, check_at_least

PORT = 8422


def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="Where to listen; off loopback a token is needed")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one")] = PORT,
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
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UserError(
            "a server needs starlette and uvicorn: install them with pip install 'manyheads[web]'"
        )
    from manyheads.loading import load_run
    from manyheads.serve.app import serve as answer
    from manyheads.serve.app import work_of
    from manyheads.serve.batching import Bounds

    if not 0 <= port < 2**16:
        raise UserError(f"--port {port} must be from 0 to {2**16 - 1}")
    if token is not None and not token:
        raise UserError("--token is empty: give one, or leave it out")
    check_at_least("--beam", beam, 1)
    check_at_least("--rows", rows, 1)
    check_at_least("--batch-tokens", batch_tokens, 1)
    check_at_least("--waiting", waiting, 1)
    choose(device, threads)
    opened = load_run(run, device, say)
    bounds = Bounds(rows=rows, tokens=batch_tokens, waiting=waiting)

    def ready(address: str, needed: str | None) -> None:
        write(f"{address}\n")
        if needed is not None and needed != token:
            say(f"token: {needed}")
        say("Ctrl-C or SIGTERM ends it")

    answer(opened, work_of(opened, bounds, source, target, beam), bounds, host, port, token, ready)
