"""Continuous batching: a row that joins a running batch gets the text of a batch of its own."""

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.models.tiny import POSITIONS, tiny, words
from tests.web.small_pages import make_runs

from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample
from manyheads.loading import LoadedRun, load_torch_run
from manyheads.models.gpt import GptConfig
from manyheads.serve.continuous import (
    Chunk,
    CompletionRequest,
    Completions,
    LeftPaddedCache,
    left_pad,
    supports_left_padding,
)
from manyheads.serve.scheduler import Bounds, Fits, Job, Scheduler, Take, Work, take_none

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    return load_torch_run(make_runs(tmp_path_factory.mktemp("runs")) / "deep" / "writer")


def completions(loaded: LoadedRun, position: str = "rotary", core: str = "dense") -> Completions:
    """A small language model with these parts and the tokenizer of a run."""
    size = loaded.tokenizer.vocab_size
    model = tiny(GptConfig, position, core, vocab_size=size, max_length=40).build().eval()
    work = Completions(loaded, Bounds(rows=6, tokens=400))
    work.generator = Generator(
        model, loaded.tokenizer, loaded.decode(at_limit="truncate", min_length=6)
    )
    work.context, work.left_padding = 40, supports_left_padding(model)
    return work


def requests(loaded: LoadedRun, count: int, seed: int) -> list[CompletionRequest]:
    """Prompts of 1 to 9 tokens, 1 to 20 tokens of text, greedy or sampled."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        size = loaded.tokenizer.vocab_size
        prompts = tuple(
            tuple(draw.randrange(5, size) for _ in range(draw.randint(1, 9)))
            for _ in range(draw.randint(1, 2))
        )
        sample = Sample(temperature=draw.choice([0.0, 0.8, 1.3]), seed=number)
        made.append(CompletionRequest(prompts, 1, draw.randint(1, 20), sample))
    return made


def answers(work: Completions, waiting: Sequence[CompletionRequest], *, together: bool) -> Any:
    """The last chunk of each row, computed request by request or joining at random steps."""

    async def run() -> list[dict[int, tuple[str, int, str | None]]]:
        jobs = [Job(work.check(request)) for request in waiting]
        queue, draw = list(jobs), random.Random(1)

        def take(fits: Fits[CompletionRequest]) -> list[Job[CompletionRequest]]:
            taken: list[Job[CompletionRequest]] = []
            while queue and draw.random() < 0.4:
                if not fits([*(job.request for job in taken), queue[0].request]):
                    break
                taken.append(queue.pop(0))
            return taken

        while queue:
            first = queue.pop(0)
            await asyncio.to_thread(work.compute, [first], take if together else take_none)
        for job in jobs:
            job.end()
        results = []
        for job in jobs:
            chunks: list[Chunk] = [chunk async for chunk in job.parts()]
            last = {chunk.row: (chunk.text, chunk.tokens, chunk.finish) for chunk in chunks}
            results.append(last)
        return results

    return asyncio.run(run())


@pytest.mark.parametrize("position", POSITIONS)
def test_joining_changes_no_text(loaded: LoadedRun, position: str) -> None:
    work = completions(loaded, position)
    waiting = requests(loaded, 8, seed=len(position))
    alone = answers(work, waiting, together=False)
    assert [len(rows) for rows in alone] == [request.rows for request in waiting]
    assert answers(work, waiting, together=True) == alone


@pytest.mark.parametrize("position", POSITIONS)
def test_a_joined_cache_is_that_of_each_row(position: str) -> None:
    """Rows join, leave and continue; logits equal those of the whole text, to rounding."""
    model = tiny(GptConfig, position, "dense").build().eval()
    texts = [words(length).tolist() for length in (9, 12, 6, 14)]
    starts = [3, 7, 1, 5]
    with torch.no_grad():
        caches = []
        for group in ((0, 1), (2, 3)):
            prompts, padding = left_pad([texts[row][: starts[row]] for row in group], CPU)
            cache = LeftPaddedCache(padding)
            if prompts.shape[1] > 1:
                model.hidden(prompts[:, :-1], cache=cache)
            caches.append((cache, prompts[:, -1]))
        (cache, tokens), (other, others) = caches
        cache.join(other)
        tokens = torch.cat([tokens, others])
        rows, at = [0, 1, 2, 3], list(starts)
        for _ in range(6):
            logits = model(tokens[:, None], cache=cache)[:, 0]
            for index, row in enumerate(rows):
                full = model(torch.tensor([texts[row][: at[row]]]))[0, -1]
                assert torch.allclose(logits[index], full, atol=1e-5)
            left = [index for index, row in enumerate(rows) if at[row] + 1 < len(texts[row])]
            if len(left) < len(rows):
                rows = [rows[index] for index in left]
                cache.select_rows(torch.tensor(left))
                assert not cache.padding.all()  # no position is padding everywhere
            for row in rows:
                at[row] += 1
            tokens = torch.tensor([texts[row][at[row] - 1] for row in rows])


def test_a_short_request_does_not_wait_for_a_long_one(loaded: LoadedRun) -> None:
    work = completions(loaded)
    long = CompletionRequest(((5, 6),), 1, 30, Sample(temperature=0.0), stream=True)
    short = CompletionRequest(((7, 8, 9),), 1, 2, Sample(temperature=0.0))

    async def run() -> tuple[int, int]:
        scheduler, running, release = (
            Scheduler(work, waiting=9),
            threading.Event(),
            threading.Event(),
        )
        first = scheduler.submit(long)
        send = first.send

        def pause(part: Any) -> None:
            send(part)
            running.set()
            assert release.wait(10)

        first.send = pause  # type: ignore[method-assign]
        await asyncio.to_thread(running.wait)
        second = scheduler.submit(short)
        release.set()
        [chunk] = [part async for part in second.parts()]
        ended_first = not first.ended
        _ = [part async for part in first.parts()]
        assert ended_first
        await asyncio.to_thread(scheduler.close)
        return chunk.tokens, scheduler.computed

    tokens, batches = asyncio.run(run())
    assert batches == 1
    assert tokens <= 2


class Steps(Work[int]):
    """Runs until no request is taken; a negative number is an error."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.order: list[int] = []
        self.started, self.release = threading.Event(), threading.Event()

    def fits(self, requests: Sequence[int]) -> bool:
        return sum(map(abs, requests)) <= self.limit

    def compute(self, jobs: Sequence[Job[int]], take: Take[int] = take_none) -> None:
        self.started.set()
        assert self.release.wait(10)
        while jobs:
            self.order += [job.request for job in jobs]
            if any(request < 0 for request in self.order):
                raise ValueError("a failure that nobody expected")
            for job in jobs:
                job.end()
            jobs = take(self.fits)


