"""Labelled texts and pairs of texts: the nine tasks of GLUE, and a user's own tables.

Tables are TSV: columns between tabs, one row a line, no quoting (a quote is a character).
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int

from manyheads.data.corpus import (
    STEMS,
    check_folder,
    check_held_out,
    check_split,
    hold_out,
    is_here,
    read_lines,
    split_file,
)
from manyheads.errors import DataError, UserError

Text = str | tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Texts, or pairs of them, of one split with their labels; or with numbers in their place.

    `name` is the file, and `lines` are the places of the rows in it, as a person counts them.
    """

    texts: list[Text]
    labels: list[str]
    numbers: list[float]
    lines: list[int]
    name: str
    notes: tuple[str, ...] = ()

    def rows(self, rows: list[int]) -> "Labelled":
        """Some of the rows."""
        return replace(
            self,
            texts=[self.texts[row] for row in rows],
            labels=[self.labels[row] for row in rows] if self.labels else [],
            numbers=[self.numbers[row] for row in rows] if self.numbers else [],
            lines=[self.lines[row] for row in rows],
        )


@dataclass(frozen=True)
class Columns:
    """Where a table has its label and its texts: by names in its header, or by numbers.

    Numbers count from 1. Where all are numbers, the table has no header.
    """

    label: str
    text: str
    pair: str = ""

    @property
    def wanted(self) -> list[str]:
        """Label, text, and the second text where there is one."""
        return [self.label, self.text, *([self.pair] if self.pair else [])]

    @property
    def numbered(self) -> bool:
        return all(name.isdecimal() for name in self.wanted)


FILES = {"train": "train.tsv", "valid": "dev.tsv"}
ENTAILED = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Glue:
    """A task of GLUE: its files and columns, labels in the files' own words, how it is judged.

    A task without labels asks for a number. F1 is that of the last label.
    """

    folder: str
    columns: Columns
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    files: dict[str, str] = field(default_factory=lambda: FILES)
    broken_rows: Literal["refuse", "skip"] = "refuse"


GLUE = {
    "cola": Glue("CoLA", Columns("2", "4"), metrics=("matthews",)),
    "sst-2": Glue("SST-2", Columns("label", "sentence")),
    "mrpc": Glue("MRPC", Columns("Quality", "#1 String", "#2 String"), metrics=("accuracy", "f1")),
    "qqp": Glue(
        "QQP",
        Columns("is_duplicate", "question1", "question2"),
        metrics=("accuracy", "f1"),
        # Some questions of the official files hold a line end, which cuts their rows in two.
        broken_rows="skip",
    ),
    "sts-b": Glue(
        "STS-B",
        Columns("score", "sentence1", "sentence2"),
        labels=(),
        metrics=("pearson", "spearman"),
    ),
    "mnli": Glue(
        "MNLI",
        Columns("gold_label", "sentence1", "sentence2"),
        labels=("contradiction", "entailment", "neutral"),
        files=FILES | {"valid": "dev_matched.tsv", "valid_mismatched": "dev_mismatched.tsv"},
    ),
    "qnli": Glue("QNLI", Columns("label", "question", "sentence"), labels=ENTAILED),
    "rte": Glue("RTE", Columns("label", "sentence1", "sentence2"), labels=ENTAILED),
    "wnli": Glue("WNLI", Columns("label", "sentence1", "sentence2")),
}

OF_ALL_TASKS = ("task", "folder", "broken_rows")


