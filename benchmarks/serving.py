"""A served model under load: throughput, latency and memory, next to another release or a batch.

    python benchmarks/serving.py runs/demo                          # a translator: /translate
    python benchmarks/serving.py runs/demo --against ../release-0.1 # next to another checkout
    python benchmarks/serving.py runs/books --clients 64            # a language model, streamed
    python benchmarks/serving.py random-124M --clients 64 -- --device cuda --dtype bfloat16

Servers and clients are processes of their own. Each client sends a request, waits for the answer
and sends the next, over one connection. Sides take turns: a round loads one server after the other,
while the others are idle. A language model is also compared with static batches of the same
requests, by us and by `transformers`: a static batch is done when its longest text is.

--against needs a run that both releases load (one that the other release wrote). Options after `--`
are those of `manyheads serve`. Each row is printed when it is measured; a side that exceeds --limit
seconds in a round is an error. The last line is one JSON object with medians over rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from manyheads.run import read_run
from speed import limited, reported
from startup import save_random

Request = dict[str, Any]


@dataclass
class Load:
    """Measurements of clients: seconds of answers, of first texts and between texts, errors."""

    seconds: float = 0.0
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        row: dict[str, Any] = {"requests_per_second": round(len(self.times) / self.seconds, 1)}
        if self.tokens:
            row["tokens_per_second"] = round(self.tokens / self.seconds)
        for name, values in (("", self.times), ("first_text_", self.firsts), ("gap_", self.gaps)):
            if values:
                ordered = sorted(values)
                for percent in (50, 99):
                    value = ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
                    row[f"{name}p{percent}_ms"] = round(1000 * value, 1)
        return row | {"requests": len(self.times), "errors": len(self.errors)}


# --- Clients --------------------------------------------------------------------------------------


async def _client(
    address: str, path: str, requests: Sequence[Request], numbers: Iterator[int], until: float,
    load: Load,
) -> None:  # fmt: skip
    where = urlsplit(address)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    while time.monotonic() < until:
        body = json.dumps(requests[next(numbers) % len(requests)]).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        begun = time.monotonic()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if "chunked" in answer:
            await _read_stream(reader, begun, load)
        else:
            length = int(answer.split("content-length:")[1].split("\r\n")[0])
            content = await reader.readexactly(length)
            if answer.split(" ")[1] != "200":
                load.errors.append(f"{answer.split(' ')[1]} {content[:200]!r}")
                continue
        load.times.append(time.monotonic() - begun)
    writer.close()


async def _read_stream(reader: asyncio.StreamReader, begun: float, load: Load) -> None:
    """Server-sent events in chunks: the times of texts, and the tokens of the last event."""
    last = begun
    while size := int(await reader.readuntil(b"\r\n"), 16):
        data = await reader.readexactly(size + 2)
        now = time.monotonic()
        if b'"text":' in data:
            (load.firsts if last == begun else load.gaps).append(now - last)
            last = now
        if b'"usage":' in data:
            load.tokens += int(data.split(b'"completion_tokens":')[1].split(b",")[0])
    await reader.readexactly(2)


def put_under_load(
    address: str, path: str, requests: Sequence[Request], clients: int, seconds: float
) -> Load:
    """So many clients for so long, each with a request after the other."""

    async def together() -> Load:
        load, begun, numbers = Load(), time.monotonic(), count()
        how = path, requests, numbers, begun + seconds, load
        await asyncio.gather(*(_client(address, *how) for _ in range(clients)))
        load.seconds = time.monotonic() - begun
        return load

    return asyncio.run(together())


# --- Sides ----------------------------------------------------------------------------------------


@contextmanager
def served(
    run: Path, options: Sequence[str], checkout: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of that run, by the code of a checkout: its address and process."""
    command = [sys.executable, "-m", "manyheads", "serve", str(run), "--port", "0", *options]
    source = (checkout or Path(__file__).parent.parent) / "src"
    environment = os.environ | {"PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
    ) as process:
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


