"""Commands that train: demo, train, distill."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from manyheads.commands import options
from manyheads.commands.catalogue import Recipe, commented_toml, complete_recipe
from manyheads.commands.help import recipe_list
from manyheads.commands.options import argument, option, out_option
from manyheads.commands.shared import (
    Compute,
    Decoding,
    command_name,
    is_torchrun,
    refuse_torchrun,
    resumable,
    say,
    write,
)
from manyheads.errors import UserError

if TYPE_CHECKING:
    import torch

    from manyheads.run import Run
    from manyheads.train.step import World

_RECIPE = "A built-in recipe (below) or a TOML file"


def read_with_seed(recipe: str, overrides: Sequence[str] | None, seed: int | None) -> "Run":
    from manyheads.recipes import read_recipe

    return read_recipe(recipe, [*(overrides or []), *([] if seed is None else [f"seed={seed}"])])


def train_run(
    run: "Run",
    out: Path,
    device: "torch.device",
    world: "World | None" = None,
    *,
    fresh: bool = False,
) -> None:
    """Train to the end; a signal saves, and prints the command that resumes.

    `fresh` deletes the run in the folder first; other files stay.
    """
    from manyheads import run as runs
    from manyheads.train.step import ONE_PROCESS

    world = world or ONE_PROCESS
    report: Callable[[str], None] = say if world.is_main else lambda line: None
    with resumable(report, "the same command" if world.is_distributed else ""):
        runs.train_run(run, out, device, world, report, fresh=fresh)


def demo(
    out: options.Out = Path("runs/demo"),
    open_page: Annotated[
        bool, option("Watch it learn in a browser while it trains, until Ctrl-C", "--open")
    ] = False,
    seed: options.Seed = None,
    compute: Compute = Compute(),
) -> None:
    """Train a translator on the built-in phrasebook and show it (minutes).

    Examples
      $ manyheads demo
      $ manyheads demo --open
    """
    from manyheads.commands.demo import show, watch

    refuse_torchrun("demo")
    device = compute.choose()
    page = watch(out) if open_page else None
    train_run(read_with_seed("phrasebook", None, seed), out, device)
    show(out, device, command_name())
    if page is not None:
        say("the page stays open until Ctrl-C")
        page.join()


def train(
    recipe: Annotated[
        str | None, argument("RECIPE", _RECIPE, autocompletion=complete_recipe)
    ] = None,
    overrides: options.Overrides = None,
    out: Annotated[Path | None, out_option("Run folder [default: runs/RECIPE]", "FOLDER")] = None,
    fresh: Annotated[
        bool, option("Delete the run in the folder, start over at step 0", "--fresh")
    ] = False,
    dry_run: Annotated[
        bool, option("Print parameters, steps, estimated time and memory; stop", "--dry-run")
    ] = False,
    print_config: Annotated[
        bool, option("Print all settings as a recipe; stop", "--print-config")
    ] = False,
    exportable_to: Annotated[
        str | None,
        option("Refuse a model that huggingface, ... cannot hold", metavar="FORMAT"),
    ] = None,
    seed: options.Seed = None,
    compute: Compute = Compute(),
) -> None:
    """Train a model; the same command again resumes it.

    Examples
      $ manyheads train phrasebook
      $ manyheads train language data.folder=books train.learning_rate=3e-4
      $ manyheads train phrasebook model.layers=4 train.accumulate=2 --dry-run
      $ manyheads train classify data.train=reviews.tsv init=runs/bert
      $ torchrun --nproc-per-node 4 -m manyheads train phrasebook

    Settings
      train.learning_rate, train.batch_tokens, train.weight_decay, train.accumulate,
      train.precision, ... : manyheads settings RECIPE train
      model=PRESET trains a published model: transformer-base, bert-base, gpt2, ...
      init=FOLDER starts from pretrained weights: a run or an imported model.
      Metrics go to metrics.jsonl; train.log_to=tensorboard sends them on.
      The weights of the best validation loss are kept (train.checkpoint).
      train.patience=N stops early, after N validations without a better loss.

    {recipes}
    """
    if recipe is None:
        say(f"Recipes (manyheads recipes has more about them):\n{recipe_list()}")
        raise UserError(f"train needs a recipe: {command_name()} train phrasebook")
    with _processes() as world:
        run = read_with_seed(recipe, overrides, seed)
        if exportable_to is not None:
            from manyheads.commands.exchange import check_exportable

            check_exportable(run, exportable_to)
        if print_config:
            if world.is_main:
                write(commented_toml(run))
            return
        if "train.parallel=fsdp" in (overrides or []) and not world.is_distributed:
            raise UserError(
                "train.parallel=fsdp has no effect in one process: start with torchrun "
                "--nproc-per-node N -m manyheads train ..., or leave it out"
            )
        folder = out or Path("runs") / Path(recipe).stem
        place = compute.choose()
        if world.is_distributed:
            from manyheads.train.parallel import device_of

            place = device_of(world, place)
        if dry_run:
            from manyheads.lab.dry_run import measure

            if world.is_main:
                plan = measure(run, place)
                for note in plan.notes:
                    say(note)
                write(plan.text())
            return
        train_run(run, folder, place, world, fresh=fresh)
        if world.is_main:
            say(f"trained: {folder}; {_next_step(run, folder)}")


def _processes() -> "AbstractContextManager[World]":
    """Those of torchrun, connected, or this one."""
    from manyheads.train.step import ONE_PROCESS

    if not is_torchrun():
        return nullcontext(ONE_PROCESS)
    from manyheads.train.parallel import connected

    return connected(say)


def _next_step(run: "Run", folder: Path) -> str:
    if run.spec.evaluate is None:
        return f"fine-tune it: {command_name()} train classify data.train=FILE init={folder}"
    split = "" if run.data and "test" in run.data.splits() else " --split valid"
    return f"next: {command_name()} evaluate {folder}{split}"


def prepare(
    recipe: Recipe,
    overrides: options.Overrides = None,
    out: Annotated[Path, out_option("Folder of the prepared data", "FOLDER")] = Path("prepared"),
    workers: Annotated[
        int | None, option("Processes that tokenise [default: one for each core]", min=1)
    ] = None,
) -> None:
    """Tokenise a large corpus once, in parallel; again: continue, or verify.

    Examples
      $ manyheads prepare language data.folder=corpus --out prepared
      $ manyheads train language data.folder=prepared
      $ manyheads prepare translation data.train=pairs.jsonl.gz --workers 16

    Training maps the shards in FOLDER: it starts at once, and its memory does not
    grow with the corpus. The tokens are those of training without preparation.
    For language models of text, and translation.
    """
    from manyheads.prepare import prepare_data

    refuse_torchrun("prepare")
    prepare_data(read_with_seed(recipe, overrides, None), out, workers or os.cpu_count() or 1, say)
    say(f"prepared: {out}; next: {command_name()} train {recipe} data.folder={out}")


def distill(
    run: Annotated[Path, argument("RUN", "The teacher: the run folder of a translator")],
    overrides: options.Overrides = None,
    out: Annotated[
        Path | None, out_option("Run folder of the student [default: RUN-student]", "FOLDER")
    ] = None,
    beam: options.Beam = None,
    shortlist: Annotated[
        int, option("Target tokens for each source token; 0: no shortlist", panel="Search", min=0)
    ] = 50,
    fresh: Annotated[
        bool, option("Delete the run in the folder, start over at step 0", "--fresh")
    ] = False,
    compute: Compute = Compute(),
) -> None:
    """Train a small, fast student on a teacher's translations; again: resume.

    Examples
      $ manyheads distill runs/mine --out runs/small
      $ manyheads distill runs/mine model.decoder.layers=2 --out runs/small

    The student has the settings of its teacher, with 6 encoder layers and 1 decoder
    layer. Settings (KEY=VALUE) change them. Translations are kept in RUN/distilled
    for other students. --dtype int8 and --engine ctranslate2 restrict the output to
    the lexical shortlist in FOLDER/shortlist.txt.
    """
    from manyheads.distill import Distillation

    refuse_torchrun("distill")
    folder, device = out or run.with_name(f"{run.name}-student"), compute.choose()
    teacher = Decoding(compute.device, compute.threads).open(run, say)
    student = Distillation(teacher, overrides or [], beam, shortlist)
    train_run(student.prepare(folder, say, fresh=fresh), folder, device)
    name = command_name()
    say(f"trained: {folder}; next: {name} evaluate {folder} --dtype int8 --device cpu")
    say(f"translate with: {name} translate {folder} --dtype int8 --device cpu < FILE")
