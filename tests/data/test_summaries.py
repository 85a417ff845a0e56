"""Documents and summaries: which file and which keys are read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.data.helpers import refusal, write

from manyheads.config import parse
from manyheads.data.summaries import SummaryData, as_lines
from manyheads.errors import DataError, UserError

GOOD = {"dialogue": "A: Hello.\nB: Bye.", "summary": "They part."}


def write_rows(path: Path, rows: list[Any]) -> str:
    """Rows as JSON lines; a string is written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return str(write(path, "".join(f"{line}\n" for line in lines)))


def numbered(count: int, split: str = "train") -> list[dict[str, str]]:
    return [{"dialogue": f"{split} {n}", "summary": f"short {n}"} for n in range(count)]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("valid", ["valid", "dev"])
def test_a_folder_of_json_lines(valid: str, ending: str, tmp_path: Path) -> None:
    stems = {"train": ("train", 4), "valid": (valid, 2), "test": ("test", 3)}
    for stem, count in stems.values():
        write_rows(tmp_path / f"{stem}.jsonl{ending}", numbered(count, stem))
    data = SummaryData(folder=str(tmp_path))
    assert data.splits() == list(stems)
    for split, (stem, count) in stems.items():
        corpus = data.read(split)
        assert corpus.sources == [f"{stem} {n}" for n in range(count)]
        assert corpus.references == [[f"short {n}"] for n in range(count)]


def test_lines_of_documents_and_several_summaries(tmp_path: Path) -> None:
    several = {"dialogue": GOOD["dialogue"], "summary1": "One.", "summary2": "Two\nlines."}
    listed = {"dialogue": "a", "summary": ["One.", "Two."]}
    write_rows(tmp_path / "train.jsonl", [GOOD, several, {**several, **GOOD}, listed])
    write_rows(tmp_path / "valid.jsonl", [GOOD])
    corpus = SummaryData(folder=str(tmp_path)).read("train")
    assert corpus.sources == ["A: Hello. ⏎ B: Bye."] * 3 + ["a"]
    assert as_lines(corpus.sources[0]) == GOOD["dialogue"]
    part = ["They part."]
    assert corpus.references == [part, ["One.", "Two ⏎ lines."], part, ["One.", "Two."]]
    assert corpus.targets == ["They part.", "One.", "They part.", "One."]


def test_files_and_keys_of_your_own(tmp_path: Path) -> None:
    row = {"text": "long", "headline": "short"}
    files = {"train": "a.json", "valid": "b.txt", "source": "text", "target": "headline"}
    for name, count in (("a.json", 2), ("b.txt", 1)):
        write_rows(tmp_path / name, [row] * count)
    data = parse(SummaryData, files | {"folder": str(tmp_path)})
    assert data.splits() == ["train", "valid"]
    assert data.read("train").sources == ["long", "long"]
    assert data.read("valid").targets == ["short"]
    assert "data.test=FILE" in refusal(UserError, data.read, "test")
    assert "did you mean 'valid'?" in refusal(UserError, data.read, "vaild")


def test_without_a_validation_file_a_seeded_part_is_held_out(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", numbered(100))
    data = SummaryData(folder=str(tmp_path), valid_fraction=0.1)
    train, valid = data.read("train"), data.read("valid")
    assert (len(train.sources), len(valid.sources)) == (90, 10)
    assert {*train.sources, *valid.sources} == {f"train {n}" for n in range(100)}
    assert valid.rows is not None
    assert valid.references == [[f"short {row}"] for row in valid.rows]
    assert data.read("valid") == valid


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{'dialogue'}", "not JSON"),
        ("", "at character 1"),
        ("[" * 9999, "not JSON"),
        ('["a", "b"]', "not a JSON object"),
        ({"dialog": "a", "summary": "b"}, "data.source=dialog"),
        ({"dialogue": "a", "short": "b"}, "data.target=COLUMN"),
        ({**GOOD, "summary": " \n "}, "'summary' is empty"),
        ({**GOOD, "dialogue": ["a"]}, "'dialogue' is not"),
        ({**GOOD, "summary": ["a", None]}, "'summary[1]' is not"),
        ({**GOOD, "summary": ["", "a"]}, "'summary[0]' is empty"),
        ({**GOOD, "summary": []}, "'summary' is not"),
        ({"dialogue": "a", "summary1": "b", "summary2": ""}, "'summary2' is empty"),
        ({**GOOD, "dialogue": "a \ud800"}, "surrogate"),
    ],
)
def test_a_broken_row_is_named(row: Any, problem: str, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [GOOD, row, GOOD])
    message = refusal(DataError, SummaryData(folder=str(tmp_path)).read, "train")
    assert message.startswith(f"{train}:2: ")
    assert problem in message


def test_missing_files_and_wrong_settings_are_refused(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.jsonl", [GOOD])
    for settings, fix in (
        ({}, "train.jsonl"),
        ({"folder": str(tmp_path)}, "data.train=FILE"),
        ({"folder": str(tmp_path / "no")}, "is not a folder"),
        ({"folder": train}, f"data.train={train}"),
        ({"train": "missing.jsonl"}, "missing.jsonl"),
    ):
        assert fix in refusal(UserError, parse(SummaryData, settings).read, "train")
