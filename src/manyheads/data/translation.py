"""Parallel text as batches: source and target with their ends, padded, and what is real."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from manyheads.data.batching import Ragged, Rows
from manyheads.data.corpus import (
    SHARES,
    STEMS,
    check_folder,
    check_held_out,
    check_split,
    hold_out,
    is_here,
    read_pairs,
)
from manyheads.errors import DataError, UserError
from manyheads.phrasebook import Pair, sentences
from manyheads.tokenizer.bpe_dropout import BpeDropout
from manyheads.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs of one split, where known with their gold word alignments.

    `name` is what a message calls it, and `rows` are their places in the files, counted from 0,
    where the split has not all of them. `references` are all the targets that a source has, where
    it has several to be scored by; the first is its target.
    """

    sources: list[str]
    targets: list[str]
    aligned: list[Pair] | None = None
    notes: tuple[str, ...] = ()
    name: str = "the corpus"
    rows: list[int] | None = None
    references: list[list[str]] | None = None

    def part(self, split: str, held_out: float) -> "Corpus":
        """The pairs to train on, or those held out for validation."""
        rows = hold_out(len(self.sources), held_out, seed=0)[split == "valid"]
        return replace(
            self,
            sources=[self.sources[row] for row in rows],
            targets=[self.targets[row] for row in rows],
            name=f"{self.name} ({SHARES[split]})",
            rows=rows,
            references=self.references and [self.references[row] for row in rows],
        )


@dataclass(frozen=True, kw_only=True)
class PhrasebookData:
    """The built-in corpus: a grammar that writes pairs with gold alignments."""

    pair: Literal["en-de", "en-fr"] = "en-de"
    train_pairs: int = 100_000
    valid_pairs: int = 500
    test_pairs: int = 1000
    kind: ClassVar[str] = "phrasebook"

    def __post_init__(self) -> None:
        # No split has endlessly many sentences: the last ones would be drawn for ever.
        for split, most in (("train", 300_000), ("valid", 20_000), ("test", 20_000)):
            pairs = getattr(self, f"{split}_pairs")
            if not 1 <= pairs <= most:
                raise UserError(f"data.{split}_pairs={pairs} must be from 1 to {most:_}")

    def splits(self) -> list[str]:
        return ["train", "valid", "test", "compositional"]

    def read(self, split: str) -> Corpus:
        check_split(split, self.splits())
        counts = {"train": self.train_pairs, "valid": self.valid_pairs}
        pairs = sentences(self.pair, split, counts.get(split, self.test_pairs))
        return Corpus([p.source for p in pairs], [p.target for p in pairs], pairs)


