"""Documents with their summaries: DialogSum, and JSON lines of your own.

A text of several lines becomes one line with LINE_END between them, so that documents can be
treated as lines everywhere, and a model can separate the turns of a dialogue.
"""

import difflib
import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from manyheads.data.corpus import FileData, ValidFraction, read_lines
from manyheads.data.translation import Corpus
from manyheads.errors import DataError, UserError

LINE_END = "⏎"


def as_line(text: str) -> str:
    """The lines of a text that are not empty as one, ` ⏎ ` between them."""
    lines = (line.strip() for line in text.splitlines())
    return f" {LINE_END} ".join(line for line in lines if line)


def as_lines(text: str) -> str:
    """The inverse: a line end at each ⏎."""
    return "\n".join(line.strip() for line in text.split(LINE_END))


@dataclass(frozen=True, kw_only=True)
class SummaryData(FileData):
    """JSON lines: one object per line, with a document and its summary.

    In `folder`, train.jsonl, valid.jsonl (or val.jsonl, dev.jsonl) and test.jsonl are found by
    name, plain or .gz. Several summaries of a document are a list, or have keys that end in
    1, 2, … (summary1, summary2): all are references for scoring, and the first is the target.
    """

    source: Annotated[str, "Key of the document"] = "dialogue"
    target: Annotated[str, "Key of the summary"] = "summary"
    valid_fraction: ValidFraction = 0.02
    kind: ClassVar[str] = "summaries"
    SUFFIX: ClassVar[str] = ".jsonl"

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            if not getattr(self, name):
                raise UserError(f"data.{name} is empty: set the key that it has in the files")
        if self.source == self.target:
            raise UserError(f"data.source and data.target must differ (not {self.source})")

    def read(self, split: str) -> Corpus:
        """The documents, summaries and references of a split."""
        path, is_held_out = self._locate(split)
        sources, references = [], []
        for number, line in enumerate(read_lines(path), start=1):
            where = f"{path}:{number}"
            row = _parse(line, where)
            sources.append(_get_text(row, self.source, "source", where))
            row, keys = self._flatten(row)
            references.append([_get_text(row, key, "target", where) for key in keys])
        corpus = Corpus(
            sources,
            [summaries[0] for summaries in references],
            notes=(f"{path}: {len(sources):,} documents",),
            name=str(path),
            references=references,
        )
        return corpus.part(split, self.valid_fraction) if is_held_out else corpus

    def _missing(self, split: str) -> str:
        if split == "test":
            return super()._missing(split)
        problem = f"data.folder={self.folder} has no train.jsonl"
        problem = problem if self.folder else "data.folder with train.jsonl is needed"
        keys = f"{self.source} and {self.target}"
        return f"{problem}: or set data.train=FILE, JSON lines with the keys {keys}"

    def _flatten(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """A row with each summary of a list under a key of its own, and the keys of summaries."""
        summaries = row.get(self.target)
        if isinstance(summaries, list) and summaries:
            listed = {f"{self.target}[{n}]": summary for n, summary in enumerate(summaries)}
            return {**row, **listed}, list(listed)
        keys: list[str] = []
        while f"{self.target}{len(keys) + 1}" in row:
            keys.append(f"{self.target}{len(keys) + 1}")
        return row, keys if keys and self.target not in row else [self.target]


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{str(error).partition(': line')[0]}, at character {getattr(error, 'colno', 1)}"
        raise DataError(f"{where}: not JSON ({reason}); write one object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object with a document and its summary")
    return row


def _get_text(row: dict[str, Any], key: str, setting: str, where: str) -> str:
    """The text at a key of a row, as one line."""
    if key not in row:
        close = difflib.get_close_matches(key, row, n=1)
        names = ", ".join(list(row)[:10])
        fix = f"set data.{setting}={close[0] if close else 'KEY'}"
        raise DataError(f"{where}: no key '{key}' among ({names}): {fix}")
    if not isinstance(row[key], str):
        raise DataError(f"{where}: '{key}' is not a text: fix the row")
    text = as_line(row[key])
    if not text:
        raise DataError(f"{where}: '{key}' is empty: fix the row, or remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: '{key}' contains a lone surrogate (\\ud…): fix it") from None
    return text
