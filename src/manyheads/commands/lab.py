"""Commands of the lab: compare, claims, scaling-laws, plan, cost, tables, quiz."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.commands import options
from manyheads.commands.catalogue import Recipe
from manyheads.commands.options import argument, option
from manyheads.commands.shared import (
    Compute,
    check_image,
    draw,
    print_json,
    print_table,
    refuse_torchrun,
    resumable,
    say,
    write,
)
from manyheads.commands.training import read_with_seed, train_run
from manyheads.errors import UserError

_ATTENTION = "Implementations with their settings, e.g. 'fused,tiled block=256' [default: all]"
_DEVICES, _BATCH = "Devices", "Batch"


def compare(
    recipe: Recipe,
    overrides: options.Overrides = None,
    sweep: Annotated[
        list[str] | None,
        option("A setting and its values (repeatable: all combinations)", metavar="KEY=A,B,..."),
    ] = None,
    match: Annotated[
        str | None,
        option("Equal parameters, flops or time for all, as the first has", metavar="NAME"),
    ] = None,
    out: options.Out = Path("runs/compare"),
    split: options.Split = "valid",
    seed: options.Seed = None,
    as_json: options.Json = False,
    compute: Compute = Compute(),
) -> None:
    """Train several variants of a recipe: one table of scores, one plot.

    Examples
      $ manyheads compare phrasebook --sweep model.position=learned,rotary
      $ manyheads compare phrasebook train.steps=300 --sweep seed=1,2,3
      $ manyheads compare phrasebook --sweep model=seq2seq,rnn --match parameters

    --match parameters changes model.dim of all runs but the first; flops and time
    change train.steps. With --sweep seed=1,2,3 the table ends with mean ± SD.
    """
    from manyheads.lab.compare import compare_variants, table_of

    refuse_torchrun("compare")
    device = compute.choose()
    rows, title = compare_variants(
        lambda settings: read_with_seed(recipe, settings, seed),
        *(overrides or [], sweep or []),
        match=match,
        out=out,
        split=split,
        device=device,
        train=lambda run, folder: train_run(run, folder, device),
        say=say,
    )
    if as_json:
        print_json({"runs": rows, "split": split} | ({"match": match} if match else {}))
    else:
        print_table(table_of(rows, title), 140, highlight=True)


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
    compute: Compute = Compute(),
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
    from manyheads.lab.claims.claim import Setting, parse_seeds

    known = runner.claims()
    names = list(known) if everything else list(dict.fromkeys(run or []))
    if run and everything:
        raise UserError("--all tests every claim: leave out --run")
    if not names:
        if report is not None:
            raise UserError("--report needs claims to test: add --all or --run NAME")
        if as_json:
            print_json({"claims": runner.as_rows(known)})
        else:
            write(pages.listing(known))
        return
    if report is not None and report.is_file():
        raise UserError(f"{report} is a file: choose a folder with --report")
    for name in names:  # refuses an unknown one before anything runs
        runner.code_of(runner.find(name))
    device = compute.choose()
    setting = Setting(seeds=parse_seeds(seeds), large=large, device=device, threads=compute.threads)
    results = runner.run_all(names, setting, report, again=again)
    if as_json:
        print_json({"claims": [result.as_json() for result in results]})
    else:
        write(f"{pages.counted(results)}\n")
    if report is not None:
        pages.save_report(results, setting, report, everything=everything)
        say(f"report: {report / 'index.html'}")


def cost(
    cores: Annotated[str | None, option(_ATTENTION, "--attention", metavar="A,B,...")] = None,
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
    compute: Compute = Compute(),
) -> None:
    """Benchmark attention implementations: time and memory by length.

    Examples
      $ manyheads cost --lengths 512,1024,2048 --causal
      $ manyheads cost --attention 'dense,fused,tiled block=256' --plot cost.png
    """
    from manyheads.config import parse
    from manyheads.lab import cost as lab
    from manyheads.train.loop import precision_of
    from manyheads.train.optimizer import Train

    check_image("--plot", plot)
    device = compute.choose()
    measured, measured_lengths = lab.read_cores(cores), lab.read_lengths(lengths)
    setup = lab.Setup(
        device=device,
        dtype=precision_of(parse(Train, {"precision": precision}), device),
        causal=causal,
        heads=heads,
        head_dim=head_dim,
        batch=batch,
        rounds=rounds,
        seed=seed,
    )
    costs = lab.Measurement(measured, measured_lengths, setup).run()
    kind, command = lab.machine(setup), shlex.join(["manyheads", *sys.argv[1:]])
    if as_json:
        print_json({"command": command, "machine": kind, "cores": lab.as_rows(costs)})
    else:
        print_table(lab.table_of(costs, measured_lengths), 60 + 24 * len(measured_lengths))
        write(f"{command}\n{', '.join(f'{name} {value}' for name, value in kind.items())}\n")
    for note in lab.notes(costs):
        say(note)
    draw(plot, lambda path: lab.plot(costs, path))


def plan(
    name: Annotated[str, argument("MODEL", "A preset, a recipe, a run or a Hugging Face folder")],
    overrides: options.Overrides = None,
    devices: Annotated[int, option("Number of devices", panel=_DEVICES)] = 1,
    device_kind: Annotated[
        str, option("a100, h100, h200 or rtx4090", metavar="NAME", panel=_DEVICES)
    ] = "h100",
    per_node: Annotated[int, option("Devices of a node", panel=_DEVICES)] = 8,
    parallel: Annotated[
        str, option("ddp, fsdp or hsdp (a copy in each node)", metavar="NAME", panel=_DEVICES)
    ] = "fsdp",
    shard: Annotated[
        int | None, option("Devices that share a copy of the weights", panel=_DEVICES)
    ] = None,
    tokens: Annotated[float | None, option("Tokens of the training", metavar="X")] = None,
    length: Annotated[
        int | None, option("Tokens of a text [default: model.max_length]", panel=_BATCH)
    ] = None,
    micro_batch: Annotated[
        int | None, option("Texts of a device's micro-batch [default: 1]", panel=_BATCH)
    ] = None,
    accumulate: Annotated[int, option("Micro-batches in a step", panel=_BATCH)] = 1,
    checkpointing: Annotated[
        bool, option("Activation checkpointing", "--checkpointing", panel=_BATCH)
    ] = False,
    plot: Annotated[Path | None, options.plot_option("Plot memory and speed by devices")] = None,
    as_json: options.Json = False,
) -> None:
    """Memory, traffic, time and cost of a training on many GPUs.

    Examples
      $ manyheads plan gpt3-13b --devices 64 --tokens 260e9 --checkpointing
      $ manyheads plan gpt3-xl --devices 8 --device-kind a100 --parallel ddp

    Nothing is trained or measured. docs/scale.md has the model, its constants and its
    error against published figures.
    """
    from manyheads.lab.plan import Setup, model_of, plan_training, plot_devices

    check_image("--plot", plot)
    config, is_checkpointed = model_of(name, overrides or [])
    layout: Any = parallel  # checked by Setup
    setup = Setup(
        device_kind=device_kind,
        devices=devices,
        per_node=per_node,
        layout=layout,
        shard=shard,
        length=length,
        micro_batch=1 if micro_batch is None else micro_batch,
        accumulate=accumulate,
        checkpointed=float(checkpointing or is_checkpointed),
    )
    result = plan_training(config, setup)
    if as_json:
        print_json({"name": name, **result.as_dict(tokens)})
    else:
        write(result.text(tokens))
    draw(plot, lambda path: plot_devices(config, setup, path))


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
    compute: Compute = Compute(),
) -> None:
    """Fit scaling laws to small runs; predict and train a larger one.

    Examples
      $ manyheads scaling-laws language data.folder=books --budget 3h
      $ manyheads scaling-laws language --plan

    The recipe must be a language model. Without data.folder the text is the built-in
    phrasebook. The same command again resumes.
    """
    from manyheads.lab.figures.kaplan import best_for_budget
    from manyheads.lab.scaling import report
    from manyheads.lab.scaling.plan import LARGER, Sweep, parse_time
    from manyheads.lab.scaling.sweep import Scaling

    refuse_torchrun("scaling-laws")
    sweep = Sweep(sizes=sizes, data=data, budget=parse_time(budget))
    device = compute.choose()
    run = read_with_seed(recipe, overrides, seed)
    scaling = Scaling(run, sweep, out, device)
    if not (plan and as_json):
        print_table(report.plan_table(scaling.plan, scaling.step_tokens), 120, to_stderr=not plan)
    for warning in report.warnings(scaling):
        say(warning)
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
    with resumable():
        findings = scaling.go()
    draw(out / "scale.png", lambda path: report.draw(scaling.plan, findings, path))
    best = None if budget_flops is None else best_for_budget(out, budget_flops)
    if as_json:
        print_json(report.as_dict(scaling.plan, findings) | ({"best": best} if best else {}))
        return
    print_table(report.runs_table(findings), 120)
    print_table(report.laws_table(findings), 120)
    write(f"{report.said(findings)}\n")
    if best is not None:
        write("".join(f"{line}\n" for line in best["lines"]))


def tables(
    name: Annotated[
        str | None, argument("NAME", "bleu, glue, summaries, gpt3 or sizes [default: a list]")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print a table of the lectures with our rows next to it.

    Examples
      $ manyheads tables bleu
      $ manyheads tables glue --json

    Published numbers are as printed. Parameters and training FLOPs are counted now;
    each score of ours has the command that made it.
    """
    from manyheads.lab.tables import table

    if name is None:
        titles = table.titles()
        if as_json:
            print_json({"tables": titles})
        else:
            write("".join(f"{each:10} {title}\n" for each, title in titles.items()))
        return
    chosen = table.lecture_table(name)
    if as_json:
        print_json(table.as_dict(chosen))
        return
    print_table(table.as_text(chosen), 220)
    write("".join(f"- {line}\n" for line in table.notes(chosen)))


def quiz(
    name: Annotated[
        str | None, argument("NAME", "A quiz, or lab for the worksheet [default: all quizzes]")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Ask the quizzes of the lectures; compute the answers.

    Examples
      $ manyheads quiz
      $ manyheads quiz masked
      $ manyheads quiz lab

    On a terminal it asks first; elsewhere it prints questions and answers. Answers are
    computed, not stored. An unknown name lists the quizzes.
    """
    from manyheads.lab.quiz import QUIZZES, answer_text, as_dict, find, question_text
    from manyheads.lab.worksheet import check_steps

    if name == "lab":
        rows = list(check_steps(lambda text: None if as_json else write(text)))
        if as_json:
            print_json({"lab": rows})
        if any(row["holds"] is False for row in rows):
            raise typer.Exit(1)
        return
    chosen = list(QUIZZES) if name is None else [find(name)]
    if as_json:
        print_json({"quizzes": [as_dict(each) for each in chosen]})
        return
    asks = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    for each in chosen:
        write(f"{question_text(each)}\n")
        if asks:
            letters = ", ".join(each.choices)
            prompt = f"  your answer ({letters})" if letters else "  Enter"
            typer.prompt(prompt, default="", show_default=False)
        write(f"{answer_text(each)}\n\n")