def memory_of(process: int) -> float:
    """MiB that a process holds, on Linux."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def static_batches(
    generate: Callable[[list[list[int]], int], object], requests: Sequence[Request], clients: int
) -> Callable[[float], Load]:
    """Batches of as many requests as there are clients, each as long as its longest text."""

    def measure(seconds: float) -> Load:
        load, begun, first = Load(), time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            batch = [requests[(first + i) % len(requests)] for i in range(clients)]
            first, started = first + clients, time.monotonic()
            generate([request["prompt"] for request in batch], _longest(batch))
            took = time.monotonic() - started
            load.times += [took] * clients
            load.firsts += [took] * clients  # nothing is streamed
            load.tokens += sum(request["max_tokens"] for request in batch)
        load.seconds = time.monotonic() - begun
        return load

    return measure


def _longest(batch: Sequence[Request]) -> int:
    return max(int(request["max_tokens"]) for request in batch)


def batch_sides(run: Path, options: Sequence[str]) -> dict[str, Callable[..., object]]:
    """Static batches by our generator and by `transformers`, on the device of the server."""
    import torch

    from manyheads.decode.generate import GREEDY, Generator
    from manyheads.exchange.huggingface import to_huggingface
    from manyheads.loading import load_torch_run

    device = "cuda" if "cuda" in options else "cpu"
    loaded = load_torch_run(run, device)
    model = loaded.model.to(torch.bfloat16 if "bfloat16" in options else torch.float32)
    decode = loaded.decode(at_limit="truncate", min_length=10**6)
    generator = Generator(model, loaded.tokenizer, decode)
    peer = to_huggingface(model).to(device).eval()

    @torch.no_grad()
    def theirs(prompts: list[list[int]], longest: int) -> object:
        width = max(map(len, prompts))
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        lengths = {"min_new_tokens": longest, "max_new_tokens": longest}
        inputs, real = torch.tensor(rows, device=device), torch.tensor(mask, device=device)
        return peer.generate(
            inputs, attention_mask=real, do_sample=False, pad_token_id=0, **lengths
        )

    def ours(prompts: list[list[int]], longest: int) -> object:
        return generator.sample(prompts, longest, GREEDY)

    return {"ours, static batch": ours, "transformers, static batch": theirs}


def requests_for(run: Path, number: int = 256) -> tuple[str, list[Request]]:
    """The path, and requests of mixed lengths."""
    settings = read_run(run)
    if settings.task == "translation":
        from manyheads.serve.translations import languages_of

        known = languages_of(settings, None, None)
        texts: list[str] = settings.data.read("test").sources  # type: ignore[union-attr]
        # One to four sentences a request, so that lengths differ by more than a factor of four.
        parts = [
            " ".join(texts[(7 * i + j) % len(texts)] for j in range(1 + i % 4))
            for i in range(number)
        ]
        shared = {"source": known.source, "target": known.target}
        return "/translate", [{"q": text, **shared} for text in parts]
    stream = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
    unit = min(16, settings.model.max_length // 16)
    return "/v1/completions", [
        {
            "prompt": [10 + (i * j) % 200 for j in range(unit * (1 + i % 4))],
            "max_tokens": 2 * unit * (1 + i % 6),
            **stream,
        }
        for i in range(number)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", help="a run folder, or random-124M")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load on each side")
    parser.add_argument("--rounds", type=int, default=6, help="rounds in turns")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a side in a round")
    parser.add_argument("--against", type=Path, help="a checkout of another release")
    inputs, options = parser.parse_known_args()
    inputs.options = [option for option in options if option != "--"]
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(inputs.run)
        if inputs.run.startswith("random-"):
            run = Path(temporary) / inputs.run
            save_random(inputs.run.removeprefix("random-"), run)
        measure(run, inputs)


def measure(run: Path, inputs: argparse.Namespace) -> None:
    path, requests = requests_for(run)
    rows: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        sides: dict[str, Callable[[float], Load]] = {}
        processes: dict[str, int] = {}
        for name, checkout in (("this release", None), ("other release", inputs.against)):
            if name == "this release" or checkout is not None:
                address, process = stack.enter_context(served(run, inputs.options, checkout))
                how = address, path, requests, inputs.clients
                sides[name] = lambda seconds, how=how: put_under_load(*how, seconds)  # type: ignore[misc]
                processes[name] = process.pid
        if path == "/v1/completions":
            for name, generate in batch_sides(run, inputs.options).items():
                sides[name] = static_batches(generate, requests, inputs.clients)
        for turn in range(-1, inputs.rounds):  # the first round warms up
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                row: dict[str, Any] = {"round": turn, "side": name}
                try:
                    with limited(inputs.limit):
                        load = sides[name](2.0 if turn < 0 else inputs.seconds / inputs.rounds)
                    row |= load.figures()
                except Exception as error:
                    row["error"] = reported(error)
                if name in processes:
                    row["memory_mib"] = round(memory_of(processes[name]), 1)
                print(json.dumps(row), flush=True)
                if turn >= 0 and "error" not in row:
                    rows.setdefault(name, []).append(row)
    summary: dict[str, Any] = {}
    for name, measured in rows.items():
        figures = [key for key in measured[0] if key not in ("round", "side", "memory_mib")]
        summary[name] = {key: statistics.median(row[key] for row in measured) for key in figures}
        summary[name]["errors"] = sum(row["errors"] for row in measured)
        if "memory_mib" in measured[0]:
            summary[name]["memory_mib"] = [measured[0]["memory_mib"], measured[-1]["memory_mib"]]
    about = {"clients": inputs.clients, "seconds": inputs.seconds, "rounds": inputs.rounds}
    print(json.dumps({"bench": "serving", "path": path, **about, "sides": summary}))


if __name__ == "__main__":
    main()
