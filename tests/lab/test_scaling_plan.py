"""The plan of a sweep: its cost, the differences between its runs, and its errors."""

from dataclasses import replace
from itertools import pairwise

import pytest

from manyheads.errors import UserError
from manyheads.lab.scaling.plan import (
    LARGER,
    Plan,
    Sweep,
    check_recipe,
    make_plan,
    sizes_of,
    steps_within,
)
from manyheads.recipes import read_recipe
from manyheads.run import Run
from manyheads.summary import summarize

STEP_TOKENS = 2048


def recipe(*settings: str) -> Run:
    return read_recipe("shakespeare-char", ["data.folder=x", "model.vocab_size=65", *settings])


def plan_of(run: Run, sweep: Sweep, steps: int = 900) -> Plan:
    return make_plan(run, sweep, steps=steps, step_tokens=STEP_TOKENS)


def test_flops_are_those_of_the_account() -> None:
    plan = plan_of(recipe(), Sweep())
    for item in plan.runs:
        counted = summarize(item.run.model)
        tokens = item.run.train.steps * STEP_TOKENS
        assert item.flops == counted.training_flops["token"] * tokens
        assert item.parameters == counted.block_parameters
        assert item.parameters < counted.parameters  # without what embeds
    assert plan.flops == sum(item.flops for item in plan.runs)


def test_the_predicted_run_is_the_recipe_and_so_many_times_larger() -> None:
    run = recipe()
    plan = plan_of(run, Sweep())
    assert plan.target.run.model == run.model
    largest = max(item.flops for item in plan.fitted)
    assert LARGER <= plan.target.flops / largest < LARGER * 1.01
    for name in ("parameters", "tokens"):
        assert getattr(plan.target, name) > max(getattr(item, name) for item in plan.fitted)


@pytest.mark.parametrize("name", ["shakespeare-char", "language", "gpt-mini"])
def test_sizes_halve_at_one_aspect(name: str) -> None:
    run = read_recipe(name, ["data.folder=x", "model.vocab_size=500"])
    models = [item.model for item in sizes_of(run, Sweep())]
    counts = [summarize(model).block_parameters for model in models]
    aspect = run.model.dim / run.model.layers
    for small, large in pairwise(counts):
        assert 1.3 < large / small < 2.7
    assert counts[-1] / counts[0] == pytest.approx(16, rel=0.25)
    for model in models:
        assert 0.5 < model.dim / model.layers / aspect < 1.5
        assert model.dim % model.heads == 0


def test_a_budget_is_kept() -> None:
    run, sweep = recipe(), Sweep(budget=600.0)
    each = {f"{item.model.dim}x{item.model.layers}": 0.05 for item in sizes_of(run, sweep)}
    steps = steps_within(
        run, sweep, step_tokens=STEP_TOKENS, seconds=each, valid_tokens=20 * STEP_TOKENS
    )
    plan = make_plan(
        run,
        sweep,
        steps=steps,
        step_tokens=STEP_TOKENS,
        seconds=each,
        valid_tokens=20 * STEP_TOKENS,
    )
    assert 0.97 * 600 < plan.seconds < 600.5


def test_what_does_not_scale_is_refused() -> None:
    check_recipe(recipe())
    with pytest.raises(UserError, match="leave it out, so that heads keep"):
        check_recipe(recipe("model.kv_heads=2"))
    with pytest.raises(UserError, match="language models of text"):
        check_recipe(read_recipe("phrasebook"))
    with pytest.raises(UserError, match="leave out init=FOLDER"):
        check_recipe(replace(recipe(), init="runs/other"))
