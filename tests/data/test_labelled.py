"""Labelled texts: the official files of GLUE, a user's own tables, and each thing wrong in them."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads.config import dump, override_all, parse
from manyheads.data.labelled import GLUE, Labelled, LabelledData, places
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


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def own(tmp_path: Path, table: str, /, **settings: Any) -> LabelledData:
    """A user's own table, as written to a file."""
    write(tmp_path / "mine.tsv", table)
    return LabelledData(**({"folder": str(tmp_path), "train": "mine.tsv"} | settings))


def prepare(data: LabelledData, split: str) -> None:
    """What training does with a split."""
    part = data.read(split)
    names = data.label_names(part)
    if not data.regression:
        places(part, names)


def refused(data: LabelledData, split: str, error: type[UserError]) -> str:
    """The one line with which a split is refused."""
    with pytest.raises(UserError) as caught:
        prepare(data, split)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("given", "ending"), [("own", ""), ("parent", ".gz"), ("lower", "")])
@pytest.mark.parametrize("task", list(GLUE))
def test_each_task_is_read_from_its_official_files(
    task: str, given: str, ending: str, tmp_path: Path
) -> None:
    """From the task's own folder or its parent, plain or gzip, quotes as characters."""
    official = GLUE[task].folder
    written = official.lower().replace("-", "") if given == "lower" else official
    inside = tmp_path / "glue" / written
    write(inside / f"train.tsv{ending}", OFFICIAL[official][0])
    write(
        inside / f"{'dev_matched' if task == 'mnli' else 'dev'}.tsv{ending}", OFFICIAL[official][1]
    )
    data = parse(
        LabelledData, {"task": task, "folder": str(inside if given == "own" else inside.parent)}
    )
    train, valid = data.read("train"), data.read("valid")
    names = data.label_names(train)
    assert train.texts == TEXTS[task]
    assert train.name == str(inside / "train.tsv")
    assert data.metrics(names) == METRICS.get(task, ("accuracy",))
    assert len(valid.texts) == 1
    if task == "sts-b":
        assert (train.labels, train.numbers, names) == ([], [5.0, 0.25], ("score",))
        assert data.regression
    else:
        assert train.numbers == []
        assert places(train, names).tolist() == CLASSES[task]
        assert places(valid, names).dtype == np.int64
    first = 1 if task == "cola" else 2
    assert train.lines == ([2, 5] if task == "qqp" else [first, first + 1])


def test_rows_that_a_line_end_cut_are_left_out_of_qqp_alone(tmp_path: Path) -> None:
    """QQP says how many; any other task refuses them, unless told."""
    write(tmp_path / "train.tsv", OFFICIAL["QQP"][0])
    data = LabelledData(task="qqp", folder=str(tmp_path))
    assert "2 rows, without 2 broken ones" in data.read("train").notes[0]
    write(
        tmp_path / "train.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n1\ta\n2\tb\tc\t0\n"
    )
    data = LabelledData(task="wnli", folder=str(tmp_path))
    line = refused(data, "train", DataError)
    assert f"{tmp_path / 'train.tsv'}:3: 2 columns where 4 are needed" in line
    assert "data.broken_rows=skip" in line
    skipping = LabelledData(task="wnli", folder=str(tmp_path), broken_rows="skip")
    assert skipping.read("train").lines == [2, 4]


@pytest.mark.parametrize("task", ["cola", "mnli"])
def test_the_test_set_of_glue_has_no_labels(task: str, tmp_path: Path) -> None:
    write(tmp_path / "test.tsv", "index\tsentence\n0\tBill sang.\n")
    data = parse(LabelledData, {"task": task, "folder": str(tmp_path)})
    assert "not public: use --split valid" in refused(data, "test", UserError)