def test_requests_join_in_order_and_none_overtakes() -> None:
    work = Steps(limit=4)

    async def run() -> None:
        scheduler = Scheduler(work, waiting=99)
        jobs = [scheduler.submit(1)]
        await asyncio.to_thread(work.started.wait)
        jobs += [scheduler.submit(number) for number in (3, 4, 1, 2)]
        work.release.set()
        for job in jobs:
            assert [part async for part in job.parts()] == []
        assert scheduler.computed == 1
        assert scheduler.running == 0

    asyncio.run(run())
    assert work.order == [1, 3, 4, 1, 2]


def test_an_error_reaches_requests_that_joined() -> None:
    work = Steps(limit=4)

    async def run() -> None:
        scheduler = Scheduler(work, waiting=99)
        first = scheduler.submit(1)
        await asyncio.to_thread(work.started.wait)
        second = scheduler.submit(-2)
        work.release.set()
        assert [part async for part in first.parts()] == []
        with pytest.raises(ValueError, match="nobody expected"):
            _ = [part async for part in second.parts()]

    asyncio.run(run())


def test_prompts_of_several_lengths_without_left_padding(loaded: LoadedRun) -> None:
    """All rows of a request are answered, though they are generated length by length."""
    work = completions(loaded, "rotary", "tiled")
    assert not work.left_padding
    prompts = ((5, 6, 7), (8,), (9, 10, 11, 12))
    request = CompletionRequest(prompts, 1, 4, Sample(temperature=0.0))

    async def run() -> list[int]:
        job = Scheduler(work, waiting=9).submit(work.check(request))
        return sorted([chunk.row async for chunk in job.parts()])

    assert asyncio.run(run()) == [0, 1, 2]


def test_a_batch_stays_within_its_bounds(loaded: LoadedRun) -> None:
    work = completions(loaded)
    waiting = requests(loaded, 12, seed=3)
    seen: list[int] = []

    async def run() -> None:
        scheduler = Scheduler(work, waiting=99)
        fits = work.fits

        def observe(requests: Sequence[CompletionRequest], running: Any = ()) -> bool:
            seen.append(len(running) + sum(request.rows for request in requests[:-1]))
            return fits(requests, running)

        work.fits = observe  # type: ignore[method-assign]
        jobs = [scheduler.submit(work.check(request)) for request in waiting]
        for job in jobs:
            _ = [part async for part in job.parts()]

    asyncio.run(run())
    assert 1 < max(seen) <= 6
