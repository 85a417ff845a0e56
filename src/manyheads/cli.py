"""The command line. torch is imported inside the commands, so that help is instant."""

import dataclasses
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyheads.errors import BadData, Mistake

if TYPE_CHECKING:
    import torch

    from manyheads.run import Run

app = typer.Typer(
    help="Trains, runs and shows Transformers. Start with: manyheads demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings, e.g. model.dim=256")
]
Out = Annotated[Path, typer.Option(help="The run folder")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all cores unless given")]
Seed = Annotated[int | None, typer.Option(help="The same as seed=N")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")]


def main() -> None:
    """Run a command; a user's mistake is one line and an exit code, never a traceback."""
    # Threads that sleep while they wait: spinning ones slow a shared machine many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # as what is read, whatever the locale
    try:
        app()
    except Mistake as error:
        _say(f"manyheads: {error}")
        sys.exit(error.exit_code)
    except SystemExit:  # how every command ends
        _write("")
        raise
    except OSError as error:
        # A full disk, a missing permission: it names its file, and is nothing to debug here.
        _say(f"manyheads: {error}")
        sys.exit(BadData.exit_code)


def _write(text: str) -> None:
    """To stdout, at once. A reader that has gone is no error, and Python must not say so either."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _command() -> str:
    """How a person in this folder calls the program."""
    if shutil.which("manyheads"):
        return "manyheads"
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return shlex.join([sys.executable, "-m", "manyheads"])
    here = called.is_absolute() and called.is_relative_to(Path.cwd())
    return shlex.quote(str(called.relative_to(Path.cwd()) if here else called))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_json(scores: dict[str, Any]) -> None:
    print(json.dumps(scores, indent=2, ensure_ascii=False))


def _device(name: str, threads: int | None) -> "torch.device":
    import torch

    from manyheads.run import choose_device

    if threads is not None:
        if threads < 1:
            raise Mistake(f"--threads {threads} must be at least 1")
        torch.set_num_threads(threads)
    return choose_device(name)


def _recipe(recipe: str, overrides: Sequence[str] | None, seed: int | None) -> "Run":
    from manyheads.run import read_recipe

    extra = [] if seed is None else [f"seed={seed}"]
    return read_recipe(recipe, [*(overrides or []), *extra])


def _train(run: "Run", out: Path, device: "torch.device") -> None:
    """Train to the end, or stop on a signal with a word on how to go on."""
    from manyheads.run import SETTINGS, check_folder, locked
    from manyheads.run import train as prepare_training
    from manyheads.train.loop import Stopped

    check_folder(out)
    new = not out.exists()
    with locked(out):
        try:
            trainer = prepare_training(run, out, device)
            for note in trainer.task.notes:
                _say(note)
            count = sum(p.numel() for p in trainer.model.parameters())
            _say(f"{count:,} parameters on {device}, {trainer.dtype}".replace("torch.", ""))
            trainer.run()
        except Mistake:
            if new and not (out / SETTINGS).exists():
                shutil.rmtree(out, ignore_errors=True)  # nothing was begun: leave no folder
            raise
        except Stopped as stopped:
            _say(f"manyheads: {stopped}; go on with: {_command()} {shlex.join(sys.argv[1:])}")
            raise typer.Exit(stopped.exit_code) from None


@app.command()
def demo(
    out: Out = Path("runs/demo"),
    seed: Seed = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train a translator on the built-in phrasebook and show what it learned (minutes)."""
    from manyheads.demo import show

    chosen = _device(device, threads)
    _train(_recipe("phrasebook", None, seed), out, chosen)
    show(out, chosen, _command())


@app.command()
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
    """Train a model; the same command again goes on where it stopped."""
    run = _recipe(recipe, overrides, seed)
    if print_config:
        from manyheads.config import dump, to_toml

        print(to_toml(dump(run)), end="")
        return
    folder = out or Path("runs") / Path(recipe).stem
    _train(run, folder, _device(device, threads))
    split = "" if "test" in run.data.splits() else " --split valid"
    _say(f"trained: {folder}; next: {_command()} evaluate {folder}{split}")


@app.command()
def evaluate(
    run: RunFolder,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[a.b=c]...", help="data.* (if it has moved) and decode.*"),
    ] = None,
    split: Annotated[str, typer.Option(help="train, valid, test, ...")] = "test",
    beam: Annotated[int | None, typer.Option(help="Beam width; the run's unless given")] = None,
    as_json: Json = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Score a run on a split of its data, each number with its signature."""
    from manyheads.config import override_all
    from manyheads.run import open_run, save_scores
    from manyheads.tasks.translation import evaluate_translation

    opened = open_run(run, _device(device, threads))
    for setting in overrides or []:
        if not setting.startswith(("data.", "decode.")):
            raise Mistake(f"'{setting}' cannot change once a run is trained: only data and decode")
    changed = override_all(
        opened.run, [*(overrides or []), *([f"decode.beam={beam}"] if beam is not None else [])]
    )
    translator = dataclasses.replace(opened, run=changed).translator()
    scores = evaluate_translation(translator, changed.data, split).scores
    save_scores(run, scores)
    if as_json:
        _print_json(scores)
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


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@app.command()
def translate(
    run: RunFolder,
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 is greedy")] = None,
    n_best: Annotated[
        int, typer.Option(help="Print N translations a line: number ||| text ||| score")
    ] = 1,
    sample: Annotated[bool, typer.Option("--sample", help="Draw instead of searching")] = False,
    temperature: Annotated[float, typer.Option(help="Of --sample; 0 is greedy")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of --sample; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(help="Of --sample; 1 is off")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of --sample")] = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Translate standard input line by line: as many lines out, in the same order."""
    from manyheads.decode.lines import translate_lines
    from manyheads.decode.sample import Sample
    from manyheads.run import open_run

    draw = Sample(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if draw != Sample() and not sample:
        raise Mistake("--temperature, --top-k, --top-p and --seed are for drawing: add --sample")
    if n_best < 1:
        raise Mistake(f"--n-best {n_best} must be at least 1")
    if sample and n_best > 1:
        raise Mistake("--n-best lists what a search found: leave out --sample")
    width = beam if n_best == 1 else max(beam or 1, n_best)
    translator = open_run(run, _device(device, threads)).translator(**_given(beam=width))
    # A person at a terminal waits for each line; a file is quicker in batches.
    at_once = 1 if sys.stdin.isatty() else None
    drawing = draw if sample else None
    for line in translate_lines(
        translator, sys.stdin.buffer, n_best, drawing, warn=_say, at_once=at_once
    ):
        _write(line + "\n")


@app.command()
def info(
    name: Annotated[str, typer.Argument(metavar="PRESET|RUN", help="A preset or a run folder")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Parameters by part, FLOPs per token, memory: on paper, so that 175B costs nothing."""
    from rich.console import Console

    from manyheads.account import account, table
    from manyheads.config import override_all
    from manyheads.presets import preset
    from manyheads.run import SETTINGS, read_run

    config: Any = read_run(Path(name)).model if (Path(name) / SETTINGS).exists() else preset(name)
    settings = [setting.removeprefix("model.") for setting in overrides or []]
    counted = account(override_all(config, settings))
    if as_json:
        _print_json({"name": name, **counted.as_dict()})
    else:
        Console().print(table(counted))


@app.command()
def tokens(
    run: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run folder or tokenizer.json")],
    text: Annotated[list[str], typer.Argument(help="What to split")],
    as_json: Json = False,
) -> None:
    """Show how a text is split into tokens, merge by merge."""
    from manyheads.run import TOKENIZER
    from manyheads.tokens import Tokenizer

    tokenizer = Tokenizer.load(run / TOKENIZER if run.is_dir() else run)
    whole = " ".join(text)
    ids = tokenizer.encode(whole)
    steps = tokenizer.replay(whole)
    if as_json:
        states = [{"pieces": s.pieces, "merged": s.merged, "rank": s.rank} for s in steps]
        _print_json({"text": whole, "ids": ids, "pieces": tokenizer.pieces(ids), "steps": states})
        return
    for step in steps:
        why = f"{step.merged}" + ("" if step.rank is None else f"  (merge {step.rank + 1})")
        print("  " + "|".join(step.pieces) + (f"    ← {why}" if step.merged else ""))
    print(f"{len(ids)} tokens: {' '.join(map(str, ids))}")


@app.command()
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

    from manyheads.compare import compare_runs, table_of

    fixed = [setting for setting in overrides or [] if "," not in setting]
    varied = [
        [f"{path}={value}" for value in values.split(",")]
        for path, _, values in (s.partition("=") for s in overrides or [] if "," in s)
    ]
    if not varied:
        raise Mistake("nothing to compare: give a setting several values, a.b=x,y")
    chosen = _device(device, threads)
    plans = {
        " ".join(choice): _recipe(recipe, [*fixed, *choice], seed) for choice in product(*varied)
    }
    train_one: Callable[[Any, Path], None] = lambda run, folder: _train(run, folder, chosen)  # noqa: E731
    rows = compare_runs(plans, out, split, chosen, train_one)
    if as_json:
        _print_json({"runs": rows, "split": split})
    else:
        seeds = sorted({run.seed for run in plans.values()})
        # Never so narrow that numbers are cut: a pipe has 80 columns, a terminal may wrap.
        Console(width=max(140, Console().width)).print(
            table_of(rows, f"{split}, seed {', '.join(map(str, seeds))}")
        )
