"""Generation settings of Hugging Face folders: imported, exported again, refused if broken."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.exchange.folders import saved
from tests.test_cli import call
from tokenizers.processors import TemplateProcessing

from manyheads.decode.beam import Decode
from manyheads.errors import DataError, UserError
from manyheads.exchange.folder import (
    decode_from_hf,
    special_token_ids,
    their_decoding,
    unsupported_generation,
    write_huggingface,
)
from manyheads.exchange.huggingface import import_model
from manyheads.loading import load_run

FILES = ["config.json", "generation_config.json"]
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    known: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in known:
            known[family] = saved(tmp_path_factory.mktemp(family), family)[0]
        return known[family]

    return find


@pytest.fixture
def copied(folders: Folder, tmp_path: Path) -> Folder:
    """A folder to change."""
    return lambda family: shutil.copytree(folders(family), tmp_path / "changed")


def change(folder: Path, file: str = "generation_config.json", **settings: Any) -> Path:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def change_frame(folder: Path, template: str) -> Path:
    """Change the special tokens that the tokenizer adds to a text."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = sorted({name for name in template.split() if name != "$A"})
    special = [(name, inner.token_to_id(name)) for name in names]
    inner.post_processor = TemplateProcessing(single=template, special_tokens=special)
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {"beam": 1, "penalty": "length", "length_penalty": 1.0}),
        ({"num_beams": 4, "length_penalty": 2.0}, {"beam": 4, "length_penalty": 2.0}),
        ({"early_stopping": True}, {"stopping": "early"}),
        ({"early_stopping": False}, {"stopping": "heuristic"}),
        ({"early_stopping": "never"}, {"stopping": "exact"}),
        ({"forced_bos_token_id": 3}, {"forced_bos": 3}),
        ({"bad_words_ids": [[4], [5, 6]], "suppress_tokens": [7]}, {"suppress_tokens": (4, 7)}),
        ({"min_length": 3}, {"min_length": 2}),
        ({"min_length": 0}, {"min_length": 0}),
        ({"min_length": 9, "min_new_tokens": 3}, {"min_length": 3}),
        ({"length_penalty": None, "num_beams": None, "early_stopping": None}, {"beam": 1}),
        ({"eos_token_id": [1, 9]}, {"end": 1}),
    ],
)
def test_settings_are_imported(
    theirs: dict[str, Any], ours: dict[str, Any], copied: Folder
) -> None:
    decode = decode_from_hf(import_model(change(copied("marian"), **theirs)))
    assert {name: getattr(decode, name) for name in ours} == ours


def test_special_tokens_of_a_source_are_the_tokenizers(folders: Folder) -> None:
    decode = decode_from_hf(import_model(folders("bart")))
    assert (decode.source_start, decode.start, decode.end) == (0, 2, 2)
    decode = decode_from_hf(import_model(folders("t5")))
    assert (decode.source_start, decode.start, decode.end) == (None, 0, 1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 0}, ["repetition_penalty"]),
        ({"bad_words_ids": [[4], [5, 6]]}, ["bad_words_ids"]),
        ({"begin_suppress_tokens": [4], "do_sample": True}, ["begin_suppress_tokens", "do_sample"]),
        ({"eos_token_id": [1, 5]}, ["eos_token_id"]),
        ({"bad_words_ids": [[4]], "do_sample": False, "temperature": 0.7}, []),
        ({"begin_suppress_tokens": [], "repetition_penalty": None, "guidance_scale": 1}, []),
    ],
)
@pytest.mark.parametrize("file", FILES)
def test_settings_without_effect_are_reported(
    settings: dict[str, Any], named: list[str], file: str, copied: Folder
) -> None:
    """In one line that names them."""
    folder = change(copied("marian"), **dict.fromkeys(settings))
    notes = unsupported_generation(import_model(change(folder, file, **settings)))
    assert len(notes) == bool(named)
    assert all(name in note for note in notes for name in named)


def test_the_prompt_counts_in_their_minimum_length(copied: Folder) -> None:
    imported = import_model(change(copied("gpt2"), min_length=12))
    assert decode_from_hf(imported).min_length == 0
    assert "min_length" in unsupported_generation(imported)[0]


