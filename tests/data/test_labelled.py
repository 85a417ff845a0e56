"""Labelled texts: the official files of GLUE, a user's own tables, and each thing wrong in them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.helpers import refusal, write

from manyheads.config import parse
from manyheads.data.labelled import GLUE, Labelled, LabelledData, class_indices
from manyheads.errors import DataError, UserError

MNLI_TRAIN = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
)
MNLI_VALID = MNLI_TRAIN.replace("label1", "label1\tlabel2\tlabel3\tlabel4\tlabel5")
STS_B = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
# The official layout of each file: the training file, then the validation file.
OFFICIAL: dict[str, tuple[str, str]] = {
    "CoLA": (
        'gj04\t1\t\t"Bill" sang.\ngj04\t0\t*\tSang Bill "the.\n',
        "gj04\t1\t\tKim left.\n",
    ),
    "SST-2": (
        "sentence\tlabel\nhide new secretions \t0\na 'joy' \t1\n",
        "sentence\tlabel\nfine \t1\n",
    ),
    "MRPC": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '1\t7\t8\t"Yes, he said.\tHe said "yes".\n0\t9\t10\tNo.\t"\n',
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb\n",
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        '5\t1\t2\tWhy?\tHow?\t0\n6\t3\t4\tcut in\n"\ttwo\t0\n7\t5\t6\tWho?\tWho then?\t1\n',
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t1\t2\ta\tb\t1\n",
    ),
    "STS-B": (
        STS_B + "0\tmain\tMSR\t2012\t1\tnone\tnone\tA plane.\tAn air plane.\t5.000\n"
        "1\tmain\tMSR\t2012\t4\tnone\tnone\tA man.\tA \u2028 dog.\t0.25\n",
        STS_B + "0\tmain\tMSR\t2012\t1\tnone\tnone\ta\tb\t3.8\n",
    ),
    "MNLI": (
        MNLI_TRAIN + "0\t1\t1n\tfiction\t(\t)\t(\t)\tone\ttwo\tneutral\tneutral\n"
        "1\t1\t1c\tfiction\t(\t)\t(\t)\tthree\tfour\tneutral\tcontradiction\n",
        MNLI_VALID + "0\t1\t1n\tslate\t(\t)\t(\t)\ta\tb\tneutral\t\t\t\t\tentailment\n",
    ),
    "QNLI": (
        "index\tquestion\tsentence\tlabel\n0\tWhen?\tThen.\tentailment\n"
        "1\tWho?\tThen.\tnot_entailment\n",
        "index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n",
    ),
    "RTE": (
        "index\tsentence1\tsentence2\tlabel\n0\tNo.\tYes.\tnot_entailment\n"
        "1\tNo.\tNo.\tentailment\n",
        "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n",
    ),
    "WNLI": (
        "index\tsentence1\tsentence2\tlabel\n0\tIt.\tThe pin.\t1\n1\tIt.\tA carrot.\t0\n",
        "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t0\n",
    ),
}
TEXTS: dict[str, list[Any]] = {
    "cola": ['"Bill" sang.', 'Sang Bill "the.'],
    "sst-2": ["hide new secretions", "a 'joy'"],
    "mrpc": [('"Yes, he said.', 'He said "yes".'), ("No.", '"')],
    "qqp": [("Why?", "How?"), ("Who?", "Who then?")],
    "sts-b": [("A plane.", "An air plane."), ("A man.", "A \u2028 dog.")],
    "mnli": [("one", "two"), ("three", "four")],
    "qnli": [("When?", "Then."), ("Who?", "Then.")],
    "rte": [("No.", "Yes."), ("No.", "No.")],
    "wnli": [("It.", "The pin."), ("It.", "A carrot.")],
}
CLASSES = {
    "cola": [1, 0],
    "sst-2": [0, 1],
    "mrpc": [1, 0],
    "qqp": [0, 1],
    "mnli": [2, 0],
    "qnli": [0, 1],
    "rte": [1, 0],
    "wnli": [1, 0],
}
METRICS = {"cola": ("matthews",), "mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1")} | {
    "sts-b": ("pearson", "spearman")
}


def own(tmp_path: Path, table: str, /, **settings: Any) -> LabelledData:
    """A table of your own, written to a file."""
    write(tmp_path / "mine.tsv", table)
    return parse(LabelledData, {"folder": str(tmp_path), "train": "mine.tsv"} | settings, "data")


def prepare(data: LabelledData, split: str) -> None:
    """Read a split as training does."""
    part = data.read(split)
    names = data.label_names(part)
    if not data.regression:
        class_indices(part, names)


@pytest.mark.parametrize(("folder", "ending"), [("own", ""), ("parent", ".gz")])
@pytest.mark.parametrize("task", list(GLUE))
def test_each_task_is_read_from_its_official_files(
    task: str, folder: str, ending: str, tmp_path: Path
) -> None:
    """From the folder of the task or its parent, plain or gzip, quotes as characters."""
    official = GLUE[task].folder
    inside = tmp_path / "glue" / official
    valid_name = "dev_matched" if task == "mnli" else "dev"
    write(inside / f"train.tsv{ending}", OFFICIAL[official][0])
    write(inside / f"{valid_name}.tsv{ending}", OFFICIAL[official][1])
    root = inside if folder == "own" else inside.parent
    data = parse(LabelledData, {"task": task, "folder": str(root)})
    assert data.splits()[:2] == ["train", "valid"]
    train, valid = data.read("train"), data.read("valid")
    names = data.label_names(train)
    assert train.texts == TEXTS[task]
    assert train.name == str(inside / "train.tsv")
    assert data.metrics(names) == METRICS.get(task, ("accuracy",))
    assert len(valid.texts) == 1
    if task == "sts-b":
        assert (train.labels, names) == ([5.0, 0.25], ("score",))
        assert data.regression
    else:
        assert class_indices(train, names).tolist() == CLASSES[task]
        assert class_indices(valid, names).dtype == np.int64
    first = 1 if task == "cola" else 2
    assert train.lines == ([2, 5] if task == "qqp" else [first, first + 1])
    assert "--split valid" in refusal(UserError, data.read, "test")  # test labels are not public


def test_rows_split_by_a_line_end_are_skipped_in_qqp_only(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", OFFICIAL["QQP"][0])
    data = LabelledData(task="qqp", folder=str(tmp_path))
    assert "2 rows, without 2 broken ones" in data.read("train").notes[0]
    rows = "0\ta\tb\t1\n1\ta\n2\tb\tc\t0\n"
    write(tmp_path / "train.tsv", f"index\tsentence1\tsentence2\tlabel\n{rows}")
    data = LabelledData(task="wnli", folder=str(tmp_path))
    message = refusal(DataError, data.read, "train")
    assert message.startswith(f"{tmp_path / 'train.tsv'}:3: 'label' is empty")
    assert "data.broken_rows=skip" in message
    skipping = LabelledData(task="wnli", folder=str(tmp_path), broken_rows="skip")
    assert skipping.read("train").lines == [2, 4]


NUMBERED = {"text": "1", "label": "2"}


@pytest.mark.parametrize(
    ("table", "settings", "texts", "labels", "lines"),
    [
        ("text\tlabel\n good \tyes\nbad\tno\n", {}, ["good", "bad"], ["yes", "no"], [2, 3]),
        ("bad\tno\r\ngood\tyes", NUMBERED, ["bad", "good"], ["no", "yes"], [1, 2]),
        (
            'id\tanswer\ta\tb\n7\t2\tx\ty\n8\t10\tz\t"\n',
            {"text": "a", "pair": "b", "label": "answer"},
            [("x", "y"), ("z", '"')],
            ["2", "10"],
            [2, 3],
        ),
        ("text\tlabel\n\nx\t\n\ty\na\tb\tc\na\tb\t\n", {"broken_rows": "skip"}, ["a"], ["b"], [6]),
    ],
)
def test_an_own_table_is_read_by_names_or_numbers(
    table: str,
    settings: dict[str, Any],
    texts: list[Any],
    labels: list[str],
    lines: list[int],
    tmp_path: Path,
) -> None:
    """A header exactly if columns are named; lines are counted from 1."""
    part = own(tmp_path, table, valid="mine.tsv", **settings).read("train")
    assert (part.texts, part.labels, part.lines) == (texts, labels, lines)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("mine.csv", 'label,text\nyes,"good, ""very""\nfilm"\nno, bad\n'),
        ("mine.csv.gz", 'label,text,more\nyes,"good, ""very""\nfilm",\nno,bad\n'),
        (
            "mine.jsonl",
            '{"text": "good, \\"very\\"\\nfilm", "label": "yes"}\n{"label": "no", "text": "bad"}',
        ),
    ],
)
def test_tables_may_be_csv_or_json_lines(name: str, table: str, tmp_path: Path) -> None:
    write(tmp_path / name, table)
    part = parse(LabelledData, {"folder": str(tmp_path), "train": name, "valid": name}).read(
        "train"
    )
    assert (part.texts, part.labels) == (['good, "very"\nfilm', "bad"], ["yes", "no"])
    write(tmp_path / "mine.csv", 'label,text\nyes,"good\n')
    mine = LabelledData(folder=str(tmp_path), train="mine.csv", valid="mine.csv")
    assert refusal(DataError, mine.read, "train").startswith(f"{tmp_path / 'mine.csv'}:2: ")


@pytest.mark.parametrize(
    ("labels", "names", "metrics"),
    [
        (["10", "9", "-1", "9"], ("-1", "9", "10"), ("accuracy",)),
        (["10", "9", "x"], ("10", "9", "x"), ("accuracy",)),
        (["no", "yes", "no"], ("no", "yes"), ("accuracy", "f1")),
    ],
)
def test_own_labels_are_sorted_as_numbers_or_words(
    labels: list[str], names: tuple[str, ...], metrics: tuple[str, ...], tmp_path: Path
) -> None:
    rows = "".join(f"t\t{label}\n" for label in labels)
    data = own(tmp_path, "text\tlabel\n" + rows, valid="mine.tsv")
    part = data.read("train")
    assert data.label_names(part) == names
    assert [names[index] for index in class_indices(part, names)] == labels
    assert data.metrics(names) == metrics


@pytest.mark.parametrize("answer", ["label", "number"])
def test_held_out_rows_have_only_labels_of_training(answer: str, tmp_path: Path) -> None:
    rows = [f"text {i}\t{i % 2 if i < 70 else i}\n" for i in range(80)]
    data = own(tmp_path, "text\tlabel\n" + "".join(rows), answer=answer, valid_fraction=0.5)
    train, valid = data.read("train"), data.read("valid")
    assert sorted(train.lines + valid.lines) == list(range(2, 82))
    assert data.read("valid") == valid
    for part in (train, valid):
        assert part.texts == [f"text {line - 2}" for line in part.lines]
        answers = [x if isinstance(x, str) else str(round(x)) for x in part.labels]
        assert answers == [rows[line - 2].split("\t")[1].strip() for line in part.lines]
        assert part.notes[-1].startswith(f"{len(part.texts)} ")
    if answer == "number":
        assert len(valid.texts) == 40
    else:  # ten labels have one row each; those of them that were drawn are trained on
        assert 30 <= len(valid.texts) < 40
        names = data.label_names(train)
        assert names == ("0", "1", *map(str, range(70, 80)))
        assert set(class_indices(valid, names).tolist()) == {0, 1}


HEADER = "text\tlabel\n"
REGRESSION = {"answer": "number"}


@pytest.mark.parametrize(
    ("table", "settings", "problem"),
    [
        ("text\tlable\na\t1\n", {}, ":2: no column 'label' among (text, lable)"),
        ("fine film\t1\nb\t0\n", {}, ":2: no column 'label' among (fine film, 1)"),
        (HEADER + "a\t1\n", {"label": ""}, ":2: no column ''"),
        ("a\t1\n", NUMBERED | {"text": "0"}, ":1: no column '0' among (1, 2)"),
        (HEADER + "a\t1\nb\n", {}, ":3: 'label' is empty"),
        (HEADER + "a\t1\n\n", {}, ":3: 'label' is empty"),
        ("a\t1\nb\n", NUMBERED, ":2: '2' is empty"),
        (HEADER + "a\t1\nb\tc\t0\n", {}, ":3: 3 columns"),
        (HEADER + "a\t1\nb\t \n", {}, ":3: 'label' is empty"),
        (HEADER + "a\t1\n \t0\n", {}, ":3: 'text' is empty"),
        ("a\t1\n\t0\n", NUMBERED, ":2: '1' is empty"),
        (HEADER + "a\t1\nb\tbad\n", REGRESSION, ":3: 'bad'"),
        (HEADER + "a\tnan\n", REGRESSION, ":2: 'nan'"),
        (HEADER + "a\t1\nb\t-inf\n", REGRESSION, ":3: '-inf'"),
        (HEADER + "a\t3,5\n", REGRESSION, ":2: '3,5'"),
        ("", {}, ": the file is empty"),
        (HEADER, {}, ": no row"),
        (HEADER + "a\n", {"broken_rows": "skip"}, ": no row"),
        (HEADER + "a\t1\nb\t1\n", {}, ": every label is '1'"),
        (HEADER + "a\tx\nb\ty\n", {"valid": ""}, ": too few rows"),
    ],
)
def test_a_problem_of_a_table_is_one_line(
    table: str, settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    data = own(tmp_path, table, **({"valid": "mine.tsv"} | settings))
    assert refusal(DataError, prepare, data, "train").startswith(
        f"{tmp_path / 'mine.tsv'}{problem}"
    )


def test_an_unknown_label_is_named_with_its_line() -> None:
    part = Labelled(texts=["a", "b"], labels=["1", "x"], lines=[2, 9], name="dev.tsv")
    assert refusal(DataError, class_indices, part, ("0", "1")).startswith("dev.tsv:9: ")
    assert class_indices(part, ("x", "1")).tolist() == [1, 0]


def test_a_glue_file_of_another_task_is_refused(tmp_path: Path) -> None:
    """By its columns, or else by its labels."""
    write(tmp_path / "train.tsv", OFFICIAL["RTE"][0])
    for task, problem in (
        ("sst-2", "no column 'sentence'"),
        ("qqp", "no column 'is_duplicate'"),
        ("wnli", "train.tsv:2: the label 'not_entailment'"),
    ):
        data = parse(LabelledData, {"task": task, "folder": str(tmp_path)})
        assert problem in refusal(DataError, prepare, data, "train")


@pytest.mark.parametrize(
    ("settings", "split", "problem"),
    [
        ({"task": "sst-2"}, "train", "data.folder is needed"),
        ({"task": "sst-2", "folder": "nowhere"}, "train", "data.folder=nowhere"),
        ({"task": "sst-2", "folder": "."}, "train", "no file train.tsv"),
        ({"task": "mnli", "folder": "."}, "valid_mismatch", "did you mean 'valid_mismatched'?"),
        ({}, "train", "data.train=FILE is needed"),
        ({"folder": "nowhere", "train": "a.tsv"}, "train", "data.folder=nowhere"),
        ({"train": "missing.tsv"}, "train", "no file missing.tsv"),
        ({"train": "a.tsv"}, "test", "data.test=FILE"),
        ({"train": "a.tsv"}, "vaild", "did you mean 'valid'?"),
    ],
)
def test_a_missing_file_is_one_line(
    settings: dict[str, Any],
    split: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem in refusal(UserError, parse(LabelledData, settings).read, split)


def test_texts_are_read_without_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "new.csv", 'text,more\ngood,"a\tb"\nbad,c\n')
    assert [*LabelledData().read_texts(path)] == ["good", "bad"]
    assert [*LabelledData(pair="more").read_texts(path)] == ["good\ta b", "bad\tc"]
    wrong = LabelledData(text="review")
    assert "data.text=" in refusal(DataError, lambda: [*wrong.read_texts(path)])
    numbered = write(tmp_path / "numbered.tsv", "good\nbad\n")
    assert [*LabelledData(**NUMBERED).read_texts(numbered)] == ["good", "bad"]
