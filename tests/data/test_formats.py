"""Each file format with each task, large files, and the one line for malformed files."""

import csv
import gzip
import io
import json
import random
import sys
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.data.helpers import refusal

from manyheads.data.files import join_names, read_rows
from manyheads.data.labelled import LabelledData
from manyheads.data.language import TextData
from manyheads.data.summaries import SummaryData
from manyheads.data.translation import FilesData
from manyheads.errors import DataError, UserError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

Table = list[dict[str, Any]]
ROWS: Table = [
    {"en": "A dog, „red“", "de": "Ein Hund", "label": "1"},
    {"en": "two cats", "de": "zwei Katzen", "label": "0"},
    {"en": "ein 'ü'", "de": 'a "ü"', "label": "1"},
    {"en": "the end", "de": "das Ende", "label": "0"},
]
EN, DE = [row["en"] for row in ROWS], [row["de"] for row in ROWS]


def to_csv(rows: Table, delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def to_tsv(rows: Table) -> bytes:
    lines = [list(rows[0]), *(map(str, row.values()) for row in rows)]
    return "".join("\t".join(line) + "\n" for line in lines).encode()


def to_jsonl(rows: Table) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def to_parquet(rows: Table) -> bytes:
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    return file.getvalue()


WRITERS: dict[str, Callable[[Table], bytes]] = {
    ".tsv": to_tsv,
    ".csv": to_csv,
    "-semicolons.csv": lambda rows: to_csv(rows, ";"),
    ".jsonl": to_jsonl,
    ".parquet": to_parquet,
}
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda content: arrow.Codec("zstd").compress(content, asbytes=True),
}


def translation(path: Path) -> Any:
    data = FilesData(train=str(path), valid=str(path), source_column="en", target_column="de")
    corpus = data.read("train")
    return corpus.sources, corpus.targets


def summaries(path: Path) -> Any:
    data = SummaryData(train=str(path), valid=str(path), source="en", target="de")
    corpus = data.read("train")
    return corpus.sources, corpus.targets


def classification(path: Path) -> Any:
    data = LabelledData(train=str(path), valid=str(path), text="en")
    part = data.read("train")
    return part.texts, part.labels


def language(path: Path) -> Any:
    texts = TextData(file=str(path), valid=str(path), text="en").read("train")
    return texts.documents


TASKS: dict[Callable[[Path], Any], Any] = {
    translation: (EN, DE),
    summaries: (EN, DE),
    classification: (EN, [row["label"] for row in ROWS]),
    language: [[f"{text}\n"] for text in EN],
}


@pytest.mark.parametrize(
    ("suffix", "packed"),
    [*product([suffix for suffix in WRITERS if suffix != ".parquet"], PACKERS), (".parquet", "")],
)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_every_task_reads_every_format(
    task: Callable[[Path], Any], suffix: str, packed: str, tmp_path: Path
) -> None:
    path = tmp_path / f"mine{suffix}{packed}"
    path.write_bytes(PACKERS[packed](WRITERS[suffix](ROWS)))
    assert task(path) == TASKS[task]
    assert task(tmp_path / f"mine{suffix}") == TASKS[task]  # found without .gz or .zst


@pytest.mark.parametrize("suffix", [".tsv", ".jsonl"])
@pytest.mark.parametrize(
    "data",
    [
        FilesData(train="-", source_column="en", target_column="de", valid_fraction=0.5),
        SummaryData(train="-", source="en", target="de", valid_fraction=0.5),
        LabelledData(train="-", text="en", valid_fraction=0.5),
    ],
    ids=lambda data: data.kind,
)
def test_standard_input_has_every_split(
    data: Any, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO(WRITERS[suffix](ROWS * 4))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content))
    items = [item for split in ("train", "valid") for item in data.read(split).items()]
    monkeypatch.undo()
    assert len(items) == 4 * len(ROWS)
    texts = [item if isinstance(item, str) else item[0] for item in items]
    assert sorted(texts) == sorted(EN * 4)


def test_standard_input_is_running_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"{text}\n" for text in EN)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    data = TextData(file="-", lines="sentences", valid_fraction=0.5)
    documents = [*data.read("train").documents, *data.read("valid").documents]
    assert [text for document in documents for text in document] == EN


def test_empty_input_is_refused_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file can be removed, standard input cannot."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    (tmp_path / "empty.txt").touch()
    for name, fix in (("-", "pipe"), (str(tmp_path / "empty.txt"), "remove it")):
        data = TextData(file=name, lines="sentences", valid_fraction=0.5)
        assert fix in refusal(DataError, data.read, "train")


def test_names_in_messages_are_few_and_short() -> None:
    """Ten names of at most 30 characters."""
    assert join_names(["a" * 30, "b" * 31]) == f"({'a' * 30}, {'b' * 29}…)"
    assert join_names([*"abcdefghij"]) == "(a, b, c, d, e, f, g, h, i, j)"
    assert join_names([*"abcdefghijk"]) == "(a, b, c, d, e, f, g, h, i, j, …)"


@pytest.mark.parametrize("packed", PACKERS)
def test_plain_text_is_two_files_or_running_text(packed: str, tmp_path: Path) -> None:
    for side, lines in (("en", EN), ("de", DE)):
        content = PACKERS[packed]("\n".join(lines).encode())
        (tmp_path / f"train.{side}{packed}").write_bytes(content)
    corpus = FilesData(folder=str(tmp_path), source="en", target="de", valid_fraction=0.5)
    pairs = [*corpus.read("train").items(), *corpus.read("valid").items()]
    assert sorted(pairs) == sorted(zip(EN, DE, strict=True))
    file = str(tmp_path / f"train.en{packed}")
    assert TextData(file=file, valid=file).read("train").documents == [["\n".join([*EN, ""])]]


