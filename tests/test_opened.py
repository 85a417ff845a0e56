"""Folders opened: the same model whatever the folder, or one line on what is wrong with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exchange.folders import FAMILIES, saved
from torch import Tensor

import manyheads
from manyheads.errors import BadData, Mistake
from manyheads.exchange.ctranslate2 import write_ctranslate2
from manyheads.exchange.folder import write_huggingface
from manyheads.exchange.huggingface import receive
from manyheads.models.seq2seq import Seq2Seq
from manyheads.opened import TorchRun, decode_of, notes_of, open_any, open_run, run_of
from manyheads.run import save_run

ENCODERS = ("bert", "roberta", "electra", "distilbert")
Folder = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    known: dict[str, tuple[Path, Any]] = {}

    def find(family: str) -> tuple[Path, Any]:
        if family not in known:
            known[family] = saved(tmp_path_factory.mktemp(family), family)
        return known[family]

    return find


@pytest.fixture
def copy(folders: Folder, tmp_path: Path) -> Callable[[str], Path]:
    """A folder to break."""
    return lambda family: shutil.copytree(folders(family)[0], tmp_path / "broken")


def imported(folder: Path, out: Path) -> Path:
    arrival = receive(folder)
    save_run(run_of(arrival), arrival.tokenizer, arrival.model, out)
    return out


def logits(family: str, theirs: Any, ours: Any) -> tuple[Tensor, Tensor]:
    """What the two say of the same input."""
    with torch.no_grad():
        if family == "vit":
            images = torch.randn(2, 3, 8, 8)
            return theirs(images).logits, ours(images)
        words = torch.randint(6, 60, (2, 9))
        if isinstance(ours, Seq2Seq):
            written = torch.randint(6, 60, (2, 5))
            return theirs(words, decoder_input_ids=written).logits, ours(words, written)
        return theirs(words).logits, ours(words)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_and_the_run_made_of_it_are_one_model(
    family: str, folders: Folder, tmp_path: Path
) -> None:
    folder, theirs = folders(family)
    run = imported(folder, tmp_path / "run")
    models = [
        manyheads.load(folder),
        manyheads.load(str(run)),
        open_run(run).model,
        open_any(run).model,  # type: ignore[attr-defined]
        manyheads.from_huggingface(folder),
    ]
    torch.manual_seed(1)
    wanted, said = logits(family, theirs, models[0])
    torch.testing.assert_close(said, wanted, atol=1e-5, rtol=1e-5)
    for model in models[1:]:
        assert not model.training
        torch.manual_seed(1)
        assert torch.equal(logits(family, theirs, model)[1], said)
    assert models[0].run == models[1].run == open_any(run).run
    back = manyheads.to_huggingface(models[1])
    assert type(back) is type(theirs)
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        kept = family not in ENCODERS or name == "pad_token_id"
        ours = getattr(back.config, name, None)
        assert not kept or ours == getattr(theirs.config, name, None), name
    tokenizers = [model.tokenizer for model in models[:2]]
    if family == "vit":
        assert tokenizers == [None, None]
    else:
        assert tokenizers[0].to_json() == tokenizers[1].to_json()


def test_a_run_can_be_moved(folders: Folder, tmp_path: Path) -> None:
    run = imported(folders("bert")[0], tmp_path / "here")
    before = open_any(run).encoder().embed(["a dog"])
    shutil.move(run, tmp_path / "there")
    assert (open_any(tmp_path / "there").encoder().embed(["a dog"]) == before).all()


# --- how it writes ---


@pytest.mark.parametrize(
    ("told", "ours"),
    [
        ({}, {"beam": 1, "penalty": "length", "length_penalty": 1.0}),
        ({"num_beams": 4, "length_penalty": 2.0}, {"beam": 4, "length_penalty": 2.0}),
        ({"early_stopping": True}, {"stopping": "beam-ended"}),
        ({"early_stopping": False}, {"stopping": "none-better-now"}),
        ({"early_stopping": "never"}, {"stopping": "none-better-ever"}),
        ({"forced_bos_token_id": 3}, {"first": 3}),
        ({"bad_words_ids": [[4], [5, 6]], "suppress_tokens": [7]}, {"banned": (4, 7)}),
        ({"min_new_tokens": 3}, {"shortest": 3}),
        ({"eos_token_id": [1, 9]}, {"end": 1}),
    ],
)
def test_a_model_writes_as_it_is_told_there(
    told: dict[str, Any], ours: dict[str, Any], copy: Callable[[str], Path]
) -> None:
    folder = copy("marian")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **told}))
    decode = decode_of(receive(folder))
    assert {name: getattr(decode, name) for name in ours} == ours


def test_the_frame_of_a_source_is_the_tokenizers(folders: Folder) -> None:
    decode = decode_of(receive(folders("bart")[0]))
    assert (decode.source_start, decode.start, decode.end) == (0, 2, 2)
    decode = decode_of(receive(folders("t5")[0]))
    assert (decode.source_start, decode.start, decode.end) == (None, 0, 1)


def test_what_is_asked_for_there_and_not_done_here_is_said(copy: Callable[[str], Path]) -> None:
    folder = copy("marian")
    assert notes_of(receive(folder)) == []
    path = folder / "generation_config.json"
    told = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 0, "eos_token_id": [1, 5]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **told}))
    (folder / "tokenizer.json").unlink()
    notes = notes_of(receive(folder))
    assert len(notes) == 3
    assert "repetition_penalty=1.3" in notes[0]
    assert "any of the tokens [1, 5], here with 1 alone" in notes[1]
    assert "tokenizer.json" in notes[2]


def test_a_tokenizer_without_an_end_is_told_of(copy: Callable[[str], Path]) -> None:
    folder = copy("bart")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    [note] = notes_of(receive(folder))
    assert "no end" in note
    [(ids, _)] = open_any(folder).encoder().tokenizer.framed([""])
    assert ids == [2]  # vectors are of what a translation reads


def test_settings_of_writing_come_back_from_an_exported_folder(
    folders: Folder, tmp_path: Path
) -> None:
    opened = open_any(folders("bart")[0])
    assert isinstance(opened, TorchRun)
    decode = opened.decode(beam=3, length_penalty=2.0, shortest=2, banned=(5, 7), first=9)
    write_huggingface(opened.model, opened.tokenizer, decode, tmp_path / "out")
    assert decode_of(receive(tmp_path / "out")) == decode


# --- what a folder cannot ---


@pytest.mark.parametrize(
    ("family", "asked", "part"),
    [
        ("bert", "translator", "holds a bert model: what translates is an encoder–decoder"),
        ("bert", "generator", "what continues texts is a decoder-only model"),
        ("gpt2", "translator", "holds a gpt model"),
        ("t5", "generator", "holds a seq2seq model"),
        ("vit", "encoder", "holds a model of images, which no command reads yet"),
        ("vit", "translator", "holds a vit model"),
    ],
)
def test_what_a_model_is_not_for_is_said(
    family: str, asked: str, part: str, folders: Folder
) -> None:
    opened = open_any(folders(family)[0])
    with pytest.raises(Mistake, match=part) as raised:
        getattr(opened, asked)()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "asked"), [("bert", "encoder"), ("gpt2", "generator"), ("t5", "translator")]
)
def test_a_folder_without_a_tokenizer_holds_a_model_and_reads_no_text(
    family: str, asked: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(family)
    (folder / "tokenizer.json").unlink()
    assert manyheads.load(folder).tokenizer is None
    with pytest.raises(Mistake, match=r"has no tokenizer.json: put the model's own there"):
        getattr(open_any(folder), asked)()


def test_an_exported_folder_only_writes(folders: Folder, tmp_path: Path) -> None:
    folder = folders("gpt2")[0]
    opened = open_any(folder)
    assert isinstance(opened, TorchRun)
    out = tmp_path / "ctranslate2"
    save_run(opened.run, opened.own_tokenizer, opened.model, out)
    (out / "model.safetensors").unlink()
    write_ctranslate2(opened.model, opened.tokenizer, out)  # type: ignore[arg-type]
    exported = open_any(out)
    assert exported.run == opened.run
    assert exported.generator().vocabulary == opened.generator().vocabulary
    with pytest.raises(Mistake, match="gives no vectors or labels: use the run"):
        exported.encoder()
    with pytest.raises(Mistake, match="load the run itself"):
        manyheads.load(out)


# --- folders that are wrong ---


def test_a_tokenizer_of_another_model_is_refused(
    folders: Folder, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy("bert")
    run = imported(folder, tmp_path / "run")
    for place in (folder, run):
        shutil.copy(folders("roberta")[0] / "tokenizer.json", place)
        with pytest.raises(BadData, match=r"has \d+ tokens, the model \d+: they do not belong"):
            open_any(place)


def test_a_folder_whose_settings_do_not_say_what_it_is(copy: Callable[[str], Path]) -> None:
    folder = copy("bert")
    settings = json.loads((folder / "config.json").read_text())
    del settings["model_type"]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(BadData, match="no model_type"):
        open_any(folder)


def test_a_folder_that_is_not_there_or_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="there is no run folder"):
        open_any(tmp_path / "nowhere")
    with pytest.raises(BadData, match="is no run folder"):
        open_any(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(BadData, match="is no run folder"):
        open_any(tmp_path)


def test_weights_of_another_model_are_refused(folders: Folder, tmp_path: Path) -> None:
    one = imported(folders("bert")[0], tmp_path / "one")
    other = imported(folders("electra")[0], tmp_path / "other")
    shutil.copy(one / "model.safetensors", other)
    with pytest.raises(BadData, match="belongs to another model"):
        open_any(other)
