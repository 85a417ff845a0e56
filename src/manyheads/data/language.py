"""Running text: files, one stream of tokens, and the windows of it that a step trains on."""

import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Int

from manyheads.data.batching import digest_of
from manyheads.data.corpus import SplitData, SplitItems, check_folder
from manyheads.data.files import PACKED, is_table, plain_name, read_columns, stream_lines
from manyheads.data.shards import CALL, Column
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer

Lines = Literal["text", "sentences"]
Line = tuple[bool, str]  # and whether a document begins with it

# Words in the name of a file that decide its split; any other file is for training.
SPLIT_WORDS = {"valid": {"valid", "val", "dev", "validation"}, "test": {"test"}}
NOT_TEXT = (".md", ".json", ".toml")

# Characters of a running text that the tokenizer gets as one string.
BLOCK = 1 << 17
LONG_LINE = 50  # characters

LARGEST_SHUFFLE = 1 << 20  # numbers in one shuffle; more are shuffled block by block

REST_OF_WORD = re.compile(r"\A(\w|['’]\w)*")


@dataclass(frozen=True)
class Texts(SplitItems):
    """The documents of one split, each a list of sentences, or of one running text.

    If a line is a sentence, its end is predicted too: it counts as one character, one byte
    (its line end) and one word. `name` is for messages. Documents `from_rows` of a table are
    held out as a unit.
    """

    documents: list[list[str]]
    lines: Lines
    notes: tuple[str, ...] = ()
    name: str = "the text"
    from_rows: bool = False
    unit: ClassVar[str] = "long lines"

    def items(self) -> Iterable[Hashable]:
        """Lines that two texts hardly share by chance."""
        lines = (line for text in self._sentences() for line in text.splitlines())
        return (line.strip() for line in lines if len(line) >= LONG_LINE)

    @property
    def characters(self) -> int:
        return sum(map(len, self._sentences())) + self._ends

    @property
    def bytes(self) -> int:
        return sum(len(sentence.encode()) for sentence in self._sentences()) + self._ends

    @property
    def words(self) -> int:
        return sum(len(sentence.split()) for sentence in self._sentences()) + self._ends

    def strings(self) -> list[str]:
        """The strings that a tokenizer gets, in training and in use."""
        return [string for document in self.documents for string in self.blocks(document)]

    def encoded(self, tokenizer: Tokenizer, *, ends: bool) -> "EncodedText":
        return EncodedText(self, tokenizer, ends=ends)

    def blocks(self, document: list[str]) -> list[str]:
        """The strings of one document: its sentences, or long blocks of a running text."""
        if self.lines == "sentences":
            return document
        [text] = document
        return list(join_blocks(re.findall(r"[^\n]*\n|[^\n]+", text)))

    def part(self, split: str, valid_fraction: float) -> "Texts":
        """The beginning for training, or the end for validation."""
        lines = [(not row, line) for part in self.documents for row, line in enumerate(part)]
        parts = divide(lines, Counts.of(lines), self, split, valid_fraction)
        which = "the last part" if split == "valid" else "the first part"
        return replace(self, documents=by_document(parts), name=f"{self.name}, {which}")

    def _sentences(self) -> Iterator[str]:
        return chain.from_iterable(self.documents)

    @property
    def _ends(self) -> int:
        return 0 if self.lines == "text" else sum(1 for _ in self._sentences())


