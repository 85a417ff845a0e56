"""Continuous batching of translations: a sentence that joins gets the translation of its own."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from tests.models.tiny import POSITIONS, tiny
from tests.web.small_pages import make_runs

from manyheads.decode.beam import Hypothesis
from manyheads.decode.translate import Translator
from manyheads.engines import Engine
from manyheads.loading import LoadedRun, load_torch_run
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.phrasebook import sentences
from manyheads.serve.app import build_app
from manyheads.serve.scheduler import Bounds, Fits, Job, Scheduler, run_batch
from manyheads.serve.search import SearchBatch, SentenceRow
from manyheads.serve.translations import (
    Languages,
    Translation,
    TranslationRequest,
    Translations,
)

HERE = "http://127.0.0.1:8422"
TEXTS = [pair.source for pair in sentences("en-de", "test", 24)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    return load_torch_run(make_runs(tmp_path_factory.mktemp("runs")) / "translator")


def translations(loaded: LoadedRun, position: str = "", beam: int = 3) -> Translations:
    """The translator of a run, or one with first weights and this position scheme."""
    work = Translations(loaded, Languages("en", "de"), Bounds(rows=6, tokens=400), beam)
    if position:
        size = loaded.tokenizer.vocab_size
        torch.manual_seed(len(position))
        config = tiny(Seq2SeqConfig, position, "dense", vocab_size=size, max_length=40)
        work.translator = replace(work.translator, model=config.build().eval())  # type: ignore[type-var]
    return work


async def compute(
    work: Translations, requests: Sequence[TranslationRequest]
) -> list[list[Translation]]:
    """The answers to requests that join at random steps."""
    jobs = [Job(request) for request in requests]
    queue, draw = list(jobs), random.Random(1)

    def take(fits: Fits[TranslationRequest]) -> list[Job[TranslationRequest]]:
        taken: list[Job[TranslationRequest]] = []
        while queue and draw.random() < 0.4:
            if not fits([*(job.request for job in taken), queue[0].request]):
                break
            taken.append(queue.pop(0))
        return taken

    while queue:
        await asyncio.to_thread(work.compute, [queue.pop(0)], take)
    return [[part async for part in job.parts()] for job in jobs]


@pytest.mark.parametrize(
    ("position", "beam"), [("", 1), ("rotary", 1), *((name, 3) for name in ("", *POSITIONS))]
)
def test_joining_changes_no_translation(loaded: LoadedRun, position: str, beam: int) -> None:
    work = translations(loaded, position, beam)
    texts = [TEXTS[i : i + 1 + i % 3] for i in range(0, 20, 2)]
    expected = [work.translator.translate_long(some) for some in texts]
    results = asyncio.run(compute(work, [work.make_request(some) for some in texts]))
    assert [[answer.texts[0] for answer in answers] for answers in results] == expected


def test_alternatives_are_those_of_one_search(loaded: LoadedRun) -> None:
    work = translations(loaded)
    requests = [work.make_request([text], 2) for text in TEXTS[:6]]
    decode = work.translator.tokenizer.decode
    for request, [answer] in zip(requests, asyncio.run(compute(work, requests)), strict=True):
        [nbest] = work.translator.search(request.parts, n_best=3)
        assert answer.texts == [decode(hypothesis.tokens) for hypothesis in nbest]


def test_rows_leave_when_they_end_and_free_their_slots(loaded: LoadedRun) -> None:
    """The cache of the batch is as long as the longest of its rows; each row runs to its limit."""
    translator: Any = translations(loaded).translator
    lengths = {"min_length": 1000, "max_length_ratio": 1.0, "max_length_extra": 1}
    translator = replace(translator, decode=replace(translator.decode, **lengths))
    finished: list[int] = []

    async def run() -> None:
        job: Job[None] = Job(None)
        texts = ["a" if number % 3 else text for number, text in enumerate(TEXTS)]
        rows = [SentenceRow(job, number, text, {}) for number, text in enumerate(texts)]
        batch = SearchBatch(translator, 1, lambda row, _: finished.append(row.number))
        waiting = list(rows)

        def more(running: list[SentenceRow]) -> list[SentenceRow]:
            steps = batch.beams.length.max() if running else 0
            assert batch.session.cache._slots == 3 * int(steps) or not running
            assert len(batch.session.padding) == len(running) or not running
            return [waiting.pop(0)] if waiting and len(running) < 4 else []

        run_batch(batch, [waiting.pop(0)], more)

    with torch.no_grad():
        asyncio.run(run())
    assert sorted(finished) == [*range(len(TEXTS))]
    assert finished != sorted(finished)  # a short sentence does not wait for a long one


def test_a_cancelled_sentence_leaves_at_once(loaded: LoadedRun) -> None:
    translator: Any = translations(loaded).translator
    left: list[tuple[int, int]] = []
    steps = 0

    async def run() -> None:
        jobs: list[Job[None]] = [Job(None), Job(None)]
        rows = [SentenceRow(job, n, TEXTS[n], {}) for n, job in enumerate(jobs)]
        batch = SearchBatch(translator, 1, lambda row, _: left.append((row.number, steps)))

        def more(running: list[SentenceRow]) -> list[SentenceRow]:
            nonlocal steps
            steps += 1
            if steps == 2:
                jobs[0].cancelled = True
            return []

        run_batch(batch, rows, more)

    asyncio.run(run())
    assert left[0] == (0, 2)
    assert left[1][0] == 1


def test_ctranslate2_workers_translate_as_one_call_does(loaded: LoadedRun) -> None:
    pytest.importorskip("ctranslate2")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        work = Translations(
            loaded.with_engine(Engine("ctranslate2")), Languages("en", "de"), Bounds(), None
        )
        assert work.workers == 2
        expected = work.translator.translate(TEXTS)

        async def run() -> list[str]:
            scheduler = Scheduler(work, waiting=99)
            jobs = [scheduler.submit(work.make_request([text])) for text in TEXTS]
            results = []
            for job in jobs:
                [answer] = [part async for part in job.parts()]
                results.append(answer.texts[0])
            await asyncio.to_thread(scheduler.close)
            return results

        assert asyncio.run(run()) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_alignment_and_confidence_on_request(loaded: LoadedRun, engine: str) -> None:
    pytest.importorskip("ctranslate2")
    work = Translations(loaded.with_engine(Engine(engine)), Languages("en", "de"), Bounds(), None)
    client = TestClient(build_app("small", work), HERE)
    body = {"q": f"{TEXTS[0]}\n\n{TEXTS[1]}", "target": "de"}
    plain = client.post("/translate", json=body).json()
    assert "alignment" not in plain
    assert "confidence" not in plain
    both = client.post("/translate", json=body | {"alignment": True, "confidence": True}).json()
    assert both["translatedText"] == plain["translatedText"]
    words = plain["translatedText"].split()
    assert [row["word"] for row in both["confidence"]] == words
    assert all(0 < row["probability"] <= 1 for row in both["confidence"])
    sources = len(body["q"].split())
    assert [target for _, target in both["alignment"]] == [*range(len(words))]
    assert all(0 <= source < sources for source, _ in both["alignment"])
    one = client.post("/translate", json=body | {"q": TEXTS[0]}).json()["translatedText"]
    first = len(one.split())
    assert all(source >= len(TEXTS[0].split()) for source, _ in both["alignment"][first:])
    answer = client.post("/translate", json=body | {"q": [TEXTS[0]], "alignment": "yes"})
    assert answer.status_code == 400


def test_word_probabilities_are_products_over_tokens(loaded: LoadedRun) -> None:
    work = translations(loaded)
    request = work.make_request([TEXTS[2]], confidence=True)
    [[answer]] = asyncio.run(compute(work, [request]))
    [[best, *_]] = work.translator.search(request.parts)
    assert isinstance(work.translator, Translator)
    total = torch.tensor(answer.probabilities).log().sum()
    assert isinstance(best, Hypothesis)
    assert float(total) >= best.log_probability - 1e-2  # the end is not part of a word


def test_int8_has_no_confidence(loaded: LoadedRun) -> None:
    pytest.importorskip("ctranslate2")
    engine = Engine("ctranslate2", "int8")
    work = Translations(loaded.with_engine(engine), Languages("en", "de"), Bounds(), None)
    client = TestClient(build_app("small", work), HERE)
    body = {"q": TEXTS[0], "target": "de"}
    assert client.post("/translate", json=body | {"confidence": True}).status_code == 400
    assert client.post("/translate", json=body).status_code == 200
