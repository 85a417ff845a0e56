"""The command that puts the lectures to the test: claims."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.commands.shared import Device, Json, Threads, choose, print_json, say
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.lab.claims.claim import Claim, Setting
    from manyheads.lab.claims.runner import Result


def claims(
    run: Annotated[
        list[str] | None, typer.Option("--run", metavar="NAME", help="A claim to run; repeatable")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run all of them")] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="A folder for results, pictures and one page with all of them"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Between commas; an experiment for each")] = "1,2,3",
    large: Annotated[bool, typer.Option("--large", help="At the size for a GPU")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also what the folder has")] = False,
    as_json: Json = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """What the lectures claim: lists the claims, or runs them, each with a computed verdict.

    manyheads claims --all --report claims goes on where it was stopped.
    """
    from manyheads.lab.claims import report as pages
    from manyheads.lab.claims import runner
    from manyheads.lab.claims.claim import Setting

    known = runner.claims()
    names = list(known) if everything else list(dict.fromkeys(run or []))
    if run and everything:
        raise UserError("--all is every claim: leave out --run")
    if not names:
        if report is not None:
            raise UserError("--report needs claims to run: add --all or --run NAME")
        _list(known, as_json)
        return
    if report is not None and report.is_file():
        raise UserError(f"{report} is a file: choose a folder with --report")
    for name in names:  # a wrong one is said before anything runs, and the code that runs is noted
        runner.code_of(runner.find(name))
    setting = Setting(
        seeds=_seeds(seeds), large=large, device=choose(device, threads), threads=threads
    )
    results = _measured(names, setting, report, again)
    if as_json:
        print_json({"claims": [result.as_json() for result in results]})
    else:
        print(pages.counted(results))
    if report is not None:
        # Also those that the folder has from before, run in the same way.
        others = (runner.kept(name, setting, report) for name in known if name not in names)
        results = sorted(
            [*results, *filter(None, others)], key=lambda one: list(known).index(one.name)
        )
        what = "--all" if everything else " ".join(f"--run {one.name}" for one in results)
        command = runner.command_of(what, setting)
        into = shlex.quote(report.resolve().name)  # where it lies on this machine is nobody's need
        pages.write_report(results, report, f"{command} --report {into}")
        say(f"report: {report / 'index.html'}")


def _measured(
    names: list[str], setting: "Setting", report: Path | None, again: bool
) -> "list[Result]":
    """One after the other, but for what the folder has; each is kept there when it is done."""
    from manyheads.lab.claims import report as pages
    from manyheads.lab.claims import runner
    from manyheads.train.metrics import Bar

    results = []
    try:
        with Bar("claims", len(names)) as bar:
            for done, name in enumerate(names):
                bar.update(done, name)
                found = None if again or report is None else runner.kept(name, setting, report)
                result = found or runner.run(name, setting, report)
                results.append(result)
                bar.say(f"{name}: {pages.WORDS[result.verdict]}; {result.why}")
            bar.update(len(names), "done")
    except KeyboardInterrupt:
        where = "nothing is kept without --report" if report is None else f"the others: {report}"
        say(f"manyheads: stopped in {name}; {where}; the same command goes on")
        raise typer.Exit(130) from None
    return results


def _list(known: "Mapping[str, Claim]", as_json: bool) -> None:
    from manyheads.lab.claims.report import said_in

    if as_json:
        told = ("sentence", "deck", "criterion")
        rows = [
            {"name": name} | {word: getattr(claim, word) for word in told}
            for name, claim in known.items()
        ]
        print_json({"claims": rows})
        return
    for name, claim in known.items():
        print(f"{name}: {claim.sentence} ({said_in(claim.deck)})")


def _seeds(given: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(one) for one in given.split(","))
    except ValueError:
        raise UserError(
            f"--seeds {given} must be whole numbers between commas, e.g. 1,2,3"
        ) from None
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {given} must be different numbers, e.g. 1,2,3")
    if not all(0 <= seed < 2**63 for seed in seeds):
        raise UserError(f"--seeds {given} must be at least 0, below 2^63, e.g. 1,2,3")
    return seeds