def test_notes_are_printed_once(copied: Folder) -> None:
    folder = change(copied("gpt2"), repetition_penalty=1.3)
    words = ("--prompt", "a", "--max-new-tokens", "2")
    code, _, printed = call("generate", folder, *words)
    assert (code, printed.count("repetition_penalty")) == (0, 1)
    run = folder.parent / "run"
    assert "repetition_penalty" in call("import", folder, "--out", run)[2]
    assert call("generate", run, *words)[2] == ""


def test_a_source_gets_an_end_without_a_frame(copied: Folder) -> None:
    folder = copied("bart")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    [(ids, _)] = load_run(folder).encoder().tokenizer.framed([""])
    assert ids == [2]  # vectors are of what a translation reads


def test_exported_settings_are_imported_again(folders: Folder, tmp_path: Path) -> None:
    """And the exported model is left unchanged."""
    opened = load_run(folders("bart"))
    before = {name: str(value) for name, value in vars(opened.model).items()}
    decode = opened.decode(
        beam=3, length_penalty=2.0, min_length=2, suppress_tokens=(5, 7), forced_bos=9
    )
    write_huggingface(opened.model, opened.tokenizer, decode, tmp_path / "out")
    assert decode_from_hf(import_model(tmp_path / "out")) == decode
    assert {name: str(value) for name, value in vars(opened.model).items()} == before


def test_settings_that_change_in_transformers(folders: Folder, tmp_path: Path) -> None:
    opened = load_run(folders("bart"))
    ours = Decode(start=2, end=2)
    theirs = their_decoding(ours, opened.model)
    assert theirs == {"penalty": "length", "at_limit": "force-eos-free"}
    write_huggingface(opened.model, opened.tokenizer, ours, tmp_path / "out")
    back = decode_from_hf(import_model(tmp_path / "out"))
    assert {name: getattr(back, name) for name in theirs} == theirs
    assert back.length_penalty == ours.length_penalty
    greedy = dataclasses.replace(ours, beam=1)
    assert their_decoding(greedy, opened.model)["length_penalty"] == 1.0


def test_special_tokens_are_those_of_decode(folders: Folder) -> None:
    opened = load_run(folders("bart"))
    decode = opened.decode(start=4, end=5, forced_bos=9)
    assert special_token_ids(opened.tokenizer, decode, opened.model) == {
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 5,
        "decoder_start_token_id": 4,
        "forced_bos_token_id": 9,
        "forced_eos_token_id": 5,
    }
    truncated = dataclasses.replace(decode, at_limit="truncate", forced_bos=None)
    ids = special_token_ids(opened.tokenizer, truncated, opened.model)
    assert "forced_eos_token_id" not in ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("length_penalty", "x"), ("early_stopping", [1]), ("bad_words_ids", [["a"]])),
        *(("min_length", "a\nb"), ("num_beams", 0), ("eos_token_id", [[1]])),
    ],
)
@pytest.mark.parametrize("file", FILES)
def test_broken_settings_are_refused(name: str, value: Any, file: str, copied: Folder) -> None:
    folder = copied("marian")
    [other] = {*FILES} - {file}
    change(folder, other, **{name: None})
    with pytest.raises(DataError) as raised:
        decode_from_hf(import_model(change(folder, file, **{name: value})))
    line = str(raised.value)
    assert name in line or "decode." in line
    assert "\n" not in line


@pytest.mark.parametrize("template", ["<unk> <pad> $A </s> <unk>", "$A </s> <pad>", "$A <pad>"])
def test_other_frames_of_a_source_are_refused(template: str, copied: Folder) -> None:
    folder = change_frame(copied("marian"), template)
    with pytest.raises(UserError, match=template.split()[-1]):
        load_run(folder)


def test_an_encoder_needs_its_special_tokens(copied: Folder) -> None:
    folder = copied("bert")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    [(ids, _)] = load_run(folder).encoder().tokenizer.framed([""])
    assert ids == [2, 3]  # [CLS] and [SEP]
    path.write_text(path.read_text().replace("[CLS]", "[one]").replace("[SEP]", "[two]"))
    opened = load_run(folder)
    with pytest.raises(UserError, match=r"\[CLS\] and \[SEP\]"):
        opened.encoder()
    write_huggingface(opened.model, opened.tokenizer, Decode(), folder.parent / "out")
    assert not any(load_run(folder.parent / "out").tokenizer.frame())
