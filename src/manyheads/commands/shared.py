"""Shared by the commands: input and output, devices, loading a model."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.errors import UserError

if TYPE_CHECKING:
    import torch

    from manyheads.loading import LoadedRun

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")


def check_image(option: str, path: Path | None) -> None:
    if path is not None and path.suffix.lower() not in IMAGE_SUFFIXES:
        raise UserError(f"{option} {path} must end in one of {', '.join(IMAGE_SUFFIXES)}")


# --- input and output ---


@contextmanager
def to_reader() -> Iterator[None]:
    """Write to stdout and flush it. A reader that has gone ends the program without a word."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the buffer must go somewhere, or Python reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def write(text: str) -> None:
    with to_reader():
        print(text, end="")


def say(line: str) -> None:
    """Progress, notes and errors go to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(values: dict[str, Any]) -> None:
    write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def print_table(
    table: Any, width: int, *, to_stderr: bool = False, highlight: bool = False
) -> None:
    """Wide enough that no number is cut: a pipe has 80 columns, a terminal may wrap."""
    from rich.console import Console

    width = max(width, Console().width)
    Console(width=width, highlight=highlight, stderr=to_stderr).print(table)


def draw(path: Path | None, plot: Callable[[Path], object]) -> None:
    """Save a plot next to other output; without matplotlib that output is all there is."""
    if path is None:
        return
    try:
        plot(path)
        say(f"plot: {path}")
    except UserError as error:
        say(str(error))


@contextmanager
def input_lines(file: Path | None) -> Iterator[Iterable[bytes]]:
    """The lines of a file or of standard input; a hint if it is a terminal."""
    from manyheads.data.files import STDIN, raw_lines

    if file is not None and file != STDIN:
        yield raw_lines(file)
        return
    if sys.stdin is None:
        raise UserError("standard input is closed: name a FILE, or pipe lines into the command")
    if sys.stdin.isatty():
        say("Reading lines from the terminal: type one and press Enter. Ctrl-D ends.")
    yield sys.stdin.buffer


def is_interactive(file: Path | None) -> bool:
    """True at a terminal, where the user waits for each line; a file is faster in batches."""
    return file is None and sys.stdin is not None and sys.stdin.isatty()


def split_words(words: Sequence[str] | None, allowed: str) -> tuple[Path | None, list[str]]:
    """`[FILE] [KEY=VALUE]...` in its two parts; only settings that begin with `allowed`."""
    settings = [word for word in words or [] if "=" in word and not Path(word).is_file()]
    files = [Path(word) for word in words or [] if word not in settings]
    for setting in settings:
        if not setting.startswith(allowed):
            raise UserError(f"'{setting}' cannot change after training: only {allowed}* can")
    for file in files[:1]:
        if not file.is_file():
            raise UserError(
                f"{file} is not a file: pass a file or standard input; settings are KEY=VALUE"
            )
    if len(files) > 1:
        raise UserError(f"one FILE at a time: leave out {files[1]}")
    return (files[0] if files else None), settings


def command_name() -> str:
    """How to call the program from this folder."""
    if shutil.which("manyheads"):
        return "manyheads"
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return shlex.join([sys.executable, "-m", "manyheads"])
    here = called.is_absolute() and called.is_relative_to(Path.cwd())
    return shlex.quote(str(called.relative_to(Path.cwd()) if here else called))


# --- devices and models ---


def choose(name: str, threads: int | None) -> "torch.device":
    """The device of that name, with this number of CPU threads."""
    import torch

    from manyheads.run import choose_device

    if threads is not None:
        if threads < 1:
            raise UserError(f"--threads {threads} must be at least 1")
        torch.set_num_threads(threads)
    return choose_device(name)


def is_torchrun() -> bool:
    """True if torchrun has started several processes."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def refuse_torchrun(command: str) -> None:
    if is_torchrun():
        raise UserError(f"torchrun works only with `manyheads train`: start {command} without it")


def dtype_of(dtype: str, *, half: bool = False, int8: bool = False) -> str:
    """The option --dtype, or its spelling in release 0.1."""
    names = {"bfloat16": half, "int8": int8} | {dtype: dtype != "float32"}
    chosen = [name for name, is_set in names.items() if is_set]
    if len(chosen) > 1:
        raise UserError(f"--dtype {' and '.join(chosen)}: choose one")
    return chosen[0] if chosen else "float32"


def open_model(
    run: Path,
    device: str,
    threads: int | None,
    warn: Callable[[str], None] = lambda line: None,
    *,
    engine: str = "torch",
    dtype: str = "float32",
    others: Sequence[Path] = (),
    only_torch: str = "",
) -> "LoadedRun":
    """The model of a run, or the ensemble of several, with an engine in a precision.

    `only_torch` names a requested feature that only PyTorch has; exports refuse it themselves.
    """
    from manyheads.engines import Engine
    from manyheads.loading import TorchRun, ensemble, load_run

    choose(device, threads)  # refuses a missing device; the folder decides what `auto` means
    chosen = Engine(engine, dtype, warn)
    on_cpu = device == "auto" and chosen.is_ctranslate2
    loaded = [load_run(folder, "cpu" if on_cpu else device, warn) for folder in (run, *others)]
    only_torch = "ensembles" if others else only_torch
    if only_torch and isinstance(loaded[0], TorchRun):
        chosen = chosen.only_torch(f"CTranslate2 has no {only_torch}", loaded[0].device)
    return ensemble([model.with_engine(chosen) for model in loaded])
