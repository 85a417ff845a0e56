"""The command that fits scaling laws: scale."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyheads.commands.shared import (
    Device,
    Json,
    Out,
    Overrides,
    Seed,
    Threads,
    choose,
    command_name,
    print_json,
    say,
)
from manyheads.errors import UserError

SECONDS = {"s": 1, "m": 60, "h": 3600}
FEW_STEPS = 300  # docs/scaling.md has a sweep that failed by runs of 265


def scale(
    recipe: Annotated[str, typer.Argument(help="A recipe of a language model, or a TOML file")],
    overrides: Overrides = None,
    sizes: Annotated[int, typer.Option(help="How many models, each about twice the last")] = 4,
    data: Annotated[int, typer.Option(help="How many amounts of text, each twice the last")] = 4,
    budget: Annotated[
        str | None,
        typer.Option(help="For the whole, e.g. 15m or 2h; the recipe's own steps unless given"),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and its cost; stop")] = False,
    out: Out = Path("runs/scale"),
    seed: Seed = None,
    as_json: Json = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Scaling laws: small models on little text predict the recipe's own run, which then checks it.

    manyheads scale language data.folder=books --budget 3h

    Without data.folder the text is the built-in phrasebook's. The same command goes on.
    """
    from rich.console import Console

    from manyheads.lab.scaling import report
    from manyheads.lab.scaling.plan import LARGER, Sweep
    from manyheads.lab.scaling.sweep import Scaling
    from manyheads.recipes import read_recipe
    from manyheads.train.loop import Stopped
    from manyheads.train.step import World

    if World.of_environment().is_distributed:
        raise UserError("torchrun is for `manyheads train`: start scale without it")
    sweep = Sweep(sizes=sizes, data=data, budget=_seconds(budget))
    chosen = choose(device, threads)
    extra = [] if seed is None else [f"seed={seed}"]
    scaling = Scaling(read_recipe(recipe, [*(overrides or []), *extra]), sweep, out, chosen)
    console = Console(width=max(120, Console().width), highlight=False, stderr=not plan)
    if not (plan and as_json):
        console.print(report.plan_table(scaling.plan, scaling.step_tokens))
    _warn(scaling.epochs, min(one.run.train.steps for one in scaling.plan.fitted))
    if plan:
        if as_json:
            print_json(report.plan_dict(scaling.plan))
        return
    say(
        f"{len(scaling.plan.fitted)} runs, then one of {LARGER} times the compute of any: "
        f"{scaling.plan.flops:.2e} FLOPs, about {report.time_of(scaling.plan.seconds)}"
    )
    if ended := len(scaling.results()):
        say(f"{ended} of all {len(scaling.plan.runs)} are trained already")
    try:
        findings = scaling.go()
    except Stopped as stopped:
        say(f"manyheads: {stopped}; go on with: {command_name()} {shlex.join(sys.argv[1:])}")
        raise typer.Exit(stopped.exit_code) from None
    picture = out / "scale.png"
    try:
        report.draw(scaling.plan, findings, picture)
        say(f"picture: {picture}")
    except UserError as error:  # no matplotlib: the tables are worth having all the same
        say(str(error))
    if as_json:
        print_json(report.as_dict(scaling.plan, findings))
        return
    console = Console(width=max(120, Console().width), highlight=False)
    console.print(report.runs_table(findings))
    console.print(report.laws_table(findings))
    print(report.said(findings))


def _warn(epochs: float, fewest: int) -> None:
    """Laws of data are of new data, and of runs that have begun to follow them."""
    if fewest < FEW_STEPS:
        say(
            f"the shortest runs have {fewest} steps: so short, they often follow another law than "
            "longer ones, and mislead the prediction; raise train.steps or --budget"
        )
    if epochs > 1:
        say(
            f"the predicted run reads the text {epochs:.1f} times: a law of tokens is one of new "
            "tokens, and up to about 4 times they are nearly as good; more text would be better"
        )


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        raise UserError(f"--budget {text} must be a time, e.g. 90s, 15m or 2h")
    return float(found[1]) * SECONDS[found[2]]
