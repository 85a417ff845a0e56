"""Attention benchmark: numbers are right where they are known, and refusals take one line."""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch
from rich.console import Console

from manyheads import cli
from manyheads.errors import UserError
from manyheads.lab import cost as cost_module
from manyheads.lab.cost import (
    OUT_OF_MEMORY,
    Cost,
    Measurement,
    Point,
    Setup,
    Trial,
    attempt,
    crossover,
    draw,
    exponent,
    needed,
    notes,
    read_cores,
    rungs,
    table_of,
)
from manyheads.lab.device_memory import free_memory, peak_memory
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import AttentionInputs, AttentionSizes, Dense, Fused
from manyheads.nn.linformer import Linformer
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


def test_one_point_has_no_exponent() -> None:
    assert exponent([(512, 3.0)]) is None
    assert Cost(core="dense", exact=True).time_exponent is None


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


def test_the_crossover_is_the_last() -> None:
    """A core that is faster once and slower again is not faster from there on."""
    other = times({512: 1.0, 1024: 1.0, 2048: 1.0, 4096: 1.0})
    core = times({512: 0.5, 1024: 2.0, 2048: 2.0, 4096: 0.5})
    assert crossover(core, other) == math.ceil(math.sqrt(2048 * 4096))
    assert crossover(core[:3], other) == "never here"


# --- memory ---


def test_peak_memory_is_that_of_a_known_pattern() -> None:
    """1000 and 2000 floats at once, then 500 after both are freed."""

    def act() -> torch.Tensor:
        first, second = torch.empty(1000), torch.empty(2000)
        del first, second
        return torch.empty(500)

    assert peak_memory(act, CPU) == 4 * 3000
    assert peak_memory(lambda: None, CPU) == 0


def test_garbage_of_before_is_not_counted() -> None:
    """A reference cycle that is freed later must not hide later allocations."""
    circle: list[object] = [torch.empty(5000)]
    circle.append(circle)
    del circle

    def act() -> list[list[object]]:
        empty: list[list[object]] = [[] for _ in range(20_000)]  # enough to call for a collection
        torch.empty(1000)
        return empty

    assert peak_memory(act, CPU) == 4 * 1000


def test_some_memory_is_free() -> None:
    free = free_memory(CPU)
    assert free is None or free > 0


def test_memory_of_dense_holds_its_scores_and_that_of_tiled_a_block() -> None:
    """Dense holds scores and weights of all pairs, tiled those of a block of pairs."""
    n, setup = 256, Setup(device=CPU, head_dim=8)
    inputs = draw(setup, n)
    pairs = setup.heads * n * n * 4
    forward, both = Trial(Dense(), setup, inputs).memory()
    assert 2 * pairs <= forward < 2.5 * pairs
    assert both >= 3 * pairs
    assert Trial(Tiled(block=32), setup, inputs).memory()[1] < pairs / 2


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


def test_what_a_length_needs_is_told_from_those_before() -> None:
    assert needed([], 512) == 0
    assert needed([(512, 10)], 1024) == 40  # nothing is known: the worst
    assert needed([(256, 10), (512, 40)], 2048) == pytest.approx(640)
    assert needed([(256, 10), (512, 20)], 2048) == pytest.approx(80)
    assert needed([(256, 10), (512, 10)], 1024) == 20  # never less than in proportion


def test_no_step_is_a_leap() -> None:
    """For any lengths, each measured length is at most four times an earlier one."""
    assert rungs([512, 1024, 2048]) == [512, 1024, 2048]
    assert rungs([32]) == [32]
    for lengths in ([131072], [64, 65536], [512, 16384, 131072]):
        ladder = rungs(lengths)
        assert ladder == sorted(set(ladder))
        assert set(lengths) <= set(ladder)
        assert ladder[0] <= 512
        assert all(b <= 4 * max(a, 128) for a, b in pairwise(ladder))


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


