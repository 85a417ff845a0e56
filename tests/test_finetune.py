"""A run that begins with a trained model: its stack is there, what is new on top is new."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exchange.folders import saved
from tests.tasks.small_texts import CASES, SIZES, STEPS, recipe_trainer, trainer, write_texts
from tests.train.small_runs import assert_same_bits, hurt
from torch import Tensor

from manyheads.errors import UserError
from manyheads.finetune import ON_TOP
from manyheads.loading import load_run, load_torch_run
from manyheads.models.bert import Bert
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.nn.lora import LowRank
from manyheads.recipes import read_recipe
from manyheads.run import read_run
from manyheads.train.checkpoint import read_tensors, write_tensors
from manyheads.train.loop import Trainer

SHORT = ("train.steps=4", "train.save_every=4", "train.validate_every=4")
TRAIN = tuple(setting for setting in SIZES if setting.startswith("train."))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def starts(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs to begin with, one of each kind."""
    folder = tmp_path_factory.mktemp("starts")
    names = ("causal stream", "masked pairs", "replaced", "spans", "labels")
    for name in names:
        trainer(name, texts, folder / name, *SHORT).run()
    return {name: folder / name for name in names}


def classifier(start: Path, texts: Path, out: Path, *overrides: str) -> Trainer:
    """What `train classify data.folder=TABLES init=START` makes."""
    table = f"data.folder={texts / 'tables'}"
    return recipe_trainer("classify", out, *TRAIN, *STEPS, table, f"init={start}", *overrides)


