"""Running text: read, encoded into one stream, and which stretches of it a step trains on."""

import hashlib
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Int

from manyheads.data.corpus import check_folder, check_held_out, check_split, read_lines
from manyheads.errors import DataError, UserError
from manyheads.tokenizer.tokenizer import Tokenizer

Lines = Literal["text", "sentences"]

# Parts of a file's name that say what it is for; any other file is for training.
PURPOSES = {"valid": {"valid", "val", "dev", "validation"}, "test": {"test"}}
NOT_TEXT = (".md", ".json", ".toml")

# What the tokenizer gets of a running text at once, in characters, and in all in one call: the
# library keeps several hundred bytes of each token until the call returns.
BLOCK = 1 << 17
CALL = 1 << 21


@dataclass(frozen=True)
class Document:
    """Sentences that follow each other, and where the first of them stands.

    Of a running text they are its lines, each with its line end.
    """

    sentences: list[str]
    file: str
    line: int


@dataclass(frozen=True)
class Texts:
    """The documents of one split; `name` is what a message calls them.

    Where a line is a sentence, its end is predicted too: it counts as one character, one byte
    (the line end that it stands for) and one word.
    """

    documents: list[Document]
    lines: Lines
    notes: tuple[str, ...] = ()
    name: str = "the text"

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
        """The text as a tokenizer is to see it, in training and in use."""
        return [string for document in self.documents for string in self.pieces(document)]

    def pieces(self, document: Document) -> list[str]:
        """The strings of one document: its sentences, or a running text in long blocks."""
        return document.sentences if self.lines == "sentences" else list(_blocks(document))

    def _sentences(self) -> Iterator[str]:
        return chain.from_iterable(document.sentences for document in self.documents)

    @property
    def _ends(self) -> int:
        if self.lines == "text":
            return 0
        return sum(len(document.sentences) for document in self.documents)


def _blocks(document: Document) -> Iterator[str]:
    """A running text in blocks of whole lines.

    A block ends where it would fall apart anyway: where a line end alone parts two words, or
    before a space that belongs to the word after it. A text without such a place for long (code
    with deep indents) is cut at some line end.
    """
    lines, start, size = document.sentences, 0, 0
    for row, line in enumerate(lines):
        if size >= BLOCK:
            apart = re.search(r"\S\n\S|\n \S", lines[row - 1][-2:] + line[:2])
            if apart or size >= CALL:
                yield "".join(lines[start:row])
                start, size = row, 0
        size += len(line)
    yield "".join(lines[start:])


@dataclass(frozen=True, kw_only=True)
class TextData:
    """A user's own text: one `file` (in `folder`, where given), or every text file of `folder`.

    `lines` says what a line is. "text": nothing, each file is one document as it stands, line
    ends included (the last line always gets one). "sentences": one sentence, without the spaces
    around it, and an empty line ends a document.

    A file of the folder is for validation or test by the parts of its name: corpus.valid.txt,
    wiki-test.raw.gz. Without validation files the last share `held_out` of the training text
    serves: its last characters, or its last documents (of a single document, the last sentences).
    `short` says what becomes of documents too short for next-sentence prediction.
    """

    folder: str = ""
    file: str = ""
    lines: Lines = "text"
    held_out: float = 0.1
    short: Literal["refuse", "skip"] = "refuse"
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        check_held_out(self.held_out)

    def splits(self) -> list[str]:
        files = self._files()
        return [
            split
            for split in ("train", "valid", "test")
            if files[split] or (split == "valid" and files["train"])
        ]

    def read(self, split: str) -> Texts:
        files = self._files()
        check_split(split, files)
        paths = files[split]
        held_out = not files["valid"] and split != "test"
        if held_out:
            paths = files["train"]
        if not paths:
            raise UserError(self._missing(split, files))
        documents = [document for path in paths for document in self._documents(path)]
        name = str(paths[0]) if len(paths) == 1 else f"{self.folder} ({len(paths)} files)"
        if held_out:
            name += ", the last part" if split == "valid" else ", the first part"
            cut = _cut_characters if self.lines == "text" else _cut_sentences
            documents = cut(documents, self.held_out)[split == "valid"]
        texts = Texts(documents, self.lines, name=name)
        kinds = f"{len(documents):,} documents, " if len(documents) > 1 else ""
        note = f"{name}: {kinds}{texts.characters:,} characters"
        return Texts(documents, self.lines, (note,), name)

    def _missing(self, split: str, files: dict[str, list[Path]]) -> str:
        if split == "test":
            return (
                "there is no split 'test': add NAME.test.txt to data.folder, or use --split valid"
            )
        others = ", ".join(path.name for path in chain(*files.values()))
        return f"data.folder={self.folder} has no training text, only {others}: give data.file=NAME"

    def _files(self) -> dict[str, list[Path]]:
        """The files of each split, by name."""
        files: dict[str, list[Path]] = {"train": [], "valid": [], "test": []}
        folder = check_folder(self.folder, "data.file")
        if not self.folder and not self.file:
            raise UserError("data.folder or data.file is needed, e.g. data.folder=corpus")
        if self.file:
            return {**files, "train": [folder / self.file]}
        names = {path.name for path in folder.iterdir() if path.is_file()}
        for name in sorted(names):
            again = name.endswith(".gz") and name.removesuffix(".gz") in names
            if not again and not name.startswith(".") and not name.endswith(NOT_TEXT):
                parts = set(re.split(r"[._-]", name.lower()))
                split = next((key for key, words in PURPOSES.items() if parts & words), "train")
                files[split].append(folder / name)
        if not any(files.values()):
            raise UserError(
                f"data.folder={self.folder} holds no text file (subfolders are not read)"
            )
        return files

    def _documents(self, path: Path) -> Iterator[Document]:
        lines = read_lines(path)
        if not any(line.strip() for line in lines):
            raise DataError(f"{path}: every line is empty; give a file with text in it")
        if self.lines == "text":
            yield Document([line + "\n" for line in lines], str(path), 1)
            return
        sentences: list[str] = []
        for row, line in enumerate([*lines, ""], start=1):
            if sentence := line.strip():
                sentences.append(sentence)
            elif sentences:
                yield Document(sentences, str(path), row - len(sentences))
                sentences = []


