"""A few of the cases of benchmarks/fuzz.py: each is answered or refused, and none takes long."""

import gc
import random
from pathlib import Path

import mido
import pytest
from tests.data.small_music import midi_bytes
from tests.faults import fuzzing
from tests.faults.fuzzing import Inputs, fuzz

from manyheads.data.events import PerformanceEvents
from manyheads.errors import DataError, UserError
from manyheads.recipes import read_recipe
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Words

# Cases of each target.
COUNTS = {
    "tokens": 150,
    "tokenizer.json": 60,
    "tables": 120,
    "midi": 200,
    "pictures": 80,
    "settings": 60,
    "metrics": 60,
    "view": 60,
    "serve": 40,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", COUNTS)
def test_strange_inputs_are_answered_or_refused(name: str, inputs: Inputs) -> None:
    report = fuzz(name, inputs.targets[name], range(COUNTS[name]), seed=7)
    assert not report.failures, report.failures[0]
    assert report.answered + report.refused == COUNTS[name]
    assert report.answered > COUNTS[name] // 100


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_many_strange_inputs(name: str, inputs: Inputs) -> None:
    report = fuzz(name, inputs.targets[name], range(2_000), seed=8)
    assert not report.failures, report.failures[0]
    assert report.slowest < 5


def test_a_case_is_the_same_again(inputs: Inputs) -> None:
    assert inputs.targets.keys() == COUNTS.keys()
    for name, target in inputs.targets.items():
        cases = [repr(target(random.Random(f"7 {name} 3"))[0]) for _ in range(2)]
        assert cases[0] == cases[1]


def test_what_is_neither_answered_nor_refused_is_reported(inputs: Inputs) -> None:
    """An error of ours, several lines, and no end: the three ways to fail."""

    def broken() -> bool:
        raise KeyError("ours")

    def endless() -> bool:
        while True:
            gc.collect(0)

    class Long(UserError):
        def __str__(self) -> str:
            return "two\nlines"

    def long() -> bool:
        raise Long

    fuzzing.PATIENCE, before = 0.1, fuzzing.PATIENCE
    try:
        for use, word in ((broken, "KeyError"), (endless, "Hang"), (long, "lines")):
            report = fuzz("some", lambda draw, use=use: (b"given", use), range(1), seed=1)
            [failure] = report.failures
            assert word in failure.error
            assert failure.given == "b'given'"
    finally:
        fuzzing.PATIENCE = before


@pytest.mark.slow
def test_memory_is_flat_over_requests(inputs: Inputs) -> None:
    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def ask() -> None:
        for name in ("view", "serve"):
            fuzz(name, inputs.targets[name], range(500), seed=9)

    for _ in range(2):  # a warm-up: kept traces, and caches of torch for each shape
        ask()
    before = memory()
    for _ in range(10):
        ask()
    assert memory() - before < 16 * 2**20


def test_what_was_found_stays_mended(tmp_path: Path) -> None:
    """A pause of years, layers without end, sizes past 64 bits, a vocabulary that lacks a token."""
    struck = mido.Message("note_on", note=60, velocity=64)
    years = midi_bytes([struck, struck.copy(time=2**27)], path=tmp_path / "long.mid", beat=1)
    with pytest.raises(DataError, match="hours, more than 24"):
        PerformanceEvents().words(years, "long.mid")
    with pytest.raises(UserError, match=r"model\.layers"):
        read_recipe("language", ["model.layers=99999999999"])
    with pytest.raises(UserError, match="no model has such sizes"):
        read_recipe("language", ["model.dim=100000000000000000000", "model.heads=4"])
    content = Words().train(["a b"]).to_json().replace('"<unk>": 3', '"<ink>": 3')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="cannot encode the text"):
        Tokenizer.load(tmp_path / "tokenizer.json").encode("c")
    assert str(UserError("one\rline\n\x1b[2J\ud800")) == "one line  [2J "
