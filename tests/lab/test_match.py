"""compare --match: every run has the parameters, the FLOPs or the time of the first."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.test_cli import TINY, call, mistake

from manyheads.lab.compare import table_of
from manyheads.lab.match import check_match, matched, parameters_of, training_flops, unequal
from manyheads.recipes import read_recipe
from manyheads.run import Run

KINDS = ("seq2seq", "rnn", "gnmt", "convs2s", "bytenet")


@pytest.fixture(scope="module")
def plans() -> dict[str, Run]:
    settings = ["tokens.vocab_size=600", "train.steps=900"]
    return {kind: read_recipe("phrasebook", [*settings, f"model={kind}"]) for kind in KINDS}


def test_parameters_are_matched_by_the_width(plans: dict[str, Run]) -> None:
    results, lines = matched(plans, "parameters", lambda run: 0.0)
    goal = parameters_of(plans["seq2seq"])
    assert results["seq2seq"] is plans["seq2seq"]
    assert max(map(parameters_of, plans.values())) > 2 * goal
    for kind, run in results.items():
        assert parameters_of(run) == pytest.approx(goal, rel=0.03), kind
        assert run.train.steps == 900
    assert len(lines) == len(KINDS)
    assert not unequal(results)
    assert "--match" in unequal(plans)


def test_flops_and_time_are_matched_by_the_steps(plans: dict[str, Run]) -> None:
    results, _ = matched(plans, "flops", lambda run: 0.0)
    goal = training_flops(plans["seq2seq"])
    for kind, run in results.items():
        assert run.model == plans[kind].model
        assert training_flops(run) == pytest.approx(goal, rel=0.01), kind
    # A training of the second kind takes thrice as long per step.
    results, _ = matched(
        plans, "time", lambda run: run.train.steps * (3.0 if run.model.kind == "rnn" else 1.0)
    )
    assert [run.train.steps for run in results.values()] == [900, 300, 900, 900, 900]


def test_the_command_states_what_is_equal(tmp_path: Path, plans: dict[str, Run]) -> None:
    words = (
        "compare",
        "phrasebook",
        *TINY[:4],
        *TINY[8:],
        "train.steps=2",
        "--out",
        tmp_path / "c",
    )
    sweep = ("--sweep", "model=seq2seq,rnn", "--device", "cpu")
    code, out, err = call(*words, *sweep, "--match", "parameters", "--json")
    assert code == 0, err
    assert "equal parameters:" in err
    compared = json.loads(out)
    assert compared["match"] == "parameters"
    first, second = (row["parameters"] for row in compared["runs"])
    assert second == pytest.approx(first, rel=0.05)
    assert "'parameters'" in mistake(*words, *sweep, "--match", "parametres")
    with_epochs = {"a": read_recipe("phrasebook", ["train.epochs=2"])}
    with pytest.raises(Exception, match=r"train\.steps=N"):
        check_match("flops", with_epochs)


def test_the_table_ends_with_the_means_of_seeds() -> None:
    rows: list[dict[str, Any]] = [
        {"settings": f"model.position={name} seed={seed}", "parameters": 9, "loss": loss}
        for name, seed, loss in (("rotary", 1, 1.0), ("rotary", 2, 1.2), ("alibi", 1, 4.0))
    ]
    table = table_of(rows, "")
    names, losses = ([*column.cells] for column in (table.columns[0], table.columns[-1]))
    assert names[3:] == ["model.position=rotary mean ± SD of 2 seeds"]  # none of one seed
    assert losses[3:] == ["1.100 ± 0.141"]
