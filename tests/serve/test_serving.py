"""The HTTP APIs: documented requests work, errors have the documented format."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from tests.web.small_pages import SENTENCE, make_runs

from manyheads.data.translation import FilesData
from manyheads.errors import UserError
from manyheads.loading import load_torch_run
from manyheads.serve.app import build_app, work_of
from manyheads.serve.scheduler import Bounds, Job, Scheduler, Take, Work, take_none
from manyheads.serve.translations import languages_of
from manyheads.web.guard import AccessPolicy
from manyheads.web.responses import Problem

HERE = "http://localhost"
OTHER = "The cat sleeps."
BOUNDS = Bounds(rows=8, tokens=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


def client_of(folder: Path, door: AccessPolicy | None = None, where: str = HERE) -> TestClient:
    loaded = load_torch_run(folder)
    app = build_app("small", work_of(loaded, BOUNDS, None, None, None), BOUNDS, door)
    return TestClient(app, where)


@pytest.fixture(scope="module")
def translator(folder: Path) -> TestClient:
    return client_of(folder / "translator")


@pytest.fixture(scope="module")
def writer(folder: Path) -> TestClient:
    return client_of(folder / "deep" / "writer")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """The translations of the run's translator."""
    translator = load_torch_run(folder / "translator").translator()
    translations = translator.translate_long([SENTENCE, OTHER])
    return dict(zip((SENTENCE, OTHER), translations, strict=True))


def test_libretranslate_as_documented(translator: TestClient, expected: dict[str, str]) -> None:
    body = {"q": SENTENCE, "source": "en", "target": "de", "format": "text", "api_key": ""}
    assert translator.post("/translate", json=body).json() == {"translatedText": expected[SENTENCE]}
    assert translator.post("/translate", data=body).json() == {"translatedText": expected[SENTENCE]}
    several = translator.post("/translate", json={**body, "q": [SENTENCE, OTHER]}).json()
    assert several == {"translatedText": [expected[SENTENCE], expected[OTHER]]}
    auto = translator.post("/translate", json={**body, "source": "auto"}).json()
    assert auto["detectedLanguage"] == {"confidence": 0.0, "language": "en"}
    more = translator.post("/translate", json={**body, "alternatives": 3}).json()
    assert more.keys() == {"translatedText", "alternatives"}
    assert 1 <= len(more["alternatives"]) <= 3
    assert len({more["translatedText"], *more["alternatives"]}) == 1 + len(more["alternatives"])
    listed = translator.get("/languages").json()
    assert listed[0] == {"code": "en", "name": "English", "targets": ["de"]}
    assert translator.post("/detect", json={"q": "Hi"}).json()[0]["language"] == "en"


def test_deepl_as_documented(translator: TestClient, expected: dict[str, str]) -> None:
    key = {"Authorization": "DeepL-Auth-Key some-key:fx"}
    translations = [
        {"detected_source_language": "EN", "text": expected[text]} for text in (SENTENCE, OTHER)
    ]
    body = {"text": [SENTENCE, OTHER], "target_lang": "DE"}
    for body_format in ({"json": body}, {"data": body}):
        answer = translator.post("/v2/translate", headers=key, **body_format)  # type: ignore[arg-type]
        assert answer.json() == {"translations": translations}
    counted = {**body, "show_billed_characters": True}
    billed = translator.post("/v2/translate", json=counted).json()["translations"]
    assert [row["billed_characters"] for row in billed] == [len(SENTENCE), len(OTHER)]
    regional = {"text": [OTHER], "target_lang": "de-DE", "source_lang": "EN-GB"}
    assert translator.post("/v2/translate", json=regional).json() == {
        "translations": translations[1:]
    }


def test_lines_stay_lines_and_empty_ones_empty(
    translator: TestClient, expected: dict[str, str]
) -> None:
    body = {"q": f"{SENTENCE}\n\n{OTHER}", "source": "en", "target": "de"}
    written = translator.post("/translate", json=body).json()["translatedText"]
    assert written == f"{expected[SENTENCE]}\n\n{expected[OTHER]}"
    for empty in ("", "\n", " "):
        answer = translator.post("/translate", json={**body, "q": empty}).json()
        assert answer["translatedText"].strip() == ""
    assert translator.post("/translate", json={**body, "q": []}).json() == {"translatedText": []}


def message_of(answer: Any, path: str) -> str:
    """The message of an error, which must have the format of its API."""
    values = answer.json()
    if path.startswith("/v1"):
        assert values["error"].keys() == {"message", "type", "param", "code"}
        message = values["error"]["message"]
    else:
        name = "message" if path.startswith("/v2") else "error"
        assert values.keys() == {name}
        message = values[name]
    assert isinstance(message, str)
    assert "\n" not in message
    return str(message)


BAD = [b"", b"{", b"[]", b"7", b"\xff", b"[" * 5000, b'{"q": 3, "text": 3, "prompt": 3.5}']


