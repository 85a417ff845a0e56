"""Shared by the commands: input and output; options for devices, engines and sampling."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from manyheads.commands import options
from manyheads.errors import UserError, check_at_least

if TYPE_CHECKING:
    import torch

    from manyheads.decode.sample import Sample
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
def input_lines(file: Path | None) -> Iterator[Iterator[str]]:
    """The lines of a file or of standard input; a hint if it is a terminal."""
    from manyheads.data.files import STDIN, raw_lines
    from manyheads.fileio import decode_lines

    if file is not None and file != STDIN:
        yield decode_lines(raw_lines(file), str(file))
        return
    if is_torchrun():
        raise UserError("torchrun passes no standard input to its processes: name a FILE")
    if sys.stdin is None:
        raise UserError("standard input is closed: name a FILE, or pipe lines into the command")
    if sys.stdin.isatty():
        say("Reading lines from the terminal: type one and press Enter. Ctrl-D ends.")
    yield decode_lines(sys.stdin.buffer)


def is_interactive(file: Path | None) -> bool:
    """True at a terminal, where the user waits for each line; a file is faster in batches."""
    return file is None and sys.stdin is not None and sys.stdin.isatty()


def split_words(words: Sequence[str] | None, allowed: str) -> tuple[Path | None, list[str]]:
    """`[FILE] [KEY=VALUE]...` in its two parts; only settings that begin with `allowed`."""
    from manyheads.config import is_setting

    settings = [word for word in words or [] if is_setting(word) and not Path(word).is_file()]
    files = [Path(word) for word in words or [] if word not in settings]
    for setting in settings:
        if not setting.startswith(allowed):
            raise UserError(
                f"'{setting}' cannot change after training: only {allowed}* can (as a path: "
                f"./{setting})"
            )
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
    is_on_path = shutil.which("manyheads") is not None
    return "manyheads" if is_on_path else shlex.join([sys.executable, "-m", "manyheads"])


@contextmanager
def resumable(report: Callable[[str], None] = say, command: str = "") -> Iterator[None]:
    """A signal has saved the training: print the command that resumes it, and exit."""
    from manyheads.train.loop import Stopped

    try:
        yield
    except Stopped as stopped:
        command = command or f"{command_name()} {shlex.join(sys.argv[1:])}"
        report(f"manyheads: {stopped}; resume with: {command}")
        raise typer.Exit(stopped.exit_code) from None


def is_torchrun() -> bool:
    """True if torchrun has started several processes."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def refuse_torchrun(command: str) -> None:
    if is_torchrun():
        raise UserError(f"torchrun does not work with {command}: start it without torchrun")


@contextmanager
def row_processes(command: str) -> Iterator[None]:
    """Under torchrun each process translates or embeds a part of the rows; the main one prints."""
    if command not in ("translate", "summarize", "embed", "evaluate") or not is_torchrun():
        yield
        return
    import torch

    from manyheads.decode.translate import BaseTranslator
    from manyheads.exchange.ctranslate2 import Ctranslate2Translator
    from manyheads.tasks.encode import TextEncoder
    from manyheads.train.parallel import connected, device_of, shared_rows

    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        connected(say) as world,
        shared_rows(world, "search", BaseTranslator, Ctranslate2Translator),
        shared_rows(world, "embed", TextEncoder),
    ):
        device_of(world, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if not world.is_main:
            sys.stdout = sys.stderr = nowhere
        yield


# --- options that belong together: one parameter of a command, see `flat` in manyheads.cli ---


@dataclass(frozen=True)
class Compute:
    """Where a command computes."""

    device: options.Device = "auto"
    threads: options.Threads = None

    def choose(self) -> "torch.device":
        """The device; sets the number of CPU threads."""
        import torch

        from manyheads.run import choose_device

        if self.threads is not None:
            check_at_least("--threads", self.threads, 1)
            torch.set_num_threads(self.threads)
        return choose_device(self.device)

    def open(self, run: Path) -> "LoadedRun":
        """The model of a run, computed by PyTorch."""
        return Decoding(self.device, self.threads, engine="torch").open(run)


@dataclass(frozen=True)
class Decoding(Compute):
    """Where, with which engine and in which precision a command decodes."""

    engine: options.Engine = "auto"
    dtype: options.Dtype = "float32"

    def open(
        self,
        run: Path,
        warn: Callable[[str], None] = lambda line: None,
        others: Sequence[Path] = (),
        *,
        only_torch: str = "",
    ) -> "LoadedRun":
        """The model of a run, or the ensemble of several.

        `only_torch` names a requested feature that only PyTorch has.
        """
        from manyheads.engines import Engine
        from manyheads.loading import ensemble, load_run

        self.choose()  # refuses a missing device; the folder decides what `auto` means
        engine = Engine(self.engine, self.dtype, warn)
        device = "cpu" if self.device == "auto" and engine.is_ctranslate2 else self.device
        loaded = [load_run(folder, device, warn) for folder in (run, *others)]
        only_torch = "ensembles" if others else only_torch
        if only_torch:
            engine = engine.only_torch(f"CTranslate2 has no {only_torch}", loaded[0].device)
        return ensemble([model.with_engine(engine) for model in loaded])


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled."""

    temperature: options.Temperature = 0.8
    top_k: options.TopK = 0
    top_p: options.TopP = 1.0
    min_p: options.MinP = 0.0
    seed: options.SampleSeed = 1

    def checked(self) -> "Sample":
        from manyheads.decode.sample import Sample

        return Sample(**vars(self))
