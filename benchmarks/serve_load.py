"""A served model under load and attack: many clients, some of which cancel, and hostile requests.

    manyheads train phrasebook train.steps=50 --out runs/small
    python benchmarks/serve_load.py runs/small                              # 60 s, 200 clients
    python benchmarks/serve_load.py runs/small --seconds 5 --clients 40

Three of ten clients close their connection before the answer comes. One hostile client for every
ten others sends what `HOSTILE` lists, and keeps half-open connections. A thread asks /health all
the time. The server is a process of its own; at the end it gets SIGTERM while half-open connections
are left. Printed as one JSON object:

    answered, errors        well-formed requests with status 200, and all others by their reason
    cancelled, refused      requests that clients gave up, and hostile ones that were refused
    not_refused             hostile requests that got another answer than 4xx, 503 or a closed
                            connection, by name
    health_max_ms, _p99_ms  response time of /health
    memory_mib              of the server at the start, after a quarter of the time, at the end
    shutdown_seconds        from SIGTERM to the end of the process; exit_code is 0
"""

import argparse
import asyncio
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

CANCEL = 0.3  # fraction of well-formed requests that are given up
HOSTILE_FRACTION = 0.1  # hostile clients for each other one
HALF_OPEN = 500  # connections that send half of their headers
JSON = "Content-Type: application/json"
FORM = "Content-Type: application/x-www-form-urlencoded"


