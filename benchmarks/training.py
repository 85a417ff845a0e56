"""Training steps of ours against compiled `transformers`: equal sizes and tokens, in turns.

    python benchmarks/training.py gpt translation bert --rows runs/bench-training.jsonl
    python benchmarks/training.py sizes                      # tokens/s and memory from 1M to 1.3B
    python benchmarks/training.py gpt --profile              # also which kernels a step of ours is
    python benchmarks/training.py bert --ours                # without transformers
    python benchmarks/training.py gpt --tiny                 # a look at the program itself

Ours is the training loop as `manyheads train` runs it (recorded passes, compiled blocks, batches
made ahead); theirs a plain loop with the model compiled, bfloat16 by autocast, fused AdamW and
clipping, its batches on the device before. A figure is the median over rounds that take turns in
one process. One JSON object a line, of each side:

    tokens_per_second        real ones, padding apart
    first_step_seconds       the first update, with what it compiles
    compile_seconds          what getting ready took beyond the updates done meanwhile
    compiled_first_epoch     graphs that were compiled, and later ones
    recorded, recorded_later passes that were recorded, and those in the timed rounds
    peak_gib, reserved_gib   the most memory that its tensors held, and that was taken for them;
                             theirs with all its batches

and with --profile of the row

    kernels                  name, milliseconds and calls a step of ours, those of most time first
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.optimize import compile_blocks
from manyheads.train.loop import Trainer
from manyheads.train.optimizer import Train
from manyheads.train.step import Loss
from speed import (
    Row,
    Rows,
    compared,
    compilations,
    device_of,
    in_turns,
    kernels_of,
    options,
    reported,
)
from training_cases import OURS, SEED, Case, Feed, Losses, bert, gpt, sized, translation

WARM = 2  # epochs before anything is timed
PROFILED = 3  # steps of a profile


@dataclass
class Fixed:
    """A task with batches drawn in advance, with the interface that the training loop needs."""

    drawn: list[Any]
    loss: Losses
    of: Callable[[Any], tuple[int, dict[str, int]]]  # tokens, and predictions of each term
    device: torch.device
    digest = "drawn"
    per_epoch = 1
    notes: tuple[str, ...] = ()

    def batches(self, step: int) -> list[Any]:
        return [self.drawn[step % len(self.drawn)].to(self.device)]

    def tokens(self, batch: Any) -> int:
        return self.of(batch)[0]

    def counts(self, batch: Any) -> dict[str, int]:
        return self.of(batch)[1]

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Loss]:
        return self.loss(model, batch)

    def describe(self, step: int) -> str:
        return str(step)

    def validate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}


@dataclass
class Contender:
    """One of the compared trainers: a step by its number, and the real tokens in it."""

    step: Callable[[int], object]
    tokens: Callable[[int], int]
    recorded: Callable[[], int] = lambda: 0
    parameters: int = 0


def ours(case: Case, device: torch.device) -> Contender:
    torch.manual_seed(SEED)
    with device:
        model = case.config.build()
    task = Fixed(case.drawn, case.loss, case.of, device)
    train = Train(steps=10**6, schedule="constant", learning_rate=1e-4, compile="yes")
    folder = Path(tempfile.mkdtemp())
    trainer = Trainer(model, task, train, dim=case.config.dim, seed=SEED, folder=folder)
    compile_blocks(model)
    graphs: dict[Any, Any] = getattr(trainer.forward_backward, "graphs", {})
    return Contender(
        trainer.step,
        lambda number: case.of(case.drawn[number % len(case.drawn)])[0],
        lambda: len(graphs),
        sum(p.numel() for p in model.parameters()),
    )


def their_update(case: Case, device: torch.device) -> Callable[[dict[str, Tensor]], None]:
    assert case.theirs is not None
    torch.manual_seed(SEED)
    with device:
        model = case.theirs().train()
    compiled = torch.compile(model, dynamic=case.dynamic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(inputs: dict[str, Tensor]) -> None:
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
            loss = compiled(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def fed(update: Callable[[dict[str, Tensor]], None], feeds: list[Feed], device: Any) -> Contender:
    """Theirs, its batches on the device."""
    here = [({name: x.to(device) for name, x in inputs.items()}, n) for inputs, n in feeds]
    return Contender(
        lambda number: update(here[number % len(here)][0]),
        lambda number: here[number % len(here)][1],
    )


def timed(step: Callable[[int], object], first: int, count: int, device: torch.device) -> float:
    """Seconds for so many steps."""
    synchronize(device)
    begun = time.perf_counter()
    for number in range(first, first + count):
        step(number)
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ready(
    make: Callable[[], Contender], epoch: int, device: torch.device
) -> tuple[Contender, dict[str, float]]:
    """A contender after its warm-up epochs, and their time, compilations and memory."""
    on_gpu, before = device.type == "cuda", 0
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, taken = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    graphs = compilations()
    contender = make()
    first = timed(contender.step, 0, 1, device)
    seconds = first + timed(contender.step, 1, epoch - 1, device)
    after = compilations()
    seconds += timed(contender.step, epoch, (WARM - 1) * epoch, device)
    figures = {"first_step_seconds": first, "ready_seconds": seconds, "warm_steps": WARM * epoch}
    figures |= {"compiled_first_epoch": after - graphs, "compiled_later": compilations() - after}
    figures["recorded"] = contender.recorded()
    if on_gpu:
        figures["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        figures["reserved_gib"] = (torch.cuda.max_memory_reserved() - taken) / 2**30
    return contender, figures


def measured(
    case: Case, device: torch.device, rounds: int, ceiling: float, profile: bool, peers: bool
) -> Row:
    """All contenders in turns, ours made first; the error of one is reported, others continue."""
    errors: dict[str, str] = {}
    contenders: dict[str, Contender] = {}
    figures: dict[str, dict[str, float]] = {}

    def prepare(name: str, make: Callable[[], Contender]) -> None:
        try:
            contenders[name], figures[name] = ready(make, case.epoch[name], device)
        except Exception as error:  # a figure of the other side is still one
            errors[name] = reported(error)

    prepare(OURS, lambda: ours(case, device))
    update = cache(lambda: their_update(case, device))  # one model, whatever it is fed
    for name, feeds in case.feeds().items() if peers and case.theirs is not None else ():
        prepare(name, lambda feeds=feeds: fed(update(), feeds, device))

    def rate(name: str, turn: int) -> float:
        side, count, graphs = contenders[name], case.round[name], compilations()
        at = WARM * case.epoch[name] + turn * count
        seconds = timed(side.step, at, count, device)
        figures[name]["compiled_later"] += compilations() - graphs
        return sum(side.tokens(at + n) for n in range(count)) / seconds

    rates = in_turns(
        {name: lambda turn, name=name: rate(name, turn) for name in contenders}, rounds, errors
    )
    row = compared(rates, [OURS])
    for name, side in row["sides"].items():
        more, mine = figures[name], contenders[name]
        tokens = sum(mine.tokens(n) for n in range(int(more["warm_steps"])))
        more["compile_seconds"] = more["ready_seconds"] - tokens / side["tokens_per_second"]
        more["recorded_later"] = mine.recorded() - more["recorded"]
        side |= {key: round(value, 3) for key, value in more.items()}
    if OURS in contenders:
        row["parameters"] = contenders[OURS].parameters
    if OURS in rates and profile:
        first = WARM * case.epoch[OURS] + rounds * case.round[OURS]
        several = partial(timed, contenders[OURS].step, first, PROFILED, device)
        row["kernels"] = kernels_of(several, device, PROFILED)
    if OURS in rates and case.length:
        config = case.config
        a_token = 6 * row["parameters"] + 12 * config.layers * config.dim * case.length
        row["teraflops"] = a_token * statistics.median(rates[OURS]) / 1e12
        row |= {"ceiling_teraflops": ceiling, "of_ceiling": row["teraflops"] / ceiling}
    return row | {"batch": case.batch, "errors": errors}


def matmul_teraflops(device: torch.device) -> float:
    """TFLOP/s of a large matrix product: the ceiling for models made of matrix products."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timed(lambda _: a @ b, 0, 10, device)
    seconds = statistics.median(timed(lambda _: a @ b, 0, 10, device) / 10 for _ in range(9))
    return 2 * size**3 / seconds / 1e12


