"""The splits of a data set: the files of each, and held-out rows."""

import random
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from manyheads.config import Between, nearest
from manyheads.data.files import TABLES, is_here
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.data.prepared import Index

# File names of each split, in order of preference.
STEMS = {"train": ("train",), "valid": ("valid", "val", "dev", "validation"), "test": ("test",)}

ValidFraction = Annotated[
    float,
    Between(0, 1, open_low=True, open_high=True),
    "Fraction of the training data held out if there are no validation files",
]
Files = TypeVar("Files")
Part = TypeVar("Part")


class SplitItems:
    """The data of one split, as items that no other split should have."""

    unit: ClassVar[str]  # their name in messages

    def items(self) -> Iterable[Hashable]:
        raise NotImplementedError

    def leaks(self, train: Any) -> list[bool]:
        """Whether training also has it, for each item."""
        leaked = set(self.items()).intersection(train.items())
        return [item in leaked for item in self.items()]


@dataclass(frozen=True, kw_only=True)
class SplitData(Generic[Files]):
    """Settings of data with the splits train, valid and test.

    A subclass finds the files of a split. Without validation files, `valid_fraction` of the
    training data is held out, the same part for every seed of a run.
    """

    folder: Annotated[str, "Folder with the files"] = ""
    valid_fraction: ValidFraction = 0.1
    RENAMED: ClassVar[dict[str, str]] = {"held_out": "valid_fraction"}

    def splits(self) -> list[str]:
        if index := read_index(self.folder):
            texts = (split for split in STEMS if find_table(self.folder, "", split))
            return list(dict.fromkeys([*index.splits, *texts]))
        return [split for split in STEMS if split != "test" or self._find(split) is not None]

    def read(self, split: str) -> Any:
        """The data of a split."""
        index = read_index(self.folder)
        if index is not None and split in index.splits:
            index.check_kind(self)
            return index.part(split)
        files, is_held_out = self.locate(split)
        part = self._read(files)
        return part.part(split, self.valid_fraction) if is_held_out else part

    def _read(self, files: Files) -> Any:
        """The data of files, of which `part(split, valid_fraction)` gives a part."""
        raise NotImplementedError

    def locate(self, split: str) -> tuple[Files, bool]:
        """The files of a split, and whether only a part of them belongs to it."""
        check_split(split, [*STEMS, *self._extra_splits()])
        is_held_out = split in ("train", "valid") and self._find("valid") is None
        files = self._find("train" if is_held_out else split)
        if files is None:
            raise UserError(self._missing(split))
        return files, is_held_out

    def _find(self, split: str) -> Files | None:
        """The files of a split, if it has its own."""
        raise NotImplementedError

    def _extra_splits(self) -> Iterable[str]:
        return ()

    def _missing(self, split: str) -> str:
        """The error message for a split without files."""
        if split == "test":
            return "there is no split 'test': set data.test=FILE, or use --split valid"
        names = ", ".join(f"train{suffix}" for suffix in TABLES)
        return f"data.train=FILE is needed, or data.folder with one of {names}"


@dataclass(frozen=True, kw_only=True)
class TableData(SplitData[Path]):
    """Settings of data with one table for each split, such as train.tsv."""

    train: Annotated[str, "Training file, in `folder` if that is set"] = ""
    valid: Annotated[str, "Validation file"] = ""
    test: Annotated[str, "Test file"] = ""

    def _find(self, split: str) -> Path | None:
        return find_table(self.folder, getattr(self, split), split)


def find_table(folder: str, name: str, split: str) -> Path | None:
    """The table of a split: the file that a setting names, or train.tsv etc. in `folder`."""
    parent = check_folder(folder, "data.train")
    if name:
        return parent / name
    paths = [parent / f"{stem}{suffix}" for stem in STEMS[split] for suffix in TABLES]
    return next((path for path in paths if folder and is_here(path)), None)


def read_index(folder: str) -> "Index | None":
    """The index of prepared data, if a folder holds such data."""
    from manyheads.data import prepared  # which imports this module

    return prepared.read_index(folder)


def report_leaks(data: Any, train: SplitItems, valid: SplitItems) -> list[str]:
    """A line for each split with items that also occur in training."""
    parts, notes = {"valid": valid}, []
    with suppress(UserError):  # a damaged test set does not stop a training
        parts |= {"test": data.read("test")} if "test" in data.splits() else {}
    for split, part in parts.items():
        leaks = part.leaks(train)
        if any(leaks):
            count = f"{sum(leaks):,} of {len(leaks):,} {part.unit}"
            notes.append(f"{count} of '{split}' also occur in training")
    return notes


def check_split(split: str, known: Iterable[str]) -> None:
    names = list(known)
    if split not in names:
        raise UserError(f"there is no split '{split}': {nearest(split, names)}")


def check_folder(folder: str, file_setting: str = "data.folder") -> Path:
    """The path of data.folder, which must be a folder if it is set."""
    path = Path(folder)
    if path.is_file():
        value = path.parent if file_setting == "data.folder" else folder
        raise UserError(f"data.folder={folder} is a file: set {file_setting}={value}")
    if folder and not path.is_dir():
        if path.is_absolute():
            raise UserError(f"data.folder={folder} is not a folder: check the path")
        fix = "run the command where it is, or set an absolute path"
        raise UserError(f"data.folder={folder} is not a folder in {Path.cwd()}: {fix}")
    return path


def hold_out(count: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Rows for training and rows for validation, at least one of each, in ascending order."""
    validation = held_out_rows(count, fraction, seed)
    return [row for row in range(count) if row not in validation], sorted(validation)


def held_out_rows(count: int, fraction: float, seed: int) -> set[int]:
    if count < 2:
        raise UserError(f"cannot hold out some of {count} rows: add rows, or validation files")
    held_out = min(max(round(count * fraction), 1), count - 1)
    return set(random.Random(seed).sample(range(count), held_out))


def select_rows(part: Part, rows: Sequence[int]) -> Part:
    """Some rows of a dataclass of parallel lists."""
    lists = {name: value for name, value in vars(part).items() if isinstance(value, list)}
    selected: dict[str, Any] = {name: [x[row] for row in rows] for name, x in lists.items()}
    return replace(part, **selected)  # type: ignore[type-var]
