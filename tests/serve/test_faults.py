"""Faults of a running server: nothing wrong is served, and slots are freed."""

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.web.small_pages import make_runs

from manyheads import engines
from manyheads.decode.sample import Sample
from manyheads.engines import Engine
from manyheads.errors import DataError
from manyheads.loading import LoadedRun, load_torch_run
from manyheads.phrasebook import sentences
from manyheads.serve.continuous import CompletionBatch, CompletionRequest, Completions
from manyheads.serve.scheduler import Bounds, Scheduler, Work
from manyheads.serve.translations import Languages, Translations
from manyheads.train.checkpoint import WEIGHTS

TEXTS = [pair.source for pair in sentences("en-de", "test", 16)]
BOUNDS = Bounds(rows=32, tokens=4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


def translations(loaded: LoadedRun) -> Translations:
    return Translations(loaded, Languages("en", "de"), BOUNDS, 2)


async def answer_of(scheduler: Scheduler[Any], request: Any) -> list[Any]:
    job = scheduler.submit(request)
    return [part async for part in job.parts()]


def test_weights_that_change_under_a_running_server(folder: Path, tmp_path: Path) -> None:
    """The server answers with the weights that it has loaded, whatever happens to the folder."""
    pytest.importorskip("ctranslate2")
    run = shutil.copytree(folder / "translator", tmp_path / "run")
    work = translations(load_torch_run(run).with_engine(Engine("ctranslate2")))
    requests = [work.make_request([text]) for text in TEXTS]

    async def answers() -> list[Any]:
        scheduler = Scheduler(work, waiting=99)
        results = [await answer_of(scheduler, request) for request in requests]
        await asyncio.to_thread(scheduler.close)
        return results

    before = asyncio.run(answers())
    damaged = bytearray((run / WEIGHTS).read_bytes())
    damaged[-200:] = bytes(200)
    (run / WEIGHTS).write_bytes(damaged)
    shutil.rmtree(run / engines.FOLDER)
    assert asyncio.run(answers()) == before
    with pytest.raises(DataError):
        load_torch_run(run)


def test_a_full_disk_during_a_conversion(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch translates, half a conversion is not kept, and the next start converts."""
    pytest.importorskip("ctranslate2")
    run = shutil.copytree(folder / "translator", tmp_path / "run")
    shutil.rmtree(run / engines.FOLDER, ignore_errors=True)
    write = engines.write_ctranslate2

    def fail(*args: Any) -> None:
        write(*args)
        raise OSError(28, "No space left on device")

    expected = load_torch_run(run).translate(TEXTS)
    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(engines, "write_ctranslate2", fail)
        loaded = load_torch_run(run).with_engine(Engine("auto", report=said.append))
        assert loaded.translate(TEXTS) == expected
    assert "No space left" in said[0]
    assert not list((run / engines.FOLDER).iterdir())
    assert load_torch_run(run).with_engine(Engine("auto", report=said.append)).translate(TEXTS)
    assert said[-1] == "engine: ctranslate2, float32"


def test_a_stream_that_is_dropped_frees_its_slot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row leaves at the next step; the other request continues."""
    work = Completions(load_torch_run(folder / "deep" / "writer"), BOUNDS)
    sizes: list[int] = []
    step = CompletionBatch.step

    def observe(batch: CompletionBatch) -> None:
        sizes.append(len(batch.rows))
        step(batch)

    monkeypatch.setattr(CompletionBatch, "step", observe)
    length = work.context - 4
    sample = Sample(temperature=0.0)
    stream = CompletionRequest(((5, 6),), 1, length, sample, stream=True)
    other = CompletionRequest(((7, 8),), 1, length, sample)

    async def run() -> None:
        scheduler: Scheduler[CompletionRequest] = Scheduler(work, waiting=9)
        alone = await answer_of(scheduler, other)
        job, second = scheduler.submit(stream), scheduler.submit(other)
        async for _ in job.parts():
            break
        scheduler.drop(job)
        assert [part async for part in second.parts()] == alone
        await asyncio.to_thread(scheduler.close)
        assert scheduler.running == scheduler.waiting == 0

    asyncio.run(run())
    assert sizes[-1] == 1


def many_requests(work: Work[Any], loaded: LoadedRun) -> Sequence[Any]:
    if isinstance(work, Translations):
        return [work.make_request([text]) for text in TEXTS]
    tokens = loaded.tokenizer.encode(" ".join(TEXTS))
    return [
        CompletionRequest(
            (tuple(tokens[i : i + 1 + i % 5]),), 1, 1 + i % 7, Sample(temperature=0.0)
        )
        for i in range(16)
    ]


MAKE: dict[str, Callable[[LoadedRun], Work[Any]]] = {
    "deep/writer": lambda loaded: Completions(loaded, BOUNDS),
    "translator": translations,
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
@pytest.mark.parametrize("name", MAKE)
def test_10000_requests_with_random_cancellations(name: str, engine: str, folder: Path) -> None:
    """Each answer is that of the request computed in a batch of its own."""
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2")
        if name != "translator":
            pytest.skip("language models are served in PyTorch")
    loaded = load_torch_run(folder / name).with_engine(Engine(engine))
    work = MAKE[name](loaded)
    requests = many_requests(work, loaded)
    counts = {"answered": 0, "cancelled": 0}

    async def client(scheduler: Scheduler[Any], expected: list[Any], draw: random.Random) -> None:
        while sum(counts.values()) < 10_000:
            number = draw.randrange(len(requests))
            job = scheduler.submit(requests[number])
            if draw.random() < 0.4:
                await asyncio.sleep(draw.uniform(0, 0.01))
                scheduler.drop(job)
                counts["cancelled"] += 1
            else:
                assert [part async for part in job.parts()] == expected[number]
                counts["answered"] += 1

    async def run() -> None:
        scheduler: Scheduler[Any] = Scheduler(work, waiting=999)
        expected = [await answer_of(scheduler, request) for request in requests]
        clients = [client(scheduler, expected, random.Random(seed)) for seed in range(48)]
        await asyncio.gather(*clients)
        await asyncio.to_thread(scheduler.close)
        assert scheduler.running == scheduler.waiting == 0

    asyncio.run(run())
    assert counts["answered"] > 5000
    assert counts["cancelled"] > 3000