def request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if not any(line.lower().startswith(("content-length", "transfer")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


HOSTILE = {
    "huge form": request("/translate", b"a&" * 131_000, FORM),
    "form of one name": request("/detect", b"q=a&" * 60_000, FORM),
    "body over the limit": request("/translate", b"x" * 400_000, JSON),
    "announced body of 10 GB": request("/translate", b"", JSON, f"Content-Length: {10**10}"),
    "negative length": request("/translate", b"", JSON, "Content-Length: -1"),
    "two lengths": request("/translate", b"{}", JSON, "Content-Length: 2", "Content-Length: 9"),
    "length and chunks": request(
        "/translate", b"0\r\n\r\n", JSON, "Content-Length: 5", "Transfer-Encoding: chunked"
    ),
    "broken chunks": request("/translate", b"zz\r\n{}\r\n", JSON, "Transfer-Encoding: chunked"),
    "unknown coding": request("/translate", b"{}", JSON, "Transfer-Encoding: gzip"),
    "plain text": request("/translate", b"{}", "Content-Type: text/plain"),
    "no content type": request("/v1/completions", b"{}"),
    "JSON nested deeply": request("/translate", b"[" * 100_000, JSON),
    "JSON with a large number": request("/translate", b'{"q": ' + b"9" * 50_000 + b"}", JSON),
    "not UTF-8": request("/translate", b'{"q": "\xff\xfe"}', JSON),
    "another host": request("/health", b"", "Host: evil.example", method="GET"),
    "another origin": request("/translate", b"{}", JSON, "Origin: http://evil.example"),
    "path outside": request("/../../etc/passwd", b"", method="GET"),
    "unknown method": request("/translate", b"{}", JSON, method="BREW"),
    "headers of 1 MB": request("/health", b"", f"X: {'x' * 2**20}", method="GET"),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00" * 50,
    "zero bytes": b"\0" * 1000,
}
HALF_HEADERS = b"POST /translate HTTP/1.1\r\nHost: local"
HALF_BODY = request("/translate", b'{"q": "half', JSON, "Content-Length: 5000")


class Load:
    """The clients, and counts of what they get."""

    def __init__(self, host: str, port: int, path: str, bodies: list[bytes], seed: int = 1) -> None:
        self.host, self.port, self.path, self.bodies = host, port, path, bodies
        self.draw = random.Random(seed)
        self.answered, self.cancelled, self.refused = 0, 0, 0
        self.errors: Counter[str] = Counter()
        self.not_refused: Counter[str] = Counter()

    async def run(self, clients: int, until: float) -> None:
        hostile = max(1, round(clients * HOSTILE_FRACTION))
        await asyncio.gather(
            *(self.client(until) for _ in range(clients)),
            *(self.hostile(until) for _ in range(hostile)),
            *(self.half_open(until, data) for data in (HALF_HEADERS, HALF_BODY)),
        )

    async def client(self, until: float) -> None:
        """Well-formed requests one after the other, each on a new connection."""
        while time.monotonic() < until:
            data = request(self.path, self.draw.choice(self.bodies), JSON, "Connection: close")
            patience = self.draw.uniform(0, 0.3) if self.draw.random() < CANCEL else None
            try:
                async with asyncio.timeout(patience):
                    answer = await self.exchange(data)
            except TimeoutError:
                self.cancelled += 1
                continue
            except OSError as error:
                self.errors[type(error).__name__] += 1
                continue
            if answer.startswith(b"HTTP/1.1 200"):
                self.answered += 1
            else:
                self.errors[answer[:40].decode("latin-1") or "no answer"] += 1

    async def hostile(self, until: float) -> None:
        while time.monotonic() < until:
            name = self.draw.choice(list(HOSTILE))
            answer = b""
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    answer = await self.exchange(HOSTILE[name], end=b"\r\n")
            if not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 503")):
                self.refused += 1
            else:
                self.not_refused[f"{name}: {answer[:40]!r}"] += 1
            await asyncio.sleep(0.01)

    async def half_open(self, until: float, data: bytes) -> None:
        """Connections that send half of a request, replaced as the server closes them."""
        writers: list[asyncio.StreamWriter] = []
        while time.monotonic() < until:
            writers = [writer for writer in writers if not writer.is_closing()]
            while len(writers) < HALF_OPEN:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(self.host, self.port)
                    writer.write(data)
                    writers.append(writer)
            await asyncio.sleep(0.1)
            for writer in writers[: HALF_OPEN // 2]:  # these are slow, the others are silent
                with suppress(OSError):
                    writer.write(b"x")
                    await writer.drain()

    async def exchange(self, data: bytes, end: bytes | None = None) -> bytes:
        """Send bytes; the answer up to its end, or to these bytes."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            if end is None:
                return await reader.read()
            with suppress(asyncio.IncompleteReadError):
                return await reader.readuntil(end)
            return b""
        finally:
            writer.transport.abort()


class Health(threading.Thread):
    """Asks /health every 20 ms; seconds of each answer."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(daemon=True)
        self.address, self.times, self.ended = (host, port), [0.0], threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            began = time.perf_counter()
            connection = http.client.HTTPConnection(*self.address, timeout=30)
            try:
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
            except (OSError, AssertionError, http.client.HTTPException):
                self.times.append(float("inf"))
            else:
                self.times.append(time.perf_counter() - began)
            connection.close()


@contextmanager
def started(
    run: Path, *options: str, log: IO[str] | None = None
) -> Iterator[tuple[str, int, subprocess.Popen[str]]]:
    """A server of that run: host, port and process; its messages go to `log`."""
    command = [sys.executable, "-m", "manyheads", "serve", str(run), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    address = urlsplit(process.stdout.readline().strip())
    try:
        yield str(address.hostname), int(address.port or 0), process
    finally:
        process.kill()
        process.wait()


def memory_of(process: int) -> float:
    """MiB that a process holds, on Linux."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def requests_for(host: str, port: int) -> tuple[str, list[bytes]]:
    """The path of the API, and bodies of well-formed requests."""
    texts = ["The dog sleeps.", "A small cat sees the old tree.", "We read.", "Children play here."]
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("GET", "/languages")
    answer = connection.getresponse()
    known = json.loads(answer.read())
    if answer.status == 200:
        pair = {"source": known[0]["code"], "target": known[1]["code"]}
        return "/translate", [json.dumps({"q": text, **pair}).encode() for text in texts]
    how = {"max_tokens": 12, "seed": 1}
    return "/v1/completions", [json.dumps({"prompt": text, **how}).encode() for text in texts]


async def _apply(load: Load, clients: int, seconds: float, process: int) -> float:
    """Run the load; the memory after a quarter of the time."""
    running = asyncio.ensure_future(load.run(clients, time.monotonic() + seconds))
    await asyncio.sleep(seconds / 4)
    warm = memory_of(process)
    await running
    return warm


def measure(run: Path, clients: int, seconds: float, *options: str) -> dict[str, Any]:
    with started(run, *options) as (host, port, process):
        load = Load(host, port, *requests_for(host, port))
        start, health = memory_of(process.pid), Health(host, port)
        health.start()
        warm = asyncio.run(_apply(load, clients, seconds, process.pid))
        health.ended.set()
        health.join()
        end = memory_of(process.pid)
        left = [http.client.HTTPConnection(host, port) for _ in range(20)]
        for number, connection in enumerate(left):
            connection.connect()
            connection.sock.sendall(HALF_BODY if number % 2 else HALF_HEADERS)
        began = time.monotonic()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        seconds_to_stop, code = time.monotonic() - began, process.returncode
    times = sorted(health.times)
    return {
        "clients": clients,
        "seconds": seconds,
        "answered": load.answered,
        "errors": dict(load.errors),
        "cancelled": load.cancelled,
        "refused": load.refused,
        "not_refused": dict(load.not_refused),
        "health_max_ms": round(1000 * times[-1], 1),
        "health_p99_ms": round(1000 * times[int(0.99 * len(times))], 1),
        "memory_mib": [round(size, 1) for size in (start, warm, end)],
        "shutdown_seconds": round(seconds_to_stop, 2),
        "exit_code": code,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    inputs, rest = parser.parse_known_args()  # the rest are options of `manyheads serve`
    print(json.dumps(measure(inputs.run, inputs.clients, inputs.seconds, *rest)))


if __name__ == "__main__":
    main()
