"""`load_run`: every kind of folder gives the same model, or a one-line error."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.exchange.folders import FAMILIES, saved
from torch import Tensor

import manyheads
from manyheads.config import dump, to_toml
from manyheads.errors import DataError, UserError
from manyheads.exchange.folder import write_huggingface
from manyheads.exchange.huggingface import import_model
from manyheads.loading import load_run, load_torch_run, run_of
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.run import Run, save_run
from manyheads.tokenizer.train import Bpe

ENCODERS = ("bert", "roberta", "electra", "distilbert")
Folder = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    cache: dict[str, tuple[Path, Any]] = {}

    def find(family: str) -> tuple[Path, Any]:
        if family not in cache:
            cache[family] = saved(tmp_path_factory.mktemp(family), family)
        return cache[family]

    return find


@pytest.fixture
def copy(folders: Folder, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a folder, to damage the copy."""
    return lambda family: shutil.copytree(folders(family)[0], tmp_path / "broken")


def import_to(folder: Path, out: Path) -> Path:
    """The run folder `out`, made from a Hugging Face folder."""
    imported = import_model(folder)
    save_run(run_of(imported), imported.tokenizer, imported.model, out)
    return out


def logits(family: str, theirs: Any, ours: Any) -> tuple[Tensor, Tensor]:
    """The logits of the transformers model and of ours for the same random input."""
    with torch.no_grad():
        if family == "vit":
            images = torch.randn(2, 3, 8, 8)
            return theirs(images).logits, ours(images)
        words = torch.randint(6, 60, (2, 9))
        if isinstance(getattr(ours, "model", ours), Seq2Seq):
            target = torch.randint(6, 60, (2, 5))
            return theirs(words, decoder_input_ids=target).logits, ours(words, target)
        return theirs(words).logits, ours(words)


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_folder_and_imported_run_are_the_same_model(
    family: str, folders: Folder, tmp_path: Path
) -> None:
    folder, theirs = folders(family)
    run = import_to(folder, tmp_path / "run")
    models: list[Any] = [
        manyheads.load(folder),
        manyheads.load(str(run)),
        load_torch_run(run).model,
        load_run(run).model,  # type: ignore[attr-defined]
        manyheads.from_huggingface(folder),
    ]
    torch.manual_seed(1)
    expected, actual = logits(family, theirs, models[0])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for model in models[1:]:
        assert not model.training
        torch.manual_seed(1)
        assert torch.equal(logits(family, theirs, model)[1], actual)
    assert models[0].run == models[1].run == load_run(run).run
    back = manyheads.to_huggingface(models[1])
    assert type(back) is type(theirs)
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        if family not in ENCODERS or name == "pad_token_id":
            assert getattr(back.config, name, None) == getattr(theirs.config, name, None), name
    if family != "vit":
        assert models[0].tokenizer.to_json() == models[1].tokenizer.to_json()


def test_a_run_can_be_moved(folders: Folder, tmp_path: Path) -> None:
    run = import_to(folders("bert")[0], tmp_path / "here")
    before = load_run(run).encoder().embed(["a dog"])
    shutil.move(run, tmp_path / "there")
    assert (load_run(tmp_path / "there").encoder().embed(["a dog"]) == before).all()


def test_loading_a_run_samples_no_weights(folders: Folder, tmp_path: Path) -> None:
    """Initialising a large model takes longer than reading its weights."""
    folder = import_to(folders("bart")[0], tmp_path)
    before = torch.get_rng_state()
    load_torch_run(folder)
    assert torch.equal(before, torch.get_rng_state())


def test_float64_weights_are_imported_exactly(copy: Callable[[str], Path], tmp_path: Path) -> None:
    for number, family in enumerate(("marian", "t5", "roberta")):
        folder = copy(family).rename(tmp_path / family)
        weights = load_file(folder / "model.safetensors")
        fine = {name: x.double() + 1e-10 for name, x in weights.items()}
        save_file(fine, folder / "model.safetensors", {"format": "pt"})
        run = import_to(folder, tmp_path / str(number))
        there, here = manyheads.load(folder).state_dict(), load_torch_run(run).model.state_dict()
        assert {x.dtype for x in here.values()} == {torch.float64}
        assert all(torch.equal(here[name], there[name]) for name in there)
        assert all(x.dtype == torch.float64 for x in load_torch_run(run).model.buffers())


def test_config_of_an_exported_folder_describes_its_weights(tmp_path: Path) -> None:
    """Marian has sinusoidal positions as [sin cos] halves, ours alternate: the export differs."""
    tokenizer = Bpe(vocab_size=270).train(["a dog"])
    sizes: Any = {"dim": 16, "layers": 1, "heads": 2, "ffn_dim": 16, "max_length": 20}
    config = Seq2SeqConfig(vocab_size=tokenizer.vocab_size, **sizes)
    run = Run(data=None, tokens=None, model=config)
    model = config.build().eval()
    write_huggingface(model, tokenizer, run.decode, tmp_path / "out")
    (tmp_path / "out" / "run.toml").write_text(to_toml(dump(run)))
    loaded: Any = manyheads.load(tmp_path / "out")
    assert loaded.config != config
    assert loaded.run == dataclasses.replace(run, model=loaded.config)


# --- unsupported operations ---


@pytest.mark.parametrize(
    ("family", "operation", "message"),
    [
        ("bert", "translator", "holds a bert model, but only an encoder–decoder translates"),
        ("bert", "generator", "only a decoder-only model continues texts"),
        ("gpt2", "translator", "holds a gpt model"),
        ("t5", "generator", "holds a seq2seq model"),
        ("vit", "encoder", "holds an image model, which reads no text"),
        ("bert", "labeller", "only a vit model labels pictures"),
        ("vit", "translator", "holds a vit model"),
    ],
)
def test_unsupported_operations_are_refused_in_one_line(
    family: str, operation: str, message: str, folders: Folder
) -> None:
    opened = load_run(folders(family)[0])
    with pytest.raises(UserError, match=message) as raised:
        getattr(opened, operation)()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "operation"), [("bert", "encoder"), ("gpt2", "generator"), ("t5", "translator")]
)
def test_a_folder_without_a_tokenizer_loads_but_takes_no_text(
    family: str, operation: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(family)
    (folder / "tokenizer.json").unlink()
    assert manyheads.load(folder).model.tokenizer is None  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"has no tokenizer.json"):
        getattr(load_run(folder), operation)()


# --- damaged folders ---


def test_a_tokenizer_of_another_model_is_refused(
    folders: Folder, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy("bert")
    run = import_to(folder, tmp_path / "run")
    for path in (folder, run):
        shutil.copy(folders("roberta")[0] / "tokenizer.json", path)
        if path == run:
            with pytest.raises(DataError, match="checksum"):
                load_run(run)
            settings = (run / "run.toml").read_text().splitlines(keepends=True)
            (run / "run.toml").write_text(
                "".join(settings[1:])
            )  # without the checksum line, as the message advises
        with pytest.raises(DataError, match=r"has \d+ tokens, the model \d+: they do not belong"):
            load_run(path)
