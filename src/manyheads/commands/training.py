"""Commands that train and score: demo, train, evaluate, compare."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.commands.shared import (
    PICTURES,
    Device,
    EightBits,
    Half,
    Json,
    Out,
    Overrides,
    RunFolder,
    Seed,
    Threads,
    With,
    choose,
    command_name,
    open_model,
    print_json,
    say,
)
from manyheads.errors import UserError

if TYPE_CHECKING:
    import torch

    from manyheads.run import Run
    from manyheads.train.step import World


def _recipe(recipe: str, overrides: Sequence[str] | None, seed: int | None) -> "Run":
    from manyheads.recipes import read_recipe

    extra = [] if seed is None else [f"seed={seed}"]
    return read_recipe(recipe, [*(overrides or []), *extra])


def _refuse_torchrun(command: str) -> None:
    from manyheads.train.step import World

    if World.of_environment().is_distributed:
        raise UserError(f"torchrun is for `manyheads train`: start {command} without it")


def _train(run: "Run", out: Path, device: "torch.device", world: "World | None" = None) -> None:
    """Train to the end, or stop on a signal with a word on how to go on."""
    from manyheads.run import train_run
    from manyheads.train.loop import Stopped
    from manyheads.train.step import ONE_PROCESS

    world = world or ONE_PROCESS
    report: Callable[[str], None] = say if world.is_main else lambda line: None
    try:
        train_run(run, out, device, world, report)
    except Stopped as stopped:
        command = f"{command_name()} {shlex.join(sys.argv[1:])}"
        how = "the same command" if world.is_distributed else command
        report(f"manyheads: {stopped}; go on with: {how}")
        raise typer.Exit(stopped.exit_code) from None


def demo(
    out: Out = Path("runs/demo"),
    seed: Seed = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train a translator on the built-in phrasebook and show what it learned (minutes)."""
    from manyheads.commands.demo import show

    _refuse_torchrun("demo")
    chosen = choose(device, threads)
    _train(_recipe("phrasebook", None, seed), out, chosen)
    show(out, chosen, command_name())


def train(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe or a TOML file")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; runs/RECIPE unless given")
    ] = None,
    seed: Seed = None,
    device: Device = "auto",
    threads: Threads = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings and stop")
    ] = False,
) -> None:
    """Train a model; the same command again goes on where it stopped.

    manyheads train classify data.task=sst-2 data.folder=glue init=RUN

    init=FOLDER begins with the model that is there, a run or an imported one. Several processes
    train together if torchrun starts them: torchrun --nproc-per-node 4 -m manyheads train ...
    """
    from manyheads.train.step import World

    world = World.of_environment()
    with world.connected(say):
        run = _recipe(recipe, overrides, seed)
        if print_config:
            from manyheads.config import dump, to_toml, unset

            if world.is_main:
                print(to_toml(dump(run)))
                for name, word in unset(run).items():
                    print(f"# {name}={word}")
            return
        _check_parallel(overrides or [])
        folder = out or Path("runs") / Path(recipe).stem
        _train(run, folder, world.device(choose(device, threads)), world)
    if world.is_main:
        say(f"trained: {folder}; {_next(run, folder)}")
    world.exit()


def _check_parallel(overrides: Sequence[str]) -> None:
    given = next((one for one in overrides if one.startswith("train.parallel=")), None)
    if given and given != "train.parallel=ddp" and "RANK" not in os.environ:
        raise UserError(
            f"{given} has no say in one process: start with torchrun --nproc-per-node N -m "
            "manyheads train ..., or leave it out"
        )


def _next(run: "Run", folder: Path) -> str:
    if run.spec.evaluate is None:
        return f"fine-tune it: {command_name()} train classify data.train=FILE init={folder}"
    split = "" if run.data and "test" in run.data.splits() else " --split valid"
    return f"next: {command_name()} evaluate {folder}{split}"