def test_tables_in_a_folder_are_splits_by_name(tmp_path: Path) -> None:
    for split, suffix in (("train", ".parquet"), ("dev", ".csv"), ("test", ".jsonl")):
        (tmp_path / f"{split}{suffix}").write_bytes(WRITERS[suffix](ROWS))
    for data in (
        FilesData(folder=str(tmp_path), source_column="en", target_column="de"),
        SummaryData(folder=str(tmp_path), source="en", target="de"),
        LabelledData(folder=str(tmp_path), text="en"),
        TextData(folder=str(tmp_path), text="en"),
    ):
        assert data.splits() == ["train", "valid", "test"]
        for split in data.splits():
            assert len([*data.read(split).items()]) in (0, len(ROWS))  # no line is long


def test_nested_columns_are_reached_with_a_dot(tmp_path: Path) -> None:
    """Hugging Face's translation data sets have {"translation": {"en": ..., "de": ...}}."""
    rows = [{"translation": row} for row in ROWS]
    for suffix in (".jsonl", ".parquet"):
        path = tmp_path / f"mine{suffix}"
        path.write_bytes(WRITERS[suffix](rows))
        columns = {"source_column": "translation.en", "target_column": "translation.de"}
        data = FilesData(train=str(path), **columns)
        assert data.languages == ("en", "de")
        assert [source for source, _ in data.read("train").items()] == EN[:3]
        wrong = FilesData(train=str(path), source_column="translation.fr", target_column="de")
        assert "data.source_column=" in refusal(DataError, wrong.read, "train")


def test_rows_of_a_table_are_held_out_as_documents(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(to_jsonl([{"text": f"one {n}\ntwo {n}"} for n in range(10)]))
    data = TextData(file=str(path), valid_fraction=0.25)
    train, valid = data.read("train").documents, data.read("valid").documents
    assert [*train, *valid] == [[f"one {n}\ntwo {n}\n"] for n in range(10)]
    assert len(valid) == 3


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("mine.parquet", "mine.jsonl.zst"):
        (tmp_path / name).write_bytes(b"content")
        assert "manyheads[parquet]" in refusal(UserError, language, tmp_path / name)


def test_a_table_is_read_as_a_stream(tmp_path: Path) -> None:
    """Memory does not grow with the file."""
    peaks = []
    for count in (2_000, 20_000):
        path = tmp_path / f"{count}.jsonl"
        line = json.dumps({"text": "word " * 40})
        path.write_text(f"{line}\n" * count)
        packed = tmp_path / f"{count}.jsonl.zst"
        packed.write_bytes(PACKERS[".zst"](path.read_bytes()))
        for file in (path, packed):
            tracemalloc.start()
            assert sum(1 for _ in read_rows(file)) == count
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert max(peaks) < 500_000


# --- malformed files ---

LINES = 12


def malformed(seed: int, folder: Path) -> tuple[Callable[[Path], Any], Path, int | None]:
    """A task, a file that it cannot read, and the line of the problem; None for all of the file."""
    draw = random.Random(seed)
    task = draw.choice([*TASKS])
    suffix = draw.choice([*WRITERS])
    row = draw.randrange(LINES)
    rows: Table = [
        {"en": f"a dog {n}", "de": f"ein Hund {n}", "label": str(n % 2)} for n in range(LINES)
    ]
    packed = draw.choice([*PACKERS]) if suffix != ".parquet" else ""
    path = folder / f"seed{seed}{suffix}{packed}"
    number = row + (1 if suffix in (".jsonl", ".parquet") else 2)
    kind = draw.choice(["file", "file", "empty cell", "column", "line", "line", "line", "line"])
    line: int | None = number
    if kind == "file" or (kind == "line" and suffix == ".parquet"):
        content = PACKERS[packed](WRITERS[suffix](rows))
        if packed or suffix == ".parquet":
            start = draw.randrange(1, len(content) - 4)
            content = draw.choice([content[:start], b"no " + content, b""])
        else:
            content = b"" if draw.random() < 0.5 else b"\xef\xbb\xbf"
        path.write_bytes(content)
        return task, path, None
    if kind == "empty cell":
        rows[row]["en"] = draw.choice(["", " ", "\u3000"])
    elif kind == "column":
        rows = [{("english" if key == "en" else key): row[key] for key in row} for row in rows]
        line = number - row
    lines = WRITERS[suffix](rows).splitlines(keepends=True) if suffix != ".parquet" else []
    if kind == "line":
        text = lines[number - 1]
        broken = [text.replace(b"dog", b"d\xf6g"), text.replace(b"dog", b"\xed\xa0\x80")]
        if suffix == ".jsonl":
            surrogate = text.replace(b"dog", b"\\ud800")
            listed = text.replace(b'"a dog', b'["x"], "no": "')
            cut = text[: draw.randrange(1, len(text) - 2)] + b"\n"
            broken += [b"[1, 2]\n", b"null\n", b"\n", b"[" * 9999 + b"\n", surrogate, listed, cut]
        elif suffix == ".tsv":
            broken += [text.rstrip() + b"\tmore\n"]
        else:
            broken += [b'"' + text, text.rstrip() + b",a;b,c;d,e;f\n", b'"a"b' + text]
        lines[number - 1] = draw.choice(broken)
    path.write_bytes(to_parquet(rows) if suffix == ".parquet" else PACKERS[packed](b"".join(lines)))
    return task, path, line


def test_malformed_files_are_named_with_their_line(tmp_path: Path) -> None:
    for seed in range(200):
        task, path, line = malformed(seed, tmp_path)
        message = refusal(DataError, task, path)
        where = f"{path}: " if line is None else f"{path}:{line}: "
        assert message.startswith(where), (seed, message)
