"""Settings of writing, theirs and ours: taken as they are meant, given back, refused if broken."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.exchange.folders import saved
from tests.test_cli import call, mistake
from tokenizers.processors import TemplateProcessing

from manyheads.decode.beam import Decode
from manyheads.errors import DataError, UserError
from manyheads.exchange.folder import (
    changed_decoding,
    decode_from_hf,
    unsupported_generation,
    special_token_ids,
    write_huggingface,
)
from manyheads.exchange.huggingface import import_model
from manyheads.loading import TorchRun, load_run, import_notes

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


def tell(folder: Path, file: str = "generation_config.json", **settings: Any) -> Path:
    """Change some settings of a file."""
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def frame(folder: Path, template: str) -> Path:
    """Change what the tokenizer puts around a text."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = {name for name in template.split() if name != "$A"}
    marks = [(name, inner.token_to_id(name)) for name in sorted(names)]
    inner.post_processor = TemplateProcessing(single=template, special_tokens=marks)
    inner.save(str(folder / "tokenizer.json"))
    return folder


# --- how it writes ---


@pytest.mark.parametrize(
    ("told", "ours"),
    [
        ({}, {"beam": 1, "penalty": "length", "length_penalty": 1.0}),
        ({"num_beams": 4, "length_penalty": 2.0}, {"beam": 4, "length_penalty": 2.0}),
        ({"early_stopping": True}, {"stopping": "early"}),
        ({"early_stopping": False}, {"stopping": "heuristic"}),
        ({"early_stopping": "never"}, {"stopping": "exact"}),
        ({"forced_bos_token_id": 3}, {"forced_bos": 3}),
        ({"bad_words_ids": [[4], [5, 6]], "suppress_tokens": [7]}, {"suppress_tokens": (4, 7)}),
        ({"min_new_tokens": 3}, {"min_length": 3}),
        ({"min_length": 3}, {"min_length": 2}),
        ({"min_length": 1}, {"min_length": 0}),
        ({"min_length": 0}, {"min_length": 0}),
        ({"min_length": 9, "min_new_tokens": 3}, {"min_length": 3}),
        ({"length_penalty": None, "num_beams": None, "early_stopping": None}, {"beam": 1}),
        ({"eos_token_id": [1, 9]}, {"end": 1}),
    ],
)
def test_a_model_writes_as_it_is_told_there(
    told: dict[str, Any], ours: dict[str, Any], copy: Callable[[str], Path]
) -> None:
    decode = decode_from_hf(import_model(tell(copy("marian"), **told)))
    assert {name: getattr(decode, name) for name in ours} == ours


def test_the_frame_of_a_source_is_the_tokenizers(folders: Folder) -> None:
    decode = decode_from_hf(import_model(folders("bart")[0]))
    assert (decode.source_start, decode.start, decode.end) == (0, 2, 2)
    decode = decode_from_hf(import_model(folders("t5")[0]))
    assert (decode.source_start, decode.start, decode.end) == (None, 0, 1)


def test_what_is_asked_for_there_and_not_done_here_is_said(copy: Callable[[str], Path]) -> None:
    folder = copy("marian")
    assert import_notes(import_model(folder)) == []
    tell(folder, repetition_penalty=1.3, no_repeat_ngram_size=0, eos_token_id=[1, 5])
    (folder / "tokenizer.json").unlink()
    notes = import_notes(import_model(folder))
    assert len(notes) == 3
    assert "repetition_penalty=1.3" in notes[0]
    assert "any of the tokens [1, 5], here with 1 alone" in notes[1]
    assert "tokenizer.json" in notes[2]


