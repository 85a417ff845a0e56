"""The command that measures cores: cost."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.commands.shared import (
    PICTURES,
    Device,
    Json,
    Threads,
    choose,
    print_json,
    say,
)
from manyheads.errors import UserError


def cost(
    cores: Annotated[
        str | None,
        typer.Option(
            help="Cores, each with its settings; unless given all but packed and flex, which "
            "gain nothing over fused here"
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Lengths")] = "512,1024,2048,4096,8192,16384",
    causal: Annotated[bool, typer.Option("--causal", help="See the past alone")] = False,
    heads: Annotated[int, typer.Option(help="Heads")] = 2,
    head_dim: Annotated[int, typer.Option(help="Channels of a head")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences at once")] = 1,
    rounds: Annotated[int, typer.Option(help="Over how many rounds a time is the median")] = 3,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    seed: Annotated[int, typer.Option(help="What is drawn")] = 1,
    picture: Annotated[Path | None, typer.Option(help="A file to draw the growth into")] = None,
    as_json: Json = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Time and peak memory of cores against the length, measured, with the exponents of growth.

    manyheads cost --cores 'dense,fused,tiled block=256' --lengths 512,1024,2048 --causal
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

    if picture is not None and picture.suffix not in PICTURES:
        raise UserError(f"--picture {picture} must end in one of {', '.join(PICTURES)}")
    chosen = choose(device, threads)
    measured, wanted = read_cores(cores), read_lengths(lengths)
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
    costs = Measurement(measured, wanted, setup).run()
    kind = machine(setup)
    words = [f"--cores={','.join(measured)}", f"--lengths={','.join(map(str, wanted))}"]
    words += ["--causal"] if causal else []
    words += [f"--heads={heads}", f"--head-dim={head_dim}", f"--batch={batch}"]
    words += [f"--rounds={rounds}", f"--precision={kind['precision']}", f"--seed={seed}"]
    words += [f"--device={kind['device']}", f"--threads={kind['threads']}"]
    command = shlex.join(["manyheads", "cost", *words])
    if as_json:
        print_json({"command": command, "machine": kind, "cores": as_rows(costs)})
    else:
        # Never so narrow that numbers are cut: a pipe has 80 columns, a terminal may wrap.
        console = Console(width=max(60 + 24 * len(wanted), Console().width), highlight=False)
        console.print(table_of(costs, wanted))
        print(command)
        print(", ".join(f"{name} {value}" for name, value in kind.items()))
    for note in notes(measured, costs, setup):
        say(note)
    if picture is not None:
        _draw(costs, picture)


def _draw(costs: list[Any], path: Path) -> None:
    from manyheads.view.figures import growth

    shown = [cost for cost in costs if cost.points]
    times = {cost.core: [(p.length, 1000 * p.time) for p in cost.points] for cost in shown}
    memory = {cost.core: [(p.length, p.memory / 2**20) for p in cost.points] for cost in shown}
    titles = ("milliseconds, forward and backward", "MiB at the peak")
    try:
        growth(dict(zip(titles, (times, memory), strict=True)), "length", path)
        say(f"picture: {path}")
    except UserError as error:  # no matplotlib: the table is worth having all the same
        say(str(error))
