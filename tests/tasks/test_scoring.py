"""What `evaluate` says of each task: its own keys, and what validation said of the same weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.small_texts import CASES, trainer, write_texts
from tests.train.small_runs import records

from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.errors import UserError
from manyheads.loading import TorchRun, load_torch_run
from manyheads.models.bert import BertConfig
from manyheads.run import Run
from manyheads.train.checkpoint import read_tensors

LANGUAGE = {"loss", "perplexity", "bits_per_character", "bits_per_byte", "word_perplexity"}
PAIRS = {"masked_loss", "next_sentence_loss", "next_sentence_accuracy"}
KEYS = {
    "causal stream": LANGUAGE,
    "causal documents": LANGUAGE,
    "masked": {"loss", "perplexity"},
    "masked pairs": {"loss", "perplexity"} | PAIRS,
    "spans": {"loss", "perplexity"},
    "denoising": {"loss", "perplexity"},
    "labels": {"accuracy", "f1"},
    "a number": {"pearson", "spearman"},
    "pictures": {"loss", "accuracy"},
}
ABOUT = {"signature", "split", "examples"}
SHORT = ("train.steps=4", "train.save_every=4", "train.validate_every=2", "train.checkpoint=last")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def made(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every kind that can be scored, and one of ELECTRA, which keeps its last weights."""
    folder = tmp_path_factory.mktemp("runs")
    for name in (*KEYS, "replaced"):
        trainer(name, texts, folder / name, *SHORT).run()
    return {name: folder / name for name in (*KEYS, "replaced")}


def scored(folder: Path, split: str = "valid", stride: int | None = None) -> dict[str, Any]:
    opened = load_torch_run(folder)
    assert opened.run.data is not None
    return opened.evaluate(opened.run.data, split, stride)


@pytest.mark.parametrize("name", KEYS)
def test_the_scores_are_those_of_the_last_validation(name: str, made: dict[str, Path]) -> None:
    scores = scored(made[name])
    assert scores.keys() - {"confusion"} == KEYS[name] | ABOUT
    assert scores["split"] == "valid"
    assert scores["examples"] > 0
    assert scores["signature"].keys() <= KEYS[name]
    assert scores["signature"]
    last = records(made[name])[-1]
    assert (last["step"], last["split"]) == (4, "valid")
    for key in KEYS[name]:
        assert scores[key] == pytest.approx(last[key], rel=1e-5), key
    assert read_tensors(made[name] / "model.safetensors")[1]["step"] == 4


@pytest.mark.parametrize("name", ["masked", "masked pairs", "spans", "denoising"])
def test_validation_is_the_same_however_a_run_is_batched(
    name: str, texts: Path, tmp_path: Path
) -> None:
    """What is hidden or broken in held-out text hangs neither on the seed nor on the batches."""
    share = "data.held_out=0.4"
    many = trainer(name, texts, tmp_path / "many", share, "train.batch_rows=9")
    few = trainer(name, texts, tmp_path / "few", share, "train.batch_rows=1", "seed=7")
    few.model.load_state_dict(many.model.state_dict())
    for key, value in many.task.validate(many.model).items():
        assert few.task.validate(few.model)[key] == pytest.approx(value, rel=1e-6), key


def test_the_last_weights_are_kept_where_that_is_asked(texts: Path, tmp_path: Path) -> None:
    for keep, step in (("last", 6), ("best", 2)):
        worse = ("train.learning_rate=3", "train.schedule=constant", "train.clip=none")
        steps = ("train.steps=6", "train.validate_every=2", "train.warmup_steps=0")
        found = trainer(
            "causal stream", texts, tmp_path / keep, *steps, *worse, f"train.checkpoint={keep}"
        )
        losses = iter([1.0, 2.0, 3.0])
        found.task.validate = lambda model, left=losses: {"loss": next(left)}  # type: ignore[method-assign, misc]
        found.run()
        assert read_tensors(tmp_path / keep / "model.safetensors")[1]["step"] == step


