"""Pieces of music as running text: folders and archives of MIDI files, and chorales in JSON."""

import json
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from manyheads.data.corpus import (
    STEMS,
    check_folder,
    check_held_out,
    check_split,
    hold_out,
    is_here,
    read_lines,
)
from manyheads.data.events import REST, ChoraleGrid, Encoding, PerformanceEvents, grid_of
from manyheads.data.language import Document, Texts
from manyheads.data.midi import PITCHES, SUFFIXES, read_bytes
from manyheads.errors import DataError, UserError, check_above_zero

ARCHIVES = (".tar.gz", ".tgz", ".tar")
SILENCE = -1  # in files of chorales
SEPARATE = "give chorales with separate voices, such as Jsb16thSeparated.json"
LINE = 64  # words


@dataclass(frozen=True)
class Music(Texts):
    """The pieces of one split, a word for each event.

    The first document is empty: so every piece, also the first, comes after the end of another,
    and a model that writes on after an end begins a new one. `closing` words end each piece.
    """

    vocabulary: tuple[str, ...] = ()
    closing: int = 0

    def strings(self) -> list[str]:
        """Every word of the encoding once, also those that these pieces do not have."""
        return [" ".join(self.vocabulary)]

    @property
    def pieces_of_words(self) -> list[list[str]]:
        """The words of each piece, without those that close it."""
        found = (" ".join(document.sentences).split() for document in self.documents[1:])
        return [words[: len(words) - self.closing] for words in found]


@dataclass(frozen=True, kw_only=True)
class MusicData:
    """A user's own music, with an `encoding` that says what its words are.

    `folder` holds train, valid and test, each a folder of MIDI files or an archive of them
    (train.tar.gz); or it holds MIDI files, in folders as they may be. Without files for validation
    a share `held_out` of the others serves, drawn by file. For chorales `file` names a JSON file
    instead (in `folder`, where given) that has, for each split, pieces as lists of sixteenths,
    each four pitches from soprano to bass, −1 for silence.

    In training each stretch is moved by a drawn number of semitones, up to `transpose` up or down,
    and each performance is also there at each tempo of `tempi` (1.05 is 5 % faster).
    """

    folder: str = ""
    file: str = ""
    encoding: Encoding = field(default_factory=PerformanceEvents)
    held_out: float = 0.1
    transpose: int = 0
    tempi: tuple[float, ...] = ()
    kind: ClassVar[str] = "music"

    def __post_init__(self) -> None:
        check_held_out(self.held_out)
        if not 0 <= self.transpose < PITCHES:
            raise UserError(f"data.transpose={self.transpose} must be from 0 to {PITCHES - 1}")
        for tempo in self.tempi:
            check_above_zero("data.tempi", tempo)
        if isinstance(self.encoding, ChoraleGrid) and self.tempi:
            raise UserError("data.tempi does not apply to data.encoding=chorale: leave it out")
        if self.file and not isinstance(self.encoding, ChoraleGrid):
            raise UserError(
                f"data.file={self.file} is for chorales in JSON: give MIDI files as data.folder, "
                "or choose data.encoding=chorale"
            )

    def splits(self) -> list[str]:
        if self.file:
            return list(STEMS)
        places = self._places()
        return [split for split in STEMS if places[split] or split == "valid"]

    def read(self, split: str) -> Music:
        check_split(split, STEMS)
        pieces = self._chorales(split) if self.file else self._files(split)
        where = str(Path(self.folder) / self.file) if self.file else self.folder
        name, closing = f"{where}, {split}", self.encoding.closing
        documents, events = [Document([""], where, 1)], 0
        for file, words in pieces:
            documents.append(Document(list(_lines([*words, *closing])), file, 1))
            events += len(words)
        note = f"{name}: {len(documents) - 1:,} pieces, {events:,} events"
        vocabulary = tuple(self.encoding.vocabulary())
        return Music(documents, "text", (note,), name, vocabulary, len(closing))

    def _files(self, split: str) -> Iterator[tuple[str, list[str]]]:
        """The words of each MIDI file of a split, in training at each tempo."""
        places = self._places()
        place = places[split]
        held = split != "test" and places["valid"] is None
        if held:
            place = places["train"]
        if place is None:
            raise UserError(
                f"data.folder={self.folder} has no music for the split '{split}': put a folder "
                f"{split} of MIDI files there, or {split}.tar.gz, or use --split valid"
            )
        files = list(_contents(place))
        if not files:
            raise DataError(f"{place} holds no MIDI file ({' or '.join(SUFFIXES)}): put some there")
        rows = list(range(len(files)))
        if held:
            rows = hold_out(len(files), self.held_out, seed=0)[split == "valid"]
        for row in rows:
            name, content = files[row]
            for tempo in (1.0, *self.tempi) if split == "train" else (1.0,):
                yield name, self.encoding.words(content, name, tempo)

    def _places(self) -> dict[str, Path | None]:
        """The folder or the archive of each split; music that is in none is for training."""
        folder = self._checked()
        found: dict[str, Path | None] = {}
        for split, stems in STEMS.items():
            names = [stem + suffix for stem in stems for suffix in ("", *ARCHIVES)]
            there = (folder / name for name in names if (folder / name).exists())
            found[split] = next(there, None)
        if not any(found.values()):
            found["train"] = folder
        return found

    def _checked(self) -> Path:
        """The folder, which a file that is here by itself does without."""
        folder = check_folder(self.folder, "data.folder")
        if not self.folder and not (self.file and is_here(Path(self.file))):
            what = f"the one that holds {self.file}" if self.file else "a folder of MIDI files"
            raise UserError(f"data.folder is needed: {what}, e.g. data.folder=music")
        return folder

    def _chorales(self, split: str) -> Iterator[tuple[str, list[str]]]:
        path = self._checked() / self.file
        if path.suffix == ".npz":
            raise DataError(f"{path} holds pickled objects, which are not read: give JSON")
        try:
            table: Any = json.loads("\n".join(read_lines(path)))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not whole JSON ({error.msg})") from None
        pieces = table.get(split) if isinstance(table, dict) else None
        if not isinstance(pieces, list) or not pieces:
            raise DataError(
                f"{path}: there is no split '{split}' with pieces in it; give an object with "
                "train, valid and test, each a list of chorales"
            )
        for number, piece in enumerate(pieces, start=1):
            name = f"{path}, {split}, piece {number}"
            words = grid_of(_frames(piece, name))
            if all(word == REST for word in words):
                raise DataError(f"{name}: no note in this piece; take it out of the file")
            yield name, words


