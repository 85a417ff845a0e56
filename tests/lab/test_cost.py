"""Attention benchmark: numbers are right where they are known, and refusals take one line."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from manyheads import cli
from manyheads.lab import cost as cost_module
from manyheads.lab.cost import (
    OUT_OF_MEMORY,
    Measurement,
    Point,
    Setup,
    crossover,
    exponent,
)
from manyheads.lab.device_memory import peak_memory
from manyheads.nn.attention import AttentionInputs, AttentionSizes, Dense, Fused
from manyheads.nn.tiled import Tiled

CPU = torch.device("cpu")
SMALL = Setup(device=CPU, head_dim=8, rounds=1)


def times(values: dict[int, float]) -> list[Point]:
    """Points with equal forward and backward time."""
    return [
        Point(length=n, forward=value / 2, backward=value / 2, forward_memory=n, memory=n)
        for n, value in values.items()
    ]


@dataclass(frozen=True)
class Failing(Dense):
    """Works below a length and fails from that length on, when built or when called."""

    error: Callable[[], Exception] = MemoryError
    limit: int = 1
    built: bool = True
    exact: ClassVar[bool] = False

    def build(self, sizes: AttentionSizes) -> "Failing":
        if self.built and sizes.max_length >= self.limit:
            raise self.error()
        return self

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        if not self.built and inputs.q.shape[2] >= self.limit:
            raise self.error()
        return super().__call__(inputs)


# --- what the numbers say ---


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_is_that_of_a_power(power: float) -> None:
    points = [(n, 7.0 * n**power) for n in (512, 1024, 4096, 65536)]
    assert exponent(points) == pytest.approx(power, abs=1e-12)


def test_the_crossover_is_where_two_powers_meet() -> None:
    """n² and 3000 n cross at 3000, between two lengths, also if lengths are missing."""
    lengths = (512, 1024, 2048, 4096, 8192)
    square = times({n: n**2 * 1e-9 for n in lengths})
    line = times({n: 3000 * n * 1e-9 for n in lengths})
    assert crossover(line, square) == pytest.approx(3000, abs=1)
    assert crossover(line, square[:-1]) == pytest.approx(3000, abs=1)
    assert crossover(line[:2], square) == "never here"
    assert crossover(line[3:], square) == "always"
    assert crossover(line, []) is None


# --- memory ---


def test_peak_memory_is_that_of_a_known_pattern() -> None:
    """1000 and 2000 floats at once, then 500 after both are freed."""

    def act() -> torch.Tensor:
        first, second = torch.empty(1000), torch.empty(2000)
        del first, second
        return torch.empty(500)

    assert peak_memory(act, CPU) == 4 * 3000
    assert peak_memory(lambda: None, CPU) == 0


def test_memory_grows_as_it_must() -> None:
    """Memory of dense grows as n², of the others about as n; bytes are deterministic."""
    cores = {"dense": Dense(), "fused": Fused(), "tiled": Tiled(block=256)}
    setup = Setup(device=CPU, head_dim=32, rounds=1)
    actual = {cost.core: cost for cost in Measurement(cores, [256, 512, 1024], setup).run()}
    assert actual["dense"].memory_exponent == pytest.approx(2.0, abs=0.1)
    for name in ("fused", "tiled"):
        power = actual[name].memory_exponent
        assert power is not None
        assert power < 1.3
    assert all(point.memory > point.forward_memory for point in actual["dense"].points)


def test_a_length_that_needs_more_than_there_is_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense needs 1.5 MiB at 256 and would need four times as much at 512; tiled continues."""
    monkeypatch.setattr(cost_module, "free_memory", lambda device: 3 * 2**20)
    cores = {"dense": Dense(), "tiled": Tiled(block=64)}
    dense, tiled = Measurement(cores, [128, 256, 512], SMALL).run()
    assert [point.length for point in dense.points] == [128, 256]
    assert [point.length for point in tiled.points] == [128, 256, 512]
    assert dense.stopped is not None
    assert dense.stopped.startswith(OUT_OF_MEMORY)
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(said) == 1
    assert said[0].startswith("dense is left out from 512 on: out of memory: needs about ")


# --- numbers of another algorithm ---


# --- the command ---


class Command:
    """`manyheads cost WORDS` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: object, code: int = 0) -> tuple[str, str]:
        """Standard output and standard error of a successful call."""
        self.monkeypatch.setattr("sys.argv", ["manyheads", "cost", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed, said = self.capsys.readouterr()
        assert int(ended.value.code or 0) == code, said
        return printed, said


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_the_command_gives_all_as_one_object(command: Command) -> None:
    words = ("--cores", "dense,tiled block=64,fused", "--lengths", "64,32,128", "--rounds", 2)
    printed, _ = command(*words, "--heads", 1, "--head-dim", 4, "--causal", "--json")
    actual = json.loads(printed)
    assert set(actual) == {"command", "machine", "cores"}
    assert set(actual["machine"]) == {"device", "name", "threads", "torch", "precision"}
    assert actual["machine"]["torch"] == torch.__version__
    assert [core["core"] for core in actual["cores"]] == ["dense", "tiled block=64", "fused"]
    for core in actual["cores"]:
        assert [point["length"] for point in core["points"]] == [32, 64, 128]
        assert all(value > 0 for point in core["points"] for value in point.values())
        assert core["exact"]
        assert core["stopped"] is None
        assert core["faster_than_fused_from"] is None
        points = core["points"]
        power = exponent([(p["length"], p["forward"] + p["backward"]) for p in points])
        assert core["time_exponent"] == pytest.approx(power)
        power = exponent([(p["length"], p["memory"]) for p in points])
        assert core["memory_exponent"] == pytest.approx(power)
