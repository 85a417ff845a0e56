"""Pieces of music as running text: folders and archives of MIDI files, and chorales in JSON."""

import json
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

from manyheads.config import Between, Positive
from manyheads.data.corpus import STEMS, SplitData, check_folder, hold_out
from manyheads.data.events import (
    PITCHES,
    REST,
    SUFFIXES,
    ChoraleGrid,
    Encoding,
    PerformanceEvents,
    encode_grid,
)
from manyheads.data.files import is_here, read_bytes, read_lines
from manyheads.data.language import Texts
from manyheads.errors import DataError, UserError

ARCHIVES = (".tar.gz", ".tgz", ".tar")
SILENCE = -1  # in files of chorales
FOUR_VOICES = "use chorales with separate voices, such as Jsb16thSeparated.json"
LINE = 64  # words
PITCH = re.compile(r"(?:on|p)(\d+)")
PHRASE = 6  # intervals
BAR = 64  # words of a grid
SKETCH = 512  # phrases that represent a piece
JACCARD = 0.02
JACCARD_GRID = 0.3
FEWEST_SHARED = 10  # phrases; scales and other exercises have fewer


def is_grid(words: Sequence[str]) -> bool:
    return not any(word.startswith("on") for word in words)


def phrases(words: Sequence[str]) -> set[int]:
    """Hashes of the runs of intervals in a piece, at most SKETCH of them.

    Transposition and tempo do not change them. A run of a grid is a bar: held notes repeat.
    """
    pitches = [int(match[1]) for match in map(PITCH.fullmatch, words) if match]
    intervals = bytes((after - before) % 256 for before, after in pairwise(pitches))
    length = BAR if is_grid(words) else PHRASE
    runs = (intervals[start : start + length] for start in range(len(intervals) - length + 1))
    return set(sorted(set(map(zlib.crc32, runs)))[:SKETCH])


def group_pieces(files: Iterable[Sequence[str]]) -> list[int]:
    """The piece of each file, as the number of its first file.

    Files are one piece if the Jaccard index of their phrases is JACCARD or more. In 61 piano
    performances of 18 pieces it is at least 0.036 for one piece, and at most 0.0075 for two.
    Chorales share cadences: at most 0.17 in the JSB Chorales, except for copies.
    """
    index: dict[int, list[int]] = {}  # the files with a phrase
    pieces: list[int] = []
    sizes: list[int] = []
    for number, words in enumerate(files):
        hashes, threshold = phrases(words), JACCARD_GRID if is_grid(words) else JACCARD
        shared = Counter(chain.from_iterable(index.get(phrase, ()) for phrase in hashes))
        same = {
            pieces[other]
            for other, count in shared.items()
            if count >= max(FEWEST_SHARED, threshold * (len(hashes) + sizes[other] - count))
        }
        first = min(same, default=number)
        pieces = [*(first if piece in same else piece for piece in pieces), first]
        sizes.append(len(hashes))
        for phrase in hashes:
            index.setdefault(phrase, []).append(number)
    return pieces


@dataclass(frozen=True)
class Music(Texts):
    """The pieces of one split, a word for each event.

    The first document is empty, so that every piece comes after the end of another, and a model
    that continues after an end begins a new piece. Each piece ends with `closing` words.
    """

    vocabulary: tuple[str, ...] = ()
    closing: int = 0
    unit: ClassVar[str] = "pieces"

    def leaks(self, train: Any) -> list[bool]:
        """Whether training has a file of the same piece, for each piece."""
        known = train.pieces_of_words
        pieces = group_pieces([*known, *self.pieces_of_words])
        in_training = {*pieces[: len(known)]}
        return [piece in in_training for piece in pieces[len(known) :]]

    def strings(self) -> list[str]:
        """Every word of the encoding once, also words that do not occur."""
        return [" ".join(self.vocabulary)]

    @property
    def pieces_of_words(self) -> list[list[str]]:
        """The words of each piece, without the closing ones."""
        pieces = (text.split() for [text] in self.documents[1:])
        return [words[: len(words) - self.closing] for words in pieces]


