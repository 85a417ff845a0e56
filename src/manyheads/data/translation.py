"""Parallel text as padded batches: sources, decoder inputs, labels and their masks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.config import Between, nearest
from manyheads.data.alignment import read_alignment, token_links
from manyheads.data.batching import (
    Batches,
    Ragged,
    Rows,
    TooLong,
    digest_of,
    fit_length,
    map_tensors,
    to_device,
)
from manyheads.data.corpus import (
    STEMS,
    SplitData,
    SplitItems,
    ValidFraction,
    check_folder,
    find_table,
    hold_out,
    select_rows,
)
from manyheads.data.files import is_here, plain_name, read_columns, stream_parallel
from manyheads.errors import DataError, UserError
from manyheads.phrasebook import Pair, sentences
from manyheads.tokenizer.bpe_dropout import BpeDropout
from manyheads.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus(SplitItems):
    """Sentence pairs of one split, with gold word alignments where known.

    `rows` are the row numbers in the files, from 0, if they are not all of one file.
    `references` are all targets of a source, if it has several to be scored by.
    """

    sources: list[str]
    targets: list[str]
    aligned: list[Pair] | None = None
    notes: tuple[str, ...] = ()
    name: str = "the corpus"  # in messages
    rows: list[int] | None = None
    references: list[list[str]] | None = None
    unit: ClassVar[str] = "pairs"

    def items(self) -> Iterable[tuple[str, str]]:
        return zip(self.sources, self.targets, strict=True)

    def encoded(
        self, tokenizer: Tokenizer, max_length: int, too_long: TooLong, frame: "Frame"
    ) -> "EncodedPairs":
        return EncodedPairs(self, tokenizer, max_length, too_long, frame)

    def part(self, split: str, valid_fraction: float) -> "Corpus":
        """The pairs for training, or those held out for validation."""
        rows = hold_out(len(self.sources), valid_fraction, seed=0)[split == "valid"]
        which = "held-out pairs" if split == "valid" else "without held-out pairs"
        notes = self.notes
        if split == "valid":
            notes = (*notes, f"{len(rows):,} of them held out for validation")
        return replace(select_rows(self, rows), name=f"{self.name} ({which})", notes=notes)


@dataclass(frozen=True, kw_only=True)
class PhrasebookData:
    """The built-in corpus: a grammar that generates pairs with gold alignments."""

    # No split has infinitely many sentences, so each count has a limit.
    pair: Annotated[Literal["en-de", "en-fr"], "Languages"] = "en-de"
    train_pairs: Annotated[int, Between(1, 300_000), "Training pairs"] = 100_000
    valid_pairs: Annotated[int, Between(1, 20_000), "Validation pairs"] = 500
    test_pairs: Annotated[int, Between(1, 20_000), "Test pairs"] = 1000
    kind: ClassVar[str] = "phrasebook"

    def splits(self) -> list[str]:
        return ["train", "valid", "test", "compositional"]

    def read(self, split: str) -> Corpus:
        if split not in self.splits():
            raise UserError(f"there is no split '{split}': {nearest(split, self.splits())}")
        counts = {"train": self.train_pairs, "valid": self.valid_pairs}
        pairs = sentences(self.pair, split, counts.get(split, self.test_pairs))
        return Corpus([p.source for p in pairs], [p.target for p in pairs], pairs)


@dataclass(frozen=True, kw_only=True)
class FilesData(SplitData[tuple[Path, Path]]):
    """Two files of your own, one sentence per line, or a table with a column for each side.

    `source` and `target` are files (in `folder`, if set) or the endings of files with the same
    stem: with folder=corpus source=en target=de, training reads corpus/train.en and
    corpus/train.de; validation and test read valid.* and test.* (or the first test…) there.
    Without them, `train`, `valid` and `test` are tables, or train.tsv etc. in `folder`.
    """

    source: Annotated[str, "Source file, or its ending in `folder`, e.g. en"] = ""
    target: Annotated[str, "Target file, or its ending in `folder`, e.g. de"] = ""
    valid_source: Annotated[str, "Source file for validation"] = ""
    valid_target: Annotated[str, "Target file for validation"] = ""
    test_source: Annotated[str, "Source file for testing"] = ""
    test_target: Annotated[str, "Target file for testing"] = ""
    train: Annotated[str, "Training table, in place of two files"] = ""
    valid: Annotated[str, "Validation table"] = ""
    test: Annotated[str, "Test table"] = ""
    source_column: Annotated[str, "Column of the source in a table, e.g. en"] = "source"
    target_column: Annotated[str, "Column of the target in a table, e.g. de"] = "target"
    alignment: Annotated[str, "Word links of the training pairs (Pharaoh: i-j), in `folder`"] = ""
    valid_fraction: ValidFraction = 0.02
    empty_lines: Annotated[Literal["refuse", "skip"], "Pairs with an empty side"] = "refuse"
    kind: ClassVar[str] = "files"

    def __post_init__(self) -> None:
        tables = [name for name in ("train", "valid", "test") if getattr(self, name)]
        if self.alignment and not self.source:
            raise UserError("data.alignment needs data.source and data.target: set them")
        if self.source and tables:
            raise UserError(
                f"data.{tables[0]} is a table, and data.source={self.source} a text of one side: "
                "set data.source= and data.target=, or leave out the table"
            )

    @property
    def languages(self) -> tuple[str, str]:
        """The endings or columns of the two sides, often their languages."""
        sides = (self.source or self.source_column), (self.target or self.target_column)
        source, target = (plain_name(side).rpartition(".")[2] for side in sides)
        return source, target

    def _read(self, files: tuple[Path, Path]) -> Corpus:
        source, target = files
        table = list(self.stream(files))
        pairs = [(line - 1, *row) for line, row in table if row is not None]
        name = f"{source}, {target}" if self.source else str(source)
        if not pairs:
            raise DataError(f"{name}: no row with both sides; check the file")
        numbers, sources, targets = (list(side) for side in zip(*pairs, strict=True))
        notes = [f"{name}: {len(sources):,} pairs"]
        if skipped := len(table) - len(pairs):
            notes.append(f"{skipped:,} pairs with an empty side were skipped")
        aligned = None
        if self.alignment and files == self._find("train"):
            path = check_folder(self.folder) / self.alignment
            aligned = read_alignment(path, len(table), numbers, sources, targets)
        return Corpus(sources, targets, aligned, tuple(notes), name, numbers)

    def stream(self, files: tuple[Path, Path]) -> Iterator[tuple[int, list[str] | None]]:
        """The number of each row, from 1, and both sides; None if it is skipped."""
        skip = self.empty_lines == "skip"
        if self.source:
            return stream_parallel(*files, skip_empty=skip)
        columns = {"source_column": self.source_column, "target_column": self.target_column}
        return read_columns(files[0], columns, skip="empty_lines", on=skip)

    def _find(self, split: str) -> tuple[Path, Path] | None:
        """The two files of a split: the configured ones, or those found by their stem."""
        if not self.source and not self.target:
            table = find_table(self.folder, getattr(self, split, ""), split)
            if table is None and split == "train":
                raise UserError(
                    "set data.source and data.target, e.g. data.source=en data.target=de, or "
                    "data.train=TABLE with data.source_column and data.target_column"
                )
            return None if table is None else (table, table)
        if not self.source or not self.target:
            raise UserError("data.source and data.target go together: set both")
        folder, prefix = check_folder(self.folder), "" if split == "train" else f"{split}_"
        names = [getattr(self, f"{prefix}{side}", "") for side in ("source", "target")]
        if any(names) and not all(names):
            raise UserError(f"data.{split}_source and data.{split}_target go together: set both")
        if all(names) and (split != "train" or is_here(folder / names[0])):
            return folder / names[0], folder / names[1]
        stems = STEMS.get(split, (split,))
        for stem in (*stems, *(self._extra_splits() if split == "test" else ())):
            pair = folder / f"{stem}.{self.source}", folder / f"{stem}.{self.target}"
            if self.folder and is_here(pair[0]):
                return pair
        # A missing training file is reported with similar names when it is read.
        return (folder / self.source, folder / self.target) if split == "train" else None

    def _extra_splits(self) -> list[str]:
        """Test sets such as test_2016; without a plain test.en the first of them is `test`."""
        ending = f".{self.source}"
        paths = Path(self.folder).glob(f"test*{ending}*") if self.folder and self.source else ()
        names = {plain_name(path.name) for path in paths}
        return sorted(name.removesuffix(ending) for name in names if name.endswith(ending))

    def _missing(self, split: str) -> str:
        if not self.source:
            return super()._missing(split)
        return (
            f"there is no split '{split}': set data.test_source and data.test_target, or add "
            f"test.{self.source} to data.folder, or use --split valid"
        )


@dataclass(frozen=True, kw_only=True)
class TestFiles(FilesData):
    """A test set for `evaluate`: a source file and one or more files of references."""

    __test__ = False  # not a test of pytest
    references: tuple[str, ...] = ()

    def splits(self) -> list[str]:
        return ["test"]

    def read(self, split: str) -> Corpus:
        files = [self.source, *self.references]
        rows = [row for _, row in stream_parallel(*map(Path, files)) if row is not None]
        sources, references = [source for source, *_ in rows], [texts for _, *texts in rows]
        targets = [texts[0] for texts in references]
        return Corpus(sources, targets, name=", ".join(files), references=references)


TranslationData = PhrasebookData | FilesData


@dataclass(frozen=True)
class Batch:
    """Sentence pairs for teacher forcing: `target` is `labels` shifted right by the start token.

    `source_real` and `loss_mask` are False at padding.
    """

    source: Int[Tensor, "b s"]
    source_real: Bool[Tensor, "b s"]
    target: Int[Tensor, "b t"]
    labels: Int[Tensor, "b t"]
    loss_mask: Bool[Tensor, "b t"]
    source_tokens: int
    target_tokens: int
    links: Float[Tensor, "b t s"] | None = None  # 1: tokens of linked words (guided alignment)

    @staticmethod
    def of(sources: Ragged, targets: Ragged, rows: Rows, start: int, pad: int) -> "Batch":
        """These rows of sequences that include their end tokens."""
        source, source_real = sources.padded(rows, pad)
        labels, loss_mask = targets.padded(rows, pad)
        target = torch.cat([torch.full((len(rows), 1), start), labels[:, :-1]], dim=1)
        tokens = int(sources.lengths[rows].sum()), int(targets.lengths[rows].sum())
        return Batch(source, source_real, target, labels, loss_mask, *tokens)

    def to(self, device: torch.device | str) -> "Batch":
        return to_device(self, device)

    def twice(self) -> "Batch":
        """The batch concatenated with itself, for R-Drop."""
        both = map_tensors(self, lambda x: torch.cat([x, x]))
        tokens = 2 * self.source_tokens, 2 * self.target_tokens
        return replace(both, source_tokens=tokens[0], target_tokens=tokens[1])

    def padded(self, rows: int, multiple: int) -> "Batch":
        """The same with `rows` rows and lengths that are multiples, so that shapes repeat.

        The added rows have no predictions, and one key each: attention over no key is undefined.
        """
        missing = rows - len(self.source)

        def pad(x: Tensor) -> Tensor:
            sides = [side for n in reversed(x.shape[1:]) for side in (0, -n % multiple)]
            return F.pad(x, (*sides, 0, missing))

        larger = map_tensors(self, pad)
        larger.source_real[len(self.source) :, 0] = True
        return larger


@dataclass(frozen=True)
class Frame:
    """Special tokens around texts: a target begins with `start`, both sides end with `end`.

    Some models also read `source_start` before a source. `pad` fills shorter rows.
    """

    start: int
    end: int
    pad: int
    source_start: int | None = None

    @staticmethod
    def of(tokenizer: Tokenizer) -> "Frame":
        return Frame(tokenizer.start, tokenizer.end, tokenizer.pad)

    def source(self, ids: Sequence[int]) -> list[int]:
        """A source as an encoder reads it."""
        return [*([] if self.source_start is None else [self.source_start]), *ids, self.end]


class EncodedPairs:
    """A corpus as token ids, from which batches of rows are made.

    `too_long` decides about a pair with a side of more than `max_length` tokens, the end token
    included: refuse it, skip it, or truncate it before its end token.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        max_length: int,
        too_long: TooLong = "refuse",
        frame: Frame | None = None,
    ) -> None:
        self.frame = Frame.of(tokenizer) if frame is None else frame
        if not corpus.sources:
            raise DataError(f"{corpus.name} has no sentence pair")
        if max_length < 2:
            raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
        sources = [self.frame.source(ids) for ids in tokenizer.encode_batch(corpus.sources)]
        targets = [[*ids, self.frame.end] for ids in tokenizer.target.encode_batch(corpus.targets)]
        lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        numbers = [row + 1 for row in corpus.rows or range(len(sources))]  # lines in the files
        self.rows, self.notes = fit_length(corpus.name, lengths, numbers, max_length, too_long)
        self.numbers = [numbers[row] for row in self.rows]
        self.aligned: list[Pair] = []
        self.sources = Ragged.of([_truncate(sources[row], max_length) for row in self.rows])
        self.targets = Ragged.of([_truncate(targets[row], max_length) for row in self.rows])

    def add_bpe_dropout(
        self, corpus: Corpus, cuts: Sequence[BpeDropout], copies: int, max_length: int
    ) -> None:
        """BPE-dropout: append copies of all pairs with other segmentations.

        A copy that would be too long keeps the segmentation without dropout.
        """
        texts = [[side[row] for row in self.rows] for side in (corpus.sources, corpus.targets)]
        plain = list(zip(self.sources.rows(), self.targets.rows(), strict=True))
        pairs = list(plain)
        for copy in range(copies):
            sources, targets = (
                cut.encode_batch(side, copy, n)
                for n, (cut, side) in enumerate(zip(cuts, texts, strict=True))
            )
            for original, source, target in zip(plain, sources, targets, strict=True):
                pair = (self.frame.source(source), [*target, self.frame.end])
                pairs.append(pair if max(map(len, pair)) <= max_length else original)
        self.sources, self.targets = (Ragged.of(list(side)) for side in zip(*pairs, strict=True))
        self.numbers = self.numbers * (copies + 1)

    def add_links(self, corpus: Corpus, tokenizer: Tokenizer) -> None:
        """Guided alignment: batches have the links between tokens."""
        pairs = corpus.aligned or []
        self.aligned, self.tokenizer = [pairs[row] for row in self.rows], tokenizer

    def digest(self) -> str:
        """A hash of all token sequences in their order, and of word links."""
        sources, targets = self.sources, self.targets
        links = [np.array(sorted(pair.alignment)) for pair in self.aligned]
        return digest_of(sources.starts, sources.flat, targets.starts, targets.flat, *links)

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        """The longer side of each row."""
        return np.maximum(self.sources.lengths, self.targets.lengths)

    def order(self, budget: int, seed: int) -> Any:
        """Batches of so many tokens for every step."""
        return Batches(self.lengths, budget, seed)

    def batch(self, rows: Rows) -> Batch:
        batch = Batch.of(self.sources, self.targets, rows, self.frame.start, self.frame.pad)
        if not self.aligned:
            return batch
        first = len(self.frame.source([])) - 1  # after the source's start token
        height, width = batch.target.shape[1] - 1, batch.source.shape[1] - 1  # without the ends
        links = [token_links(self.tokenizer, self.aligned[row]) for row in rows]
        padded = [F.pad(x, (first, width - first - x.shape[1], 0, height - len(x))) for x in links]
        return replace(batch, links=F.pad(torch.stack(padded), (0, 1, 0, 1)))


def _truncate(ids: list[int], limit: int) -> list[int]:
    """At most `limit` ids, the last one (the end token) included."""
    return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]
