"""Fair comparisons: plans with as many parameters, training FLOPs or seconds as the first one.

Parameters are matched by the width (model.dim, and model.ffn_dim in proportion), FLOPs and time by
the number of steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from manyheads.config import nearest
from manyheads.errors import UserError
from manyheads.run import Run
from manyheads.summary import count_parameters, summarize

Match = Literal["parameters", "flops", "time"]
LENGTH = 32  # tokens of a sentence, for the FLOPs of attention
WIDEST = 2**14
UNLIKE = 1.1  # ratio of parameters from which a comparison is called unequal


def check_match(by: str | None, plans: Mapping[str, Run]) -> None:
    if by is None:
        return
    if by not in get_args(Match):
        raise UserError(f"--match {by}: {nearest(by, get_args(Match))}")
    for run in plans.values():
        if by != "parameters" and run.train.epochs is not None:
            raise UserError(
                f"--match {by} changes train.steps: set train.steps=N, not train.epochs"
            )


def matched(
    plans: Mapping[str, Run], by: str, seconds: Callable[[Run], float]
) -> tuple[dict[str, Run], list[str]]:
    """The plans with the cost of the first, and a line about each; `seconds` times a training."""
    (_, first), *_ = plans.items()
    costs: dict[str, tuple[Callable[[Run], float], str]] = {
        "parameters": (parameters_of, "parameters"),
        "flops": (training_flops, "training FLOPs"),
        "time": (seconds, "s of training"),
    }
    cost, unit = costs[by]
    goal, results, lines = cost(first), {}, []
    for name, run in plans.items():
        if run is not first and by == "parameters":
            run = _with_parameters(run, goal)
        elif run is not first:
            steps = max(1, round(run.train.steps * goal / cost(run)))
            run = replace(run, train=replace(run.train, steps=steps))
        size = (
            f"model.dim={run.model.dim}" if by == "parameters" else f"train.steps={run.train.steps}"
        )
        reached = goal if by == "time" else cost(run)
        lines.append(f"{name}: {size}, {reached:.4g} {unit}")
        results[name] = run
    return results, lines


def parameters_of(run: Run) -> int:
    """Parameters; before its tokenizer is trained, a run has the vocabulary that it asks for."""
    return count_parameters(_with_vocabulary(run.model, run))


def training_flops(run: Run) -> float:
    """FLOPs of all steps, forward and backward, for texts of LENGTH tokens."""
    config = _with_vocabulary(run.model, run)
    summary = summarize(config, min(LENGTH, getattr(config, "max_length", LENGTH)))
    of_text = sum(n * summary.training_flops[token] for token, n in summary.tokens.items())
    texts = run.train.batch_tokens / max(summary.tokens.values())
    return of_text * texts * run.train.accumulate * run.train.steps


def _with_vocabulary(config: Any, run: Run) -> Any:
    size = config.vocab_size or getattr(run.tokens, "vocab_size", None) or 1000
    return replace(config, vocab_size=size)


def _with_parameters(run: Run, goal: int | float) -> Run:
    """The run with the width whose number of parameters is nearest."""
    config: Any = run.model
    unit = 2 * getattr(config, "heads", 1)  # rotary positions turn pairs of channels of a head

    def wide(units: int) -> Run:
        sizes: dict[str, Any] = {"dim": units * unit}
        if getattr(config, "ffn_dim", None) is not None:
            sizes["ffn_dim"] = max(1, round(config.ffn_dim * units * unit / config.dim))
        return replace(run, model=replace(config, **sizes))

    low, high = 1, WIDEST // unit
    while high - low > 1:  # parameters grow with the width
        middle = (low + high) // 2
        low, high = (middle, high) if parameters_of(wide(middle)) <= goal else (low, middle)
    return min((wide(low), wide(high)), key=lambda other: abs(parameters_of(other) - goal))


def unequal(plans: Mapping[str, Run]) -> str:
    """A warning if the models of a comparison differ in size; empty otherwise."""
    counts = [parameters_of(run) for run in plans.values()]
    if max(counts) <= UNLIKE * min(counts):
        return ""
    return (
        f"the models have {min(counts):,} to {max(counts):,} parameters: "
        "--match parameters, flops or time makes their cost equal"
    )
