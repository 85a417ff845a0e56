"""Labelled texts and pairs of texts: the nine tasks of GLUE, and tables of your own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Int

from manyheads.config import parse, read_toml
from manyheads.data.corpus import SplitItems, TableData, check_folder, hold_out, select_rows
from manyheads.data.files import join_names, read_columns
from manyheads.errors import DataError, UserError

Text = str | tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Labelled(SplitItems):
    """Texts, or pairs of texts, of one split with their labels, or numbers for a regression.

    `name` is the file, and `lines` are the line numbers of the rows in it, from 1.
    """

    texts: list[Text]
    labels: list[str] | list[float]
    lines: list[int]
    name: str
    notes: tuple[str, ...] = ()
    unit: ClassVar[str] = "texts"

    def items(self) -> list[Text]:
        return self.texts

    def strings(self) -> list[str]:
        """All texts; a pair gives two."""
        return [text for row in self.texts for text in ([row] if isinstance(row, str) else row)]

    def part(self, split: str, valid_fraction: float) -> "Labelled":
        """The rows for training or validation; every label of validation occurs in training."""
        train, valid = hold_out(len(self.texts), valid_fraction, seed=0)
        if isinstance(self.labels[0], str):
            known = {self.labels[row] for row in train}
            valid = [row for row in valid if self.labels[row] in known]
            train = sorted({*range(len(self.texts))} - {*valid})
        if not valid:
            raise DataError(
                f"{self.name}: too few rows of each label to hold some out for validation; add "
                "rows, set data.valid, or set data.answer=number if the labels are numbers"
            )
        rows, use = (valid, "held out") if split == "valid" else (train, "for training")
        return replace(select_rows(self, rows), notes=(*self.notes, f"{len(rows):,} of them {use}"))


@dataclass(frozen=True, kw_only=True)
class Glue:
    """A task of GLUE, a row of glue.toml."""

    folder: str
    columns: tuple[str, ...]  # label, text, second text
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    train: str = "train.tsv"
    valid: str = "dev.tsv"
    valid_mismatched: str = ""
    broken_rows: Literal["refuse", "skip"] = "refuse"

    @property
    def files(self) -> dict[str, str]:
        names = ("train", "valid", "valid_mismatched")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


_TABLES = read_toml(Path(__file__).with_name("glue.toml"))
GLUE: dict[str, Glue] = {name: parse(Glue, table) for name, table in _TABLES.items()}
SETTINGS_OF_GLUE = ("task", "folder", "broken_rows")


@dataclass(frozen=True, kw_only=True)
class LabelledData(TableData):
    """A task of GLUE from its official files, or tables of your own.

    For GLUE, `folder` is the folder of the task or its parent. The other settings are for tables
    of your own: in `folder`, train.tsv (or .csv, .jsonl), valid.tsv (or dev.tsv) and test.tsv are
    found by name, and columns are names in the header or, without a header, numbers from 1.
    """

    task: Annotated[
        Literal["own", "cola", "sst-2", "mrpc", "qqp", "sts-b", "mnli", "qnli", "rte", "wnli"],
        "A task of GLUE, or `own` for your own tables",
    ] = "own"
    text: Annotated[str, "Column of the text"] = "text"
    pair: Annotated[str, "Column of the second text, for pairs"] = ""
    label: Annotated[str, "Column of the label"] = "label"
    answer: Annotated[Literal["label", "number"], "Classification or regression"] = "label"
    broken_rows: Annotated[
        Literal["refuse", "skip"], "Rows without text or label, or with too many columns"
    ] = "refuse"
    kind: ClassVar[str] = "labelled"

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            is_own = setting.name not in SETTINGS_OF_GLUE
            if self._glue is not None and is_own and value != setting.default:
                raise UserError(
                    f"data.{setting.name}={value} is for tables of your own, and data.task="
                    f"{self.task} has official ones: remove it, or set data.task=own"
                )

    @property
    def _glue(self) -> Glue | None:
        return GLUE.get(self.task)

    @property
    def regression(self) -> bool:
        return self.answer == "number" if self._glue is None else not self._glue.labels

    @property
    def columns(self) -> tuple[str, ...]:
        """Label, text and, for pairs, second text."""
        if self._glue is not None:
            return self._glue.columns
        return (self.label, self.text, self.pair) if self.pair else (self.label, self.text)

    def splits(self) -> list[str]:
        return super().splits() if self._glue is None else list(self._glue.files)

    def label_names(self, train: Labelled) -> tuple[str, ...]:
        """The labels in the order of their class indices; a regression has one, `score`."""
        if self.regression:
            return ("score",)
        names = sorted({str(label) for label in train.labels})
        if len(names) < 2:
            raise DataError(
                f"{train.name}: every label is '{names[0]}', and a classifier needs two: check "
                f"that the column '{self.columns[0]}' holds the labels"
            )
        if self._glue is not None:
            return self._glue.labels
        if all(label.removeprefix("-").isdecimal() for label in names):
            names.sort(key=int)
        return tuple(names)

    def metrics(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The metrics of the task; F1 is that of the last label."""
        if self._glue is not None:
            return self._glue.metrics
        if self.regression:
            return ("pearson", "spearman")
        return ("accuracy", "f1") if len(names) == 2 else ("accuracy",)

    def _find(self, split: str) -> Path | None:
        if self._glue is None:
            return super()._find(split)
        if split not in self._glue.files:
            return None
        if not self.folder:
            raise UserError(
                f"data.folder is needed: the folder {self._glue.folder} of GLUE, or its parent, "
                "e.g. data.folder=glue"
            )
        folder = check_folder(self.folder)
        inside = folder / self._glue.folder
        return (inside if inside.is_dir() else folder) / self._glue.files[split]

    def _extra_splits(self) -> list[str]:
        return [] if self._glue is None else list(self._glue.files)

    def _missing(self, split: str) -> str:
        if self._glue is not None:
            return f"the test labels of {self._glue.folder} are not public: use --split valid"
        return super()._missing(split)

    def read_texts(self, path: Path) -> Iterator[str]:
        """The texts of a table without labels, a tab between those of a pair."""
        columns = {name: self._settings[name] for name in self._settings if name != "label"}
        for _, texts in read_columns(path, columns, has_header=self._has_header):
            yield "\t".join(text.replace("\t", " ") for text in texts or ())

    @property
    def _settings(self) -> dict[str, str]:
        """The column that each setting names."""
        return dict(zip(("label", "text", "pair"), self.columns, strict=False))

    @property
    def _has_header(self) -> bool:
        return not all(name.isdecimal() for name in self.columns)

    def _read(self, path: Path) -> Labelled:
        skip = "skip" in (self.broken_rows, self._glue and self._glue.broken_rows)
        rows = read_columns(
            path, self._settings, has_header=self._has_header, skip="broken_rows", on=skip
        )
        table = [*rows]
        complete = [(line, *row) for line, row in table if row is not None]
        if not complete:
            raise DataError(f"{path}: no row with text and label; give a file with labelled rows")
        lines, labels, *columns = (list(column) for column in zip(*complete, strict=True))
        skipped = len(table) - len(complete)
        without = f", without {skipped:,} broken ones" if skipped else ""
        return Labelled(
            texts=columns[0] if len(columns) == 1 else list(zip(*columns, strict=True)),
            labels=_parse_numbers(path, lines, labels) if self.regression else labels,
            lines=lines,
            name=str(path),
            notes=(f"{path}: {len(complete):,} rows{without}",),
        )


def class_indices(part: Labelled, names: Sequence[str]) -> Int[np.ndarray, " rows"]:
    """The class index of each row: the position of its label among the names."""
    indices: dict[Any, int] = {name: index for index, name in enumerate(names)}
    for line, label in zip(part.lines, part.labels, strict=True):
        if label not in indices:
            raise DataError(
                f"{part.name}:{line}: the label '{label}' is none of {join_names(names)}: fix the "
                "row, or train with rows of this label"
            )
    return np.array([indices[label] for label in part.labels], dtype=np.int64)


def _parse_numbers(path: Path, lines: list[int], texts: list[str]) -> list[float]:
    numbers: list[float] = []
    for line, text in zip(lines, texts, strict=True):
        try:
            numbers.append(float(text))
        except ValueError:
            numbers.append(math.nan)
        if not math.isfinite(numbers[-1]):
            raise DataError(f"{path}:{line}: '{text}' is not a number; write it like 3.5")
    return numbers
