"""Documents and summaries: which file and which keys are read, what is refused, what is cut."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads.data.summaries import SummaryData
from manyheads.data.translation import Corpus, EncodedPairs
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.train import Characters

GOOD = {"dialogue": "A: Hello.\nB: Bye.", "summary": "They part."}


def write(folder: Path, name: str, rows: list[Any]) -> str:
    """Rows as JSON lines; a string is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    content = "".join(f"{line}\n" for line in lines).encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def numbered(count: int, split: str = "train") -> list[dict[str, str]]:
    return [{"dialogue": f"{split} {n}", "summary": f"short {n}"} for n in range(count)]


def refused(kind: type[UserError], data: SummaryData, split: str = "train") -> str:
    with pytest.raises(kind) as caught:
        data.read(split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("valid", ["valid", "dev"])
def test_a_folder_of_json_lines(valid: str, ending: str, tmp_path: Path) -> None:
    for stem, count in (("train", 4), (valid, 2), ("test", 3)):
        write(tmp_path, f"{stem}.jsonl{ending}", numbered(count, stem))
    data = SummaryData(folder=str(tmp_path))
    assert data.splits() == ["train", "valid", "test"]
    for split, stem, count in (("train", "train", 4), ("valid", valid, 2), ("test", "test", 3)):
        read = data.read(split)
        assert read.sources == [f"{stem} {n}" for n in range(count)]
        assert read.targets == [f"short {n}" for n in range(count)]
        assert read.references == [[target] for target in read.targets]


def test_documents_are_lines_and_several_summaries_are_references(tmp_path: Path) -> None:
    several = {"dialogue": GOOD["dialogue"], "summary1": "One.", "summary2": "Two\nlines."}
    write(tmp_path, "train.jsonl", [GOOD, several, {**several, **GOOD}])
    write(tmp_path, "valid.jsonl", [GOOD])
    read = SummaryData(folder=str(tmp_path)).read("train")
    assert read.sources == ["A: Hello. ⏎ B: Bye."] * 3
    assert read.references == [["They part."], ["One.", "Two ⏎ lines."], ["They part."]]
    assert read.targets == ["They part.", "One.", "They part."]


def test_own_files_and_keys(tmp_path: Path) -> None:
    row = {"text": "long", "headline": "short"}
    keys = {"source": "text", "target": "headline"}
    train = write(tmp_path, "a.json", [row] * 2)
    data = SummaryData(train=train, valid=write(tmp_path, "b.json", [row]), **keys)
    assert data.splits() == ["train", "valid"]
    assert data.read("train").sources == ["long", "long"]
    assert data.read("valid").targets == ["short"]
    assert "give data.test=FILE" in refused(UserError, data, "test")
    assert "did you mean 'valid'?" in refused(UserError, data, "vaild")
    inside = SummaryData(folder=str(tmp_path), train="a.json", valid="b.json", **keys)
    assert inside.read("train").sources == ["long", "long"]


def test_without_a_validation_file_a_seeded_share_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", numbered(100))
    data = SummaryData(folder=str(tmp_path), held_out=0.1)
    train, valid = data.read("train"), data.read("valid")
    assert (len(train.sources), len(valid.sources)) == (90, 10)
    assert {*train.sources, *valid.sources} == {f"train {n}" for n in range(100)}
    assert valid.rows is not None
    assert valid.references == [[f"short {row}"] for row in valid.rows]
    assert data.read("valid") == valid


def test_what_is_cut_of_either_share_is_told_apart(tmp_path: Path) -> None:
    file = write(tmp_path, "train.jsonl", numbered(10))
    data = SummaryData(folder=str(tmp_path), held_out=0.2)
    letters = Characters().train(data.read("train").sources)
    notes = [
        EncodedPairs(data.read(split), letters, max_length=4, too_long="truncate").notes
        for split in ("train", "valid")
    ]
    assert notes == [
        [f"{file} (without what is held out): 8 pairs of over 4 tokens are cut there"],
        [f"{file} (what is held out): 2 pairs of over 4 tokens are cut there"],
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{'dialogue'}", "not JSON (Expecting property name"),
        ("", "not JSON (Expecting value, at character 1)"),
        ("[" * 9999, "not JSON (maximum recursion"),
        ('["a", "b"]', "not a JSON object"),
        ({"dialog": "a", "summary": "b"}, "no key 'dialogue' among (dialog, summary): name "),
        ({"dialog": "a", "summary": "b"}, "another with data.source=dialog"),
        ({"dialogue": "a", "short": "b"}, "no key 'summary' among (dialogue, short): name another"),
        ({"dialogue": "a", "short": "b"}, "with data.target=KEY"),
        ({**GOOD, "summary": " \n "}, "'summary' is empty"),
        ({**GOOD, "dialogue": ""}, "'dialogue' is empty"),
        ({**GOOD, "dialogue": ["a"]}, "'dialogue' is no text"),
        ({**GOOD, "summary": ["a", 2]}, "'summary[1]' is no text"),
        ({**GOOD, "summary": ["", "a"]}, "'summary[0]' is empty"),
        ({**GOOD, "summary": []}, "'summary' is no text"),
        ({"dialogue": "a", "summary1": "b", "summary2": ""}, "'summary2' is empty"),
        ({**GOOD, "dialogue": "a \ud800"}, "'dialogue' holds half a character"),
    ],
)
def test_a_broken_row_is_named(row: Any, said: str, tmp_path: Path) -> None:
    train = write(tmp_path, "train.jsonl", [GOOD, row, GOOD])
    line = refused(DataError, SummaryData(folder=str(tmp_path)))
    assert line.startswith(f"{train}:2: ")
    assert said in line


def test_settings_without_sense(tmp_path: Path) -> None:
    assert "train.jsonl" in refused(UserError, SummaryData())
    line = refused(UserError, SummaryData(folder=str(tmp_path)))
    assert f"data.folder={tmp_path}" in line
    assert "data.train=FILE" in line
    assert "is not a folder" in refused(UserError, SummaryData(folder=str(tmp_path / "no")))
    train = write(tmp_path, "a.jsonl", [GOOD])
    assert f"give data.train={train}" in refused(UserError, SummaryData(folder=train))
    assert "missing.jsonl" in refused(UserError, SummaryData(train="missing.jsonl"))
    for settings in ({"source": ""}, {"target": ""}, {"source": "summary"}):
        with pytest.raises(UserError, match=r"data\.source|data\.target"):
            SummaryData(**settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="held_out"):
        SummaryData(held_out=1.0)


def test_what_is_too_long_is_cut_with_its_end() -> None:
    sources, targets = ["abcdefgh", "abc", "a"], ["ab", "abcdefg", "a"]
    letters = Characters().train([*sources, *targets])
    corpus = Corpus(sources, targets, name="a file")
    cut = EncodedPairs(corpus, letters, max_length=4, too_long="truncate")
    assert cut.kept == [0, 1, 2]
    assert cut.lengths.tolist() == [4, 4, 2]
    batch = cut.batch(np.arange(3))
    for read, real, texts in (
        (batch.source, batch.source_real, sources),
        (batch.wanted, batch.real, targets),
    ):
        for ids, there, text in zip(read, real, texts, strict=True):
            assert ids[there].tolist() == [*letters.encode(text[:3]), letters.end]
    assert cut.notes == ["a file: 2 pairs of over 4 tokens are cut there"]
    whole = EncodedPairs(corpus, letters, max_length=9, too_long="truncate")
    assert whole.digest() == EncodedPairs(corpus, letters, max_length=9).digest()
    assert whole.notes == []
    with pytest.raises(DataError, match=r"train\.too_long=cut"):
        EncodedPairs(corpus, letters, max_length=4)
    with pytest.raises(UserError, match="max_length=1 leaves no room"):
        EncodedPairs(corpus, letters, max_length=1, too_long="truncate")