def _first_part(count: int, held_out: float) -> int:
    """How many of `count` are not held out; at least one is, and one is not.

    Not in floating point, where 10 · (1 − 0.9) is less than 1.
    """
    kept = int(count * (1 - Fraction(str(held_out))))
    return min(max(kept, 1), count - 1)


def _cut_characters(
    documents: list[Document], held_out: float
) -> tuple[list[Document], list[Document]]:
    """The first and the last characters of all; a document in which the cut falls is two."""
    sizes = [sum(map(len, document.sentences)) for document in documents]
    left = _first_part(sum(sizes), held_out)
    first: list[Document] = []
    last: list[Document] = []
    for document, size in zip(documents, sizes, strict=True):
        if left >= size:
            first.append(document)
        elif left <= 0:
            last.append(document)
        else:
            stops = np.cumsum([len(line) for line in document.sentences])
            row = int(np.searchsorted(stops, left, "right"))
            lines, inside = document.sentences, left - (int(stops[row - 1]) if row else 0)
            begun = [lines[row][:inside]] if inside else []
            first.append(Document([*lines[:row], *begun], document.file, document.line))
            rest = [lines[row][inside:], *lines[row + 1 :]]
            last.append(Document(rest, document.file, document.line + row))
        left -= size
    return first, last


def _cut_sentences(
    documents: list[Document], held_out: float
) -> tuple[list[Document], list[Document]]:
    """The first and the last documents, or sentences where there is one document."""
    if len(documents) > 1:
        kept = _first_part(len(documents), held_out)
        return documents[:kept], documents[kept:]
    [document] = documents
    sentences, file, line = document.sentences, document.file, document.line
    if len(sentences) < 2:
        raise DataError(
            f"{file}:{line}: this one sentence cannot be trained on and held out for validation: "
            "give more text, or a folder that has a file NAME.valid.txt too"
        )
    kept = _first_part(len(sentences), held_out)
    first = Document(sentences[:kept], file, line)
    return [first], [Document(sentences[kept:], file, line + kept)]