@dataclass(frozen=True, kw_only=True)
class FilesData:
    """A user's own pair of files, one sentence a line.

    `source` and `target` are files (in `folder`, where given) or the two endings of files that
    share a stem: with folder=corpus source=en target=de, training reads corpus/train.en and
    corpus/train.de, and validation and test read valid.* and test.* (or the first test…) there.
    Without validation files a seeded share `held_out` of the training pairs serves.
    """

    folder: str = ""
    source: str = ""
    target: str = ""
    valid_source: str = ""
    valid_target: str = ""
    test_source: str = ""
    test_target: str = ""
    held_out: float = 0.02
    empty_lines: Literal["refuse", "skip"] = "refuse"
    kind: ClassVar[str] = "files"

    def __post_init__(self) -> None:
        check_held_out(self.held_out)

    def splits(self) -> list[str]:
        return [split for split in STEMS if split != "test" or self._files(split) is not None]

    def read(self, split: str) -> Corpus:
        if not self.source or not self.target:
            raise UserError(
                "data.source and data.target are needed, e.g. data.source=en data.target=de"
            )
        files = self._files(split)
        if files is not None and split != "train":
            return self._read(*files)
        if split not in STEMS:
            check_split(split, [*STEMS, *self._longer_stems("test")])
        if split == "test":
            raise UserError(
                "there is no split 'test': give data.test_source and data.test_target, or "
                f"test.{self.source} in data.folder, or use --split valid"
            )
        files = self._files("train")
        if files is None:
            files = (self._path(self.source), self._path(self.target))
        whole = self._read(*files)
        if self._files("valid") is not None:
            return whole
        return whole.part(split, self.held_out)

    def _path(self, name: str) -> Path:
        return check_folder(self.folder, "data.folder") / name

    def _files(self, split: str) -> tuple[Path, Path] | None:
        """The two files of a split: as named, or found by stem; None if there are none."""
        named = {
            "train": (self.source, self.target),
            "valid": (self.valid_source, self.valid_target),
            "test": (self.test_source, self.test_target),
        }.get(split, ("", ""))
        if any(named) and not all(named):
            raise UserError(f"data.{split}_source and data.{split}_target go together: give both")
        if all(named) and (split != "train" or is_here(self._path(named[0]))):
            return self._path(named[0]), self._path(named[1])
        for stem in (*STEMS.get(split, (split,)), *self._longer_stems(split)):
            pair = self._path(f"{stem}.{self.source}"), self._path(f"{stem}.{self.target}")
            if self.folder and is_here(pair[0]):
                return pair
        return None

    def _longer_stems(self, split: str) -> list[str]:
        """test_2016, test_2017, …: where there is no plain test.en, the first of them serves."""
        if split != "test" or not self.folder:
            return []
        ending = f".{self.source}"
        names = {
            path.name.removesuffix(".gz") for path in Path(self.folder).glob(f"test*{ending}*")
        }
        return sorted(name.removesuffix(ending) for name in names if name.endswith(ending))

    def _read(self, source: Path, target: Path) -> Corpus:
        result = read_pairs(source, target, empty_lines=self.empty_lines)
        notes = [f"{source}, {target}: {len(result.pairs):,} pairs"]
        if result.skipped:
            notes.append(f"{result.skipped:,} pairs with an empty side were skipped")
        sources, targets = [s for s, _ in result.pairs], [t for _, t in result.pairs]
        return Corpus(sources, targets, notes=tuple(notes), name=f"{source}, {target}")


TranslationData = PhrasebookData | FilesData


@dataclass(frozen=True)
class Batch:
    """Some sentence pairs. `target` begins with the start token, `wanted` ends with the end."""

    source: Int[Tensor, "b s"]
    source_real: Bool[Tensor, "b s"]
    target: Int[Tensor, "b t"]
    wanted: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"]
    source_tokens: int
    target_tokens: int

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        names = ("source", "source_real", "target", "wanted", "real")
        changed: dict[str, Any] = {name: function(getattr(self, name)) for name in names}
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> "Batch":
        return self._map(lambda x: x.to(device, non_blocking=True))

    def twice(self) -> "Batch":
        """All pairs, and then all of them again."""
        both = self._map(lambda x: torch.cat([x, x]))
        tokens = 2 * self.source_tokens, 2 * self.target_tokens
        return replace(both, source_tokens=tokens[0], target_tokens=tokens[1])

    def padded(self, rows: int, multiple: int) -> "Batch":
        """The same with so many rows, and lengths that are multiples: batches of few shapes.

        What is added is no prediction and no key, but for one in each row: a row that sees nothing
        is nothing that attention is defined for.
        """
        missing = rows - len(self.source)
        larger = self._map(lambda x: F.pad(x, (0, -x.shape[1] % multiple, 0, missing)))
        larger.source_real[len(self.source) :, 0] = True
        return larger

    @staticmethod
    def of(sources: Ragged, targets: Ragged, rows: Rows, start: int, pad: int) -> "Batch":
        """These rows of sequences that have their ends already."""
        source, source_real = sources.padded(rows, pad)
        wanted, real = targets.padded(rows, pad)
        target = torch.cat([torch.full((len(rows), 1), start), wanted[:, :-1]], dim=1)
        tokens = int(sources.lengths[rows].sum()), int(targets.lengths[rows].sum())
        return Batch(source, source_real, target, wanted, real, *tokens)


