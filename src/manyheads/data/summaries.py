"""Documents with their summaries: DialogSum, and a user's own files of JSON lines.

A text of several lines is read as one line with LINE_END where a line ended, so that documents go
through everything that takes lines, and a model can tell the turns of a dialogue apart.
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from manyheads.data.corpus import STEMS, check_held_out, check_split, read_lines, split_file
from manyheads.data.translation import Corpus
from manyheads.errors import DataError, UserError

LINE_END = "⏎"


def as_line(text: str) -> str:
    """The lines of a text that are not empty as one, ` ⏎ ` between them."""
    lines = (line.strip() for line in text.splitlines())
    return f" {LINE_END} ".join(line for line in lines if line)


def as_lines(text: str) -> str:
    """The way back: a line end at each ⏎."""
    return "\n".join(line.strip() for line in text.split(LINE_END))


@dataclass(frozen=True, kw_only=True)
class SummaryData:
    """Files of JSON lines: one object a line, with a document and its summary.

    `train`, `valid` and `test` are files, in `folder` where given; there train.jsonl, valid.jsonl
    (or val.jsonl, dev.jsonl) and test.jsonl need no naming, plain or .gz. `source` is the key of
    the document and `target` that of the summary. Where several people have written one, they
    are a list, or their keys end in 1, 2, … (summary1, summary2): all are references to score by,
    and the first is learned. Without a validation file a seeded share `held_out` of the training
    rows serves.
    """

    folder: str = ""
    train: str = ""
    valid: str = ""
    test: str = ""
    source: str = "dialogue"
    target: str = "summary"
    held_out: float = 0.02
    kind: ClassVar[str] = "summaries"

    def __post_init__(self) -> None:
        check_held_out(self.held_out)
        for name in ("source", "target"):
            if not getattr(self, name):
                raise UserError(f"data.{name} is empty: give the key that it has in the files")
        if self.source == self.target:
            raise UserError(f"data.source and data.target must differ (not {self.source})")

    def splits(self) -> list[str]:
        return [split for split in STEMS if split != "test" or self._file(split) is not None]

    def read(self, split: str) -> Corpus:
        """The documents, summaries and references of a split."""
        check_split(split, STEMS)
        path = self._file(split)
        if path is not None and split != "train":
            return self._read(path)
        if split == "test":
            raise UserError("there is no split 'test': give data.test=FILE, or use --split valid")
        train = self._file("train")
        if train is None:
            missing = f"data.folder={self.folder} has no train.jsonl"
            missing = missing if self.folder else "data.folder with train.jsonl is needed"
            keys = f"{self.source} and {self.target}"
            raise UserError(f"{missing}: or give data.train=FILE, JSON lines with the keys {keys}")
        whole = self._read(train)
        if self._file("valid") is not None:
            return whole
        return whole.part(split, self.held_out)

    def _file(self, split: str) -> Path | None:
        return split_file(self.folder, getattr(self, split), split, ".jsonl")

    def _read(self, path: Path) -> Corpus:
        sources, references = [], []
        for number, line in enumerate(read_lines(path), start=1):
            place = f"{path}:{number}"
            row = _parse(line, place)
            sources.append(_text(row, self.source, "source", place))
            row, several = self._several(row)
            references.append([_text(row, key, "target", place) for key in several])
        return Corpus(
            sources,
            [one[0] for one in references],
            notes=(f"{path}: {len(sources):,} documents",),
            name=str(path),
            references=references,
        )

    def _several(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """A row, and the keys of its summaries: the plain one, or numbered ones, as of a list."""
        listed = row.get(self.target)
        if isinstance(listed, list) and listed:
            keys = [f"{self.target}[{place}]" for place in range(len(listed))]
            return {**row, **dict(zip(keys, listed, strict=True))}, keys
        keys = []
        while f"{self.target}{len(keys) + 1}" in row:
            keys.append(f"{self.target}{len(keys) + 1}")
        return row, keys if keys and self.target not in row else [self.target]


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = f"{str(error).partition(': line')[0]}, at character {getattr(error, 'colno', 1)}"
        raise DataError(f"{place}: not JSON ({why}); write one object a line") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: not a JSON object with a document and its summary")
    return row


def _text(row: dict[str, Any], key: str, setting: str, place: str) -> str:
    """What stands at a key of a row, as one line."""
    if key not in row:
        names = ", ".join(list(row)[:10])
        close = difflib.get_close_matches(key, row, n=1)
        advice = f"data.{setting}={close[0] if close else 'KEY'}"
        raise DataError(f"{place}: no key '{key}' among ({names}): name another with {advice}")
    if not isinstance(row[key], str):
        raise DataError(f"{place}: '{key}' is no text: mend the row")
    text = as_line(row[key])
    if not text:
        raise DataError(f"{place}: '{key}' is empty: mend the row, or take it out")
    if not text.isprintable():  # seldom, so that the closer look costs nothing
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{place}: '{key}' holds half a character (\\ud…): mend it") from None
    return text
