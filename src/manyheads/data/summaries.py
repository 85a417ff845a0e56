"""Documents with their summaries: DialogSum, and tables of your own.

A text of several lines becomes one line with LINE_END between them, so that documents can be
treated as lines everywhere, and a model can separate the turns of a dialogue.
"""

from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated, ClassVar

from manyheads.data.corpus import TableData, ValidFraction
from manyheads.data.files import Row, read_rows
from manyheads.data.translation import Corpus

LINE_END = "⏎"


def as_line(text: str) -> str:
    """The lines of a text that are not empty as one, ` ⏎ ` between them."""
    lines = (line.strip() for line in text.splitlines())
    return f" {LINE_END} ".join(line for line in lines if line)


def as_lines(text: str) -> str:
    """The inverse: a line end at each ⏎."""
    return "\n".join(line.strip() for line in text.split(LINE_END))


@dataclass(frozen=True, kw_only=True)
class SummaryData(TableData):
    """Tables with a document and its summary in each row, such as JSON lines.

    In `folder`, train.jsonl (or .tsv, .csv), valid.jsonl (or val.jsonl, dev.jsonl) and test.jsonl
    are found by name, plain or .gz. Several summaries of a document are a list, or have columns
    that end in 1, 2, … (summary1, summary2): all are references for scoring, and the first is the
    target.
    """

    source: Annotated[str, "Column of the document"] = "dialogue"
    target: Annotated[str, "Column of the summary"] = "summary"
    valid_fraction: ValidFraction = 0.02
    kind: ClassVar[str] = "summaries"

    def _read(self, path: Path) -> Corpus:
        """The documents, summaries and references of a file."""
        sources, references, rows = [], [], []
        for row in read_rows(path):
            rows.append(row.line - 1)
            sources.append(as_line(row.text(self.source, "source")))
            references.append(self._summaries(row))
        return Corpus(
            sources,
            [summaries[0] for summaries in references],
            notes=(f"{path}: {len(sources):,} documents",),
            name=str(path),
            rows=rows,
            references=references,
        )

    def _summaries(self, row: Row) -> list[str]:
        """The summaries of a row, as lines."""
        values = dict(row.values)
        summaries = values.get(self.target)
        columns = [self.target]
        if isinstance(summaries, list) and summaries:
            columns = [f"{self.target}[{number}]" for number in range(len(summaries))]
            values |= zip(columns, summaries, strict=True)
        elif self.target not in values and f"{self.target}1" in values:
            numbers = takewhile(lambda n: f"{self.target}{n}" in values, count(1))
            columns = [f"{self.target}{number}" for number in numbers]
        return [as_line(replace(row, values=values).text(name, "target")) for name in columns]