@pytest.mark.parametrize("path", ["/translate", "/v2/translate", "/v1/completions"])
@pytest.mark.parametrize("body", BAD)
def test_malformed_bodies_are_refused_and_the_server_lives(
    translator: TestClient, writer: TestClient, path: str, body: bytes
) -> None:
    client = writer if path.startswith("/v1") else translator
    kind = {"Content-Type": "application/json"}
    answer = client.post(path, content=body, headers=kind)
    assert answer.status_code == 400
    message_of(answer, path)
    plain = client.post(path, content=body, headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415
    message_of(plain, path)
    foreign = client.post(path, json={}, headers={"Host": "evil.example"})
    assert foreign.status_code == 403
    assert "Host" in message_of(foreign, path)
    page = client.post(path, json={}, headers={"Origin": "http://evil.example"})
    assert page.status_code == 403
    assert client.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"target": "fr"}, "writes de"),
        ({"target": 3}, "target"),
        ({"source": "xx"}, "reads en"),
        ({"format": "html"}, "format"),
        ({"alternatives": 99}, "alternatives"),
        ({"alternatives": "x"}, "alternatives"),
        ({"alternatives": True}, "alternatives"),
        ({"q": [1]}, "q"),
        ({"q": None}, "q"),
        ({"q": "dog " * 10_000}, "tokens"),
        ({"q": "x" * 300_000}, "bytes"),
    ],
)
def test_wrong_values_are_refused(translator: TestClient, wrong: dict[str, Any], word: str) -> None:
    body = {"q": SENTENCE, "source": "en", "target": "de", **wrong}
    answer = translator.post("/translate", json=body)
    assert answer.status_code == 400
    assert word in message_of(answer, "/translate")


def test_the_api_of_another_task_is_404(translator: TestClient, writer: TestClient) -> None:
    answer = translator.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 404
    assert "/translate" in message_of(answer, "/v1/completions")
    for path in ("/translate", "/v2/translate"):
        answer = writer.post(path, json={"q": "a", "text": ["a"], "target": "de"})
        assert answer.status_code == 404
        assert "/v1/completions" in message_of(answer, path)


def test_off_loopback_each_api_accepts_the_token(folder: Path) -> None:
    door = AccessPolicy.at("0.0.0.0")
    assert door.token
    client = client_of(folder / "translator", door, "http://10.1.2.3:8422")
    assert client.get("/health").status_code == 200
    libre = {"q": OTHER, "source": "en", "target": "de"}
    deepl = {"text": [OTHER], "target_lang": "DE"}
    for key in ({}, {"api_key": "wrong"}, {"api_key": 3}):
        answer = client.post("/translate", json={**libre, **key})
        assert answer.status_code == 403
        assert "api_key" in message_of(answer, "/translate")
    half = json.dumps({**libre, "api_key": "\ud800"})  # half of a surrogate pair
    kind = {"Content-Type": "application/json"}
    assert client.post("/translate", content=half, headers=kind).status_code == 403
    assert client.post("/translate", data={**libre, "api_key": door.token}).status_code == 200
    for key in ({}, {"Authorization": "DeepL-Auth-Key wrong"}):
        answer = client.post("/v2/translate", json=deepl, headers=key)
        assert answer.status_code == 403
        message_of(answer, "/v2/translate")
    for kind in ("DeepL-Auth-Key", "Bearer"):
        key = {"Authorization": f"{kind} {door.token}"}
        assert client.post("/v2/translate", json=deepl, headers=key).status_code == 200
    assert client.get("/v1/models").status_code == 401
    key = {"Authorization": f"Bearer {door.token}"}
    assert client.get("/v1/models", headers=key).json()["data"][0]["id"] == "small"


def test_languages_come_from_the_settings_or_the_options(folder: Path) -> None:
    run = load_torch_run(folder / "translator").run
    assert languages_of(run, None, None).target == "de"
    assert languages_of(run, None, "fr").target == "fr"
    for source, target, pair in (
        ("en", "de", ("en", "de")),
        ("train.en", "train.pt-br.gz", ("en", "pt-br")),
        ("a/b/c.fr", "d.nl", ("fr", "nl")),
    ):
        files = replace(run, data=FilesData(source=source, target=target))
        known = languages_of(files, None, None)
        assert (known.source, known.target) == pair
    for data in (None, FilesData(source="left.txt.zip0", target="right")):
        with pytest.raises(UserError, match="--source"):
            languages_of(replace(run, data=data), None, None)
    with pytest.raises(UserError, match="--source deutsch"):
        languages_of(run, "deutsch", None)


def test_a_run_that_vanishes_is_still_served(folder: Path, tmp_path: Path) -> None:
    """The model is in memory."""
    copy = tmp_path / "gone"
    shutil.copytree(folder / "translator", copy)
    client = client_of(copy)
    shutil.rmtree(copy)
    body = {"text": [OTHER], "target_lang": "DE"}
    assert client.post("/v2/translate", json=body).status_code == 200
    assert client.get("/health").status_code == 200
    with pytest.raises(UserError):
        client_of(copy)