@pytest.mark.parametrize(
    ("text", "settings", "texts", "labels", "lines"),
    [
        ("text\tlabel\n good \tyes\nbad\tno\n", {}, ["good", "bad"], ["yes", "no"], [2, 3]),
        (
            "no\tbad\r\nyes\tgood",
            {"text": "2", "label": "1"},
            ["bad", "good"],
            ["no", "yes"],
            [1, 2],
        ),
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
    text: str,
    settings: dict[str, Any],
    texts: list[Any],
    labels: list[str],
    lines: list[int],
    tmp_path: Path,
) -> None:
    """A header exactly where columns are named; lines are counted as an editor counts them."""
    part = own(tmp_path, text, valid="mine.tsv", **settings).read("train")
    assert (part.texts, part.labels, part.lines) == (texts, labels, lines)


@pytest.mark.parametrize(
    ("labels", "names", "metrics"),
    [
        (["10", "9", "-1", "9"], ("-1", "9", "10"), ("accuracy",)),
        (["10", "9", "x"], ("10", "9", "x"), ("accuracy",)),
        (["no", "yes", "no"], ("no", "yes"), ("accuracy", "f1")),
    ],
)
def test_own_labels_are_sorted(
    labels: list[str], names: tuple[str, ...], metrics: tuple[str, ...], tmp_path: Path
) -> None:
    """As numbers where all are whole numbers, else as words, whatever their order in the file."""
    rows = "".join(f"t\t{label}\n" for label in labels)
    data = own(tmp_path, "text\tlabel\n" + rows, valid="mine.tsv")
    part = data.read("train")
    assert data.label_names(part) == names
    assert [names[place] for place in places(part, names)] == labels
    assert data.metrics(names) == metrics


@pytest.mark.parametrize("answer", ["label", "number"])
def test_held_out_rows_are_a_share_of_the_training_rows(answer: str, tmp_path: Path) -> None:
    """Every row is in one part, the same each time, and no part has a label that training lacks."""
    rows = [f"text {i}\t{i % 2 if i < 70 else i}\n" for i in range(80)]
    data = own(tmp_path, "text\tlabel\n" + "".join(rows), answer=answer, held_out=0.5)
    train, valid = data.read("train"), data.read("valid")
    assert sorted(train.lines + valid.lines) == list(range(2, 82))
    assert data.read("valid") == valid
    for part in (train, valid):
        assert part.texts == [f"text {line - 2}" for line in part.lines]
        answers = part.labels or [str(round(number)) for number in part.numbers]
        assert answers == [rows[line - 2].split("\t")[1].strip() for line in part.lines]
    if answer == "number":
        assert len(valid.texts) == 40
    else:  # ten labels have one row each, and those of them that were drawn went back
        assert 30 <= len(valid.texts) < 40
        names = data.label_names(train)
        assert names == ("0", "1", *map(str, range(70, 80)))
        assert set(places(valid, names).tolist()) == {0, 1}


HEADER = "text\tlabel\n"


@pytest.mark.parametrize(
    ("text", "settings", "line"),
    [
        ("text\tlable\na\t1\n", {}, ":1: no column 'label' in the header (text, lable): did you"),
        ("fine film\t1\nb\t0\n", {}, ":1: no column 'label' in the header (fine film, 1): name"),
        (HEADER + "a\t1\nb\n", {}, ":3: one column where 2 are needed; "),
        (HEADER + "a\t1\n\n", {}, ":3: one column where 2 are needed"),
        ("a\t1\nb\n", {"text": "1", "label": "2"}, ":2: one column where 2 are needed"),
        (HEADER + "a\t1\nb\tc\t0\n", {}, ":3: 3 columns where the header has 2"),
        (HEADER + "a\t1\nb\t \n", {}, ":3: an empty label (column label)"),
        (HEADER + "a\t1\n \t0\n", {}, ":3: an empty text (column text)"),
        ("a\t1\n\t0\n", {"text": "1", "label": "2"}, ":2: an empty text (column 1)"),
        (HEADER + "a\t1\nb\tbad\n", {"answer": "number"}, ":3: 'bad' is no number"),
        (HEADER + "a\tnan\n", {"answer": "number"}, ":2: 'nan' is no number"),
        (HEADER + "a\t1\nb\t-inf\n", {"answer": "number"}, ":3: '-inf' is no number"),
        (HEADER + "a\t3,5\n", {"answer": "number"}, ":2: '3,5' is no number; write it like 3.5"),
        ("", {}, ": the file is empty"),
        (HEADER, {}, ": nothing but a header"),
        (HEADER + "a\n", {"broken_rows": "skip"}, ": nothing but broken rows"),
        (HEADER + "a\t1\nb\t1\n", {}, ": every label is '1', and a classifier needs two"),
        ("text\tlabel\na\tx\nb\ty\n", {"valid": ""}, ": too few rows of each label"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table_is_one_line(
    text: str, settings: dict[str, Any], line: str, tmp_path: Path
) -> None:
    data = own(tmp_path, text, **({"valid": "mine.tsv"} | settings))
    assert f"{tmp_path / 'mine.tsv'}{line}" in refused(data, "train", DataError)


def test_a_label_that_is_not_in_the_map_is_named_with_its_line() -> None:
    part = Labelled(texts=["a", "b"], labels=["1", "x"], numbers=[], lines=[2, 9], name="dev.tsv")
    with pytest.raises(DataError, match=r"^dev\.tsv:9: the label 'x' is none of \(0, 1\): mend"):
        places(part, ("0", "1"))
    assert places(part, ("x", "1")).tolist() == [1, 0]


def test_a_glue_file_of_another_task_is_refused(tmp_path: Path) -> None:
    """By its columns, or else by its labels."""
    write(tmp_path / "train.tsv", OFFICIAL["RTE"][0])
    sst = LabelledData(task="sst-2", folder=str(tmp_path))
    assert "did you mean 'sentence2'?" in refused(sst, "train", DataError)
    qqp = LabelledData(task="qqp", folder=str(tmp_path))
    assert "is it the official file of QQP?" in refused(qqp, "train", DataError)
    wnli = LabelledData(task="wnli", folder=str(tmp_path))
    assert "train.tsv:2: the label 'not_entailment' is none of (0, 1)" in refused(
        wnli, "train", DataError
    )


@pytest.mark.parametrize(
    ("settings", "split", "line"),
    [
        ({"task": "sst-2"}, "train", "data.folder is needed: the folder SST-2 with train.tsv"),
        ({"task": "sst-2", "folder": "nowhere"}, "train", "data.folder=nowhere is not a folder"),
        ({"task": "sst-2", "folder": "."}, "train", "no file train.tsv (nor train.tsv.gz) for"),
        ({"task": "mnli", "folder": "."}, "valid_mismatch", "did you mean 'valid_mismatched'?"),
        ({}, "train", "data.train is needed (or train.tsv in data.folder)"),
        ({"folder": "nowhere", "train": "a.tsv"}, "train", "data.folder=nowhere is not a folder"),
        ({"train": "missing.tsv"}, "train", "no file missing.tsv"),
        ({"train": "a.tsv"}, "test", "give data.test=FILE, or use --split valid"),
        ({"train": "a.tsv"}, "vaild", "there is no split 'vaild': did you mean 'valid'?"),
    ],
)
def test_a_missing_file_is_one_line(
    settings: dict[str, Any],
    split: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert line in refused(parse(LabelledData, settings), split, UserError)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("task=sts2", "task=sts2: did you mean 'sts-b'?"),
        ("task=sst", "task=sst: did you mean 'sst-2'?"),
        ("text=0", "data.text=0 names no column"),
        ("label=", "data.label= names no column"),
        ("pair=text", "data.text, data.pair and data.label must differ"),
        ("held_out=1", "data.held_out=1.0 must be above 0, below 1"),
    ],
)
def test_a_wrong_setting_is_one_line(setting: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        override_all(LabelledData(), [setting])
    assert line in str(caught.value)


def test_settings_of_own_tables_are_not_ignored_by_an_official_task() -> None:
    with pytest.raises(
        UserError, match=r"data\.pair=b is for tables of your own, and data\.task=rte"
    ):
        override_all(LabelledData(), ["task=rte", "pair=b"])
    settings = override_all(LabelledData(), ["task=rte", "folder=glue"])
    assert parse(LabelledData, dump(settings)) == settings
