"""Requests that could exhaust the server are refused with a message before they cost anything."""

import asyncio
import base64
import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from starlette.testclient import TestClient
from tests.data.small_music import midi_bytes
from tests.web.small_models import SENTENCE, make_models
from tests.web.test_server import HERE, ask, problem, tensor

from manyheads.data.events import Note, write_midi
from manyheads.run import read_run, save_run
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web import app as server
from manyheads.web.guard import AccessPolicy, Guard, Limits
from manyheads.web.runs import METRICS, all_records, read_metrics

KIND = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(server.build_app(folder), HERE)


@pytest.mark.parametrize("run", ["piano", "chorales"])
def test_music_that_lasts_for_days_is_refused(client: TestClient, run: str, tmp_path: Path) -> None:
    """A few bytes can name a pause of years: its words would fill the memory."""
    mido = pytest.importorskip("mido")
    struck = mido.Message("note_on", note=60, velocity=64)
    tracks = [[struck, mido.Message("note_off", note=60, time=2**27)] for _ in range(4)]
    content = midi_bytes(*tracks, path=tmp_path / "long.mid", beat=1)
    assert len(content) < 200
    begin = time.perf_counter()
    answer = client.post(
        "/api/music", json={"run": run, "upload": base64.b64encode(content).decode()}
    )
    assert "three hours" in problem(answer, 413)
    assert time.perf_counter() - begin < 2


def test_music_of_an_hour_is_read(client: TestClient, tmp_path: Path) -> None:
    write_midi([[Note(360_000, 60, 360_020, 10)]], tmp_path / "hour.mid")
    upload = base64.b64encode((tmp_path / "hour.mid").read_bytes()).decode()
    assert ask(client, "/api/music", run="piano", upload=upload, events=8)["words"] > 3600


def test_half_a_character_is_refused_everywhere(client: TestClient) -> None:
    values: dict[str, Any] = {"run": "translator", "text": "[MASK]"}
    wrong = [{"run": "\ud800"}, {"text": "\udc00"}, {"target": "\ud800"}, {"off": ["\ud800"]}]
    for path in ("trace", "flow", "lens", "continue", "translate", "decode", "tokens", "gold"):
        for item in wrong[:2]:
            body = json.dumps({**values, **item})
            answer = client.post(f"/api/{path}", content=body, headers=KIND)
            assert "Unicode" in problem(answer, 400), path
    for item in wrong[2:]:
        answer = client.post("/api/trace", content=json.dumps({**values, **item}), headers=KIND)
        assert "Unicode" in problem(answer, 400)


def test_weights_that_are_no_numbers_are_told_of(folder: Path, tmp_path: Path) -> None:
    """A run that diverged: JSON has no nan, so none of it can be shown."""
    for name in ("translator", "writer", "reader"):
        run = read_run(folder / name)
        model = run.model.build()
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(torch.nan)
        tokenizer = Tokenizer.load(folder / name / "tokenizer.json")
        save_run(run, tokenizer, model, tmp_path / name)
    diverged = TestClient(server.build_app(tmp_path), HERE)
    for name, path in (("writer", "trace"), ("reader", "trace"), ("writer", "lens")):
        answer = diverged.post(f"/api/{path}", json={"run": name, "text": SENTENCE})
        assert "weights are broken" in problem(answer, 422), (name, path)
    answer = diverged.post("/api/trace", json={"run": "translator", "text": "a", "target": "b"})
    assert "weights are broken" in problem(answer, 422)
    assert diverged.get("/health").status_code == 200


def test_an_answer_that_is_too_large_is_asked_for_in_parts(folder: Path) -> None:
    small = TestClient(server.build_app(folder, limits=Limits(answer_bytes=300)), HERE)
    actual = ask(small, "/api/trace", run="writer", text=SENTENCE)
    name, [item] = "decoder.self.weights", actual["maps"]
    size = len(item["rows"])
    place = f"/api/trace/{actual['trace']}/tensor/{name}"
    assert "layer" in problem(small.get(place), 413)
    assert "layer" in problem(small.get(f"{place}?layer=0&normalize=1"), 413)
    assert tensor(small, actual["trace"], name, layer=0, head=0).shape == (size, size)
    assert tensor(small, actual["trace"], name, dtype="u8").numel() == 4 * size**2


def test_each_map_by_its_own_greatest(client: TestClient) -> None:
    trace = ask(client, "/api/trace", run="writer", text=SENTENCE)["trace"]
    name = "decoder.self.weights"
    weights = tensor(client, trace, name)
    scaled = tensor(client, trace, name, normalize=1)
    assert torch.equal(scaled, weights / weights.amax((2, 3), keepdim=True))
    assert torch.all(tensor(client, trace, name, normalize=1, dtype="u8").amax((2, 3)) == 255)
    assert torch.equal(tensor(client, trace, name, normalize=0), weights)