# --- cores that fail ---


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (lambda: UserError("it refuses: choose another"), "it refuses: choose another"),
        (lambda: NotImplementedError("no kernel\nfor this"), "no kernel"),
        (MemoryError, OUT_OF_MEMORY),
        (lambda: torch.OutOfMemoryError("CUDA"), OUT_OF_MEMORY),
        (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"), OUT_OF_MEMORY),
    ],
)
def test_a_core_that_fails_is_left_out_with_its_reason(
    error: Callable[[], Exception],
    reason: str,
    built: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Earlier lengths stay, the other implementations continue, and one line says why."""
    cores = {"failing": Failing(error=error, limit=64, built=built), "dense": Dense()}
    failing, dense = Measurement(cores, [16, 32, 64, 128], SMALL).run()
    assert [point.length for point in failing.points] == [16, 32]
    assert [point.length for point in dense.points] == [16, 32, 64, 128]
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    where = "from 64 on" if reason == OUT_OF_MEMORY else "at 64, 128"
    assert said == [f"failing is left out {where}: {reason}"]


def test_another_error_is_not_hidden() -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        attempt(broken)


def test_where_no_core_is_left_that_is_the_mistake() -> None:
    cores = {"failing": Failing(error=lambda: UserError("it refuses: choose another"))}
    with pytest.raises(UserError, match=r"no core can be measured: failing: it refuses"):
        Measurement(cores, [16, 32], SMALL).run()


def test_what_is_refused_at_a_length_is_tried_at_longer_ones() -> None:
    measured = Measurement({"linformer": Linformer(rank=32)}, [16, 64], SMALL).run()
    assert [[point.length for point in cost.points] for cost in measured] == [[64]]


def test_a_refusal_names_its_lengths_and_what_this_command_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cores: dict[str, Any] = {"linformer rank=32": Linformer(rank=32), "dense": Dense()}
    Measurement(cores, [8, 16, 64], SMALL).run()
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert said == [
        "linformer rank=32 is left out at 8, 16: rank=32 does not reduce 8 positions: choose "
        'a smaller one, --cores "linformer rank=4"'
    ]
    (advised,) = read_cores("linformer rank=4").values()
    actual = Measurement({"linformer": advised}, [8, 16], SMALL).run()
    assert [point.length for point in actual[0].points] == [8, 16]


def test_what_is_refused_everywhere_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    past = Setup(device=CPU, head_dim=8, rounds=1, causal=True)
    cores: dict[str, Any] = {"linformer": Linformer(rank=4), "dense": Dense()}
    Measurement(cores, [16, 32], past).run()
    why = "it mixes all positions, also later ones: leave out --causal, or this core"
    said = [line for line in capsys.readouterr().err.splitlines() if "linformer" in line]
    assert said[-1] == f"linformer is left out: {why}"
    assert sum(why in line for line in said) == 1
    with pytest.raises(UserError, match="leave out --causal"):
        Measurement({"linformer": Linformer(rank=4)}, [16, 32], past).run()
    assert "leave out --causal" not in capsys.readouterr().err


# --- numbers of another algorithm ---


def test_exponents_are_of_lengths_beyond_a_window() -> None:
    points = times({16: 1.0, 32: 4.0, 64: 8.0, 128: 16.0})
    near = Cost(core="near", exact=False, points=points, reach=32)
    assert near.time_exponent == pytest.approx(1.0)
    assert Cost(core="all", exact=False, points=points).time_exponent > 1.2  # type: ignore[operator]
    assert Cost(core="short", exact=False, points=points[:2], reach=32).time_exponent is None


@pytest.mark.parametrize(
    ("core", "note"),
    [
        (
            "longformer window=16",
            "longformer window=16 computes exact attention up to 17 positions",
        ),
        ("local size=16", "local size=16 computes exact attention up to 16 positions"),
        (
            "memory-compressed size=16 layers=L",
            "layers=L computes exact attention up to 16 positions",
        ),
        ("longformer window=8", ""),
        ("fused", ""),
    ],
)
def test_fallbacks_are_reported(core: str, note: str) -> None:
    cores = read_cores(core)
    said = notes(Measurement(cores, [12, 32, 64], SMALL).run())
    assert len(said) == bool(note)
    assert all(note in line for line in said)


def test_nor_are_lengths_on_the_way_a_measurement() -> None:
    """One refuses at once, one at an intermediate length: no requested length is measured."""
    cores = {
        "first": Failing(error=lambda: UserError("it refuses: choose another")),
        "second": Failing(limit=2048),
    }
    with pytest.raises(UserError, match=r"no core can be measured: first: it refuses"):
        Measurement(cores, [2048], SMALL).run()


def test_the_table_shows_what_ran_out_of_memory() -> None:
    console = Console(width=200)
    stopped = Cost(core="dense", exact=True, points=times({16: 1.0}), stopped=OUT_OF_MEMORY)
    full = Cost(core="fused", exact=True, points=times({16: 1.0, 32: 4.0}))
    other = Cost(core="near", exact=False, points=times({16: 2.0, 32: 3.0}))
    refused = Cost(core="never", exact=False, stopped="it refuses")
    with console.capture() as capture:
        console.print(table_of([stopped, full, other, refused], [16, 32]))
    lines = capture.get().splitlines()
    assert sum(OUT_OF_MEMORY in line and "dense" in line for line in lines) == 2
    assert any("fused" in line and "500 + 500" in line and "2.00" in line for line in lines)
    met = crossover(other.points, full.points)
    assert any("near" in line and f" {met} " in line for line in lines)
    assert not any("never" in line for line in lines)


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


def test_the_command_that_is_printed_measures_the_same(command: Command, tmp_path: Path) -> None:
    words = ("--cores", "dense", "--lengths", "16,32", "--rounds", 1, "--heads", 3)
    printed, said = command(*words, "--picture", tmp_path / "growth.png")
    assert "Traceback" not in said
    line = next(line for line in printed.splitlines() if line.startswith("manyheads cost"))
    again, _ = command(*shlex.split(line)[2:], "--json")
    assert json.loads(again)["command"] == f"{line} --json"
    assert "--heads 3" in line
    pytest.importorskip("matplotlib")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_all_cores_are_measured_unless_chosen() -> None:
    every = {option.kind for option in get_args(AttentionFunctionConfig)}
    assert set(read_cores(None)) == every
    assert read_cores("dense, tiled block=16 ,") == {
        "dense": Dense(),
        "tiled block=16": Tiled(block=16),
    }


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--cores", "dens"], "did you mean 'dense'?"),
        (["--cores", "dense,tiled blok=3"], "did you mean 'core.block'?"),
        (["--cores", "tiled block=0"], "core.block=0 must be at least 1"),
        (["--cores", "tiled block"], "write it as name=value"),
        (["--cores", ","], "--cores names none"),
        (["--lengths", "short"], "--lengths is a whole number"),
        (["--lengths", "0,16"], "--lengths=0 must be at least 1"),
        (["--lengths", ","], "--lengths names none"),
        (["--heads", "0"], "--heads=0 must be at least 1"),
        (["--head-dim", "0"], "--head-dim=0 must be at least 1"),
        (["--batch", "0"], "--batch=0 must be at least 1"),
        (["--rounds", "0"], "--rounds=0 must be at least 1"),
        (["--precision", "floot32"], "did you mean 'float32'?"),
        (["--picture", "growth.txt"], "must end in one of .png"),
    ],
)
def test_a_mistake_is_one_line(command: Command, words: Sequence[str], advice: str) -> None:
    printed, said = command(*words, code=2)
    assert printed == ""
    assert said.startswith("manyheads: ")
    assert said.count("\n") == 1
    assert advice in said
