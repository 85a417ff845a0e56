"""The benchmark of attention implementations: cost."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from manyheads.commands import options
from manyheads.commands.options import option
from manyheads.commands.shared import check_image, choose, print_json, say, write
from manyheads.errors import UserError

_ATTENTION = "Implementations with their settings, e.g. 'fused,tiled block=256' [default: all]"


def cost(
    cores: Annotated[
        str | None, option(_ATTENTION, "--attention", "--cores", metavar="A,B,...")
    ] = None,
    lengths: Annotated[
        str, option("Sequence lengths", metavar="N,N,...")
    ] = "512,1024,2048,4096,8192,16384",
    causal: Annotated[bool, option("With a causal mask", "--causal")] = False,
    heads: Annotated[int, option("Heads")] = 2,
    head_dim: Annotated[int, option("Channels of a head")] = 64,
    batch: Annotated[int, option("Sequences in the batch")] = 1,
    rounds: Annotated[int, option("Rounds; times are medians")] = 3,
    precision: Annotated[str, option("auto, float32 or bfloat16", metavar="NAME")] = "auto",
    seed: Annotated[int, option("Seed of the inputs")] = 1,
    plot: Annotated[Path | None, options.plot_option("Plot time and memory by length")] = None,
    as_json: options.Json = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Benchmark attention implementations: time and memory by length.

    Examples
      $ manyheads cost --lengths 512,1024,2048 --causal
      $ manyheads cost --attention 'dense,fused,tiled block=256' --plot cost.png
    """
    from rich.console import Console

    from manyheads.config import parse
    from manyheads.lab.cost import (
        Measurement,
        Setup,
        as_rows,
        machine,
        notes,
        read_cores,
        read_lengths,
        table_of,
    )
    from manyheads.train.loop import precision_of
    from manyheads.train.optimizer import Train

    check_image("--plot", plot)
    chosen = choose(device, threads)
    measured, measured_lengths = read_cores(cores), read_lengths(lengths)
    setup = Setup(
        device=chosen,
        dtype=precision_of(parse(Train, {"precision": precision}), chosen),
        causal=causal,
        heads=heads,
        head_dim=head_dim,
        batch=batch,
        rounds=rounds,
        seed=seed,
    )
    costs = Measurement(measured, measured_lengths, setup).run()
    kind = machine(setup)
    command = shlex.join(["manyheads", *sys.argv[1:]])
    if as_json:
        print_json({"command": command, "machine": kind, "cores": as_rows(costs)})
    else:
        # Wide enough that no number is cut: a pipe has 80 columns, a terminal may wrap.
        width = max(60 + 24 * len(measured_lengths), Console().width)
        Console(width=width, highlight=False).print(table_of(costs, measured_lengths))
        write(f"{command}\n{', '.join(f'{name} {value}' for name, value in kind.items())}\n")
    for note in notes(costs):
        say(note)
    if plot is not None:
        _plot(costs, plot)


def _plot(costs: list[Any], path: Path) -> None:
    from manyheads.view.figures import growth

    shown = [cost for cost in costs if cost.points]
    times = {cost.core: [(p.length, 1000 * p.time) for p in cost.points] for cost in shown}
    memory = {cost.core: [(p.length, p.memory / 2**20) for p in cost.points] for cost in shown}
    titles = ("milliseconds, forward and backward", "MiB at the peak")
    try:
        growth(dict(zip(titles, (times, memory), strict=True)), "length", path)
        say(f"plot: {path}")
    except UserError as error:  # no matplotlib: the table is printed all the same
        say(str(error))
