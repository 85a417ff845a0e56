"""The translation benchmark: preparation, training, scoring and tables."""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from manyheads.data.files import read_lines
from manyheads.phrasebook import sentences

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