@pytest.mark.parametrize(
    ("told", "part"),
    [
        ({"bad_words_ids": [[4], [5, 6]]}, "bans several tokens in a row (bad_words_ids)"),
        ({"begin_suppress_tokens": [4]}, "begin_suppress_tokens=[4]"),
        ({"forced_decoder_ids": [[1, 4]]}, "forced_decoder_ids=[[1, 4]]"),
        ({"exponential_decay_length_penalty": [3, 1.1]}, "exponential_decay_length_penalty=[3"),
        ({"do_sample": True, "top_p": 0.9}, "drawn (top_p=0.9): translate searches unless told"),
        ({"do_sample": True}, "drawn (as they are)"),
        ({"bad_words_ids": [[4]], "do_sample": False, "temperature": 0.7}, None),
        ({"begin_suppress_tokens": [], "repetition_penalty": None, "guidance_scale": 1}, None),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_note_is_one_line_that_names_the_file(
    told: dict[str, Any], part: str | None, file: str, copy: Callable[[str], Path]
) -> None:
    notes = unsupported_generation(import_model(tell(copy("marian"), file, **told)))
    assert len(notes) == (part is not None)
    for note in notes:
        assert note.startswith(f"{file} ")
        assert str(part) in note
        assert "\n" not in note


def test_null_leaves_a_setting_to_the_other_file(copy: Callable[[str], Path]) -> None:
    folder = tell(copy("marian"), "config.json", repetition_penalty=1.3, num_beams=3)
    tell(folder, repetition_penalty=None, num_beams=None)
    imported = import_model(folder)
    assert decode_from_hf(imported).beam == 3
    [note] = unsupported_generation(imported)
    assert note.startswith("config.json asks for repetition_penalty=1.3")


def test_a_text_counts_its_prompt_there(copy: Callable[[str], Path]) -> None:
    imported = import_model(tell(copy("gpt2"), min_length=12))
    assert decode_from_hf(imported).min_length == 0
    assert "min_length=12" in unsupported_generation(imported)[0]


def test_notes_are_also_said_where_a_folder_is_used_as_it_is(copy: Callable[[str], Path]) -> None:
    folder = tell(copy("gpt2"), repetition_penalty=1.3, do_sample=True)
    words = ("--prompt", "a", "--max-new-tokens", "2")
    code, _, said = call("generate", folder, *words)
    assert code == 0
    assert said.count("repetition_penalty=1.3") == said.count("generate's options say how") == 1
    run = folder.parent / "run"
    assert "repetition_penalty=1.3" in call("import", folder, "--out", run)[2]
    assert call("generate", run, *words)[2] == ""  # it has been said


def test_a_tokenizer_without_an_end_is_told_of(copy: Callable[[str], Path]) -> None:
    folder = copy("bart")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    [note] = import_notes(import_model(folder))
    assert "no end" in note
    [(ids, _)] = load_run(folder).encoder().tokenizer.framed([""])
    assert ids == [2]  # vectors are of what a translation reads


def test_settings_of_writing_come_back_from_an_exported_folder(
    folders: Folder, tmp_path: Path
) -> None:
    opened = load_run(folders("bart")[0])
    assert isinstance(opened, TorchRun)
    decode = opened.decode(
        beam=3, length_penalty=2.0, min_length=2, suppress_tokens=(5, 7), forced_bos=9
    )
    write_huggingface(opened.model, opened.tokenizer, decode, tmp_path / "out")
    assert decode_from_hf(import_model(tmp_path / "out")) == decode


def test_an_export_for_transformers_says_how_it_ranks_otherwise(
    folders: Folder, tmp_path: Path
) -> None:
    opened = load_run(folders("bart")[0])
    assert isinstance(opened, TorchRun)
    ours = Decode(start=2, end=2)
    assert write_huggingface(opened.model, opened.tokenizer, ours, tmp_path / "out") == [
        "decode.penalty=length in place of gnmt",
        "decode.at_limit=force-eos-free in place of force-eos",
    ]
    back = decode_from_hf(import_model(tmp_path / "out"))
    assert (back.penalty, back.length_penalty, back.at_limit) == ("length", 0.6, "force-eos-free")
    same = dataclasses.replace(ours, penalty="length", at_limit="truncate")
    assert changed_decoding(same, opened.model) == []
    greedy = dataclasses.replace(same, beam=1)
    assert changed_decoding(greedy, opened.model) == ["decode.length_penalty=1.0 in place of 0.6"]
    plain = dataclasses.replace(ours, length_penalty=0.0, at_limit="truncate")
    assert changed_decoding(plain, opened.model) == []
    gpt, bert = (load_run(folders(family)[0]).model for family in ("gpt2", "bert"))  # type: ignore[attr-defined]
    assert "decode.at_limit=truncate in place of force-eos" in changed_decoding(ours, gpt)
    assert changed_decoding(ours, bert) == []


def test_a_model_that_is_exported_stays_as_it_is(folders: Folder, tmp_path: Path) -> None:
    model = import_model(folders("bart")[0]).model
    before = {name: str(value) for name, value in vars(model).items()}
    tokenizer = load_run(folders("bart")[0]).tokenizer
    write_huggingface(model, tokenizer, Decode(start=2, end=2), tmp_path / "out")
    assert {name: str(value) for name, value in vars(model).items()} == before


def test_special_tokens_are_those_that_are_written_with(folders: Folder) -> None:
    opened = load_run(folders("bart")[0])
    assert isinstance(opened, TorchRun)
    decode = opened.decode(start=4, end=5, forced_bos=9)
    assert special_token_ids(opened.tokenizer, decode, opened.model) == {
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 5,
        "decoder_start_token_id": 4,
        "forced_bos_token_id": 9,
        "forced_eos_token_id": 5,
    }
    cut = dataclasses.replace(decode, at_limit="truncate", forced_bos=None)
    assert "forced_eos_token_id" not in special_token_ids(opened.tokenizer, cut, opened.model)


# --- what is broken ---


@pytest.mark.parametrize(
    ("told", "part"),
    [
        ({"length_penalty": "x"}, "length_penalty=x: it must be a number"),
        ({"length_penalty": True}, "length_penalty=True: it must be a number"),
        ({"length_penalty": 10**400}, "it must be a number"),
        ({"length_penalty": 9}, "decode.length_penalty=9.0 must be from -5 to 5"),
        ({"early_stopping": [1]}, "early_stopping=[1]: it must be one of False, True, never"),
        ({"early_stopping": 1}, "early_stopping=1: it must be one of"),
        ({"bad_words_ids": 5}, "bad_words_ids=5: it must be a list of lists of tokens"),
        ({"bad_words_ids": [5]}, "bad_words_ids=[5]: it must be a list of lists"),
        ({"bad_words_ids": [["a"]]}, "among the model's tokens"),
        ({"suppress_tokens": [[4]]}, "suppress_tokens=[[4]]: it must be among"),
        ({"min_length": "a"}, "min_length=a: it must be a whole number"),
        ({"min_new_tokens": 1.5}, "min_new_tokens=1.5: it must be a whole number"),
        ({"num_beams": "4"}, "num_beams=4: it must be a whole number"),
        ({"num_beams": 0}, "decode.beam=0 must be from 1"),
        ({"eos_token_id": 100000}, "eos_token_id=100000: it must be among the model's tokens, 0"),
        ({"eos_token_id": [1, 100000]}, "among the model's tokens"),
        ({"eos_token_id": True}, "eos_token_id=True: it must be among the model's tokens"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id=-1: it must be among"),
        ({"decoder_start_token_id": "0"}, "decoder_start_token_id=0: it must be among"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_settings_that_are_broken_are_one_line(
    told: dict[str, Any], part: str, file: str, copy: Callable[[str], Path]
) -> None:
    folder = copy("marian")
    other = {"config.json", "generation_config.json"} - {file}
    tell(folder, *other, **dict.fromkeys(told))
    with pytest.raises(DataError) as raised:
        decode_from_hf(import_model(tell(folder, file, **told)))
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_broken_settings_are_an_exit_code(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tell(copy("marian"), min_length="a\nb" * 99)
    assert "min_length=a b" in mistake("import", folder, "--out", tmp_path / "run", code=3)
    assert "min_length=a b" in mistake("translate", folder, stdin=b"a dog", code=3)


@pytest.mark.parametrize("template", ["<unk> <pad> $A </s> <unk>", "$A </s> <pad>", "$A <pad>"])
def test_a_frame_of_a_source_that_would_be_cut_is_refused(
    template: str, copy: Callable[[str], Path]
) -> None:
    folder = frame(copy("marian"), template)
    shown = template.replace("$A", "TEXT")
    with pytest.raises(UserError, match=f"frames a source as {shown}: only one token before it"):
        load_run(folder)


def test_an_encoder_without_a_frame_reads_nothing(copy: Callable[[str], Path]) -> None:
    folder = copy("bert")
    path = folder / "tokenizer.json"
    layout = {**json.loads(path.read_text()), "post_processor": None}
    path.write_text(json.dumps(layout))
    [(ids, _)] = load_run(folder).encoder().tokenizer.framed([""])
    assert ids == [2, 3]  # it has the tokens that BERT reads
    text = path.read_text().replace("[CLS]", "[one]").replace("[SEP]", "[two]")
    path.write_text(text)
    opened = load_run(folder)
    assert isinstance(opened, TorchRun)
    with pytest.raises(UserError, match=r"has no \[CLS\] and \[SEP\]"):
        opened.encoder()
    write_huggingface(opened.model, opened.tokenizer, Decode(), folder.parent / "out")
    assert not any(load_run(folder.parent / "out").tokenizer.frame())
