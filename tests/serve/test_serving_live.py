"""The HTTP server over real connections: OpenAI's client, load, disconnects, SIGTERM."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.web.small_pages import SENTENCE, make_runs

from manyheads.loading import load_torch_run
from manyheads.serve.app import build_app, work_of
from manyheads.serve.scheduler import Bounds
from manyheads.web.app import listen

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from serving import memory_of, put_under_load, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


class Live:
    """A server in a thread."""

    def __init__(self, folder: Path) -> None:
        import uvicorn

        self.work: Any = work_of(load_torch_run(folder), Bounds(), None, None, None)
        self.app: Any = build_app("small", self.work)
        config = uvicorn.Config(self.app, log_level="warning", server_header=False)
        self.server = uvicorn.Server(config)
        self.socket = listen("127.0.0.1", 0)
        self.socket.listen()
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    @property
    def scheduler(self) -> Any:
        return self.app.app.state.scheduler


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    server = Live(folder / "deep" / "writer")
    server.thread.start()
    yield server
    server.server.should_exit = True
    server.thread.join(20)
    assert not server.thread.is_alive()


def test_the_client_of_openai(live: Live) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{live.port}/v1", api_key="none", max_retries=0
    )
    assert [model.id for model in client.models.list()] == ["small"]
    options = {
        "model": "small",
        "prompt": "The dog",
        "max_tokens": 12,
        "seed": 1,
        "temperature": 0.7,
    }
    both = client.completions.create(**options, n=2, logprobs=2)
    assert len(both.choices) == 2
    assert both.choices[0].logprobs.tokens
    assert both.usage.completion_tokens <= 24
    plain = client.completions.create(**options).choices[0].text
    assert both.choices[0].text == plain
    parts = list(client.completions.create(**options, stream=True))
    assert "".join(part.choices[0].text for part in parts) == plain
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(**{**options, "max_tokens": 10**6})
    with pytest.raises(openai.NotFoundError, match="it is small"):
        client.completions.create(**{**options, "model": "other"})


def request(port: int, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def until(condition: Any) -> bool:
    """True if the condition holds within some seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        threading.Event().wait(0.01)
    return bool(condition())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_leaves_the_queue(
    live: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    started, release = threading.Event(), threading.Event()
    compute, computed = live.work.compute, []

    def wait(jobs: Any, take: Any) -> None:
        started.set()
        assert release.wait(20)
        computed.extend(job.request.max_tokens for job in jobs if not job.cancelled)
        compute(jobs, take)

    assert until(lambda: not live.scheduler._batches)  # else the request joins the batch before
    monkeypatch.setattr(live.work, "compute", wait)
    first = request(live.port, {"prompt": "A", "max_tokens": 3})
    assert started.wait(10)
    second = request(live.port, {"prompt": "B", "max_tokens": 4, "stream": stream})
    assert until(lambda: live.scheduler.waiting == 1)
    second.close()
    assert until(lambda: live.scheduler.waiting == 0)
    release.set()
    assert first.recv(100).startswith(b"HTTP/1.1 200")
    first.close()
    assert computed == [3]


@pytest.mark.slow
def test_under_load_and_stopped_by_sigterm(folder: Path) -> None:
    """A short form of benchmarks/serving.py: no error, and many clients get more than one."""
    texts = [SENTENCE, "The cat sleeps.", "We will see the old tree.", "A child reads."]
    requests = [{"q": q, "source": "en", "target": "de"} for q in texts]
    many = json.dumps({"q": [SENTENCE] * 60, "source": "en", "target": "de"}).encode()
    ratios = []
    with served(folder / "translator", ["--threads", "1"]) as (address, process):
        put_under_load(address, "/translate", requests, 16, 0.2)
        memory = memory_of(process.pid)
        for _ in range(3):  # the machine may be busy with something else for a moment
            one, all_ = (put_under_load(address, "/translate", requests, n, 0.5) for n in (1, 16))
            assert not one.errors + all_.errors
            ratios.append(len(all_.times) / len(one.times))
            if ratios[-1] > 1.2:
                break
        assert memory_of(process.pid) < memory + 100
        answer = asyncio.run(_request_and_terminate(address, many, process))
    assert max(ratios) > 1.2, ratios
    assert answer.startswith(b"HTTP/1.1 200")
    assert process.returncode == 0


def test_a_signal_during_start_stops_the_server(folder: Path) -> None:
    with served(folder / "translator", ["--threads", "1"]) as (address, process):
        assert address
    assert process.returncode == 0


async def _request_and_terminate(address: str, body: bytes, process: Any) -> bytes:
    """Send a request, then SIGTERM while it is computed; it must be answered."""
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    await asyncio.sleep(0.05)
    process.terminate()
    answer = await reader.read()  # to the end: the server closes what it has answered
    writer.close()
    return answer
