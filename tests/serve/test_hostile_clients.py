"""Hostile clients keep nobody out: /health answers within half a second throughout."""

import asyncio
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.serve_load import HALF_BODY, HALF_HEADERS, HOSTILE, Health, Load, measure, started
from starlette.testclient import TestClient
from tests.web.small_pages import SENTENCE, make_runs
from tests.web.test_connections import HALF_HEADERS as FEW_BYTES
from tests.web.test_connections import Running, is_closed

from benchmarks import serve_load
from manyheads import cli
from manyheads.loading import load_torch_run
from manyheads.serve.app import build_app, work_of
from manyheads.serve.scheduler import Bounds
from manyheads.web.app import build_app as build_view

HERE = "http://localhost"
DESCRIPTORS = 1024  # the limit of the server, as in a login shell
HEALTH_SECONDS, STOP_SECONDS = 0.5, 3.0


def slowdown() -> float:
    """By how much limits grow if other programs compete for the processors."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """Within this context, child processes start with this limit of open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def healthy(host: str, port: int) -> Iterator[None]:
    """/health answers in time throughout this context."""
    health = Health(host, port)
    health.start()
    yield
    health.ended.set()
    health.join()
    assert len(health.times) > 1  # under load there are few in a second
    assert max(health.times) < HEALTH_SECONDS * slowdown()


def test_denial_of_service(folder: Path, tmp_path: Path) -> None:
    """Forms of 131,000 fields, 1,050 half-sent headers and bodies, and SIGTERM with them."""
    with (
        (tmp_path / "log").open("w+") as log,
        descriptors(DESCRIPTORS),
        started(folder / "translator", "--threads", "1", log=log) as (host, port, process),
    ):
        load = Load(host, port, "", [])
        with healthy(host, port):
            end = time.monotonic() + 1
            while time.monotonic() < end:
                for name in ("huge form", "form of one name"):
                    answer = asyncio.run(load.exchange(HOSTILE[name], end=b"\r\n"))
                    assert answer.startswith(b"HTTP/1.1 400"), name
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        clients = []
        try:
            for data in (HALF_HEADERS, HALF_BODY):
                with healthy(host, port):
                    for _ in range(1050):
                        clients.append(socket.create_connection((host, port), timeout=5))
                        clients[-1].sendall(data)
                    time.sleep(0.5)
            began = time.monotonic()
            process.terminate()
            assert process.wait(20) == 0
            assert time.monotonic() - began < STOP_SECONDS * slowdown()
        finally:
            for client in clients:
                client.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        log.seek(0)
        assert "Traceback" not in (messages := log.read())
        assert len(messages) < 10_000


def test_one_client_does_not_displace_another() -> None:
    """Half-open connections of one address replace each other, not those of other addresses."""
    server = Running()
    try:
        host, port = server.socket.getsockname()
        slow = socket.create_connection((host, port), timeout=5, source_address=("127.0.0.2", 0))
        with closing(slow):
            slow.sendall(FEW_BYTES)
            attackers = [server.connect(FEW_BYTES) for _ in range(40)]
            assert is_closed(attackers[0])
            slow.sendall(b"host\r\n\r\n")
            assert slow.recv(100).startswith(b"HTTP/1.1 200")
            for client in attackers:
                client.close()
    finally:
        server.stop()
        server.socket.close()


def client_of(run: Path) -> TestClient:
    bounds = Bounds(rows=8, tokens=600)
    work = work_of(load_torch_run(run), bounds, None, None, None)
    return TestClient(build_app("small", work, bounds), HERE)


def test_errors_of_openai_name_the_parameter(folder: Path) -> None:
    client = client_of(folder / "deep" / "writer")

    def error(**body: Any) -> dict[str, Any]:
        values = client.post("/v1/completions", json={"prompt": "a", **body}).json()["error"]
        assert values.keys() == {"message", "type", "param", "code"}
        assert values["type"] == "invalid_request_error"
        return dict(values)

    for name, value in (("temperature", -1), ("n", 0), ("stop", 3), ("prompt", {})):
        assert error(**{name: value})["param"] == name
        assert error(**{name: value})["code"] is None
    assert error(model="other")["code"] == "model_not_found"
    greedy = [
        client.post("/v1/completions", json={"prompt": "The", "seed": seed, **sampling}).json()
        for seed, sampling in ((1, {"top_p": 0}), (2, {"top_p": 0}), (3, {"temperature": 0}))
    ]
    assert len({answer["choices"][0]["text"] for answer in greedy}) == 1


def test_the_token_comes_from_the_environment_or_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line of a process is visible to other users."""
    tokens: list[str | None] = []
    monkeypatch.setattr("manyheads.serve.app.serve", lambda *parts: tokens.append(parts[5]))
    (tmp_path / "token").write_text("from a file\n")
    words = ["serve", str(folder / "translator"), "--port", "0"]
    cli.app([*words, "--token-file", str(tmp_path / "token")], standalone_mode=False)
    monkeypatch.setenv("MANYHEADS_TOKEN", "from the environment")
    cli.app(words, standalone_mode=False)
    assert tokens == ["from a file", "from the environment"]


def test_detect_needs_a_text(folder: Path) -> None:
    client = client_of(folder / "translator")
    for values in ({}, {"q": None}, {"text": SENTENCE}):
        answer = client.post("/detect", json=values)
        assert answer.status_code == 400
        assert "'q'" in answer.json()["error"]
    assert client.post("/detect", json={"q": SENTENCE}).status_code == 200


def test_length_and_transfer_encoding_together_are_refused(folder: Path) -> None:
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    headers["Content-Length"] = "2"
    for client in (client_of(folder / "translator"), TestClient(build_view(folder), HERE)):
        assert client.post("/translate", content=b"{}", headers=headers).status_code == 400


def test_answers_do_not_contain_absolute_paths(folder: Path, tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "runs")
    (runs / "translator" / "run.toml").write_text("x = [")
    (runs / "reader" / "tokenizer.json").write_text("{")
    (runs / "deep" / "writer" / "model.safetensors").write_bytes(b"abc")
    client = TestClient(build_view(runs), HERE)
    answers = [client.get("/api/runs")]
    for name in ("translator", "reader", "deep/writer"):
        answers.append(client.post("/api/trace", json={"run": name, "text": "a"}))
        assert 400 <= answers[-1].status_code < 500
        assert json.loads(answers[-1].text)["error"]["message"]
    for answer in answers:
        assert str(tmp_path) not in answer.text
        assert "/tmp" not in answer.text


@pytest.mark.slow
@pytest.mark.parametrize("run", ["translator", "deep/writer"])
def test_load_and_hostile_requests(run: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short form of benchmarks/serve_load.py."""
    monkeypatch.setattr(serve_load, "HALF_OPEN", 40)
    result = measure(folder / run, 40, 8.0, "--threads", "1")
    assert result["answered"] > 50
    assert result["cancelled"] > 0
    assert not result["errors"]
    assert not result["not_refused"]
    assert result["health_max_ms"] < 1000 * HEALTH_SECONDS * slowdown()
    assert result["memory_mib"][2] < result["memory_mib"][1] + 64
    assert result["shutdown_seconds"] < STOP_SECONDS * slowdown()
    assert result["exit_code"] == 0
