"""The translation benchmark: preparation, training, scoring and tables."""

import dataclasses
import gzip
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from manyheads.data.files import read_lines
from manyheads.errors import UserError
from manyheads.phrasebook import sentences
from manyheads.presets import TRANSFORMER_BASE
from manyheads.recipes import read_recipe

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
translations: Any = importlib.import_module("translations")

SETTINGS = """train.steps=4 train.validate_every=2 train.save_every=1 train.average_checkpoints=2
    train.log_every=2 train.batch_tokens=600 tokens.vocab_size=300 model.dim=8 model.ffn_dim=8
    model.layers=1 model.heads=2 decode.beam=2 decode.max_length_extra=1
    decode.max_length_ratio=0.5"""
TINY = SETTINGS.split()


class Normalizer:
    def __init__(self, language: str) -> None:
        self.language = language

    def normalize(self, line: str) -> str:
        assert line == line.lower()  # the literature's order: lower case comes first
        return line.replace("“", '"').replace("”", '"')


class Splitter(Normalizer):
    def tokenize(self, line: str, *, return_str: bool, escape: bool) -> str:
        assert return_str
        assert not escape
        return line.replace(".", " .").replace('"', ' " ').strip()


@pytest.fixture
def with_moses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that splits full stops and quotes off."""
    module: Any = types.ModuleType("sacremoses")
    module.MosesPunctNormalizer, module.MosesTokenizer = Normalizer, Splitter
    monkeypatch.setitem(sys.modules, "sacremoses", module)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A raw corpus under Multi30k's names."""
    path = tmp_path / "raw"
    path.mkdir()
    pairs = sentences("en-de", "train", 60)
    parts = {"train": pairs[:40], "val": pairs[40:50], "test_2016_flickr": pairs[50:]}
    for stem, part in parts.items():
        for language, side in (("en", "source"), ("de", "target")):
            text = "".join(getattr(pair, side) + "\n" for pair in part)
            (path / f"{stem}.{language}").write_text(text, "utf-8")
    return path


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.usefixtures("with_moses")
def test_prepared_files_have_the_same_names_and_lines(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (folder / "other.fr").write_text("Un chien.\n")  # of no asked language
    assert translations.main(["prepare", str(folder), str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {
        f"{stem}.{language}.gz"
        for stem in ("train", "val", "test_2016_flickr")
        for language in ("en", "de")
    }
    raw, made = read_lines(folder / "val.en"), read_lines(out / "val.en")
    assert made == [line.lower().replace(".", " .") for line in raw]
    before = (out / "val.en.gz").read_bytes()
    translations.main(["prepare", str(folder), str(out)])
    assert (out / "val.en.gz").read_bytes() == before


def test_what_cannot_be_prepared_is_refused(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    out = str(tmp_path / "out")
    for arguments, word in (
        ([str(folder), out], "pip install sacremoses"),
        ([str(folder), str(folder)], "choose another folder"),
        ([str(folder), out, "--target", "fr"], "NAME.en and NAME.fr"),
        ([str(tmp_path / "none"), out], "is not a folder"),
    ):
        assert translations.main(["prepare", *arguments]) == 2
        reported = capsys.readouterr().err
        assert word in reported
        assert reported.count("\n") == 1


def test_moses_tokens_are_those_of_its_scripts() -> None:
    """For English it also moves a full stop into the quotes."""
    pytest.importorskip("sacremoses")
    words = translations.moses("en")
    assert words("A man's T-shirt says “USA 2007”.") == 'a man \'s t-shirt says " usa 2007 . "'


@pytest.mark.usefixtures("with_moses")
def test_literature_trains_on_prepared_text_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, keep = tmp_path / "out", tmp_path / "keep"
    requested = ["--systems", "published", "--device", "cpu", "--keep", str(keep), *TINY]
    assert translations.main(["literature", str(folder), *requested]) == 2
    assert "prepare" in capsys.readouterr().err
    translations.main(["prepare", str(folder), str(out)])
    capsys.readouterr()
    assert translations.main(["literature", str(out), *requested, "--seeds", "1,2"]) == 0
    actual = rows(capsys.readouterr().out)
    assert [(row["system"], row["pair"], row["seed"]) for row in actual] == [
        ("published", "en-de", 1),
        ("published", "en-de", 2),
    ]
    for row in actual:
        assert list(row["scores"]) == ["valid", "test_2016_flickr"]
        assert all(
            item.keys() == {"bleu", "chrf", "loss", "tokenised"} for item in row["scores"].values()
        )
        assert "tok:none" in row["signature"]["tokenised"]
        assert "tok:13a" in row["signature"]["bleu"]
        assert [point["step"] for point in row["curve"]] == [2, 4]
        assert 0 < row["curve"][0]["seconds"] < row["curve"][1]["seconds"] <= row["seconds"]
        assert row["ms_a_step"] == pytest.approx(1000 * row["seconds"] / 4)
    assert actual[0]["curve"] != actual[1]["curve"]
    assert (keep / "literature-published-en-de-2" / "model.safetensors").is_file()
    runs = [str(keep / f"literature-published-en-de-{seed}") for seed in (1, 2)]
    assert translations.main(["together", *runs, "--device", "cpu"]) == 0
    [both] = rows(capsys.readouterr().out)
    assert (both["table"], both["system"]) == ("literature", "published, 2 together")
    assert both["parameters"] == 2 * actual[0]["parameters"]
    for split, item in both["scores"].items():
        assert item.keys() == {"bleu", "chrf", "tokenised"}
        assert item["chrf"] != actual[0]["scores"][split]["chrf"]
    assert (
        translations.main(["literature", str(out), *requested]) == 1
    )  # a kept run is not measured
    assert "another --keep" in capsys.readouterr().err


def test_raw_text_is_scored_without_moses_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    requested = ["--pairs", "de-en", "--systems", "ours", "--device", "cpu", *TINY]
    assert translations.main(["raw", str(folder), *requested]) == 0
    said = capsys.readouterr()
    (row,) = rows(said.out)
    assert row["pair"] == "de-en"
    assert row["signature"].keys() == {"bleu", "chrf"}
    assert "sacremoses" in said.err


def test_tokenised_bleu_is_of_words_between_spaces() -> None:
    expected = ["a dog sees a small tree .", "two men walk ."]
    assert translations.tokenised(expected, expected, None)[0] == pytest.approx(100)
    joined = [line.replace(" .", ".") for line in expected]
    assert translations.tokenised(joined, expected, None)[0] < 99
    words = translations.tokenised(joined, expected, lambda line: line.replace(" .", "."))
    assert words[0] == pytest.approx(100)


def test_published_is_what_the_paper_trains() -> None:
    run = read_recipe("translation", translations.PUBLISHED.split())
    model, train = run.model, run.train
    assert (model.dim, model.layers, model.heads, model.ffn_dim) == (128, 4, 4, 256)
    assert (model.dropout, model.norm.placement, model.position.kind) == (0.3, "post", "sinusoidal")
    assert (train.steps, train.warmup_steps, train.learning_rate) == (8000, 2000, 5e-3)
    assert (train.label_smoothing, train.average_checkpoints, run.decode.beam) == (0.1, 10, 5)
    assert run.tokens.vocab_size == 10_000


@pytest.mark.parametrize("name", translations.PRESETS)
def test_every_preset_is_a_recipe_of_its_own(name: str) -> None:
    published = translations.PUBLISHED.split()
    run = read_recipe("translation", [*published, *translations.PRESETS[name].split()])
    assert (run == read_recipe("translation", published)) == (name == "published")


def test_tatoeba_base_is_transformer_base() -> None:
    """Except for settings that depend on the data, and more dropout for little data."""
    settings = [*translations.TATOEBA.split(), *translations.SYSTEMS["base"].split()]
    model = read_recipe("translation", settings).model
    local = {"vocab_size": None, "dropout": 0.3, "max_length": model.max_length, "ffn_dim": 2048}
    assert model == dataclasses.replace(TRANSFORMER_BASE, **local)


def test_tatoeba_has_a_curve_of_bleu_and_a_picture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for end in ("en", "de"):
        (folder / f"test_2016_flickr.{end}").rename(folder / f"test.{end}")
    requested = ["--systems", "rnn", "--device", "cpu", *TINY, "decode.bleu_sentences=2"]
    requested = [
        item
        for item in requested
        if not item.startswith(("model.h", "model.ffn", "train.average_checkpoints"))
    ]
    assert translations.main(["tatoeba", str(folder), *requested]) == 0
    text = capsys.readouterr().out
    assert all({"step", "seconds", "loss", "bleu"} <= row["curve"][0].keys() for row in rows(text))
    (tmp_path / "rows.jsonl").write_text(text)
    picture = tmp_path / "tatoeba.png"
    shown = ["--table", str(tmp_path / "rows.jsonl"), "--picture", str(picture)]
    assert translations.main(shown) == 0
    assert picture.stat().st_size > 1000
    assert "### tatoeba, de-en" in capsys.readouterr().out


def measured(system: str, seed: int, bleu: float) -> dict[str, Any]:
    costs = {"parameters": 2_600_000, "steps": 8000, "seconds": 100.0, "ms_a_step": 12.5}
    named = {"table": "literature", "system": system, "pair": "en-de", "seed": seed}
    scores = {"test": {"tokenised": bleu, "bleu": bleu, "chrf": 60.0}}
    signature = {"tokenised": "tok:none", "bleu": "tok:13a", "chrf": "nc:6"}
    reported = {"valid_loss": 1.5, "scores": scores, "signature": signature, "curve": []}
    return named | costs | reported


def test_the_table_has_mean_and_spread_of_the_last_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = [measured("ours", 1, 30.0), measured("ours", 2, 42.0), measured("ours", 1, 40.0)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in actual))
    assert translations.main(["--table", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        "| ours | test | 41.00 ± 1.41 (40.00 42.00) | 41.00 ± 1.41 (40.00 42.00) | 60.0 |" in text
    )
    assert "| ours | 2.60M | 8,000 | 100 | 12.5 | 1.500 |" in text
    assert "tokenised `tok:none`" in text
    with pytest.raises(UserError, match="nothing to draw"):
        translations.table([path], tmp_path / "none.png")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--systems", "puplished"], "there is no puplished"),
        (["--pairs", "en-fr"], "NAME.en and NAME.fr"),
        (["model.dimm=3"], "model.dim"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(
    arguments: list[str], word: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translations.main(["raw", str(folder), *arguments]) == 2
    assert word in capsys.readouterr().err.splitlines()[-1]


def test_no_run_begins_after_its_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requested = ["raw", str(folder), "--pairs", "en-de,de-en", "--until", "-1", *TINY]
    assert translations.main(requested) == 0
    said = capsys.readouterr()
    assert not said.out
    assert "2 runs were not begun" in said.err


def test_gzipped_corpora_are_found(folder: Path) -> None:
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert translations.stems(folder, "en", "de") == ["test_2016_flickr", "train", "val"]