def test_a_stride_gives_more_context_and_says_so(made: dict[str, Path]) -> None:
    plain, close = (scored(made["causal stream"], stride=stride) for stride in (None, 3))
    assert plain["loss"] != close["loss"]
    assert plain["examples"] == close["examples"]
    assert "context:16|stride:16" in plain["signature"]["perplexity"]
    assert "context:16|stride:3" in close["signature"]["perplexity"]
    for name in ("masked", "spans", "labels"):
        with pytest.raises(UserError, match="--stride is for language models"):
            scored(made[name], stride=3)


def test_the_training_text_is_a_split_too(made: dict[str, Path]) -> None:
    for name in ("causal stream", "masked", "spans", "labels"):
        train, valid = (scored(made[name], split) for split in ("train", "valid"))
        assert train["split"] == "train"
        assert train["examples"] > valid["examples"]
    with pytest.raises(UserError, match="split"):
        scored(made["masked"], "tset")


def test_electra_is_kept_without_what_it_is_scored_by(made: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="generator that is not kept") as caught:
        scored(made["replaced"])
    assert "\n" not in str(caught.value)
    tensors, _ = read_tensors(made["replaced"] / "model.safetensors")
    state, _ = read_tensors(made["replaced"] / "state/last.safetensors")
    both = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    assert not any("generator" in name for name in tensors)
    assert {f"model.{name}" for name in tensors} < both
    assert any(name.startswith("generator.") for name in both)
    assert not any(name.startswith("generator.tokens") for name in both)
    terms = records(made["replaced"])[0]
    assert terms["loss"] == pytest.approx(terms["masked_loss"] + 50 * terms["replaced_loss"])
    valid = records(made["replaced"])[-1]
    assert 0 < valid["replaced_accuracy"] < 1


def as_from_elsewhere(opened: TorchRun, head: Any) -> TorchRun:
    """The same model as an import has it: no data, another head, and nothing said of training."""
    assert isinstance(opened.run.model, BertConfig)
    config = dataclasses.replace(opened.run.model, head=head, next_sentence=None)
    run = Run(task="text", data=None, tokens=None, model=config)
    return dataclasses.replace(opened, run=run, model=config.build())


def test_a_model_without_the_head_for_it_is_refused(made: dict[str, Path], texts: Path) -> None:
    opened = load_torch_run(made["masked pairs"])
    bare = as_from_elsewhere(opened, None)
    assert isinstance(bare.run.spec.data_for(bare.run.model), TextData)
    with pytest.raises(UserError, match="no head for masked words"):
        bare.evaluate(TextData(folder=str(texts)), "valid")
    tables = LabelledData(folder=str(texts / "tables"))
    with pytest.raises(UserError, match="no head for labels"):
        bare.evaluate(tables, "valid")
    filled = as_from_elsewhere(opened, opened.run.model.head)
    assert filled.evaluate(TextData(folder=str(texts)), "valid").keys() >= {"loss", "perplexity"}


def test_numbers_are_not_asked_of_labels(made: dict[str, Path], texts: Path) -> None:
    numbers = LabelledData(folder=str(texts / "tables"), label="score", answer="number")
    with pytest.raises(UserError, match=r"labels \(again, once\).*number"):
        load_torch_run(made["labels"]).evaluate(numbers, "valid")


def test_every_case_is_scored_or_known() -> None:
    variants = {"masked static", "masked words", "masked pairs static", "replaced"}
    assert CASES.keys() == KEYS.keys() | variants


def test_a_letter_of_two_bytes_is_one_character(made: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("zwölf zwölf zwölf\n" * 9, encoding="utf-8")
    opened = load_torch_run(made["causal stream"])
    data = TextData(file=str(tmp_path / "words.txt"), lines="sentences")
    scores = opened.evaluate(data, "train")
    assert scores["bits_per_character"] / scores["bits_per_byte"] == pytest.approx(21 / 18)


def test_rows_come_in_the_order_of_the_seed(texts: Path, tmp_path: Path) -> None:
    orders = [
        trainer("labels", texts, tmp_path / f"{seed}", f"seed={seed}").task.batches(0)  # type: ignore[attr-defined]
        for seed in (1, 1, 2)
    ]
    first, again, other = (batches[0].tokens.tolist() for batches in orders)
    assert first == again
    assert first != other