@dataclass(frozen=True, kw_only=True)
class LabelledData:
    """A task of GLUE from its official files, or a user's own tables.

    For GLUE, `folder` is the task's own or the one that holds it. The other settings are those of
    own tables: `train`, `valid` and `test` are files, in `folder` where given (there train.tsv,
    valid.tsv or dev.tsv and test.tsv need no naming), and `text`, `pair` and `label` are columns,
    by the names of the header or, where there is none, by numbers from 1. Without a validation
    file a seeded share `held_out` of the training rows serves. A row that lacks a text or a label,
    or has more columns than the header, is refused or skipped, as `broken_rows` says.
    """

    task: Literal["own", "cola", "sst-2", "mrpc", "qqp", "sts-b", "mnli", "qnli", "rte", "wnli"] = (
        "own"
    )
    folder: str = ""
    train: str = ""
    valid: str = ""
    test: str = ""
    text: str = "text"
    pair: str = ""
    label: str = "label"
    answer: Literal["label", "number"] = "label"
    held_out: float = 0.1
    broken_rows: Literal["refuse", "skip"] = "refuse"
    kind: ClassVar[str] = "labelled"

    def __post_init__(self) -> None:
        check_held_out(self.held_out)
        for setting in fields(self):
            value = getattr(self, setting.name)
            own = setting.name not in OF_ALL_TASKS
            if self.task != "own" and own and value != setting.default:
                raise UserError(
                    f"data.{setting.name}={value} is for tables of your own, and data.task="
                    f"{self.task} has its official ones: leave it out, or set data.task=own"
                )
        columns = {"text": self.text, "pair": self.pair, "label": self.label}
        for name, value in columns.items():
            if (not value and name != "pair") or (value.isdecimal() and int(value) == 0):
                raise UserError(
                    f"data.{name}={value} names no column: give its name in the header, or its "
                    "number from 1 where there is no header"
                )
        given = [value for value in columns.values() if value]
        if len(set(given)) < len(given):
            raise UserError(f"data.text, data.pair and data.label must differ (not {given})")

    @property
    def regression(self) -> bool:
        """Whether the answer is a number."""
        return self.answer == "number" if self.task == "own" else not GLUE[self.task].labels

    @property
    def columns(self) -> Columns:
        if self.task != "own":
            return GLUE[self.task].columns
        return Columns(self.label, self.text, self.pair)

    def splits(self) -> list[str]:
        if self.task != "own":
            return list(GLUE[self.task].files)
        test = self._own_file("test")
        return [split for split in STEMS if split != "test" or (test and is_here(test))]

    def read(self, split: str) -> Labelled:
        """The rows of a split."""
        if self.task != "own":
            return self._table(self._glue_file(split))
        check_split(split, STEMS)
        path = self._own_file(split)
        if path is not None and split != "train":
            return self._table(path)
        if split == "test":
            raise UserError("there is no split 'test': give data.test=FILE, or use --split valid")
        train = self._own_file("train")
        if train is None:
            raise UserError(
                "data.train is needed (or train.tsv in data.folder): columns between tabs, e.g. "
                "data.train=reviews.tsv data.text=review data.label=stars"
            )
        whole = self._table(train)
        if self._own_file("valid") is not None:
            return whole
        rows = _hold_out(whole, self.held_out)[split == "valid"]
        use = "held out" if split == "valid" else "to train on"
        return replace(whole.rows(rows), notes=(*whole.notes, f"{len(rows):,} of them {use}"))

    def label_names(self, train: Labelled) -> tuple[str, ...]:
        """The labels in the order of their class numbers; a regression has one, `score`."""
        if self.regression:
            return ("score",)
        found = sorted(set(train.labels))
        if len(found) < 2:
            raise DataError(
                f"{train.name}: every label is '{found[0]}', and a classifier needs two: check "
                f"that the column '{self.columns.label}' holds the labels"
            )
        if self.task != "own":
            return GLUE[self.task].labels
        if all(label.removeprefix("-").isdecimal() for label in found):
            found.sort(key=int)
        return tuple(found)

    def metrics(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """What the task is judged by; F1 is that of the last label."""
        if self.task != "own":
            return GLUE[self.task].metrics
        if self.regression:
            return ("pearson", "spearman")
        return ("accuracy", "f1") if len(names) == 2 else ("accuracy",)

    def _table(self, path: Path) -> Labelled:
        task = GLUE.get(self.task)
        skip = "skip" in (self.broken_rows, task and task.broken_rows)
        remedy = (
            f"is it the official file of {task.folder}?"
            if task
            else "name its columns with data.text and data.label, by number if it has no header"
        )
        return _read_table(path, self.columns, remedy, numbers=self.regression, skip=skip)

    def _own_file(self, split: str) -> Path | None:
        return split_file(self.folder, getattr(self, split), split, ".tsv")

    def _glue_file(self, split: str) -> Path:
        task = GLUE[self.task]
        if split.startswith("test"):
            raise UserError(f"the test labels of {task.folder} are not public: use --split valid")
        check_split(split, task.files)
        if not self.folder:
            raise UserError(
                f"data.folder is needed: the folder {task.folder} with {task.files['train']}, or "
                "the one that holds it, e.g. data.folder=glue"
            )
        folder = check_folder(self.folder)
        inside = [path for path in sorted(folder.iterdir()) if _alike(path.name, task.folder)]
        path = next((path for path in inside if path.is_dir()), folder) / task.files[split]
        if not is_here(path):
            raise UserError(
                f"no file {path} (nor {path.name}.gz) for data.task={self.task}: data.folder is "
                f"the folder {task.folder} of GLUE, or the one that holds it"
            )
        return path


def places(part: Labelled, names: Sequence[str]) -> Int[np.ndarray, " rows"]:
    """The class number of each row: where its label stands among the names."""
    place = {name: number for number, name in enumerate(names)}
    for line, label in zip(part.lines, part.labels, strict=True):
        if label not in place:
            raise DataError(
                f"{part.name}:{line}: the label '{label}' is none of {_listed(names)}: mend "
                "the row, or train with rows of this label"
            )
    return np.array([place[label] for label in part.labels], dtype=np.int64)


def _read_table(
    path: Path, columns: Columns, remedy: str, *, numbers: bool, skip: bool
) -> Labelled:
    lines = read_lines(path)
    header = None if columns.numbered else [cell.strip() for cell in lines[0].split("\t")]
    at = [_column(path, name, header, remedy) for name in columns.wanted]
    texts: list[Text] = []
    answers: list[str] = []
    kept: list[int] = []
    for line, row in enumerate(lines[header is not None :], start=1 + (header is not None)):
        cells = [cell.strip() for cell in row.split("\t")]
        broken = _what_is_broken(cells, columns.wanted, at, len(header or []))
        if broken and not skip:
            raise DataError(f"{path}:{line}: {broken}; fix it, or set data.broken_rows=skip")
        if not broken:
            answer, first, *second = [cells[place] for place in at]
            texts.append((first, second[0]) if second else first)
            answers.append(answer)
            kept.append(line)
    if not kept:
        what = "a header" if header and len(lines) == 1 else "broken rows"
        raise DataError(f"{path}: nothing but {what}; give a file with labelled rows")
    left_out = len(lines) - (header is not None) - len(kept)
    without = f", without {left_out:,} broken ones" if left_out else ""
    return Labelled(
        texts=texts,
        labels=[] if numbers else answers,
        numbers=_numbers(path, kept, answers) if numbers else [],
        lines=kept,
        name=str(path),
        notes=(f"{path}: {len(kept):,} rows{without}",),
    )


def _column(path: Path, name: str, header: list[str] | None, remedy: str) -> int:
    """Where a column is, counted from 0."""
    if header is None:
        return int(name) - 1
    if name in header:
        return header.index(name)
    close = difflib.get_close_matches(name, header, n=1)
    advice = f"did you mean '{close[0]}'?" if close else remedy
    if len(header) == 1:
        advice = "the columns of a table stand between tabs"
    raise DataError(f"{path}:1: no column '{name}' in the header {_listed(header)}: {advice}")


def _what_is_broken(
    cells: list[str], names: list[str], at: list[int], in_header: int
) -> str | None:
    """What a row lacks, or has too much: a tab in a text shifts the columns after it."""
    if len(cells) <= max(at):
        found = f"{len(cells)} columns" if len(cells) > 1 else "one column"
        return f"{found} where {in_header or max(at) + 1} are needed"
    if in_header and any(cells[in_header:]):
        return f"{len(cells)} columns where the header has {in_header}"
    for name, place in zip(names, at, strict=True):
        if not cells[place]:
            what = "label" if name == names[0] else "text"
            return f"an empty {what} (column {name if in_header else place + 1})"
    return None


def _numbers(path: Path, lines: list[int], texts: list[str]) -> list[float]:
    numbers: list[float] = []
    for line, text in zip(lines, texts, strict=True):
        try:
            numbers.append(float(text))
        except ValueError:
            numbers.append(math.nan)
        if not math.isfinite(numbers[-1]):
            raise DataError(f"{path}:{line}: '{text}' is no number; write it like 3.5")
    return numbers


def _hold_out(whole: Labelled, share: float) -> tuple[list[int], list[int]]:
    """Rows for training and for validation: each label of these is also in those."""
    train, valid = hold_out(len(whole.texts), share, seed=0)
    if not whole.labels:
        return train, valid
    trained = {whole.labels[row] for row in train}
    held = [row for row in valid if whole.labels[row] in trained]
    if not held:
        raise DataError(
            f"{whole.name}: too few rows of each label to hold some out for validation; give "
            "more, or a file with data.valid, or say that labels are numbers by data.answer=number"
        )
    return sorted({*range(len(whole.texts))} - {*held}), held


def _listed(names: Sequence[str], most: int = 10) -> str:
    """Names for a message: not too many, none too long."""
    short = [name if len(name) <= 30 else f"{name[:29]}…" for name in names[:most]]
    return f"({', '.join(short)}{', …' if len(names) > most else ''})"


def _alike(one: str, other: str) -> bool:
    """Whether two names of folders are one but for capitals, - and _."""
    bare = [name.casefold().replace("-", "").replace("_", "") for name in (one, other)]
    return bare[0] == bare[1]
