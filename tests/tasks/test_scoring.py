"""`evaluate` for each task: its keys, and the scores of the last validation."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.tasks.small_texts import CASES, trainer, write_texts
from tests.train.small_runs import records

from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.errors import UserError
from manyheads.loading import LoadedRun, load_torch_run
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
VARIANTS = {"masked static", "masked pairs static", "replaced"}
SHORT = ("train.steps=4", "train.save_every=4", "train.validate_every=2", "train.checkpoint=last")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def runs(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every kind that can be scored, and one of ELECTRA."""
    assert CASES.keys() == KEYS.keys() | VARIANTS  # a new case needs its keys here
    folder = tmp_path_factory.mktemp("runs")
    for name in (*KEYS, "replaced"):
        trainer(name, texts, folder / name, *SHORT).run()
    return {name: folder / name for name in (*KEYS, "replaced")}


def evaluate(folder: Path, split: str = "valid", stride: int | None = None) -> dict[str, Any]:
    loaded = load_torch_run(folder)
    assert loaded.run.data is not None
    options = {} if stride is None else {"stride": stride}
    return loaded.evaluate(loaded.run.data, split, **options)


@pytest.mark.parametrize("name", KEYS)
def test_scores_are_those_of_the_last_validation(name: str, runs: dict[str, Path]) -> None:
    scores, last = evaluate(runs[name]), records(runs[name])[-1]
    assert scores.keys() - {"confusion"} == KEYS[name] | {
        "signature",
        "split",
        "examples",
    }
    assert scores["split"] == "valid"
    assert set() != scores["signature"].keys() <= KEYS[name]
    assert (last["step"], last["split"]) == (4, "valid")
    for key in KEYS[name]:
        assert scores[key] == pytest.approx(last[key], rel=1e-5), key
    assert read_tensors(runs[name] / "model.safetensors")[1]["step"] == 4
    train = evaluate(runs[name], "train")
    assert (train["split"], train["examples"] > scores["examples"] > 0) == ("train", True)


@pytest.mark.parametrize("name", ["masked", "masked pairs", "spans", "denoising"])
def test_validation_does_not_depend_on_batches_or_seed(
    name: str, texts: Path, tmp_path: Path
) -> None:
    held_out = "data.held_out=0.4"
    many = trainer(name, texts, tmp_path / "many", held_out, "train.batch_rows=9")
    few = trainer(name, texts, tmp_path / "few", held_out, "train.batch_rows=1", "seed=7")
    few.model.load_state_dict(many.model.state_dict())
    for key, value in many.task.validate(many.model).items():
        assert few.task.validate(few.model)[key] == pytest.approx(value, rel=1e-6), key


@pytest.mark.parametrize(("keep", "step"), [("last", 6), ("best", 2)])
def test_the_checkpoint_that_is_kept(keep: str, step: int, texts: Path, tmp_path: Path) -> None:
    steps = ("train.steps=6", "train.validate_every=2", f"train.checkpoint={keep}")
    actual = trainer("causal stream", texts, tmp_path / keep, *steps)
    losses = iter([1.0, 2.0, 3.0])
    actual.task.validate = lambda model: {"loss": next(losses)}  # type: ignore[method-assign]
    actual.run()
    assert read_tensors(tmp_path / keep / "model.safetensors")[1]["step"] == step


def test_a_stride_gives_more_context(runs: dict[str, Path]) -> None:
    plain, close = (evaluate(runs["causal stream"], stride=stride) for stride in (None, 3))
    assert plain["loss"] != close["loss"]
    assert plain["examples"] == close["examples"]
    assert "context:16|stride:16" in plain["signature"]["perplexity"]
    assert "context:16|stride:3" in close["signature"]["perplexity"]
    for name, stride in (("masked", 3), ("spans", 3), ("labels", 3), ("causal stream", 17)):
        with pytest.raises(UserError, match="--stride"):
            evaluate(runs[name], stride=stride)
    with pytest.raises(UserError, match="split"):
        evaluate(runs["masked"], "tset")


def test_electra_is_saved_without_its_generator(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="generator"):
        evaluate(runs["replaced"])
    tensors, _ = read_tensors(runs["replaced"] / "model.safetensors")
    state, _ = read_tensors(runs["replaced"] / "state/last.safetensors")
    both = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    assert not any("generator" in name for name in tensors)
    assert {f"model.{name}" for name in tensors} < both
    assert any(name.startswith("generator.") for name in both)
    assert not any(name.startswith("generator.tokens") for name in both)  # shared
    first, *_, valid = records(runs["replaced"])
    assert first["loss"] == pytest.approx(first["masked_loss"] + 50 * first["replaced_loss"])
    assert 0 < valid["replaced_accuracy"] < 1


def as_imported(loaded: LoadedRun, head: Any) -> LoadedRun:
    """The same model without data and objective, with another head."""
    assert isinstance(loaded.run.model, BertConfig)
    config = dataclasses.replace(loaded.run.model, head=head, next_sentence=None)
    run = Run(task="text", data=None, tokens=None, model=config)
    return dataclasses.replace(loaded, run=run, model=config.build())


def test_an_imported_encoder_is_scored_by_its_head(runs: dict[str, Path], texts: Path) -> None:
    loaded = load_torch_run(runs["masked pairs"])
    text, tables = TextData(folder=str(texts)), LabelledData(folder=str(texts / "tables"))
    bare = as_imported(loaded, None)
    assert isinstance(bare.run.spec.data_for(bare.run.model), TextData)
    for data, head in ((text, "masked words"), (tables, "labels")):
        with pytest.raises(UserError, match=f"no head for {head}"):
            bare.evaluate(data, "valid")
    with_head = as_imported(loaded, loaded.run.model.head)
    assert with_head.evaluate(text, "valid").keys() >= {"loss", "perplexity"}
    numbers = dataclasses.replace(tables, label="score", answer="number")
    with pytest.raises(UserError, match=r"data\.answer=number"):
        load_torch_run(runs["labels"]).evaluate(numbers, "valid")


def test_a_letter_of_two_bytes_is_one_character(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("zwölf zwölf zwölf\n" * 9, encoding="utf-8")
    data = TextData(file=str(tmp_path / "words.txt"), lines="sentences")
    scores = load_torch_run(runs["causal stream"]).evaluate(data, "train")
    assert scores["bits_per_character"] / scores["bits_per_byte"] == pytest.approx(21 / 18)


def test_the_order_of_rows_depends_on_the_seed(texts: Path, tmp_path: Path) -> None:
    first, again, other = (
        trainer("labels", texts, tmp_path / f"{number}", f"seed={seed}").task.batches(0)[0]
        for number, seed in enumerate((1, 1, 2))
    )
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
