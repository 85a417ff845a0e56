"""The time of decoding, split into prefill, steps, and the rest.

    python benchmarks/steps.py                                  the works of benchmarks/decoding.py
    python benchmarks/steps.py --only "1.3B batch 1" --profile  its kernels too, by their time
    python benchmarks/steps.py --variants "attention.MAX_DECODE_QUERIES=16"
    python benchmarks/steps.py --tiny                           small models, anywhere

Decoding uses CUDA graphs and random weights in bfloat16, not compiled. The variants of a work take
turns: the default, and with other constants of modules in manyheads.kernels (GPU kernels). One
JSON object a line, of each variant:

    tokens_per_second   of a whole text, medians as all figures
    milliseconds        of a whole text
    read_milliseconds   of what comes before the first step, waited for
    step_microseconds   of a step, by the device's own clock
    equal               share of texts that are the same as those of the first variant
    kernels             with --profile, of a whole text: name, milliseconds, how often
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from decoding import Texts, Work, kind, likeness, timed, works, writing
from manyheads.decode.decoder import GraphCache
from manyheads.errors import UserError
from speed import Row, device_of, in_turns, kernels_of, reported


@contextmanager
def changed(variant: str) -> Iterator[None]:
    """Set constants of modules as in `module.NAME=number …` within this context."""
    before = []
    for setting in variant.split():
        path, _, value = setting.partition("=")
        module_name, _, name = path.partition(".")
        try:
            module = import_module(f"manyheads.kernels.{module_name}")
            before.append((module, name, getattr(module, name)))
            setattr(module, name, type(before[-1][2])(int(value)))
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"{setting} sets no number of a module in manyheads.kernels: {error}"
            ) from None
    try:
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)


class Clock:
    """Seconds of every call of some work, by the device's clock where it has one."""

    def __init__(self, work: Callable[..., Any], device: torch.device) -> None:
        self.work, self.on_gpu = work, device.type == "cuda"
        self.marks: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, *inputs: Any) -> Any:
        begin = self._now()
        result = self.work(*inputs)
        self.marks.append((begin, self._now()))
        return result

    def seconds(self) -> list[float]:
        if not self.on_gpu:
            return [end - begin for begin, end in self.marks]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in self.marks]


def parts(run: Callable[[], Texts], graphs: GraphCache, device: torch.device) -> Row:
    """Of one text the milliseconds of reading and the median microseconds of a step."""
    [entry] = graphs.entries.values()
    held: Any = entry
    read, step = held.session.encode, held.step
    seconds: list[float] = []

    def waited(*texts: Any) -> None:
        seconds.append(timed(lambda: read(*texts), device)[0])

    clock = Clock(step, device)
    held.session.encode, held.step = waited, clock
    try:
        for _ in range(3):
            run()
    finally:
        held.session.encode, held.step = read, step
    return {
        "read_milliseconds": round(1e3 * statistics.median(seconds), 3),
        "step_microseconds": round(1e6 * statistics.median(clock.seconds()), 1),
    }


@torch.no_grad()
def measured(
    work: Work, variants: list[str], device: torch.device, rounds: int, profile: bool
) -> Iterator[Row]:
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = work.config.build().to(dtype).eval()
    texts = torch.randint(3, work.config.vocab_size, (work.batch, work.read), device=device)
    runs: dict[str, tuple[Callable[[], Texts], GraphCache]] = {}
    written: dict[str, Texts] = {}
    for variant in variants:
        graphs = GraphCache(True)
        run = writing(work, model, texts, graphs)
        with changed(variant):
            for _ in range(4):  # the third records what is read, all before it the steps
                written[variant] = run()
        runs[variant] = (run, graphs)
    tokens, errors = work.batch * work.write, dict[str, str]()
    sides = {
        variant: lambda _, run=run: tokens / timed(run, device)[0]
        for variant, (run, _) in runs.items()
    }
    for variant, rates in in_turns(sides, rounds, errors).items():
        run, graphs = runs[variant]
        rate = statistics.median(rates)
        row = {
            "row": work.name,
            "variant": variant,
            "device": kind(device),
            "tokens_per_second": round(rate, 1),
            "milliseconds": round(1e3 * tokens / rate, 2),
            **parts(run, graphs, device),
            "equal": likeness(written[variants[0]], written[variant])["equal"],
        }
        yield row | ({"kernels": kernels_of(run, device)} if profile else {})
    if errors:
        yield {"row": work.name, "errors": errors}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models: the program itself")
    parser.add_argument("--only", nargs="+", default=[""], help="works with one of these in it")
    parser.add_argument("--variants", nargs="*", default=[], help="room.NAME=number, several in ''")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also list the kernels")
    parser.set_defaults(names=False)
    inputs = parser.parse_args(arguments)
    variants = ["", *inputs.variants]
    device = device_of(parser, inputs)
    try:
        for variant in inputs.variants:
            with changed(variant):
                pass
    except UserError as error:
        parser.error(str(error))
    for work in works(inputs.tiny):
        if not any(part in work.name for part in inputs.only):
            continue
        try:
            for row in measured(work, variants, device, inputs.rounds, inputs.profile):
                print(json.dumps(row), flush=True)
        except Exception as error:  # the other works are worth measuring
            print(json.dumps({"row": work.name, "error": reported(error)}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
