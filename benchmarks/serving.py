"""A served model under load: 16 clients against one, how long answers take, what memory does.

    python benchmarks/serving.py runs/demo                    # a translator, by /translate
    python benchmarks/serving.py runs/books --seconds 60      # a language model, by /v1/completions

The server is a process of its own, and so are the clients: each asks, waits for the answer, and
asks again, over a connection that it keeps. One client and many load it in turns. Printed as JSON:
requests a second of both, the ratio in each round and its median, the 50th and 99th percentile of
an answer's time, every error, and the server's memory after each round. Options that this program
does not know are those of `manyheads serve`.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from manyheads.run import read_run


@dataclass
class Load:
    """What clients saw: the seconds of each good answer, and every other answer."""

    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.times) / self.seconds

    def add(self, other: "Load") -> None:
        self.seconds += other.seconds
        self.times += other.times
        self.errors += other.errors

    def percentile(self, share: float) -> float:
        """The time that this share of the answers took at most."""
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes
) -> tuple[int, bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(answer.split("content-length:")[1].split("\r\n")[0])
    return int(answer.split(" ")[1]), await reader.readexactly(length)


async def _client(
    address: str,
    path: str,
    bodies: Sequence[bytes],
    numbers: Iterator[int],
    until: float,
    load: Load,
) -> None:
    where = urlsplit(address)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    while time.monotonic() < until:
        begun = time.monotonic()
        status, answer = await _ask(reader, writer, path, bodies[next(numbers) % len(bodies)])
        if status == 200:
            load.times.append(time.monotonic() - begun)
        else:
            load.errors.append(f"{status} {answer[:200]!r}")
    writer.close()


async def _together(
    address: str, path: str, bodies: Sequence[bytes], clients: int, seconds: float
) -> Load:
    load, begun, numbers = Load(), time.monotonic(), count()
    every = [_client(address, path, bodies, numbers, begun + seconds, load) for _ in range(clients)]
    await asyncio.gather(*every)
    load.seconds = time.monotonic() - begun
    return load


def put_under_load(
    address: str, path: str, bodies: Sequence[bytes], clients: int, seconds: float
) -> Load:
    """So many clients for so long, each with a request after the other."""
    return asyncio.run(_together(address, path, bodies, clients, seconds))


@contextmanager
def served(run: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of that run: its address and its process; told to end, it must end well."""
    command = [sys.executable, "-m", "manyheads", "serve", str(run), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://"), "the server did not start"
            yield address, process
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
        assert process.returncode == 0, "the server did not end well"


def memory_of(process: int) -> int:
    """Bytes that a process holds, on Linux."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def requests_for(run: Path, texts: int = 64, written: int = 32) -> tuple[str, list[bytes]]:
    """The path to ask, and bodies: sentences of the phrasebook, or their beginnings to continue."""
    from manyheads.phrasebook import sentences
    from manyheads.serve.translations import languages_of

    pairs = sentences("en-de", "test", texts)
    settings = read_run(run)
    if settings.task == "translation":
        known = languages_of(settings, None, None)
        shared = {"source": known.source, "target": known.target}
        return "/translate", [json.dumps({"q": p.source, **shared}).encode() for p in pairs]
    starts = [pair.source[: 4 + number % 20] for number, pair in enumerate(pairs)]
    how = {"max_tokens": written, "temperature": 0.8, "seed": 1}
    return "/v1/completions", [json.dumps({"prompt": item, **how}).encode() for item in starts]


def measured(
    run: Path, clients: int, seconds: float, rounds: int, options: Sequence[str]
) -> dict[str, Any]:
    """One client and many in turns, so that whatever else the machine does meets both."""
    path, bodies = requests_for(run)
    item, many, ratios, memory = Load(), Load(), [], []
    with served(run, *options) as (address, process):
        put_under_load(address, path, bodies, clients, 1.0)  # what is first is slow
        for _ in range(rounds):
            single = put_under_load(address, path, bodies, 1, seconds / rounds / 3)
            together = put_under_load(address, path, bodies, clients, seconds / rounds)
            item.add(single)
            many.add(together)
            ratios.append(together.rate / single.rate)
            memory.append(memory_of(process.pid))
    return {
        "path": path,
        "clients": clients,
        "seconds": round(many.seconds, 1),
        "requests": len(many.times),
        "errors": item.errors + many.errors,
        "one_client_per_second": round(item.rate, 1),
        "many_clients_per_second": round(many.rate, 1),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 2),
        "one_p50_ms": round(1000 * item.percentile(0.5), 1),
        "p50_ms": round(1000 * many.percentile(0.5), 1),
        "p99_ms": round(1000 * many.percentile(0.99), 1),
        "memory_mib": [round(size / 2**20, 1) for size in memory],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load by all clients")
    parser.add_argument("--rounds", type=int, default=6, help="one client and many, in turns")
    inputs, rest = parser.parse_known_args()  # the rest are options of `manyheads serve`
    print(
        json.dumps(
            measured(inputs.run, inputs.clients, inputs.seconds, inputs.rounds, rest), indent=2
        )
    )


if __name__ == "__main__":
    main()
