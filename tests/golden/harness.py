"""Drive the command line in this process and reduce what it leaves to comparable values."""

import hashlib
import io
import json
import math
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tests.golden.data import WRITERS
from tests.golden.runs import Command, GoldenRun, by_name

RECORD = Path(__file__).parent / "record"
LOSS_TOLERANCE = 2e-3  # relative, on another CPU or another version of torch
CPU_FIELDS = ("model name", "cpu family", "model")
DECODING = ("translate", "generate", "evaluate")
# Outputs of 0.1 that no later release has: its own int8, speculative decoding.
REMOVED = ("--int8", "--draft")
SCORE_TOLERANCE = 1e-5  # relative: 0.1 summed products of linear layers in another order
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
# Seconds and speeds of commands, which differ from call to call.
TIMINGS = re.compile(r"second|_time|time_|tokens_per")


@contextmanager
def without_tensorboard() -> Iterator[None]:
    """Importing TensorBoard takes seconds, and the record needs metrics.jsonl only."""
    missing = object()
    before = sys.modules.get("tensorboard", missing)
    sys.modules["tensorboard"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is missing:
            del sys.modules["tensorboard"]
        else:
            sys.modules["tensorboard"] = before  # type: ignore[assignment]


def call(*arguments: str | Path, stdin: str = "") -> tuple[int, bytes, str]:
    """`manyheads ARGUMENTS < STDIN` in this process: exit code, standard output, error output."""
    from manyheads.cli import main

    before = sys.argv, sys.stdin, sys.stdout, sys.stderr
    out, err = io.BytesIO(), io.BytesIO()
    sys.argv = ["manyheads", *map(str, arguments)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(out, encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(err, encoding="utf-8", write_through=True)
    try:
        with without_tensorboard():
            main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        result = out.getvalue(), err.getvalue().decode()
        sys.argv, sys.stdin, sys.stdout, sys.stderr = before
    return int(code or 0), *result


def checked(*arguments: str | Path, stdin: str = "") -> bytes:
    """The standard output of a command that succeeds."""
    code, out, err = call(*arguments, stdin=stdin)
    if code:
        words = " ".join(map(str, arguments))
        raise AssertionError(f"manyheads {words}: exit code {code}\n{err}")
    return out


class Workspace:
    """A folder for data and runs; each data set and each run is made once, when first needed."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.folder, self.device = folder, device

    def data(self, name: str) -> Path:
        folder = self.folder / "data" / name
        if not folder.exists():
            WRITERS[name](folder)
        return folder

    def fill_in(self, text: str) -> str:
        """The text with `{name}` replaced by the folder of that data set."""
        return re.sub(r"\{(\w+)\}", lambda match: str(self.data(match[1])), text)

    def place(self) -> tuple[str, ...]:
        return ("--threads", "1", "--device", self.device)

    def train(self, run: GoldenRun, *settings: str) -> Path:
        out = self.folder / "runs" / run.name
        if out.exists():
            return out
        words = [self.fill_in(setting) for setting in (*run.settings, *settings)]
        if run.init is not None:
            words.append(f"model={self.train(by_name()[run.init])}")
        checked("train", run.recipe, *words, "--out", out, *self.place())
        return out

    def output(self, run: GoldenRun, command: Command) -> Any:
        folder = self.folder / "runs" / run.name
        words = (word if "{run}" in word else self.fill_in(word) for word in command.arguments)
        command = replace(command, arguments=tuple(words))
        return run_command(folder, command, self.place(), self.folder)


def run_command(folder: Path, command: Command, place: tuple[str, ...], root: Path) -> Any:
    """The output of a command on a run folder, as JSON values without times and paths."""
    place = () if command.name in ("tokens", "info") else place
    if command.name in DECODING:
        place = (*place, "--engine", "torch")  # the record is that of PyTorch
    if command.name == "generate" and not {"--seed", "--beam"} & set(command.arguments):
        place = (*place, "--seed", "0")  # the default of 0.1
    words = [word.replace("{run}", str(folder)) for word in command.arguments]
    raw = checked(command.name, folder, *words, *place, stdin=command.stdin)
    if command.output == "array":
        array = np.load(io.BytesIO(raw))
        return {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            "first": [float(value).hex() for value in array.ravel()[:4]],
        }
    text = raw.decode().replace(str(root), "{root}")
    if command.output == "json":
        value = untimed(json.loads(text))
        if isinstance(value, dict):
            value.pop("classes", None)  # the report by class, which 0.1 did not have
        return value
    if command.output == "json-lines":
        return [untimed(json.loads(line)) for line in text.splitlines()]
    return text.splitlines()


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: untimed(one) for key, one in value.items() if not TIMINGS.search(key)}
    return [untimed(one) for one in value] if isinstance(value, list) else value


def schema(value: Any) -> Any:
    """The names and types of a JSON value; of a list, the distinct schemas of its items."""
    if isinstance(value, dict):
        return {key: schema(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        kinds = {json.dumps(schema(one), sort_keys=True) for one in value}
        return [json.loads(kind) for kind in sorted(kinds)]
    return {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}[type(value)]


def read_metrics(folder: Path, after: int = 0) -> dict[str, Any]:
    """The losses of metrics.jsonl after a step: one for each training step, all validations."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if row["step"] > after]
    train = [row for row in rows if row["split"] == "train"]
    for row in train:
        row.pop("grad_norm", None)  # 0.1 did not log it
    valid = [row for row in rows if row["split"] == "valid"]
    return {
        "steps": [row["step"] for row in train],
        "train": {name: hexes(train, name) for name in number_names(train)},
        "valid": [
            {"step": row["step"]} | {name: value_hex(row[name]) for name in number_names([row])}
            for row in valid
        ],
    }


def number_names(rows: list[dict[str, Any]]) -> list[str]:
    names = {name: None for row in rows for name in row}
    return [n for n in names if n not in ("step", "split") and not TIMINGS.search(n)]


def hexes(rows: list[dict[str, Any]], name: str) -> list[str | None]:
    return [None if row.get(name) is None else value_hex(row[name]) for row in rows]


def value_hex(value: Any) -> str:
    return float(value).hex()


def hash_weights(path: Path) -> str:
    """SHA-256 over name, dtype, shape and bytes of all tensors of a file, sorted by name."""
    digest = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprint() -> dict[str, str]:
    """What bits depend on: the version of torch and the kind of CPU."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = [re.search(rf"^{name}\s*:\s*(.+)$", text, re.M) for name in CPU_FIELDS]
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": ", ".join(one[1].strip() for one in found if one) or platform.processor(),
    }


def read_record(name: str) -> Any:
    return json.loads((RECORD / f"{name}.json").read_text(encoding="utf-8"))


def is_exact() -> bool:
    """True if this machine must give the bits of the record."""
    return bool(read_record("fingerprint") == fingerprint())


def assert_losses(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float | None) -> None:
    """Equal bits, or values within a relative tolerance."""
    if tolerance is None:
        assert ours == theirs
        return
    assert ours["steps"] == theirs["steps"]
    assert ours["train"].keys() == theirs["train"].keys()
    for name in (name for name in theirs["train"] if name.endswith("loss")):
        pairs = zip(ours["train"][name], theirs["train"][name], strict=True)
        for at, (one, other) in enumerate(pairs):
            assert_near(one, other, tolerance, f"{name} of step {ours['steps'][at]}")
    assert len(ours["valid"]) == len(theirs["valid"])
    for mine, recorded in zip(ours["valid"], theirs["valid"], strict=True):
        assert mine.keys() == recorded.keys()
        assert_near(mine["loss"], recorded["loss"], tolerance, "validation loss")


def assert_near(one: str | None, other: str | None, tolerance: float, what: str) -> None:
    if one is None or other is None:
        assert one == other, what
        return
    a, b = float.fromhex(one), float.fromhex(other)
    assert math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-6), f"{what}: {a} instead of {b}"


def remaining(outputs: dict[str, Any]) -> dict[str, Any]:
    """The recorded outputs of commands that still exist."""
    return {
        key: output
        for key, output in outputs.items()
        if not any(option in key.split() for option in REMOVED)
    }


def assert_outputs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same outputs: texts of decoding commands are equal, their scores nearly, others in bits.

    Scores are printed with four digits: a difference in the last one is rounding.
    """
    theirs = remaining(theirs)
    assert ours.keys() == theirs.keys()
    for command, output in theirs.items():
        if command.split()[0] not in DECODING:
            assert ours[command] == output, command
            continue
        texts, numbers = zip(*(split_numbers(one) for one in (ours[command], output)), strict=True)
        assert texts[0] == texts[1], command
        for mine, recorded in zip(*numbers, strict=True):
            near = math.isclose(mine, recorded, rel_tol=SCORE_TOLERANCE, abs_tol=1.01e-4)
            assert near, f"{command}: {mine} instead of {recorded}"


def split_numbers(output: Any) -> tuple[str, list[float]]:
    """The output with `#` for each decimal number, and these numbers."""
    text = json.dumps(output, ensure_ascii=False)
    return NUMBER.sub("#", text), [float(number) for number in NUMBER.findall(text)]
