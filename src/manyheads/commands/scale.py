"""The command that fits scaling laws: scaling-laws."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyheads.commands import options
from manyheads.commands.catalogue import Recipe
from manyheads.commands.options import option
from manyheads.commands.shared import choose, command_name, print_json, refuse_torchrun, say, write
from manyheads.errors import UserError

SECONDS = {"s": 1, "m": 60, "h": 3600}
FEW_STEPS = 300  # a sweep with runs of 265 steps mispredicted its largest run


def scale(
    recipe: Recipe,
    overrides: options.Overrides = None,
    sizes: Annotated[int, option("Number of model sizes, each about twice the last")] = 4,
    data: Annotated[int, option("Number of data sizes, each twice the last")] = 4,
    budget: Annotated[
        str | None,
        option("For all runs, e.g. 15m or 2h [default: the recipe's steps]", metavar="TIME"),
    ] = None,
    budget_flops: Annotated[
        float | None, option("Also print the best N and D for X FLOPs", metavar="X")
    ] = None,
    plan: Annotated[bool, option("Print the plan and its cost; stop", "--plan")] = False,
    out: options.Out = Path("runs/scale"),
    seed: options.Seed = None,
    as_json: options.Json = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Fit scaling laws to small runs; predict and train a larger one.

    Examples
      $ manyheads scaling-laws language data.folder=books --budget 3h
      $ manyheads scaling-laws language --plan

    The recipe must be a language model. Without data.folder the text is the built-in
    phrasebook. The same command again resumes.
    """
    from rich.console import Console

    from manyheads.lab.figures.kaplan import best_for_budget
    from manyheads.lab.scaling import report
    from manyheads.lab.scaling.plan import LARGER, Sweep
    from manyheads.lab.scaling.sweep import Scaling
    from manyheads.recipes import read_recipe
    from manyheads.train.loop import Stopped

    refuse_torchrun("scaling-laws")
    sweep = Sweep(sizes=sizes, data=data, budget=_seconds(budget))
    chosen = choose(device, threads)
    extra = [] if seed is None else [f"seed={seed}"]
    scaling = Scaling(read_recipe(recipe, [*(overrides or []), *extra]), sweep, out, chosen)
    console = Console(width=max(120, Console().width), highlight=False, stderr=not plan)
    if not (plan and as_json):
        console.print(report.plan_table(scaling.plan, scaling.step_tokens))
    _warn(scaling.epochs, min(run.run.train.steps for run in scaling.plan.fitted))
    if plan:
        if as_json:
            print_json(report.plan_dict(scaling.plan))
        return
    say(
        f"{len(scaling.plan.fitted)} runs, then one of {LARGER} times the compute of any: "
        f"{scaling.plan.flops:.2e} FLOPs, about {report.time_of(scaling.plan.seconds)}"
    )
    if trained := len(scaling.results()):
        say(f"{trained} of {len(scaling.plan.runs)} runs are trained already")
    try:
        findings = scaling.go()
    except Stopped as stopped:
        say(f"manyheads: {stopped}; resume with: {command_name()} {shlex.join(sys.argv[1:])}")
        raise typer.Exit(stopped.exit_code) from None
    plot = out / "scale.png"
    try:
        report.draw(scaling.plan, findings, plot)
        say(f"plot: {plot}")
    except UserError as error:  # no matplotlib: print the tables all the same
        say(str(error))
    best = None if budget_flops is None else best_for_budget(out, budget_flops)
    if as_json:
        print_json(report.as_dict(scaling.plan, findings) | ({"best": best} if best else {}))
        return
    console = Console(width=max(120, Console().width), highlight=False)
    console.print(report.runs_table(findings))
    console.print(report.laws_table(findings))
    write(f"{report.said(findings)}\n")
    if best is not None:
        write("".join(f"{line}\n" for line in best["lines"]))


def _warn(epochs: float, fewest: int) -> None:
    """The laws hold for new data, and for runs that are past the beginning."""
    if fewest < FEW_STEPS:
        say(
            f"the shortest runs have {fewest} steps: such short runs often follow another law and "
            "mislead the prediction; raise train.steps or --budget"
        )
    if epochs > 1:
        say(
            f"the predicted run repeats the text {epochs:.1f} times: the law holds for new tokens "
            "(up to about 4 epochs are nearly as good); use more text"
        )


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match:
        raise UserError(f"--budget {text} must be a time, e.g. 90s, 15m or 2h")
    return float(match[1]) * SECONDS[match[2]]