@dataclass(frozen=True, kw_only=True)
class MusicData(SplitData[Path]):
    """Music of your own.

    `folder` holds train, valid and test, each a folder of MIDI files or an archive of them
    (train.tar.gz); or MIDI files in any subfolders, all of them for training, of which pieces are
    held out: performances of one piece stay together. For chorales `file`
    may be a JSON file instead (in `folder`, if set) with a list of pieces for each split: a piece
    is a list of sixteenths, each four pitches from soprano to bass, −1 for silence.
    """

    file: Annotated[str, "JSON file of chorales, in `folder` if that is set"] = ""
    encoding: Annotated[Encoding, "Words for music"] = field(default_factory=PerformanceEvents)
    transpose: Annotated[
        int, Between(0, PITCHES - 1), "Transpose training windows by up to so many semitones"
    ] = 0
    tempi: Annotated[
        tuple[Positive, ...], "Further tempi of each training performance; 1.05 is 5 % faster"
    ] = ()
    kind: ClassVar[str] = "music"

    def __post_init__(self) -> None:
        is_chorale = isinstance(self.encoding, ChoraleGrid)
        if is_chorale and self.tempi:
            raise UserError("data.tempi does not apply to data.encoding=chorale: remove it")
        if self.file and not is_chorale:
            raise UserError(
                f"data.file={self.file} is for chorales in JSON: set data.folder to MIDI files, "
                "or data.encoding=chorale"
            )

    def read(self, split: str) -> Music:
        path, is_held_out = self.locate(split)
        pieces = (
            _read_chorales(path, split) if self.file else self._encode(path, split, is_held_out)
        )
        source = str(path) if self.file else self.folder
        documents, events = [[""]], 0
        for words in pieces:
            events += len(words)
            words = [*words, *self.encoding.closing]
            lines = (" ".join(words[start : start + LINE]) for start in range(0, len(words), LINE))
            documents.append(["".join(f"{line}\n" for line in lines)])
        name = f"{source}, {split}"
        note = f"{name}: {len(documents) - 1:,} pieces, {events:,} events"
        vocabulary = tuple(self.encoding.vocabulary())
        closing = len(self.encoding.closing)
        return Music(documents, "text", (note,), name, vocabulary=vocabulary, closing=closing)

    def _encode(self, path: Path, split: str, is_held_out: bool) -> Iterator[list[str]]:
        """The words of each MIDI file of a split, in training at each tempo."""
        files = _read_folder(path) if path.is_dir() else _read_archive(path)
        if not files:
            raise DataError(f"{path} has no MIDI file ({' or '.join(SUFFIXES)}): add some")
        if is_held_out:
            pieces = group_pieces(self.encoding.words(content, name) for name, content in files)
            unique = sorted({*pieces})
            rows = hold_out(len(unique), self.valid_fraction, seed=0)[split == "valid"]
            chosen = {unique[row] for row in rows}
            files = [file for file, piece in zip(files, pieces, strict=True) if piece in chosen]
        for name, content in files:
            for tempo in (1.0, *self.tempi) if split == "train" else (1.0,):
                yield self.encoding.words(content, name, tempo)

    def _find(self, split: str) -> Path | None:
        """The folder or archive of a split; if there is none at all, `folder` is for training."""
        folder = check_folder(self.folder)
        if not self.folder and not (self.file and is_here(Path(self.file))):
            content = f"the folder of {self.file}" if self.file else "a folder of MIDI files"
            raise UserError(f"data.folder is needed: {content}, e.g. data.folder=music")
        if self.file:
            return folder / self.file
        paths = {
            name: [folder / f"{stem}{end}" for stem in stems for end in ("", *ARCHIVES)]
            for name, stems in STEMS.items()
        }
        existing = {name: [path for path in paths[name] if path.exists()] for name in paths}
        if split == "train" and not any(existing.values()):
            return folder
        return existing[split][0] if existing[split] else None

    def _missing(self, split: str) -> str:
        return (
            f"data.folder={self.folder} has no music for the split '{split}': add a folder {split} "
            f"of MIDI files, or {split}.tar.gz, or use --split valid"
        )


def _read_folder(folder: Path) -> list[tuple[str, bytes]]:
    paths = (path for path in sorted(folder.rglob("*")) if _is_midi(path))
    return [(str(path), read_bytes(path)) for path in paths if path.is_file()]


def _is_midi(path: Path) -> bool:
    """By its name. Hidden files, as ._a.mid in archives of macOS, are not music."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _read_archive(path: Path) -> list[tuple[str, bytes]]:
    files = []
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if _is_midi(Path(member.name)) and member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None  # a regular file
                    files.append((f"{path}:{member.name}", file.read()))
    except (tarfile.TarError, EOFError, OSError, zlib.error):
        raise DataError(f"{path}: not a complete archive; copy it again") from None
    return sorted(files)


def _read_chorales(path: Path, split: str) -> Iterator[list[str]]:
    """The words of each chorale of a JSON file."""
    text = "\n".join(read_lines(path))
    try:
        table: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from None
    pieces = table.get(split) if isinstance(table, dict) else None
    if not isinstance(pieces, list) or not pieces:
        raise DataError(
            f"{path}: there is no split '{split}' with pieces in it; use an object with train, "
            "valid and test, each a list of chorales"
        )
    for number, piece in enumerate(pieces, start=1):
        name = f"{path}, {split}, piece {number}"
        if not isinstance(piece, list):
            raise DataError(f"{name}: not a list of sixteenths; {FOUR_VOICES}")
        for row, frame in enumerate(piece, start=1):
            if not _is_frame(frame):
                raise DataError(
                    f"{name}, sixteenth {row}: {json.dumps(frame)[:40]} is not four pitches, "
                    f"integers from −1 (silence) to {PITCHES - 1}; {FOUR_VOICES}"
                )
        words = encode_grid([None if p == SILENCE else p for p in frame] for frame in piece)
        if all(word == REST for word in words):
            raise DataError(f"{name}: no note in this piece; remove it from the file")
        yield words


def _is_frame(frame: Any) -> bool:
    """True for the pitches of four voices."""
    return (
        isinstance(frame, list)
        and len(frame) == ChoraleGrid.unit
        and all(type(pitch) is int and SILENCE <= pitch < PITCHES for pitch in frame)
    )