def _frames(piece: Any, name: str) -> Iterator[list[int | None]]:
    """The sixteenths of a chorale, None for silence."""
    if not isinstance(piece, list):
        raise DataError(f"{name}: no list of sixteenths; {SEPARATE}")
    for number, frame in enumerate(piece, start=1):
        where = f"{name}, sixteenth {number}"
        if not isinstance(frame, list) or len(frame) != ChoraleGrid.unit:
            found = f"{len(frame)} pitches" if isinstance(frame, list) else "no list"
            raise DataError(f"{where}: {found}, and a chorale has four voices; {SEPARATE}")
        wrong = [one for one in frame if type(one) is not int or not SILENCE <= one < PITCHES]
        if wrong:
            raise DataError(
                f"{where}: {json.dumps(wrong[0])[:20]} is no pitch, which is a whole number from "
                f"−1 (silence) to {PITCHES - 1}; mend it, or {SEPARATE}"
            )
        yield [None if pitch == SILENCE else pitch for pitch in frame]


def _lines(words: list[str]) -> Iterator[str]:
    for start in range(0, len(words), LINE):
        yield " ".join(words[start : start + LINE]) + "\n"


def _contents(place: Path) -> Iterator[tuple[str, bytes]]:
    """The MIDI files of a folder or an archive with their names, in order of these."""
    if place.is_dir():
        for path in sorted(place.rglob("*")):
            if path.suffix.lower() in SUFFIXES and path.is_file():
                yield str(path), read_bytes(path)
        return
    found = []
    try:
        with tarfile.open(place) as archive:
            for member in archive:
                if Path(member.name).suffix.lower() in SUFFIXES and member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None  # a plain file
                    found.append((f"{place}:{member.name}", file.read()))
    except (tarfile.TarError, EOFError, OSError, zlib.error):
        raise DataError(f"{place}: not a whole archive, perhaps cut off; copy it again") from None
    yield from sorted(found)