class EncodedText:
    """A text as one stream of tokens.

    With `ends`, as causal models need it, the end token comes after each sentence, or after each
    document of a running text. `flat` are the tokens, `document_starts` where in them each
    document begins, and the end of the last; `word_starts`, with `words`, says which tokens begin
    a word.
    """

    def __init__(
        self, texts: Texts, tokenizer: Tokenizer, *, ends: bool, words: bool = False
    ) -> None:
        self.name = texts.name
        self._texts, self._tokenizer = texts, tokenizer
        pieces = [texts.pieces(document) for document in texts.documents]
        stops = np.cumsum([0, *map(len, pieces)])
        strings = list(chain.from_iterable(pieces))
        ended = np.full(len(strings), ends and texts.lines == "sentences")
        ended[stops[1:] - 1] = ends
        tokens, begins, starts = array("i"), bytearray(), [0]
        for (ids, begun), closes in zip(_encode(strings, tokenizer, words), ended, strict=True):
            tokens.extend(ids)
            begins.extend(begun)
            if closes:
                tokens.append(tokenizer.end)
                begins.append(True)
            starts.append(len(tokens))
        self._piece_starts = np.array(starts)
        self.flat: Int[np.ndarray, " n"] = np.array(tokens, dtype=np.int32)
        self.word_starts: Bool[np.ndarray, " n"] | None = np.array(begins, bool) if words else None
        self.document_starts: Int[np.ndarray, " d1"] = self._piece_starts[stops]

    @cached_property
    def sentence_starts(self) -> Int[np.ndarray, " s1"]:
        """Where in the stream each sentence begins, and the end of the last.

        A line of a running text begins with the first token that begins in it, so a line that
        is all inside a token has none.
        """
        if self._texts.lines == "sentences":
            return self._piece_starts
        starts: list[Int[np.ndarray, " _"]] = []
        for document, begin in zip(self._texts.documents, self.document_starts, strict=False):
            tokens, done = array("q"), 0
            for block in self._texts.pieces(document):
                tokens.extend(done + start for start, _ in self._tokenizer.offsets(block))
                done += len(block)
            lines = np.cumsum([0, *map(len, document.sentences[:-1])])
            starts.append(begin + np.searchsorted(tokens, lines))
        return np.concatenate([*starts, self.document_starts[-1:]])

    def document_of(self, positions: Int[np.ndarray, "*p"]) -> Int[np.ndarray, "*p"]:
        """The number of the document in which each position of the stream lies."""
        return np.searchsorted(self.document_starts, positions, "right") - 1

    def stretches(self, length: int) -> int:
        """How many whole stretches of this length there are; none is refused."""
        count = len(self.flat) // length
        if not count:
            raise DataError(
                f"{self.name}: {len(self.flat)} tokens held out are too few for a stretch of "
                f"{length}: give more text, or train with a lower model.max_length"
            )
        return count

    def digest(self) -> str:
        """Names this stream: another text, another tokenizer or other ends have another name."""
        total = hashlib.sha256()
        for part in (self.flat, self.document_starts, self._piece_starts):
            total.update(part.tobytes())
        return total.hexdigest()[:16]


def _encode(
    strings: list[str], tokenizer: Tokenizer, words: bool
) -> Iterator[tuple[list[int], list[bool]]]:
    """The ids of each string and, with `words`, which of them begin a word."""
    start = size = 0
    for row, string in enumerate([*strings, ""]):
        size += len(string)
        if row == len(strings) or size > CALL:
            some = strings[start : row + 1]
            start, size = row + 1, 0
            if words:
                yield from tokenizer.encode_words(some)
            else:
                yield from ((ids, []) for ids in tokenizer.encode_batch(some))


def gather(
    flat: Int[np.ndarray, " n"], starts: Int[np.ndarray, " rows"], length: int
) -> Int[np.ndarray, "rows length"]:
    """The stretches of `length` tokens that begin at `starts`."""
    return flat[starts[:, None] + np.arange(length)]


class Windows:
    """Stretches of `length` tokens of a stream of `tokens`, `rows` of them a step.

    An epoch cuts the stream into whole stretches, the first from an offset drawn from (seed,
    epoch), so that each epoch cuts elsewhere, and takes each stretch once, in a seeded order.
    Where the offset is `moving`, an epoch has as many stretches (`per_epoch`) as there is room for
    wherever the cuts fall; what is left before and after them is in other epochs. Otherwise the
    cuts are fixed, and the last tokens that make no whole stretch are left out.

    The stretches of all epochs are one endless row, of which step n takes the n-th `rows`: a pure
    function of (seed, step).
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
                f"{name}: {tokens} tokens are too few to train on stretches of {length}: give "
                "more text, or lower model.max_length"
            )
        self.length, self.rows, self.seed = length, rows, seed
        self.per_epoch = max(1, (tokens - length + 1) // length if moving else tokens // length)
        self._offsets = tokens - self.per_epoch * length + 1 if moving else 1
        # A step may end one epoch and begin the next.
        self._epoch = lru_cache(maxsize=2)(self._cut)

    def starts(self, step: int) -> Int[np.ndarray, " rows"]:
        """Where the stretches of this step begin (steps count from 0)."""
        begin, stop = step * self.rows, (step + 1) * self.rows
        parts = []
        while begin < stop:
            epoch, place = divmod(begin, self.per_epoch)
            parts.append(self._epoch(epoch)[place : place + stop - begin])
            begin += len(parts[-1])
        return np.concatenate(parts)

    def _cut(self, epoch: int) -> Int[np.ndarray, " _"]:
        random = np.random.default_rng([self.seed, epoch])
        offset = random.integers(self._offsets)
        return offset + self.length * random.permutation(self.per_epoch)
