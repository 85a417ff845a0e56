"""Recipes choose settings from the amount of training data, unless the user gives them."""

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.golden.record import LANGUAGE_FOLDER
from tests.test_cli import call

from manyheads.errors import UserError
from manyheads.recipes import read_recipe
from manyheads.run import make_trainer, read_run, read_tokenizer
from manyheads.sizing import RULES, fit_to_data, language, translation
from manyheads.tasks.spec import kinds
from manyheads.tokenizer.train import Tokens

CHARACTERS = [30_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 100_000_000, 10**10]


def test_more_text_means_less_regularisation_and_no_smaller_model() -> None:
    run = read_recipe("language", ["tokens=characters"])
    chosen = [language(run, count) for count in CHARACTERS]
    for name in ("model.dropout", "model.attention_dropout", "train.weight_decay"):
        values = [row[name] for row in chosen]
        assert values == sorted(values, reverse=True)
        assert values[0] > values[-1]
    for name in ("model.dim", "model.layers", "train.steps"):
        values = [row[name] for row in chosen]
        assert values == sorted(values)
    assert all("tokens.vocab_size" not in row for row in chosen)  # as many as occur


@pytest.mark.parametrize("recipe", ["language", "translation", "bert-mini", "images"])
def test_every_choice_is_a_valid_run(recipe: str) -> None:
    run = read_recipe(recipe)
    assert run.data is not None
    _, _, rule = RULES[run.task]
    for count in [1, *CHARACTERS]:
        chosen = rule(run, count)
        assert {*chosen} == {*run.by_data}
        read_recipe(recipe, [f"{name}={value}" for name, value in chosen.items()])


@pytest.mark.parametrize("kind", kinds(get_args(Tokens)))
def test_every_tokenizer_has_a_choice(kind: str) -> None:
    run = read_recipe("language", [f"tokens={kind}"])
    assert 0 < language(run, 1_000_000)["model.dropout"] <= 0.4


def test_every_kind_of_data_of_a_task_is_measured(tmp_path: Path) -> None:
    run = read_recipe("translation", ["data=phrasebook", "data.train_pairs=300"])
    trainer = make_trainer(run, tmp_path / "run", torch.device("cpu"))
    assert trainer.train.steps == translation(run, 300)["train.steps"]
    other = dataclasses.replace(read_recipe("summaries"), by_data=("train.steps",))
    with pytest.raises(UserError, match="by_data has no rule for task=summaries"):
        fit_to_data(other, None)


def test_a_trained_language_model_is_fine_tuned(tmp_path: Path) -> None:
    """The steps follow from the text and from the tokenizer of the trained model."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat. \n" * 100)
    data = f"data.folder={tmp_path}"
    run = read_recipe("language", [f"init={LANGUAGE_FOLDER}", data])
    trainer = make_trainer(run, tmp_path / "run", torch.device("cpu"))
    kind = read_tokenizer(LANGUAGE_FOLDER).kind
    chosen = language(read_recipe("language", [f"tokens={kind}", data]), 2500)
    assert trainer.train.weight_decay == chosen["train.weight_decay"]
    assert trainer.train.steps == chosen["train.steps"]


def test_matched_runs_keep_their_width(tmp_path: Path) -> None:
    """The amount of data is considered before, not after runs are made equal."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat and looked at the dog. \n" * 400)
    settings = f"data.folder={tmp_path} tokens=characters train.batch_tokens=128 train.steps=1"
    words = [*settings.split(), "train.patience=none", "--sweep", "model.feedforward=plain,gated"]
    out = tmp_path / "out"
    code, _, errors = call("compare", "language", *words, "--match", "parameters", "--out", out)
    assert code == 0, errors
    runs = [read_run(path.parent) for path in out.rglob("run.toml")]
    dims = {type(run.model.feedforward).__name__: run.model.dim for run in runs}
    assert dims["Plain"] == 192
    assert dims["Gated"] < 192


def test_pairs_choose_the_model() -> None:
    run = read_recipe("translation")
    dims = [translation(run, pairs)["model.dim"] for pairs in (1000, 29_000, 160_000, 10**7)]
    assert dims == [128, 128, 256, 512]


def test_few_pairs_are_not_read_thousands_of_times() -> None:
    """Half a step for each pair, within limits, with a warm-up and early stopping to match."""
    run = read_recipe("translation")
    for pairs, steps in ((1, 1000), (200, 1000), (4000, 2000), (8000, 4000)):
        chosen = {name: f"{name}={value}" for name, value in translation(run, pairs).items()}
        train = read_recipe("translation", [*chosen.values()]).train
        assert train.steps == steps
        assert train.warmup_steps == steps // 4
        assert train.patience is not None
        assert 1 < train.patience * train.validate_every < steps / 2
    steps = [
        translation(run, pairs)["train.steps"] for pairs in (1, 3000, 8000, 8001, 10**6, 10**7)
    ]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        (["model.dropout=0.2"], {"model.dropout"}),
        (["model.dim=64"], {"model.dim", "model.layers", "model.heads"}),
        (["train.epochs=2"], {"train.steps"}),
        (["by_data="], {*read_recipe("language").by_data}),
        (["model=gpt2"], {name for name in read_recipe("language").by_data if name[0] != "t"}),
    ],
)
def test_settings_of_the_user_stay(settings: list[str], left_out: set[str]) -> None:
    everything = {*read_recipe("language").by_data}
    assert everything - {*read_recipe("language", settings).by_data} >= left_out


def test_a_run_writes_down_what_was_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat and looked at the dog. \n" * 400)
    settings = [f"data.folder={tmp_path}", "tokens=characters", "model.dim=16", "train.steps=1"]
    run = read_recipe("language", [*settings, "model.max_length=16", "model.layers=1"])
    trainer = make_trainer(run, tmp_path / "run", torch.device("cpu"))
    trainer.close()
    written = read_run(tmp_path / "run")
    assert written.by_data == ()
    assert written.model.dropout == 0.4
    assert written.train.weight_decay == 1.6
    assert written.train.steps == 1
    note = next(note for note in trainer.task.notes if note.startswith("chosen for"))
    assert "model.dropout=0.4" in note
    assert "model.dim" not in note
