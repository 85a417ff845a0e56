"""Connections without a complete request keep nobody out, and end."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

uvicorn = pytest.importorskip("uvicorn")

from manyheads.web.app import listen  # noqa: E402
from manyheads.web.connections import limited_protocol  # noqa: E402

HEADER_SECONDS, MAX_WAITING = 0.6, 8
HALF_HEADERS = b"GET / HTTP/1.1\r\nHost: local"
HALF_BODY = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf"


async def app(scope, receive, send):  # type: ignore[no-untyped-def]
    """Answers 200 once the body is complete."""
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})


class Running:
    """A server in a thread."""

    def __init__(self) -> None:
        self.socket = listen("127.0.0.1", 0)
        self.socket.listen(256)
        protocol = limited_protocol(HEADER_SECONDS, MAX_WAITING)
        self.server = uvicorn.Server(
            uvicorn.Config(app, http=protocol, log_level="error", lifespan="off")
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def connect(self, data: bytes) -> socket.socket:
        client = socket.create_connection(self.socket.getsockname(), timeout=5)
        client.sendall(data)
        return client

    def seconds_to_answer(self) -> float:
        started = time.perf_counter()
        with closing(http.client.HTTPConnection(*self.socket.getsockname(), timeout=5)) as client:
            client.request("GET", "/")
            assert client.getresponse().read() == b"answer"
        return time.perf_counter() - started

    def stop(self) -> float:
        started = time.perf_counter()
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()
        return time.perf_counter() - started


@pytest.fixture
def running() -> Iterator[Running]:
    server = Running()
    yield server
    server.stop()
    server.socket.close()


def is_closed(client: socket.socket) -> bool:
    client.settimeout(5)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_open_connections_keep_nobody_out_and_are_closed(running: Running) -> None:
    clients = [running.connect(HALF_HEADERS) for _ in range(5 * MAX_WAITING)]
    assert running.seconds_to_answer() < 0.5
    assert all(map(is_closed, clients))  # the oldest at once, the others after HEADER_SECONDS
    for client in clients:
        client.close()


def test_headers_that_come_byte_by_byte_end_in_time(running: Running) -> None:
    client, started = running.connect(b"GET"), time.perf_counter()
    with pytest.raises(OSError), closing(client):  # noqa: PT012
        while time.perf_counter() - started < 5:
            client.sendall(b" ")
            time.sleep(0.05)
    assert time.perf_counter() - started < 3


def test_a_connection_may_stay_open_between_requests(running: Running) -> None:
    with closing(http.client.HTTPConnection(*running.socket.getsockname(), timeout=5)) as client:
        for _ in range(3):
            client.request("GET", "/")
            assert client.getresponse().read() == b"answer"
            time.sleep(HEADER_SECONDS / 2)


def test_half_a_body_does_not_delay_a_stop(running: Running) -> None:
    with closing(running.connect(HALF_BODY)):
        time.sleep(0.2)
        assert running.stop() < 2