@dataclass(frozen=True)
class Frame:
    """The tokens around texts: those that a target begins and both sides end with, and what fills
    up shorter rows; some models also read one before a source.
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
    """A corpus as token ids, from which batches of rows are made; the frame is the tokenizer's own
    unless told.

    `too_long` says what becomes of a pair with a side of over `max_length` tokens, the end
    included: it is refused, left out ("skip"), or read as far as that, with its end ("truncate").
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        max_length: int,
        too_long: Literal["refuse", "skip", "truncate"] = "refuse",
        frame: Frame | None = None,
    ) -> None:
        self.frame = Frame.of(tokenizer) if frame is None else frame
        if not corpus.sources:
            raise DataError(f"{corpus.name} holds no sentence pair")
        if max_length < 2:
            raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
        sources = [self.frame.source(ids) for ids in tokenizer.encode_batch(corpus.sources)]
        targets = [[*ids, self.frame.end] for ids in tokenizer.encode_batch(corpus.targets)]
        long = [
            row
            for row, (s, t) in enumerate(zip(sources, targets, strict=True))
            if max(len(s), len(t)) > max_length
        ]
        # As a person counts them in the files.
        numbers = [row + 1 for row in corpus.rows or range(len(sources))]
        if long and too_long == "refuse":
            tokens = max(len(sources[long[0]]), len(targets[long[0]]))
            raise DataError(
                f"{corpus.name}: {len(long)} pairs are longer than model.max_length={max_length}, "
                f"the first is pair {numbers[long[0]]} with {tokens} tokens: raise it, or leave "
                "them out with train.too_long=skip, or cut them with train.too_long=cut"
            )
        if too_long == "truncate":
            for side in (sources, targets):
                for row in long:
                    side[row] = _cut(side[row], max_length)
        left_out = set(long) if too_long == "skip" else set()
        self.kept = [row for row in range(len(sources)) if row not in left_out]
        if not self.kept:
            raise DataError(
                f"{corpus.name}: all pairs exceed model.max_length={max_length}: raise it"
            )
        done = "were left out" if too_long == "skip" else "are cut there"
        self.notes = (
            [f"{corpus.name}: {len(long):,} pairs of over {max_length} tokens {done}"]
            if long
            else []
        )
        self.numbers = [numbers[row] for row in self.kept]
        self.sources = Ragged.of([sources[row] for row in self.kept])
        self.targets = Ragged.of([targets[row] for row in self.kept])

    def cut_anew(self, corpus: Corpus, cut: BpeDropout, copies: int, max_length: int) -> None:
        """Add so many copies of all pairs, in other pieces; what would be too long stays as it is.

        Their rows come after those that there are.
        """
        texts = [[side[row] for row in self.kept] for side in (corpus.sources, corpus.targets)]
        pairs = list(zip(self.sources.rows(), self.targets.rows(), strict=True))
        whole = list(pairs)
        for copy in range(copies):
            sources, targets = (cut.encode_batch(side, copy, n) for n, side in enumerate(texts))
            for plain, source, target in zip(pairs, sources, targets, strict=True):
                other = (self.frame.source(source), [*target, self.frame.end])
                whole.append(other if max(map(len, other)) <= max_length else plain)
        self.sources, self.targets = (Ragged.of(list(side)) for side in zip(*whole, strict=True))
        self.numbers = self.numbers * (copies + 1)

    def digest(self) -> str:
        """Names these sequences of tokens: any other corpus or order has another name."""
        total = hashlib.sha256()
        for side in (self.sources, self.targets):
            total.update(side.starts.tobytes())
            total.update(side.flat.tobytes())
        return total.hexdigest()[:16]

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        """What a row costs: the longer of its sides."""
        return np.maximum(self.sources.lengths, self.targets.lengths)

    def batch(self, rows: Rows) -> Batch:
        return Batch.of(self.sources, self.targets, rows, self.frame.start, self.frame.pad)


def _cut(ids: list[int], most: int) -> list[int]:
    """So many ids at most, the last one kept."""
    return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]