def of_stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in tensors if not name.startswith(ON_TOP)}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["masked pairs", "replaced"])
def test_the_stack_of_an_encoder_is_kept(
    name: str, starts: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    actual = classifier(starts[name], texts, tmp_path / "run")
    model, state = actual.model, dict(actual.model.state_dict())
    begun = read_tensors(starts[name] / "model.safetensors")[0]
    assert isinstance(model, Bert)
    assert_equal(of_stack(state), of_stack(begun))
    assert {name for name in state if name.startswith("head.")} == {
        "head.output.weight",
        "head.output.bias",
    }
    assert state["head.output.weight"].std() < 0.1  # small first weights
    assert not state["head.output.bias"].any()
    assert model.config.head is not None
    assert model.config.head.labels == ("again", "once")  # type: ignore[union-attr]
    pooled = "pooler.project.weight"
    if name == "masked pairs":  # trained to say what follows
        assert torch.equal(state[pooled], begun[pooled])
    else:
        assert pooled not in begun
    assert not any(name.startswith("next_sentence") for name in state)
    inputs = (tmp_path / "run/tokenizer.json").read_bytes()
    assert inputs == (starts[name] / "tokenizer.json").read_bytes()
    actual.run()
    opened = load_torch_run(tmp_path / "run")
    assert opened.run.init == str(starts[name])
    assert not torch.equal(opened.model.state_dict()["tokens.weight"], begun["tokens.weight"])
    assert opened.encoder().labels == ("again", "once")


def test_the_encoder_of_an_encoder_decoder_has_the_states_that_it_had(
    starts: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    actual = classifier(starts["spans"], texts, tmp_path / "run")
    before = load_torch_run(starts["spans"]).model
    assert isinstance(before, Seq2Seq)
    assert isinstance(actual.model, Bert)
    [batch] = actual.task.batches(0)
    assert batch.mask is not None
    actual.model.eval()
    with torch.no_grad():
        ours = actual.model.hidden(batch.tokens, batch.mask)
        theirs = before.encode(batch.tokens, batch.mask).states
    assert torch.equal(ours[batch.mask], theirs[batch.mask])
    # No position of it was made a summary: the mean of all is.
    assert actual.model.config.pooler is not None
    assert actual.model.config.pooler.over == "mean"
    actual.run()


def test_a_decoder_is_read_at_its_last_token(
    starts: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    """GPT fine-tuned for classification: its states, and a linear head on the last one."""
    actual = classifier(starts["causal stream"], texts, tmp_path / "run")
    before = load_torch_run(starts["causal stream"]).model
    assert isinstance(before, Gpt)
    model = actual.model
    assert isinstance(model, Bert)
    [batch] = actual.task.batches(0)
    assert batch.mask is not None
    model.eval()
    with torch.no_grad():
        outputs = model(batch.tokens, batch.mask)
        for row, length in enumerate(batch.mask.sum(1).tolist()):
            states = before.hidden(batch.tokens[row : row + 1, :length])
            expected = model.head(states[:, -1])[0]
            torch.testing.assert_close(outputs[row], expected, rtol=0, atol=1e-5)
    actual.run()
    loaded = load_run(tmp_path / "run")
    assert len(loaded.classify(["once more"])) == 1
    assert loaded.embed(["once more"]).shape == (1, model.config.dim)
    # A framed text ends with the token that the head reads.
    assert loaded.tokenizer.framed(["once"])[0][0][-1] == loaded.tokenizer.separator


def test_an_imported_decoder(texts: Path, tmp_path: Path) -> None:
    """GPT-2's tokenizer has no [CLS] and [SEP]: the end of a text stands for it."""
    folders = pytest.importorskip("tests.exchange.folders")
    folder, theirs = folders.saved(tmp_path / "theirs", "gpt2")
    actual = classifier(folder, texts, tmp_path / "run")
    [batch] = actual.task.batches(0)
    model: Any = actual.model.eval()
    real = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
    with torch.no_grad():
        expected = theirs.transformer(batch.tokens, attention_mask=real.long()).last_hidden_state
        last = expected[torch.arange(len(real)), real.sum(1) - 1]
        outputs = model(batch.tokens, batch.mask)
        torch.testing.assert_close(outputs, model.head(last), rtol=1e-4, atol=1e-4)
    actual.run()
    loaded = load_run(tmp_path / "run")
    assert loaded.tokenizer.framed(["the dog"])[0][0][-1] == load_run(folder).tokenizer.end
    assert len(loaded.classify(["the dog", "the small tree"])) == 2


@pytest.mark.parametrize("labels", [("yes", "no"), ("a", "b", "c")])
def test_a_classifier_for_other_labels_begins_with_a_new_head(
    labels: tuple[str, ...], starts: dict[str, Path], tmp_path: Path
) -> None:
    """Also where there are as many of them: no label is another's heir."""
    rows = [f"one two {'three ' * place}\t{label}" for place, label in enumerate(labels * 8)]
    table = tmp_path / "train.tsv"
    table.write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
    settings = (f"data.train={table}", f"init={starts['labels']}")
    actual = recipe_trainer("classify", tmp_path / "run", *TRAIN, *STEPS, *settings)
    state = dict(actual.model.state_dict())
    begun = read_tensors(starts["labels"] / "model.safetensors")[0]
    assert_equal(of_stack(state), of_stack(begun))
    assert torch.equal(state["pooler.project.weight"], begun["pooler.project.weight"])
    assert len(state["head.output.weight"]) == len(labels)
    assert not state["head.output.bias"].any()
    assert not torch.equal(state["head.output.weight"], begun["head.output.weight"])


def test_a_classifier_for_the_same_labels_keeps_its_head(
    starts: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    actual = classifier(starts["labels"], texts, tmp_path / "run")
    begun = read_tensors(starts["labels"] / "model.safetensors")[0]
    assert_equal(dict(actual.model.state_dict()), begun)


@pytest.mark.parametrize("name", ["causal stream", "masked pairs", "replaced", "spans"])
def test_pretraining_goes_on_from_its_own_kind(
    name: str, starts: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    inputs = [setting for setting in CASES[name].all(texts) if not setting.startswith("tokens")]
    local = [setting for setting in inputs if not setting.startswith("model.")]
    start = f"init={starts[name]}"
    actual = recipe_trainer(CASES[name].recipe, tmp_path / "run", *local, start, *SHORT)
    assert_equal(
        dict(actual.saved_model.state_dict()), read_tensors(starts[name] / "model.safetensors")[0]
    )
    actual.run()
    assert read_run(tmp_path / "run").init == str(starts[name])


def test_going_on_does_not_begin_again(
    starts: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    """A saved run no longer depends on the folder it started from, which may change."""
    start = shutil.copytree(starts["masked pairs"], tmp_path / "start")
    whole, out = tmp_path / "whole", tmp_path / "run"
    classifier(start, texts, whole).run()
    actual = classifier(start, texts, out)

    class Killed(Exception):
        pass

    def kill() -> None:
        raise Killed

    hurt(actual, 6, kill)
    with pytest.raises(Killed):
        actual.run()
    tensors, about = read_tensors(start / "model.safetensors")
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    write_tensors(start / "model.safetensors", other, about)
    again = classifier(start, texts, out)
    assert again.progress.step == 4
    again.run()
    assert_same_bits(out, whole)


def refused(recipe: str, out: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        recipe_trainer(recipe, out, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_start_that_does_not_fit_is_refused_in_one_line(
    starts: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    def with_start(recipe: str, name: str, *overrides: str) -> str:
        data = texts / "tables" if recipe == "classify" else texts
        start = f"init={starts[name]}"
        return refused(recipe, tmp_path / "run", f"data.folder={data}", start, *overrides)

    line = with_start("bert-mini", "causal stream")
    assert f"{starts['causal stream']} holds a gpt model" in line
    assert "task=pretraining begins with a bert one or an encoder–decoder" in line
    assert "holds a bert model" in with_start("language", "masked pairs")
    assert "holds a bert model" in with_start("t5-mini", "masked pairs")
    assert not (tmp_path / "run").exists()
    line = with_start("classify", "masked pairs", "model.dim=32")
    assert str(starts["masked pairs"]) in line
    assert "model.dim is 16 there and 32 here" in line
    assert "init=nowhere" in refused("classify", tmp_path / "run", "init=nowhere")


def test_old_names_of_init_and_folders_called_like_a_kind_of_model(
    starts: dict[str, Path],
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(starts["masked pairs"], tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    data = [f"data.folder={texts / 'tables'}"]
    expected = read_recipe("classify", [*data, "init=bert"])
    assert expected.init == "bert"
    assert capsys.readouterr().err == ""
    for old in ("start=bert", "model=./bert"):
        assert dataclasses.replace(read_recipe("classify", [*data, old]), init="bert") == expected
        assert "init=FOLDER" in capsys.readouterr().err
    # A kind of model wins over a folder of that name.
    plain = read_recipe("classify", [*data, "model=bert"])
    assert (plain.init, plain.model.kind, plain.tokens is None) == ("", "bert", False)
    assert plain == read_recipe("classify", data)
    assert "did you mean 'model=bert'" in refused("classify", tmp_path / "run", "model=berd")
    assert "tokens" in refused("classify", tmp_path / "run", "init=bert", "tokens.vocab_size=9")


@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_a_translator_is_trained_in_the_frame_that_it_writes_in(
    family: str, tmp_path: Path
) -> None:
    """A model from elsewhere begins and ends texts in its own way, in training as in use."""
    start, _ = saved(tmp_path / family, family)
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").write_text("a small dog\nthe cat\n" * 20, encoding="utf-8")
    data = (f"data.folder={tmp_path}", "data.source=en", "data.target=de")
    settings = (f"init={start}", *data, "train.steps=2", "train.batch_tokens=64")
    actual = recipe_trainer("translation", tmp_path / "run", *settings, "train.validate_every=2")
    actual.run()
    opened = load_torch_run(tmp_path / "run")
    marks = opened.translator().special_tokens
    [batch] = actual.task.batches(0)
    row = batch.source[0][batch.source_real[0]].tolist()
    text = opened.tokenizer.decode(row)
    assert row == marks.source(opened.tokenizer.encode(text))
    assert set(batch.target[:, 0].tolist()) == {marks.start}
    ends = batch.labels.gather(1, batch.loss_mask.sum(1, keepdim=True) - 1)
    assert set(ends.flatten().tolist()) == {marks.end}


LORA = ("finetune.lora.rank=2", "finetune.lora.targets=encoder.*")


def test_an_update_starts_at_zero() -> None:
    """B is 0; A is uniform within ±1/√columns, as in PEFT."""
    weight = torch.randn(6, 40)
    update = LowRank(weight, rank=8, scale=2.0)
    assert torch.equal(update(weight), weight)
    assert 0.9 < update.a.abs().max() * 40**0.5 <= 1


def test_lora_trains_a_low_rank_update_and_saves_it_merged(
    starts: dict[str, Path], texts: Path, tmp_path: Path
) -> None:
    """Frozen weights keep their bits, updates have the rank, and a resumed run is the same."""
    start = starts["masked pairs"]
    trainer = classifier(start, texts, tmp_path / "run", *LORA, *SHORT)
    assert trainer.saved_model.config == trainer.model.config  # `train --dry-run` reads it
    trainer.run()
    before, after = (read_tensors(f / "model.safetensors")[0] for f in (start, tmp_path / "run"))
    changed = set()
    for name, tensor in of_stack(after).items():
        if not torch.equal(tensor, before[name]):
            changed.add(name)
            assert torch.linalg.matrix_rank((tensor - before[name]).double(), rtol=1e-4) <= 2
    linears = {n for n in of_stack(after) if n.startswith("encoder.") and after[n].ndim == 2}
    assert changed
    assert changed <= linears
    load_run(tmp_path / "run").classify(["a text"])
    half = classifier(start, texts, tmp_path / "half", *LORA, *SHORT, "train.steps=2")
    half.run()
    classifier(start, texts, tmp_path / "half", *LORA, *SHORT).run()
    assert_equal(read_tensors(tmp_path / "half" / "model.safetensors")[0], after)


def test_freezing_by_pattern(starts: dict[str, Path], texts: Path, tmp_path: Path) -> None:
    start = starts["masked pairs"]
    classifier(start, texts, tmp_path / "run", "finetune.freeze=encoder.*,tokens.*", *SHORT).run()
    before, after = (read_tensors(f / "model.safetensors")[0] for f in (start, tmp_path / "run"))
    for name, tensor in of_stack(after).items():
        frozen = name.startswith(("encoder.", "tokens."))
        assert torch.equal(tensor, before[name]) or not frozen
    with pytest.raises(UserError, match=r"finetune\.freeze"):
        classifier(start, texts, tmp_path / "other", "finetune.freeze=nothing.*")
    with pytest.raises(UserError, match="init"):
        read_recipe("classify", ["finetune.freeze=encoder.*"])