def works(kind: str, tiny: bool, rounds: int) -> Iterator[tuple[str, Callable[[], Case]]]:
    """The rows of a kind, each drawn when it is its turn."""
    length, rows = (16, 2) if tiny else (1024, 32)
    if kind == "gpt":
        yield "gpt 124M", lambda: gpt(sized("124M", tiny, length), rows, length, peer=True)
        yield (
            "gpt 124M, theirs aligned",
            lambda: gpt(sized("124M", tiny, length), rows, length, peer=True, aligned=True),
        )
    elif kind == "bert":
        yield "bert-base 128", lambda: bert(8 * rows, length // 8, tiny)
        yield "bert-base 512", lambda: bert(2 * rows, length // 2, tiny)
    elif kind == "translation":
        budget = 400 if tiny else 32_768
        yield "transformer-base", lambda: translation(budget, WARM, rounds, tiny)
    else:  # the size with a target first, then from both ends
        for name in ("350M", "1.3B", "1M", "12M", "124M", "34M", "760M", "4M"):
            some = rows // 2 if name in ("760M", "1.3B") else rows
            how = (sized(name, tiny, length), some, length)
            yield f"size {name}", lambda how=how: gpt(*how, peer=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="+", choices=["gpt", "bert", "translation", "sizes"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also which kernels a step is")
    parser.add_argument("--ours", action="store_true", help="leave out transformers")
    options(parser)
    arguments = parser.parse_args()
    device = device_of(parser, arguments)
    torch.set_num_threads(arguments.threads)
    on_gpu = device.type == "cuda"
    name, dtype = (torch.cuda.get_device_name(), "bfloat16") if on_gpu else ("CPU", "float32")
    rows = Rows("training", arguments, {"device": name, "dtype": dtype})
    ceiling = matmul_teraflops(device)
    for kind in arguments.kinds:
        for row, make in works(kind, arguments.tiny, arguments.rounds):
            how = (device, arguments.rounds, ceiling, arguments.profile, not arguments.ours)
            rows.add(row, lambda make=make, how=how: measured(make(), *how))
            torch._dynamo.reset()
            gc.collect()


if __name__ == "__main__":
    main()