def join_blocks(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a running text, with their ends, as blocks of many.

    A block ends where every tokenizer splits anyway: between two words with only a line end
    between them, or before a space that belongs to the next word. A text without such a boundary
    for long (code with deep indents) is cut at some line end.
    """
    block: list[str] = []
    size = 0
    for line in lines:
        if size >= BLOCK:
            is_boundary = re.search(r"\S\n\S|\n \S", block[-1][-2:] + line[:2])
            if is_boundary or size >= CALL:
                yield "".join(block)
                block, size = [], 0
        block.append(line)
        size += len(line)
    yield "".join(block)


@dataclass(frozen=True, kw_only=True)
class TextData(SplitData[list[Path]]):
    """Text of your own: one `file` (in `folder`, if set), or every text file of `folder`.

    With lines=text each file is one document, line ends included (the last line always gets
    one). With lines=sentences a line is a sentence, without the spaces around it, and an empty
    line ends a document. In a table (.tsv, .csv, .jsonl, .parquet) each row is a document.

    A word in the name of a file decides its split: corpus.valid.txt, wiki-test.raw.gz. Held out
    for validation are the last characters, or the last documents (of one document, sentences).
    """

    file: Annotated[str, "One file, in `folder` if that is set"] = ""
    valid: Annotated[str, "Validation file"] = ""
    test: Annotated[str, "Test file"] = ""
    text: Annotated[str, "Column of the text in a table"] = "text"
    lines: Annotated[Lines, "Whether files are running text or one sentence per line"] = "text"
    kind: ClassVar[str] = "text"
    RENAMED: ClassVar[dict[str, str]] = {**SplitData.RENAMED, "train": "file"}
    REMOVED: ClassVar[dict[str, tuple[Any, ...]]] = {"short": ("refuse", "skip")}

    def read(self, split: str) -> Texts:
        texts: Texts = super().read(split)
        if texts.notes:  # prepared data
            return texts
        count = len(texts.documents)
        documents_note = f"{count:,} documents, " if count > 1 else ""
        note = f"{texts.name}: {documents_note}{texts.characters:,} characters"
        return replace(texts, notes=(note,))

    def _read(self, paths: list[Path]) -> Texts:
        documents = [document for path in paths for document in self._documents(path)]
        name = str(paths[0]) if len(paths) == 1 else f"{self.folder} ({len(paths)} files)"
        from_rows = any(map(is_table, paths))
        return Texts(documents, self.lines, name=name, from_rows=from_rows)

    def _find(self, split: str) -> list[Path] | None:
        return self._files()[split] or None

    def _missing(self, split: str) -> str:
        if split == "test":
            return "there is no split 'test': set data.test=FILE, or use --split valid"
        names = ", ".join(path.name for path in chain(*self._files().values()))
        return f"data.folder={self.folder} has no training text, only {names}: set data.file=NAME"

    def _files(self) -> dict[str, list[Path]]:
        """The files of each split, by name."""
        folder = check_folder(self.folder, "data.file")
        named = {"train": self.file, "valid": self.valid, "test": self.test}
        files = {split: [folder / name] if name else [] for split, name in named.items()}
        if not self.folder and not any(named.values()):
            raise UserError("data.folder or data.file is needed, e.g. data.folder=corpus")
        if self.file or not self.folder:
            return files
        names = {path.name for path in folder.iterdir() if path.is_file()}
        for name in sorted(names):
            is_copy = name.endswith(PACKED) and plain_name(name) in names
            if not is_copy and not name.startswith(".") and not name.endswith(NOT_TEXT):
                words = set(re.split(r"[._-]", name.lower()))
                splits = [split for split, known in SPLIT_WORDS.items() if words & known]
                split = splits[0] if splits else "train"
                files[split] += [] if named[split] else [folder / name]
        if not any(files.values()):
            raise UserError(
                f"data.folder={self.folder} has no text file (subfolders are not read): add one"
            )
        return files

    def _documents(self, path: Path) -> list[list[str]]:
        documents = by_document(self.stream(path))
        return [["".join(lines)] for lines in documents] if self.lines == "text" else documents

    def stream(self, path: Path) -> Iterator[Line]:
        """The lines of running text, with their ends, or the sentences of a file."""
        texts: Iterable[Iterable[str]] = (
            [stream_lines(path)]
            if not is_table(path)
            else (row[0].split("\n") for _, row in read_columns(path, {"text": self.text}) if row)
        )
        is_empty = True
        for lines in texts:
            begins = True
            for line in lines:
                text = line.strip()
                is_empty = is_empty and not text
                if self.lines == "text":
                    text = f"{line}\n"
                if text:
                    yield begins, text
                begins = not text
        if is_empty:
            raise DataError(f"{path}: every line is empty; replace or remove the file")


def first_part(count: int, valid_fraction: float) -> int:
    """How many of `count` are for training; at least one is, and one is not.

    Exact arithmetic: in floating point 10 · (1 − 0.9) is less than 1.
    """
    first = int(count * (1 - Fraction(str(valid_fraction))))
    return min(max(first, 1), count - 1)


@dataclass
class Counts:
    """The size of a text, before anything is held out."""

    documents: int = 0
    rows: int = 0
    characters: int = 0

    @staticmethod
    def of(lines: Iterable[Line]) -> "Counts":
        counts = Counts()
        for begins, line in lines:
            counts.documents += begins
            counts.rows += 1
            counts.characters += len(line)
        return counts


def divide(
    lines: Iterable[Line], counts: Counts, texts: Texts, split: str, valid_fraction: float
) -> Iterator[Line]:
    """The first lines for training, or the last ones for validation.

    Documents are divided, a single one by sentences, and running text by characters. Validation
    begins with a word: the rest of a word that the cut divides is left out.
    """
    by_characters = texts.lines == "text" and (counts.documents == 1 or not texts.from_rows)
    by_documents = not by_characters and counts.documents > 1
    total = counts.documents if by_documents else counts.rows
    if not by_characters and total < 2:
        raise DataError(
            f"{texts.name}: one sentence cannot be divided into training and validation: add "
            "text, or a file NAME.valid.txt"
        )
    left = first_part(counts.characters if by_characters else total, valid_fraction)
    done, is_first = Counts(), True
    for begins, line in lines:
        done.documents += begins
        if by_characters:
            cut = min(max(left - done.characters, 0), len(line))
        else:
            is_before = done.documents <= left if by_documents else done.rows < left
            cut = len(line) if is_before else 0
        done.rows += 1
        done.characters += len(line)
        if split != "valid":
            part = line[:cut]
        else:
            part = line[cut:]
            if part and cut and line[cut - 1].isalnum():
                after_word = REST_OF_WORD.sub("", part, count=1)
                is_last = done.characters == counts.characters
                part = part if is_last and not after_word.strip() else after_word
        if part:
            yield begins or is_first, part
            is_first = False


def by_document(lines: Iterable[Line]) -> list[list[str]]:
    """The lines of each document."""
    documents: list[list[str]] = []
    for begins, line in lines:
        documents += [[]] if begins else []
        documents[-1].append(line)
    return documents


class EncodedText:
    """A text as one stream of tokens, `flat`.

    With `ends`, for causal models, an end token follows each sentence, or each document of a
    running text. `document_starts` and `sentence_starts` hold the position of each and the end of
    the last.
    """

    def __init__(self, texts: Texts, tokenizer: Tokenizer, *, ends: bool) -> None:
        self.name = texts.name
        blocks = [texts.blocks(document) for document in texts.documents]
        stops = np.cumsum([0, *map(len, blocks)])
        strings = list(chain.from_iterable(blocks))
        has_end = np.full(len(strings), ends and texts.lines == "sentences")
        has_end[stops[1:] - 1] = ends
        column = Column(strings, has_end.tolist(), (), tokenizer.end if ends else 0)
        tokens, starts = column.encode(tokenizer)
        # A running text has blocks in place of sentences.
        self.sentence_starts: Int[np.ndarray, " s1"] = starts.astype(np.int64)
        self.flat: Int[np.ndarray, " n"] = tokens.astype(np.int32)
        self.document_starts: Int[np.ndarray, " d1"] = self.sentence_starts[stops]

    def document_of(self, positions: Int[np.ndarray, "*p"]) -> Int[np.ndarray, "*p"]:
        """The number of the document of each position of the stream."""
        return np.searchsorted(self.document_starts, positions, "right") - 1

    def count_windows(self, length: int) -> int:
        """How many windows of this length there are without overlap; none is refused."""
        count = len(self.flat) // length
        if not count:
            raise DataError(
                f"{self.name}: {len(self.flat)} tokens for validation are too few for a window of "
                f"{length}: add text, or lower model.max_length"
            )
        return count

    def digest(self) -> str:
        """A hash of the stream and its divisions."""
        return digest_of(self.flat, self.document_starts, self.sentence_starts)


def room_for_text(max_length: int, special_tokens: int) -> int:
    """The tokens of a window next to special tokens."""
    if max_length < special_tokens + 2:
        raise UserError(f"model.max_length={max_length} leaves no room for text: raise it")
    return max_length - special_tokens


def gather(
    flat: Any, starts: Int[np.ndarray, " rows"], length: int
) -> Int[np.ndarray, "rows length"]:
    """The windows of `length` tokens that begin at `starts`."""
    return flat[starts[:, None] + np.arange(length)]


class Windows:
    """Windows of `length` tokens of a stream of `tokens`, `rows` of them per step.

    An epoch cuts the stream into windows and takes each once, in an order drawn from (seed,
    epoch). With `moving`, the first window begins at a drawn offset, so that each epoch cuts
    elsewhere, and `per_epoch` is the number of windows that fit at any offset. Otherwise the cuts
    are fixed, and the last tokens that do not fill a window are left out.

    The windows of all epochs are one endless sequence, of which step n takes the n-th `rows`: a
    pure function of (seed, step).
    """

    def __init__(
        self,
        tokens: int,
        length: int,
        rows: int,
        seed: int,
        *,
        moving: bool = True,
        name: str = "the text",
    ) -> None:
        if tokens < length:
            raise DataError(
                f"{name}: {tokens} tokens are too few to train on windows of {length}: add text, "
                "or lower model.max_length"
            )
        self.length, self.count, self.seed = length, rows, seed
        self.per_epoch = max(1, (tokens - length + 1) // length if moving else tokens // length)
        self._offsets = tokens - self.per_epoch * length + 1 if moving else 1
        # A step may end one epoch and begin the next.
        self._epoch = lru_cache(maxsize=2)(self._cut)

    def rows(self, step: int) -> Int[np.ndarray, " rows"]:
        """Where the windows of this step begin (steps count from 0)."""
        begin, stop = step * self.count, (step + 1) * self.count
        parts = []
        while begin < stop:
            epoch, index = divmod(begin, self.per_epoch)
            offset, order = self._epoch(epoch)
            parts.append(offset + self.length * order[index : index + stop - begin])
            begin += len(parts[-1])
        return np.concatenate(parts)

    def _cut(self, epoch: int) -> tuple[int, Any]:
        random = np.random.default_rng([self.seed, epoch])
        offset = int(random.integers(self._offsets))
        if self.per_epoch <= LARGEST_SHUFFLE:
            return offset, random.permutation(self.per_epoch)
        return offset, BlockShuffle(self.per_epoch, [self.seed, epoch])


class BlockShuffle:
    """A seeded order of `count` numbers, with an index that does not grow with them.

    Blocks of consecutive numbers are shuffled and divided into groups; the numbers of a group are
    shuffled in turn.
    """

    def __init__(self, count: int, seed: list[int], largest: int = LARGEST_SHUFFLE) -> None:
        self.count, self.seed = count, seed
        self.size = -(-count // (largest // 16))
        blocks = np.random.default_rng([*seed, 0]).permutation(-(-count // self.size))
        self.groups = np.array_split(blocks, min(len(blocks), -(-count // largest)))
        self.edges = np.cumsum([0, *(len(self._numbers(group)) for group in self.groups)])
        self._group = lru_cache(maxsize=2)(self._shuffle)

    def __getitem__(self, part: slice) -> Int[np.ndarray, " _"]:
        """The numbers at these positions, or only those of them that are in one group."""
        group = int(self.edges.searchsorted(part.start, "right")) - 1
        first = int(self.edges[group])
        return self._group(group)[part.start - first : part.stop - first]

    def _shuffle(self, group: int) -> Int[np.ndarray, " _"]:
        random = np.random.default_rng([*self.seed, 1, group])
        return random.permutation(self._numbers(self.groups[group]))

    def _numbers(self, blocks: Int[np.ndarray, " _"]) -> Int[np.ndarray, " _"]:
        numbers = (blocks[:, None] * self.size + np.arange(self.size)).ravel()
        return numbers[numbers < self.count]
