"""The command that tests the claims of the lectures: claims."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.commands import options
from manyheads.commands.options import option
from manyheads.commands.shared import choose, print_json, say, write
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.lab.claims.claim import Claim, Setting
    from manyheads.lab.claims.runner import Result


def claims(
    run: Annotated[
        list[str] | None, option("A claim to test (repeatable)", "--run", metavar="NAME")
    ] = None,
    everything: Annotated[bool, option("Test all claims", "--all")] = False,
    report: Annotated[
        Path | None, option("Save results, plots, report", metavar="FOLDER", panel="Output")
    ] = None,
    seeds: Annotated[str, option("One experiment each", metavar="N,N,...")] = "1,2,3",
    large: Annotated[bool, option("Experiments of a size for a GPU", "--large")] = False,
    again: Annotated[bool, option("Repeat claims that the report has", "--again")] = False,
    as_json: options.Json = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """List the claims of the lectures, or test them by experiments.

    Examples
      $ manyheads claims
      $ manyheads claims --run NAME --seeds 1,2,3
      $ manyheads claims --all --report claims

    With --report, the same command again resumes.
    """
    from manyheads.lab.claims import report as pages
    from manyheads.lab.claims import runner
    from manyheads.lab.claims.claim import Setting

    known = runner.claims()
    names = list(known) if everything else list(dict.fromkeys(run or []))
    if run and everything:
        raise UserError("--all tests every claim: leave out --run")
    if not names:
        if report is not None:
            raise UserError("--report needs claims to test: add --all or --run NAME")
        _list(known, as_json)
        return
    if report is not None and report.is_file():
        raise UserError(f"{report} is a file: choose a folder with --report")
    for name in names:  # refuses an unknown one before anything runs
        runner.code_of(runner.find(name))
    setting = Setting(
        seeds=_seeds(seeds), large=large, device=choose(device, threads), threads=threads
    )
    results = _measured(names, setting, report, again)
    if as_json:
        print_json({"claims": [result.as_json() for result in results]})
    else:
        write(f"{pages.counted(results)}\n")
    if report is not None:
        # Also earlier results of the same settings.
        others = (runner.kept(name, setting, report) for name in known if name not in names)
        results = sorted(
            [*results, *filter(None, others)], key=lambda result: list(known).index(result.name)
        )
        names_of = " ".join(f"--run {result.name}" for result in results)
        command = runner.command_of("--all" if everything else names_of, setting)
        into = shlex.quote(report.resolve().name)  # without the path on this machine
        pages.write_report(results, report, f"{command} --report {into}")
        say(f"report: {report / 'index.html'}")


def _measured(
    names: list[str], setting: "Setting", report: Path | None, again: bool
) -> "list[Result]":
    """Results one after another, from the folder if it has them; each is saved there."""
    from manyheads.lab.claims import report as pages
    from manyheads.lab.claims import runner
    from manyheads.train.metrics import Bar

    results = []
    try:
        with Bar("claims", len(names)) as bar:
            for done, name in enumerate(names):
                bar.update(done, name)
                saved = None if again or report is None else runner.kept(name, setting, report)
                result = saved or runner.run(name, setting, report)
                results.append(result)
                bar.say(f"{name}: {pages.WORDS[result.verdict]}; {result.why}")
            bar.update(len(names), "done")
    except KeyboardInterrupt:
        saved_in = "nothing is saved without --report" if report is None else f"saved: {report}"
        say(f"manyheads: stopped in {name}; {saved_in}; the same command resumes")
        raise typer.Exit(130) from None
    return results


def _list(known: "Mapping[str, Claim]", as_json: bool) -> None:
    from manyheads.lab.claims.report import said_in

    if as_json:
        keys = ("sentence", "deck", "criterion")
        rows = [
            {"name": name} | {key: getattr(claim, key) for key in keys}
            for name, claim in known.items()
        ]
        print_json({"claims": rows})
        return
    for name, claim in known.items():
        write(f"{name}: {claim.sentence} ({said_in(claim.deck)})\n")


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(number) for number in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
        raise UserError(
            f"--seeds {text} must be different integers from 0 to below 2^63, e.g. 1,2,3"
        )
    return seeds
