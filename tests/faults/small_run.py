"""A run small enough to be broken many times, and commands in this process or in a forked one."""

import errno
import gc
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.train.small_runs import SMALL
from tests.train.small_runs import assert_same_bits as assert_same_bits

from manyheads import cli
from manyheads.data.translation import Batch
from manyheads.tasks.translation import TranslationTask

ON = ("train.average_checkpoints=1", "train.steps=20")
SHORT = ("train.average_checkpoints=1", "train.steps=5")

RECIPE = f"""{SMALL}
[train]
steps = 60
batch_tokens = 300
warmup_steps = 8
validate_every = 10
save_every = 5
log_every = 1
average_checkpoints = 3

[decode]
beam = 1
bleu_sentences = 0
"""


def call(*words: str | Path) -> tuple[int, str, str]:
    """`manyheads WORDS` in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["manyheads", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    return int(code or 0), out.getvalue(), err.getvalue()


def train(recipe: Path, out: Path, *overrides: str) -> tuple[int, str, str]:
    return call("train", recipe, *overrides, "--out", out, "--device", "cpu")


def mistake(result: tuple[int, str, str], *parts: str) -> str:
    """The one line of a refusal, which has these parts."""
    code, printed, said = result
    assert code in (2, 3)
    assert printed == ""
    lines = [line for line in said.splitlines() if line.startswith("manyheads: ")]
    assert len(lines) == 1, said
    assert said.splitlines()[-1] == lines[0]
    assert "Traceback" not in said
    for part in parts:
        assert part in lines[0]
    return lines[0]


def fork(action: Callable[[], int], said: Path) -> int:
    """A real process that starts with everything imported; its stderr goes to a file."""
    number = os.fork()
    if number:
        return number
    # Threads do not survive a fork: collecting a translator of the parent would wait for them.
    gc.freeze()
    try:
        stream = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 2)
        code = action()
    except BaseException as error:
        os.write(2, repr(error).encode())
        code = 99
    os._exit(code)


def ending(number: int, patience: float = 600.0) -> int:
    """How a process ended: its exit code, or minus its signal."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    raise AssertionError("the process did not end")


def command(recipe: Path, out: Path, *overrides: str) -> Callable[[], int]:
    """`manyheads train` for a forked process; its output goes to stderr."""

    def work() -> int:
        code, _, said = train(recipe, out, *overrides)
        os.write(2, said.encode())
        return code

    return work


def reached(out: Path) -> int:
    """The step of the last complete line of metrics."""
    path = out / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def until(action: Callable[[], int], last: int) -> Callable[[], int]:
    """The same training at its own speed, but a process that outran its killer waits for it."""

    def work() -> int:
        plain = TranslationTask.batches

        def waiting(self: TranslationTask, step: int) -> list[Batch]:
            if step > last:
                time.sleep(600)
            return plain(self, step)

        TranslationTask.batches = waiting  # type: ignore[method-assign]
        return action()

    return work


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def limited(action: Callable[[], int], most: int) -> Callable[[], int]:
    """The same work where no file may grow past so many bytes."""

    def work() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        return action()

    return work


def used(folder: Path) -> tuple[int, str, str]:
    return call("evaluate", folder, "--split", "valid", "--device", "cpu")


def again(recipe: Path, folder: Path) -> tuple[int, str, str]:
    return train(recipe, folder, "train.steps=6", "train.average_checkpoints=1")


# What Python tells of, and changes a disk.
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate")
TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def changes_disk(event: str, args: tuple[Any, ...], folder: str) -> bool:
    """Whether an operation makes, opens for writing, moves or removes something in a folder."""
    if event not in ("open", *CHANGES) or not str(args[0]).startswith(folder):
        return False
    if event != "open":
        return True
    mode, flags = args[1], args[2]
    return any(one in "wax+" for one in mode) if mode else bool(flags & TO_WRITE)


def at_change(
    action: Callable[[], int], number: int, folder: Path, then: Callable[[str], None]
) -> Callable[[], int]:
    """The same work, for a forked process: from its n-th change of a folder on, `then` happens."""

    def work() -> int:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if changes_disk(event, args, str(folder)):
                count += 1
                if count >= number:
                    then(event)

        sys.addaudithook(hook)
        return action()

    return work


def die(event: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