class Slow(Work[int]):
    """Echoes numbers; the first batch waits until it is released."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started, self.release = threading.Event(), threading.Event()

    def fits(self, requests: Sequence[int]) -> bool:
        return len(requests) <= 10

    def compute(self, jobs: Sequence[Job[int]], take: Take[int] = take_none) -> None:
        self.batches.append([job.request for job in jobs])
        self.started.set()
        assert self.release.wait(10)
        for job in jobs:
            if job.request < 0:
                raise ValueError("a failure that nobody expected")
            job.send(job.request)


async def everything(job: Job[int]) -> list[Any]:
    return [part async for part in job.parts()]


def test_requests_during_a_batch_form_the_next_one() -> None:
    work = Slow()

    async def run() -> list[list[Any]]:
        scheduler = Scheduler(work, waiting=100)
        jobs = [scheduler.submit(0)]
        await asyncio.to_thread(work.started.wait)
        jobs += [scheduler.submit(number) for number in range(1, 16)]
        work.release.set()
        answers = [await everything(job) for job in jobs]
        await asyncio.to_thread(scheduler.close)
        with pytest.raises(Problem, match="stopping"):
            scheduler.submit(1)
        return answers

    assert asyncio.run(run()) == [[number] for number in range(16)]
    assert work.batches == [[0], [*range(1, 11)], [*range(11, 16)]]


def test_the_queue_is_bounded_and_dropped_jobs_free_it() -> None:
    work = Slow()

    async def run() -> None:
        scheduler = Scheduler(work, waiting=2)
        first = scheduler.submit(0)
        await asyncio.to_thread(work.started.wait)
        second, third = scheduler.submit(1), scheduler.submit(2)
        with pytest.raises(Problem) as refused:
            scheduler.submit(3)
        assert refused.value.status == 503
        scheduler.drop(second)
        fourth = scheduler.submit(4)
        work.release.set()
        assert [await everything(job) for job in (first, third, fourth)] == [[0], [2], [4]]

    asyncio.run(run())
    assert work.batches == [[0], [2, 4]]


def test_closing_finishes_the_queue() -> None:
    work = Slow()

    async def run() -> list[Any]:
        scheduler = Scheduler(work, waiting=9)
        jobs = [scheduler.submit(0)]
        await asyncio.to_thread(work.started.wait)
        jobs.append(scheduler.submit(1))
        closing = asyncio.ensure_future(asyncio.to_thread(scheduler.close))
        work.release.set()
        await closing
        return [await everything(job) for job in jobs]

    assert asyncio.run(run()) == [[0], [1]]


def test_a_failed_batch_does_not_stop_the_next_one() -> None:
    work = Slow()
    work.release.set()

    async def run() -> None:
        scheduler = Scheduler(work, waiting=9)
        with pytest.raises(ValueError, match="nobody expected"):
            await everything(scheduler.submit(-1))
        assert await everything(scheduler.submit(5)) == [5]

    asyncio.run(run())


def test_a_full_queue_is_503_with_retry_after(folder: Path) -> None:
    bounds = replace(BOUNDS, waiting=0)
    work = work_of(load_torch_run(folder / "translator"), bounds, None, None, None)
    client = TestClient(build_app("small", work, bounds), HERE)
    for path in ("/translate", "/v2/translate"):
        answer = client.post(
            path,
            json={"q": "a", "source": "en", "target": "de", "text": ["a"], "target_lang": "DE"},
        )
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        message_of(answer, path)


def test_an_unexpected_error_is_500_without_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(load_torch_run(folder / "translator"), BOUNDS, None, None, None)
    app = build_app("small", work, BOUNDS)
    client = TestClient(app, HERE, raise_server_exceptions=False)
    body = {"text": [OTHER], "target_lang": "DE"}
    with monkeypatch.context() as patched:
        patched.setattr(work, "compute", lambda jobs: 1 / 0)
        answer = client.post("/v2/translate", json=body)
        assert answer.status_code == 500
        assert "zero" not in message_of(answer, "/v2/translate")
    assert client.post("/v2/translate", json=body).status_code == 200


def test_translations_do_not_depend_on_the_batch(
    translator: TestClient, folder: Path, expected: dict[str, str]
) -> None:
    """Several requests in one batch: each gets its own texts back."""
    work: Any = work_of(load_torch_run(folder / "translator"), BOUNDS, None, None, None)
    torch.manual_seed(0)

    async def run() -> list[list[Any]]:
        jobs = [Job(work.make_request(texts)) for texts in ([SENTENCE], [OTHER, SENTENCE], [])]
        assert work.fits([job.request for job in jobs])
        await asyncio.to_thread(work.compute, jobs)
        for job in jobs:
            job.end()
        return [await everything(job) for job in jobs]

    best = [[answer.texts[0] for answer in answers] for answers in asyncio.run(run())]
    assert best == [[expected[SENTENCE]], [expected[OTHER], expected[SENTENCE]], []]


def test_a_form_of_many_fields_is_refused_at_once(translator: TestClient) -> None:
    """Parsing is linear and bounded: one request does not block the others."""
    kind = {"content-type": "application/x-www-form-urlencoded"}
    for path in ("/translate", "/detect"):
        started = time.perf_counter()
        answer = translator.post(path, content="a&" * 131_000, headers=kind)
        assert answer.status_code == 400
        assert time.perf_counter() - started < 2