def test_another_page_is_refused_also_without_an_origin(client: TestClient) -> None:
    for site in ("cross-site", "same-site"):
        sent = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
        assert "cross-site" in problem(client.get("/api/positions", headers=sent), 403)
        followed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
        assert client.get("/positions", headers=followed).status_code == 200
    for site in ("same-origin", "none"):
        assert client.get("/api/runs", headers={"Sec-Fetch-Site": site}).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    sent: list[Any] = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
    guard = Guard(server.build_app(Path()), AccessPolicy(), Limits(body_seconds=0.01))
    asyncio.run(guard(scope, never, send))
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["type"] == "slow"


def test_nothing_is_computed_for_those_who_have_gone(folder: Path) -> None:
    """They leave the queue while another has the model, and their place to those who come."""
    app: Any = server.build_app(folder, limits=Limits(requests=3))
    library = app.app.state.library
    body = json.dumps({"run": "translator", "text": SENTENCE}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/flow", "headers": headers}
    scope |= {"query_string": b"", "raw_path": b"/api/flow", "root_path": "", "scheme": "http"}

    async def requested(gone: asyncio.Event) -> int:
        inputs, sent = [{"type": "http.request", "body": body}], []

        async def receive() -> Any:
            if inputs:
                return inputs.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return int(sent[0]["status"])

    async def hasty() -> list[int]:
        gone = asyncio.Event()
        waiting = [asyncio.ensure_future(requested(gone)) for _ in range(3)]
        while app.running < 3:
            await asyncio.sleep(0)
        crowded = await requested(asyncio.Event())
        gone.set()
        left = await asyncio.gather(*waiting)
        assert app.running == 0
        return [crowded, *left]

    with library._lock:  # as long as another is computing
        assert asyncio.run(asyncio.wait_for(hasty(), 5)) == [503, 499, 499, 499]
    assert app.app.state.traces.bytes == 0
    assert asyncio.run(requested(asyncio.Event())) == 200


def test_files_of_the_page_need_no_place(folder: Path) -> None:
    full = TestClient(server.build_app(folder, limits=Limits(requests=0)), HERE)
    assert full.get("/health").status_code == full.get("/page/main.js").status_code == 200
    answer = full.get("/api/runs")
    assert "again" in problem(answer, 503)
    assert answer.headers["retry-after"] == "1"


def test_what_leaves_nothing_to_draw_is_refused(client: TestClient) -> None:
    for name, values in (("temperature", (1e308, 1e-38, 1e-300, 101)), ("top_p", (1e-320, 1e-9))):
        for value in values:
            requested = {"run": "writer", "text": "The", name: value}
            for path in ("decode", "next"):
                assert name in problem(client.post(f"/api/{path}", json=requested), 400), value
    hot = ask(client, "/api/next", run="writer", text="The", temperature=100, top_p=1e-6)
    assert hot["left"] >= 1


def test_a_text_goes_on_as_the_model_writes(client: TestClient) -> None:
    baseline = ask(client, "/api/continue", run="writer", text=SENTENCE)["text"]
    off = [f"decoder.self.{layer}.{head}" for layer in (0, 1) for head in (0, 1)]
    assert ask(client, "/api/continue", run="writer", text=SENTENCE, off=off)["text"] != baseline
    assert ask(client, "/api/continue", run="writer", text=SENTENCE)["text"] == baseline
    for run, word in (
        ("translator", "continues a text"),
        ("pictures", "continues a text"),
        ("gone", "gone"),
    ):
        answer = client.post("/api/continue", json={"run": run, "text": "a"})
        assert word in problem(answer, 404 if run == "gone" else 400)


def test_long_measurements_are_read_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyheads.web.runs.MOST_BYTES", 100)
    path = tmp_path / METRICS
    path.write_text("".join(f'{{"step": {n}, "loss": {n}.5}}\n' for n in range(40)))
    assert [record["step"] for record in all_records(path)] == list(range(40))
    first = read_metrics(path)
    assert first["more"] is True
    assert read_metrics(path, path.stat().st_size)["more"] is False
    assert list(all_records(tmp_path / "none")) == []


def test_an_address_that_is_printed_can_be_opened_at_once(folder: Path) -> None:
    """A client may connect as soon as the URL is printed."""

    def ready(address: str) -> None:
        parts = urlsplit(address)
        socket.create_connection((parts.hostname, parts.port), timeout=2).close()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.serve(folder, "127.0.0.1", 0, None, ready)


def test_a_text_of_ten_thousand_tokens_is_refused_everywhere(client: TestClient) -> None:
    long = {"text": "dog [MASK] " * 5000}
    paths = ("trace", "flow", "lens", "tokens", "translate", "decode", "next")
    for path, run in [*((path, "translator") for path in paths), ("continue", "writer")]:
        answer = client.post(f"/api/{path}", json={"run": run, **long})
        assert "tokens" in problem(answer, 413), path
    assert "masks" in problem(client.post("/api/fill", json={"run": "reader", **long}), 413)
    assert client.get("/health").json() == {"status": "ok"}