def evaluate(
    run: RunFolder,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[a.b=c]...", help="data.* (if it has moved) and decode.*"),
    ] = None,
    split: Annotated[str, typer.Option(help="train, valid, test, ...")] = "test",
    beam: Annotated[int | None, typer.Option(help="Beam width; the run's unless given")] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Of language models: how far a window moves; else its length (music: ½)"),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Of image models: a file to draw which class is taken for which into"),
    ] = None,
    others: With = None,
    int8: EightBits = False,
    half: Half = False,
    as_json: Json = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Score a run on a split of its data, each number with its signature.

    Scores in eight bits, in bfloat16, with other runs or by another search are told, not kept.
    """
    from manyheads.config import override_all
    from manyheads.data.language import TextData
    from manyheads.run import SETTINGS, save_scores
    from manyheads.view.figures import confusion

    _refuse_torchrun("evaluate")
    opened = open_model(run, device, threads, say, int8=int8, half=half, others=others or ())
    for setting in overrides or []:
        if not setting.startswith(("data", "decode.")):
            raise UserError(f"'{setting}' cannot change after training: only data and decode")
    known = opened.run
    _refuse_unfitting(known, beam, picture, int8)
    if known.data is None and overrides:
        known = dataclasses.replace(known, data=known.spec.data_for(known.model))
    given = {setting.partition("=")[0] for setting in overrides or []}
    for one, other in (("data.folder", "data.file"), ("data.file", "data.folder")):
        if isinstance(known.data, TextData) and one in given and other not in given:
            # Another text, not a place for the old one.
            known = override_all(known, [f"{other}="])
    changed = override_all(
        known, [*(overrides or []), *([f"decode.beam={beam}"] if beam is not None else [])]
    )
    if changed.data is None:
        raise UserError(f"{run} came without data: give data.folder=... or other data.*")
    scores = dataclasses.replace(opened, run=changed).evaluate(changed.data, split, stride)
    form = {"computed_in": "int8" if int8 else "bfloat16"} if int8 or half else {}
    form |= {"written_with": " ".join(map(str, others))} if others else {}
    form |= _searched_with(known.decode, changed.decode)
    _show_scores(scores | form, as_json)
    if "loss" not in scores and changed.task == "translation":
        how = "several runs that write together" if others else "what another program runs"
        say(f"loss and perplexity are not computed of {'eight bits' if int8 else how}")
    if not form and (run / SETTINGS).is_file():  # that of another program is left as it is
        save_scores(run, scores)
    if picture is not None:
        found = scores["confusion"]
        confusion(found["counts"], found["classes"], f"{run}, {split}", picture)
        say(f"picture: {picture}")


def _searched_with(old: object, new: object) -> dict[str, str]:
    names = [name for name, value in vars(new).items() if getattr(old, name) != value]
    told = " ".join(f"decode.{name}={getattr(new, name)}" for name in names)
    return {"decoded_with": told} if told else {}


def _refuse_unfitting(run: "Run", beam: int | None, picture: Path | None, int8: bool) -> None:
    writes = "translate" in run.spec.offers
    if beam is not None and not writes:
        raise UserError("--beam is for translators: leave it out")
    if int8 and not writes:
        raise UserError("--int8 is for models that generate: leave it out")
    if picture is not None and "label" not in run.spec.offers:
        raise UserError("--picture is for models of images: leave it out")
    if picture is not None and picture.suffix not in PICTURES:
        raise UserError(f"--picture {picture} must end in one of {', '.join(PICTURES)}")


def _show_scores(scores: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(scores)
        return
    for name, value in scores.items():
        if isinstance(value, float):
            print(f"{name:>20}  {value:.4f}")
        elif isinstance(value, (str, int)):
            print(f"{name:>20}  {value}")
    for layer, rates in enumerate(scores.get("alignment_error_by_head", []), start=1):
        print(f"{f'errors of layer {layer}':>20}  {'  '.join(f'{rate:.3f}' for rate in rates)}")
    for name, signature in scores["signature"].items():
        print(f"{name + ' signature':>20}  {signature}")


def compare(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe or a TOML file")],
    overrides: Overrides = None,
    out: Out = Path("runs/compare"),
    split: Annotated[str, typer.Option(help="The split to score")] = "valid",
    seed: Seed = None,
    as_json: Json = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train every combination of comma-separated settings; one table, one picture.

    manyheads compare phrasebook model.position=sinusoidal,learned,rotary train.steps=300
    """
    from rich.console import Console

    from manyheads.lab.compare import compare_runs, table_of
    from manyheads.loading import refuse_unscored

    _refuse_torchrun("compare")
    fixed = [setting for setting in overrides or [] if "," not in setting]
    varied = [
        [f"{path}={value}" for value in values.split(",")]
        for path, _, values in (s.partition("=") for s in overrides or [] if "," in s)
    ]
    if not varied:
        raise UserError("nothing to compare: give a setting several values, a.b=x,y")
    chosen = choose(device, threads)
    plans = {
        " ".join(choice): _recipe(recipe, [*fixed, *choice], seed) for choice in product(*varied)
    }
    for name, run in plans.items():
        refuse_unscored(run, name)
    train_one: Callable[[Any, Path], None] = lambda run, folder: _train(run, folder, chosen)  # noqa: E731
    rows = compare_runs(plans, out, split, chosen, train_one)
    if as_json:
        print_json({"runs": rows, "split": split})
    else:
        seeds = sorted({run.seed for run in plans.values()})
        # Never so narrow that numbers are cut: a pipe has 80 columns, a terminal may wrap.
        Console(width=max(140, Console().width)).print(
            table_of(rows, f"{split}, seed {', '.join(map(str, seeds))}")
        )
