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


@contextmanager
def input_lines(file: Path | None) -> Iterator[Iterable[bytes]]:
    """The lines of a file or of standard input; a hint if it is a terminal."""
    if file is not None:
        if not file.is_file():
            raise UserError(f"{file} is not a file")
        with file.open("rb") as lines:
            yield lines
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
            raise UserError(f"{file} is not a file; settings are written as KEY=VALUE")
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


def is_bfloat16(dtype: str, half: bool) -> bool:
    from manyheads.config import nearest

    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {dtype}: {nearest(dtype, ('float32', 'bfloat16'))}")
    return half or dtype == "bfloat16"


def open_model(
    run: Path,
    device: str,
    threads: int | None,
    warn: Callable[[str], None] = lambda line: None,
    *,
    int8: bool = False,
    bfloat16: bool = False,
    compile: bool = False,
    others: Sequence[Path] = (),
) -> "LoadedRun":
    """The model of a run, or the ensemble of several, in the requested precision."""
    from manyheads.loading import ensemble, load_run

    if int8 and (bfloat16 or compile):
        raise UserError(
            "--int8 works on a CPU, --dtype bfloat16 and --compile on a GPU: choose one"
        )
    if others and compile:
        raise UserError("--compile works with one model: leave out --compile or --ensemble")
    choose(device, threads)  # refuses a missing device; the folder decides what `auto` means
    place = "cpu" if int8 and device == "auto" else device
    loaded = [load_run(folder, place, warn) for folder in (run, *others)]
    if int8:
        return ensemble([model.in_int8() for model in loaded])
    loaded = [model.in_half() for model in loaded] if bfloat16 else loaded
    return loaded[0].compiled() if compile else ensemble(loaded)
