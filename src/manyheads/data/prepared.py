"""Prepared data: a corpus that `manyheads prepare` has tokenised, for training without reading it.

    DATA/index.json        the splits, their shards, and the settings of data and tokenizer
    DATA/tokenizer.json
    DATA/train/00000.safetensors ...

A text has the same tokens, and a small one the same batches, as without preparation. Validation
and test pairs stay text, since translations are compared with it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Int

from manyheads.data.batching import Batches, Ragged, Rows, TooLong, digest_of
from manyheads.data.corpus import SplitItems, held_out_rows
from manyheads.data.files import find_file, is_table
from manyheads.data.language import (
    Counts,
    EncodedText,
    Line,
    Lines,
    TextData,
    Texts,
    divide,
    join_blocks,
)
from manyheads.data.shards import FORMAT, Arrays, Column, Facts, Job, damaged, read_shard
from manyheads.data.translation import Batch, Corpus, EncodedPairs, FilesData, Frame
from manyheads.errors import DataError, UserError
from manyheads.fileio import check_sum_of, read_json, replace_file
from manyheads.tokenizer.tokenizer import Tokenizer

INDEX, TOKENIZER = "index.json", "tokenizer.json"
SHARD = 1 << 24  # characters of a shard
SAMPLE = 1 << 27  # characters that a tokenizer is trained on, evenly spaced
GROUP = 1 << 20  # pairs that are sorted by length together
MAPPED = 32  # shards of a split that a process maps at once: they count as its memory


# --- read ---


@dataclass(frozen=True)
class Index:
    """The index of a folder of prepared data."""

    folder: Path
    task: str
    data: dict[str, Any]  # settings, without the folder
    tokens: dict[str, Any] | None  # None: the tokenizer of another run
    target_tokens: dict[str, Any] | None
    ends: bool
    tokenizer: str  # its checksum
    splits: dict[str, list[Facts]]  # the facts of each shard
    request: dict[str, Any]  # the settings of the command

    def check_kind(self, data: Any) -> None:
        """Refuse data that the settings read as data of another kind."""
        if self.data["kind"] != data.kind:
            raise UserError(
                f"{self.folder} was prepared for task={self.task}: choose other data, or a run of "
                "that task"
            )

    def part(self, split: str) -> Any:
        """The data of a split, in place of what is read from text files."""
        shards = Shards(self, split)
        if self.data["kind"] == FilesData.kind:
            return PreparedCorpus(shards)
        return PreparedTexts(shards, self.data["lines"])


def read_index(folder: str) -> Index | None:
    """The index of a folder, if it holds prepared data."""
    path = Path(folder) / INDEX
    if not folder or not path.is_file() or b'"prepared"' not in path.read_bytes():
        return None
    fix = f"delete {folder} and prepare the data again"
    table = read_json(path, fix)
    try:
        if table.pop("prepared") != FORMAT:
            raise DataError(f"{path} is of another release: {fix}")
        splits = table.pop("splits").items()
        table["splits"] = {name: [Facts(**facts) for facts in shards] for name, shards in splits}
        return Index(Path(folder), **table)
    except (LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not an index of prepared data ({error}): {fix}") from None


class Shards:
    """The shards of a split; `arrays(n)` are those of the n-th, mapped."""

    def __init__(self, index: Index, split: str) -> None:
        self.index, self.name = index, f"{index.folder} ({split})"
        if check_sum_of(index.folder / TOKENIZER) != index.tokenizer:
            raise DataError(
                f"{index.folder / TOKENIZER} has changed: restore it, or delete {index.folder} "
                "and prepare the data again"
            )
        self.facts = index.splits[split]
        self.paths = [shard_path(index.folder, split, n) for n in range(len(self.facts))]
        self.digest = digest_of(prefix=" ".join(facts.checksum for facts in self.facts))
        for path, facts in zip(self.paths, self.facts, strict=True):
            if read_shard(path)[1] != facts:
                raise damaged(path, f"not the shard of {INDEX}")
        self.arrays = lru_cache(MAPPED)(self._map)

    def _map(self, number: int) -> Arrays:
        return read_shard(self.paths[number])[0]

    def sum(self, name: str) -> int:
        return sum(getattr(facts, name) for facts in self.facts)

    @property
    def notes(self) -> tuple[str, ...]:
        size = f"{self.sum('rows'):,} rows, {self.sum('characters'):,} characters"
        return (f"{self.name}: {len(self.paths):,} shards, {size}",)

    def tokens(self, column: str, vocab_size: int) -> "Mapped":
        counts = [facts.tokens[column] for facts in self.facts]
        return Mapped(self, f"{column}.tokens", counts, [vocab_size] * len(counts))

    def starts(self, column: str) -> "Mapped":
        """Where the rows of each shard begin in its tokens, and where the last one ends."""
        counts = [facts.rows + 1 for facts in self.facts]
        limits = [facts.tokens[column] + 1 for facts in self.facts]
        return Mapped(self, f"{column}.starts", counts, limits)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.index.folder / TOKENIZER)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if (self.index.folder / TOKENIZER).read_text("utf-8") != tokenizer.to_json():
            raise DataError(
                f"{self.index.folder} was prepared with another tokenizer: prepare the text again "
                "with init=RUN, or train a new model"
            )


class Mapped:
    """An array in parts, one in each shard, read by positions as if it were one.

    A value that is not below the limit of its shard is damage.
    """

    def __init__(
        self, shards: Shards, name: str, counts: Sequence[int], limits: Sequence[int]
    ) -> None:
        self.shards, self.name, self.limits = shards, name, limits
        self.edges: Int[np.ndarray, " n1"] = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        positions = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        shard = self.edges.searchsorted(positions, "right") - 1
        values = np.empty(positions.shape, np.int64)
        for number in np.unique(shard):
            here = shard == number
            part = self.shards.arrays(int(number))[self.name]
            values[here] = part[positions[here] - self.edges[number]]
            if (largest := values[here].max()) >= self.limits[number]:
                raise damaged(self.shards.paths[number], f"{self.name} has {largest}")
        return values


class Tokenised(SplitItems):
    """A split of which there are only tokens; whatever reads its texts is refused."""

    shards: Shards

    def __init__(self, shards: Shards, **named: Any) -> None:
        vars(self).update(shards=shards, name=shards.name, notes=shards.notes, **named)

    def _refuse(self) -> Any:
        raise UserError(
            f"{self.shards.name} has tokens only, and this reads the text: set data.folder to the "
            "corpus that was prepared"
        )

    def items(self) -> Iterable[Any]:
        """None: shards are not searched for what two splits share."""
        return ()


class PreparedTexts(Tokenised, Texts):
    """A split of running text or sentences that is tokenised already."""

    documents = property(Tokenised._refuse)

    def __init__(self, shards: Shards, lines: Lines) -> None:
        super().__init__(shards, lines=lines)

    @property
    def amount(self) -> int:
        """The characters of all strings."""
        return int(self.shards.sum("characters"))

    @property
    def characters(self) -> int:
        return self.amount + self._ends

    @property
    def bytes(self) -> int:
        return int(self.shards.sum("bytes")) + self._ends

    @property
    def words(self) -> int:
        return int(self.shards.sum("words")) + self._ends

    @property
    def _ends(self) -> int:
        return 0 if self.lines == "text" else int(self.shards.sum("rows"))

    def encoded(self, tokenizer: Tokenizer, *, ends: bool) -> EncodedText:
        if ends != self.shards.index.ends:
            raise UserError(f"{self.name} was prepared for another task: use the text itself")
        self.shards.check_tokenizer(tokenizer)
        return PreparedStream(self.shards, tokenizer.vocab_size)


class PreparedStream(EncodedText):
    """A text as one stream of tokens on disk."""

    def __init__(self, shards: Shards, vocab_size: int) -> None:
        self.name, self.shards = shards.name, shards
        self.flat: Any = shards.tokens("text", vocab_size)
        self.before = np.cumsum([0, *(facts.documents for facts in shards.facts)])

    def document_of(self, positions: np.ndarray) -> np.ndarray:
        shard = self.flat.edges.searchsorted(positions, "right") - 1
        numbers = np.empty(positions.shape, np.int64)
        for number in np.unique(shard):
            here = shard == number
            starts = self.shards.arrays(int(number))["documents"]
            local = positions[here] - self.flat.edges[number]
            numbers[here] = self.before[number] + starts.searchsorted(local, "right") - 1
        return numbers

    def digest(self) -> str:
        return self.shards.digest


class PreparedCorpus(Tokenised, Corpus):
    """Sentence pairs that are tokenised already."""

    sources = targets = property(Tokenised._refuse)

    @property
    def amount(self) -> int:
        return int(self.shards.sum("rows"))

    def encoded(
        self, tokenizer: Tokenizer, max_length: int, too_long: TooLong, frame: Frame
    ) -> EncodedPairs:
        self.shards.check_tokenizer(tokenizer)
        sizes = (tokenizer.vocab_size, tokenizer.target.vocab_size)
        return PreparedPairs(self.shards, sizes, max_length, too_long, frame)


class PreparedPairs(EncodedPairs):
    """Sentence pairs as token ids on disk."""

    def __init__(
        self,
        shards: Shards,
        vocab_sizes: tuple[int, int],
        max_length: int,
        too_long: TooLong,
        frame: Frame,
    ) -> None:
        self.shards, self.limit, self.too_long, self.frame = shards, max_length, too_long, frame
        self.edges = np.cumsum([0, *(facts.rows for facts in shards.facts)])
        self.numbers = range(1, int(self.edges[-1]) + 1)  # type: ignore[assignment]
        self.rows, self.notes = [], []
        longest = max((facts.longest for facts in shards.facts), default=0)
        if longest > max_length and too_long == "refuse":
            raise DataError(
                f"{shards.name}: a pair has {longest} tokens, more than model.max_length="
                f"{max_length}: raise it, or set train.too_long=skip or train.too_long=truncate"
            )
        if longest > max_length:
            action = "left out" if too_long == "skip" else "truncated"
            self.notes.append(f"{shards.name}: pairs of over {max_length} tokens are {action}")
        self.sides = [
            (shards.tokens(side, size), shards.starts(side))
            for side, size in zip(("source", "target"), vocab_sizes, strict=True)
        ]

    def digest(self) -> str:
        return self.shards.digest

    def order(self, budget: int, seed: int) -> "GroupedBatches":
        count = -(-int(self.edges[-1]) // GROUP)
        numbers = np.arange(len(self.shards.paths))
        shards = [numbers[group::count] for group in range(min(count, len(numbers)))]
        batches = GroupedBatches([self._group(numbers) for numbers in shards], budget, seed)
        if not batches.per_epoch:
            raise DataError(
                f"{self.shards.name}: all pairs exceed model.max_length={self.limit} tokens: "
                "raise it"
            )
        return batches

    def _group(self, shards: Rows) -> Callable[[], tuple[Rows, Rows]]:
        """The rows of some shards that are used, and their lengths."""

        def read() -> tuple[Rows, Rows]:
            parts = [np.arange(self.edges[n], self.edges[n + 1]) for n in shards]
            rows = np.concatenate(parts)
            lengths = np.maximum(*(self._spans(side, rows)[1] for side in self.sides))
            fits = lengths <= self.limit
            if self.too_long == "skip":
                return rows[fits], lengths[fits]
            return rows, np.minimum(lengths, self.limit)

        return read

    def _spans(self, side: tuple[Mapped, Mapped], rows: Rows) -> tuple[Rows, Rows]:
        """Where rows begin in the tokens of a side, and their lengths."""
        tokens, starts = side
        shard = self.edges.searchsorted(rows, "right") - 1
        at = rows + shard  # a shard of n rows has n + 1 starts
        local, lengths = starts[at], starts[at + 1] - starts[at]
        if (lengths < 1).any():
            raise damaged(self.shards.paths[shard[lengths.argmin()]], f"{starts.name} decreases")
        return local + tokens.edges[shard], lengths

    def batch(self, rows: Rows) -> Batch:
        sides = [self._rows(side, rows) for side in self.sides]
        start, pad = self.frame.start, self.frame.pad
        return Batch.of(sides[0], sides[1], np.arange(len(rows)), start, pad)

    def _rows(self, side: tuple[Mapped, Mapped], rows: Rows) -> Ragged:
        """These rows, truncated before their end tokens."""
        starts, lengths = self._spans(side, rows)
        used = np.minimum(lengths, self.limit)
        edges = np.cumsum([0, *used])
        where = np.repeat(starts - edges[:-1], used) + np.arange(edges[-1])
        where[edges[1:] - 1] = starts + lengths - 1  # the end token stays
        return Ragged(side[0][where].astype(np.int32), edges)


class GroupedBatches:
    """`Batches` of groups of rows, one group after the other in a new seeded order every epoch.

    Only one group is in memory. If there is only one, the batches are those of `Batches`.
    """

    def __init__(
        self, groups: list[Callable[[], tuple[Rows, Rows]]], budget: int, seed: int
    ) -> None:
        self.groups, self.budget, self.seed = groups, budget, seed
        self._open = lru_cache(maxsize=1)(self._read)
        self.counts = np.array([self._open(n)[1].per_epoch for n in range(len(groups))])
        self.per_epoch = int(self.counts.sum())

    def rows(self, step: int) -> Rows:
        """The rows of the batch of this step (steps count from 0)."""
        rows, batches, number = self._find(step)
        return rows[batches.rows(number)]

    def most(self, step: int) -> int:
        """The number of rows of the largest batch from the bucket of this step."""
        _, batches, number = self._find(step)
        return batches.most(number)

    def _find(self, step: int) -> tuple[Rows, Batches, int]:
        epoch, index = divmod(step, self.per_epoch)
        order = np.random.default_rng([self.seed, epoch, 1]).permutation(len(self.groups))
        edges = np.cumsum([0, *self.counts[order]])
        position = int(edges.searchsorted(index, "right")) - 1
        rows, batches = self._open(int(order[position]))
        return rows, batches, epoch * batches.per_epoch + index - int(edges[position])

    def _read(self, group: int) -> tuple[Rows, Batches]:
        rows, lengths = self.groups[group]()
        return rows, Batches(lengths, self.budget, self.seed)


# --- write ---


Data = TypeVar("Data", TextData, FilesData)


def shard_path(folder: Path, split: str, number: int) -> Path:
    return folder / split / f"{number:05d}.safetensors"


@dataclass
class Source(Generic[Data]):
    """The data of a split, read as a stream."""

    data: Data
    counts: Counts = field(default_factory=Counts)

    def files(self) -> list[Path]:
        files = [path for split in self.data.splits() for path in self.data.locate(split)[0]]
        return [find_file(path) for path in dict.fromkeys(files)]


class TextSource(Source[TextData]):
    """The strings of a split, with the documents that they begin and end."""

    def count(self) -> Counts:
        self.counts = Counts.of(self._lines("train", held_out=False))
        return self.counts

    def splits(self) -> list[str]:
        return self.data.splits()

    def write_texts(self, folder: Path) -> dict[str, Any]:
        """Nothing: all splits are tokenised."""
        return {}

    def sample(self, stride: int) -> tuple[Texts, int]:
        """Every n-th string for training a tokenizer, and the characters of all."""
        texts, characters = [], 0
        for number, (text, _, _) in enumerate(self._strings("train")):
            characters += len(text)
            if number % stride == 0:
                texts.append(text)
        return Texts([texts], "sentences"), characters

    def jobs(self, split: str, folder: Path, frame: Frame, *, ends: bool) -> Iterator[Job]:
        """One for each shard. `ends` adds an end token after sentences or documents."""
        by_sentence = self.data.lines == "sentences"
        for number, strings in enumerate(_cut(self._strings(split), lambda item: len(item[0]))):
            closed = [ends and (by_sentence or last) for _, _, last in strings]
            column = Column([text for text, _, _ in strings], closed, (), frame.end)
            documents = [row for row, (_, begins, _) in enumerate(strings) if begins]
            yield Job(shard_path(folder, split, number), {"text": column}, documents)

    def _strings(self, split: str) -> Iterator[tuple[str, bool, bool]]:
        """The strings for a tokenizer, and whether each begins and ends a document."""
        number = 0

        def document(line: Line) -> int:
            nonlocal number
            number += line[0]
            return number

        for _, group in groupby(self._lines(split), document):
            lines = (line for _, line in group)
            begins, last = True, None
            for string in lines if self.data.lines == "sentences" else join_blocks(lines):
                if last is not None:
                    yield last, begins, False
                    begins = False
                last = string
            assert last is not None
            yield last, begins, True

    def _lines(self, split: str, *, held_out: bool = True) -> Iterator[Line]:
        """The lines of a split, as `TextData.stream`; without `held_out` those of its files."""
        files, is_divided = self.data.locate(split)
        lines = (line for path in files for line in self.data.stream(path))
        if not is_divided or not held_out:
            return lines
        name, from_rows = self.data.folder or self.data.file, any(map(is_table, files))
        texts = Texts([], self.data.lines, name=name, from_rows=from_rows)
        return divide(lines, self.counts, texts, split, self.data.valid_fraction)


class PairSource(Source[FilesData]):
    """The sentence pairs of a split."""

    def count(self) -> Counts:
        for source, target in self._pairs("train", held_out=False):
            self.counts.rows += 1
            self.counts.characters += len(source) + len(target)
        return self.counts

    def splits(self) -> list[str]:
        return ["train"]

    def sample(self, stride: int) -> tuple[Corpus, int]:
        """Every n-th pair for training a tokenizer, and the number of all."""
        sources, targets, number = [], [], 0
        for number, (source, target) in enumerate(self._pairs("train"), start=1):
            if (number - 1) % stride == 0:
                sources.append(source)
                targets.append(target)
        return Corpus(sources, targets), number

    def jobs(self, split: str, folder: Path, frame: Frame, *, ends: bool) -> Iterator[Job]:
        """One for each shard."""
        before = () if frame.source_start is None else (frame.source_start,)
        for number, pairs in enumerate(_cut(self._pairs(split), lambda pair: sum(map(len, pair)))):
            sources, targets = (list(side) for side in zip(*pairs, strict=True))
            every = [True] * len(pairs)
            columns = {
                "source": Column(sources, every, before, frame.end),
                "target": Column(targets, every, (), frame.end),
            }
            yield Job(shard_path(folder, split, number), columns)

    def write_texts(self, folder: Path) -> dict[str, Any]:
        """Validation and test pairs as tables; returns the settings of data that read them."""
        names = self.data.languages
        names = names if len({*names}) == 2 else ("source", "target")

        def write(partial: Path) -> None:
            with partial.open("w", encoding="utf-8", newline="") as file:
                for pair in self._pairs(split):
                    row = dict(zip(names, pair, strict=True))
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")

        for split in self.data.splits():
            if split in ("valid", "test"):
                replace_file(folder / f"{split}.jsonl", write)
        return {"kind": self.data.kind, "source_column": names[0], "target_column": names[1]}

    def _pairs(self, split: str, *, held_out: bool = True) -> Iterator[tuple[str, str]]:
        files, is_divided = self.data.locate(split)
        pairs = (pair for _, pair in self.data.stream(files) if pair is not None)
        if not is_divided or not held_out:
            yield from ((source, target) for source, target in pairs)
            return
        held = held_out_rows(self.counts.rows, self.data.valid_fraction, seed=0)
        for row, (source, target) in enumerate(pairs):
            if (row in held) == (split == "valid"):
                yield source, target


T = TypeVar("T")


def _cut(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in lists of at least SHARD characters, but for the last."""
    part: list[T] = []
    characters = 0
    for item in items:
        part.append(item)
        characters += size(item)
        if characters >= SHARD:
            yield part
            part, characters = [], 0
    if part:
        yield part
