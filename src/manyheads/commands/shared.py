"""What the commands share: options that mean the same everywhere, and how to speak."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.errors import UserError

if TYPE_CHECKING:
    import torch

    from manyheads.loading import LoadedRun

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings, e.g. model.dim=256")
]
Out = Annotated[Path, typer.Option(help="The run folder")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all cores unless given")]
Seed = Annotated[int | None, typer.Option(help="The same as seed=N")]
PICTURES = (".png", ".svg", ".pdf")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, a HuggingFace or an exported one")
]
EightBits = Annotated[
    bool, typer.Option("--int8", help="Compute in eight bits: faster on a CPU, nearly the same")
]
Half = Annotated[
    bool, typer.Option("--half", help="Weights in bfloat16: faster on a GPU, nearly the same")
]
With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with", help="Another run to write with: the mean of probabilities; may be given again"
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="On a GPU: compile a step for every size of batch, half a minute each"
    ),
]


@contextmanager
def to_reader() -> Iterator[None]:
    """Writes to stdout. A reader that has gone is no error, and Python must not say so either."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def write(text: str) -> None:
    with to_reader():
        print(text, end="")


def command_name() -> str:
    """How a person in this folder calls the program."""
    if shutil.which("manyheads"):
        return "manyheads"
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return shlex.join([sys.executable, "-m", "manyheads"])
    here = called.is_absolute() and called.is_relative_to(Path.cwd())
    return shlex.quote(str(called.relative_to(Path.cwd()) if here else called))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_json(scores: dict[str, Any]) -> None:
    print(json.dumps(scores, indent=2, ensure_ascii=False))


def choose(name: str, threads: int | None) -> "torch.device":
    import torch

    from manyheads.run import choose_device

    if threads is not None:
        if threads < 1:
            raise UserError(f"--threads {threads} must be at least 1")
        torch.set_num_threads(threads)
    return choose_device(name)


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def open_model(
    run: Path,
    device: str,
    threads: int | None,
    warn: Callable[[str], None] = lambda line: None,
    *,
    int8: bool = False,
    half: bool = False,
    compile: bool = False,
    others: Sequence[Path] = (),
) -> "LoadedRun":
    from manyheads.loading import ensemble, load_run

    if int8 and (half or compile):
        raise UserError("--int8 is for a CPU, --half and --compile are for a GPU: choose one")
    if others and compile:
        raise UserError("steps are compiled for one model alone: leave out --compile or --with")
    choose(device, threads)  # refuses a device that is not here; `auto` is for the folder to say
    opened = [
        load_run(one, "cpu" if int8 and device == "auto" else device, warn)
        for one in (run, *others)
    ]
    if int8:
        return ensemble([one.in_int8() for one in opened])
    opened = [one.in_half() for one in opened] if half else opened
    return opened[0].compiled() if compile else ensemble(opened)
