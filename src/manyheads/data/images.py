"""Labelled images: folders of classes, idx files (as MNIST), arrays in a `.npz`; splits and sizes.

Labels are read first, and pixels when it is known which rows are needed.
"""

import gzip
import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Int, Shaped, UInt8
from torch.nn import functional as F

from manyheads.data.augmentation import Augment, Mixing
from manyheads.data.corpus import (
    STEMS,
    check_folder,
    check_held_out,
    check_split,
    hold_out,
    is_here,
    read_lines,
)
from manyheads.errors import DataError, UserError, check_at_least, import_optional

Pixels = UInt8[np.ndarray, "_n _channels _height _width"]  # any: they need not be alike
Labels = Int[np.ndarray, " _"]
Array = Shaped[np.ndarray, "..."]

SUFFIXES = (".png", ".jpg", ".jpeg")
CHANNELS = {1: "grey", 3: "colour"}
CLASSES = "classes.txt"
MOST_CLASSES = 2**16
AT_ONCE = 4096  # pictures of an array that are given together
FORMS = "folders of classes (train/CLASS/*.png), idx files as MNIST's, or one .npz"
LUMA = (19595, 38470, 7471)  # 0.299 red, 0.587 green and 0.114 blue, in parts of 2¹⁶


@dataclass(frozen=True, eq=False)
class Part:
    """The labels of a split as its files have them, and a way to the pixels of some rows.

    `chunks` gives these a few at a time, each with the name of the file that they are from.
    """

    name: str
    labels: Labels
    classes: list[str]
    chunks: Callable[[Sequence[int]], Iterator[tuple[str, Pixels]]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """The splits that have files of their own, and those to be held out from train, in order."""

    own: dict[str, Callable[[], Part]]
    held: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Pictures:
    pixels: UInt8[np.ndarray, "n channels height width"]
    labels: Int[np.ndarray, " n"]
    classes: list[str]
    notes: tuple[str, ...] = ()

    def digest(self) -> str:
        """Names these pictures with their labels."""
        total = hashlib.sha256(repr((self.pixels.shape, self.classes)).encode())
        total.update(np.ascontiguousarray(self.pixels).data)
        total.update(np.ascontiguousarray(self.labels).data)
        return total.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """A folder of labelled pictures in one of three forms, known by what is in it.

    Folders of classes: train/CLASS/*.png (or .jpg, .jpeg), and where there are valid (or val, dev)
    and test beside train; or CLASS/*.png, from which a test split is held out too. Files of MNIST's
    form: train-images-idx3-ubyte and train-labels-idx1-ubyte, t10k-… for the test, plain or .gz,
    with the names of the classes in classes.txt or none. Or one .npz with x_train and y_train, and
    where there are x_valid, y_valid, x_test, y_test and classes.

    `size` squeezes each picture to a square of that side, `channels` makes all grey (1) or all
    colour (3); without them pictures stay as they are, and must be alike. Without a validation
    split the share `held_out` of each class serves, the same for every seed of a run. `max_train`
    is how many pictures to train on, as equally many of each class as there are; fewer are some of
    those that more would be. `augment` and `mixing` are for training alone.
    """

    folder: str = ""
    size: int | None = None
    channels: int | None = None
    held_out: float = 0.1
    max_train: int | None = None
    augment: Augment = field(default_factory=Augment)
    mixing: Mixing = field(default_factory=Mixing)
    kind: ClassVar[str] = "images"

    def __post_init__(self) -> None:
        check_held_out(self.held_out)
        check_at_least("data.size", self.size, 1)
        check_at_least("data.max_train", self.max_train, 2)
        if self.channels not in (None, *CHANNELS):
            raise UserError(f"data.channels={self.channels} must be 1 (grey) or 3 (colour)")

    def splits(self) -> list[str]:
        form = open_folder(self.folder)
        return [split for split in STEMS if split == "train" or split in {*form.own, *form.held}]

    def read(self, split: str) -> Pictures:
        """The pictures of a split."""
        check_split(split, STEMS)
        form = open_folder(self.folder)
        train = form.own["train"]()
        if len(np.unique(train.labels)) < 2:
            raise DataError(f"{train.name}: all of one class: add pictures of a second at least")
        notes: list[str] = []
        if split in form.own and split != "train":
            part = form.own[split]()
            _check_known(part, train)
            rows = list(range(len(part.labels)))
        elif split in {"train", *form.held}:
            part = train
            rows, notes = self._rows(form, train, split)
        else:
            raise UserError(f"{self.folder} has no test split: add its files, or use --split valid")
        pixels = self._pixels(part, rows, train)
        _, channels, height, width = pixels.shape
        counted = f"{len(part.labels):,} pictures of {_counted(part, train.classes)}"
        found = f"{part.name}: {counted}, {height}×{width}, {CHANNELS[channels]}"
        return Pictures(pixels, part.labels[rows], train.classes, (found, *part.notes, *notes))

    def _rows(self, form: Form, train: Part, split: str) -> tuple[list[int], list[str]]:
        """Which rows of the training files are a split, and what a person should know of it."""
        labels: list[int] = train.labels.tolist()
        rows = {"train": list(range(len(labels)))}
        notes: list[str] = []
        for held in form.held:
            rows["train"], rows[held] = _hold_out(labels, rows["train"], self.held_out)
            if not rows[held]:
                raise DataError(
                    f"{train.name}: no class has a second picture that could be held out for "
                    f"'{held}': add pictures, or a split of its own"
                )
            notes.append(f"{len(rows[held]):,} of them held out for '{held}'")
        counts = Counter(labels)
        single = [name for number, name in enumerate(train.classes) if counts[number] == 1]
        if single and form.held:
            notes.append(f"classes with one picture, which is not held out: {listed(single)}")
        if split == "train" and self.max_train is not None:
            rows["train"] = _balanced(labels, rows["train"], self.max_train)
            notes.append(f"{len(rows['train']):,} of them to train on, by data.max_train")
        return rows[split], notes

    def _pixels(self, part: Part, rows: Sequence[int], train: Part) -> Pixels:
        """The pixels of some rows, all as large and of as many channels as the first of train."""
        first = next(train.chunks([0])) if part is not train else None
        whole: Pixels | None = None
        done = 0
        for name, pixels in part.chunks(rows):
            first = first or (name, pixels)
            self._check_alike(name, pixels, *first)
            brought = _bring(pixels, self.size, self.channels)
            if whole is None:
                whole = np.empty((len(rows), *brought.shape[1:]), dtype=np.uint8)
            whole[done : done + len(brought)] = brought
            done += len(brought)
        assert whole is not None  # no split is without a row
        return whole

    def _check_alike(self, name: str, pixels: Pixels, like: str, first: Pixels) -> None:
        (channels, *sides), (wanted, *others) = pixels.shape[1:], first.shape[1:]
        if self.channels is None and channels != wanted:
            raise DataError(
                f"{name}: {CHANNELS[channels]} where {like} is {CHANNELS[wanted]}: make all grey "
                "with data.channels=1, or all colour with data.channels=3"
            )
        if self.size is None and sides != others:
            raise DataError(
                f"{name}: {sides[0]}×{sides[1]} pixels where {like} has {others[0]}×{others[1]}: "
                "bring all to one size, for example with data.size=32"
            )


def read_picture(
    path: Path, size: int, channels: int
) -> UInt8[np.ndarray, "channels height width"]:
    return _bring(open_picture(path), size, channels)[0]


def _bring(pixels: Pixels, size: int | None, channels: int | None) -> Pixels:
    """Pictures squeezed to a square, and made grey or colour; None leaves them as they are."""
    if channels == 1 and pixels.shape[1] == 3:
        grey = np.einsum("nchw,c->nhw", pixels, np.array(LUMA, dtype=np.uint32))
        pixels = rearrange((grey + 2**15) >> 16, "n h w -> n 1 h w").astype(np.uint8)
    if channels == 3 and pixels.shape[1] == 1:
        pixels = repeat(pixels, "n 1 h w -> n c h w", c=3)
    if size is not None and pixels.shape[2:] != (size, size):
        images = torch.from_numpy(np.ascontiguousarray(pixels))
        # Where it shrinks, a pixel is a mean of all that it stands for: nothing flickers.
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
        pixels = images.numpy()
    return pixels


def _hold_out(labels: list[int], rows: list[int], share: float) -> tuple[list[int], list[int]]:
    """Rows to train on and rows held out: a seeded share of each class that has two or more."""
    of_class: dict[int, list[int]] = {}
    for row in rows:
        of_class.setdefault(labels[row], []).append(row)
    held: set[int] = set()
    for label, members in of_class.items():
        if len(members) > 1:
            held |= {members[place] for place in hold_out(len(members), share, seed=label)[1]}
    return [row for row in rows if row not in held], sorted(held)


def _balanced(labels: list[int], rows: list[int], count: int) -> list[int]:
    """So many of the rows: classes take turns, each with its next of a seeded order."""
    classes = len({labels[row] for row in rows})
    if count < classes:
        raise UserError(f"data.max_train={count} must be at least {classes}, one for each class")
    taken: Counter[int] = Counter()
    turns: list[tuple[int, int, int]] = []
    for row in Random(0).sample(rows, len(rows)):
        turns.append((taken[labels[row]], labels[row], row))
        taken[labels[row]] += 1
    return sorted(row for _, _, row in sorted(turns)[:count])


def _counted(part: Part, classes: list[str]) -> str:
    there = {*np.unique(part.labels).tolist()}
    without = [name for number, name in enumerate(classes) if number not in there]
    if not without:
        return f"{len(classes)} classes"
    return f"{len(there)} of {len(classes)} classes, none of {listed(without)}"


def _check_known(part: Part, train: Part) -> None:
    unknown = np.flatnonzero(~np.isin(part.labels, train.labels))
    if len(unknown):
        label = int(part.labels[unknown[0]])
        name = train.classes[label] if label < len(train.classes) else str(label)
        raise DataError(
            f"{part.name}: picture {unknown[0] + 1} is of the class '{name}', of which "
            f"{train.name} has none: add some there, or take it away"
        )


def open_folder(name: str) -> Form:
    """What is in a folder."""
    if not name:
        raise UserError(f"data.folder is needed: {FORMS}, e.g. data.folder=mnist")
    folder = check_folder(name, "data.folder")
    archives = sorted(folder.glob("*.npz"))
    if len(archives) > 1:
        names = listed([path.name for path in archives])
        raise UserError(f"data.folder={name} holds several .npz {names}: leave one in it")
    if archives:
        return _archive(archives[0])
    if any("idx3-ubyte" in path.name for path in folder.iterdir()):
        return _idx_files(folder)
    return _class_folders(folder)


def listed(names: Sequence[str], most: int = 10) -> str:
    """Names for a message, not too many."""
    return f"({', '.join(names[:most])}{', …' if len(names) > most else ''})"


def _missing(own: dict[str, Any]) -> tuple[str, ...]:
    return () if "valid" in own else ("valid",)


def _class_folders(folder: Path) -> Form:
    found: dict[str, Path] = {}
    for split, stems in STEMS.items():
        path = next((folder / stem for stem in stems if (folder / stem).is_dir()), None)
        if path is not None:
            found[split] = path
    if found and "train" not in found:
        there = [path.name for path in found.values()]
        raise DataError(f"{folder}: no folder train beside {listed(there)}: add it")
    train = found.get("train", folder)
    classes = [path.name for path in _folders(train)]
    if not classes:
        raise DataError(f"{train}: no folders of classes in it: give {FORMS}")
    if all(name.isdecimal() for name in classes):
        classes.sort(key=int)
    for path in found.values():
        unknown = [of_class for of_class in _folders(path) if of_class.name not in classes]
        if unknown:
            raise DataError(
                f"{unknown[0]}: this class is not in {train}; add it there, or remove it"
            )
    if not found:
        return Form({"train": partial(_pictures_of, folder, classes, folder)}, ("test", "valid"))
    # What lies beside the splits is said once, with the training split.
    own = {
        split: partial(_pictures_of, path, classes, folder if split == "train" else path)
        for split, path in found.items()
    }
    return Form({**own}, _missing(own))


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")


def _is_picture(path: Path) -> bool:
    shown = path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    return shown and not path.is_dir()


def _pictures_of(folder: Path, classes: list[str], whole: Path) -> Part:
    """The pictures of a split, which may be the whole of data.folder."""
    files: list[Path] = []
    labels: list[int] = []
    others = 0
    for path in _folders(folder):
        inside = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        pictures = [file for file in inside if _is_picture(file)]
        if not pictures:
            raise DataError(
                f"{path}: no picture ({', '.join(SUFFIXES)}) in this folder of a class: put some "
                "there, or take the folder away"
            )
        others += sum(not file.is_dir() for file in inside) - len(pictures)
        files += pictures
        labels += [classes.index(path.name)] * len(pictures)
    if not files:
        raise DataError(f"{folder}: no folders of classes in it: give {FORMS}")
    notes = [f"{others:,} files other than {', '.join(SUFFIXES)} left out"] if others else []
    loose = [file for file in whole.iterdir() if _is_picture(file)]
    loose = sorted({*loose, *pictures_in(folder)} - {*files})
    if loose:
        names = listed([str(file.relative_to(whole)) for file in loose], 3)
        notes.append(f"{len(loose):,} pictures left out: not right in a folder of a class {names}")

    def chunks(rows: Sequence[int]) -> Iterator[tuple[str, Pixels]]:
        for row in rows:
            yield str(files[row]), open_picture(files[row])

    return Part(str(folder), np.array(labels, dtype=np.int64), classes, chunks, tuple(notes))


def pictures_in(path: Path) -> list[Path]:
    """The picture files of a folder and of folders inside it, in order, none of them hidden.

    A path that has none, or is no folder, stands for itself: `open_picture` says what it is.
    """
    found = []
    for file in path.rglob("*") if path.is_dir() else ():
        folders = file.relative_to(path).parent.parts
        if _is_picture(file) and not any(name.startswith(".") for name in folders):
            found.append(file)
    return sorted(found) or [path]


def open_picture(path: Path) -> Pixels:
    """The one picture of a file, grey or colour as it is; what is transparent is seen on white."""
    import_optional("PIL", "images")
    from PIL import Image, ImageOps

    if path.is_dir():
        raise UserError(
            f"{path} is a folder, and no picture: name files ({', '.join(SUFFIXES)}), or a folder "
            "that holds some"
        )
    if not path.is_file():
        raise UserError(f"no file {path}: check the path")
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty: copy it again, or take it away")
    try:
        with Image.open(path) as file:
            # Cameras lay a picture on its side and say so beside it.
            picture: Any = ImageOps.exif_transpose(file)
            picture.load()
    except PermissionError:
        raise UserError(f"cannot read {path}: check its permissions") from None
    except Exception:  # each decoder of Pillow has errors of its own
        raise DataError(f"{path}: broken, or no picture: copy it again, or take it away") from None
    if picture.mode.startswith(("I", "F")):
        raise DataError(f"{path}: more than 8 bits a channel: save it with 8")
    mode = "L" if picture.mode in ("1", "L", "LA", "La") else "RGB"
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    pixels = np.array(picture.convert(mode)).reshape(picture.height, picture.width, -1)
    return rearrange(pixels, "height width channels -> 1 channels height width")


def _idx_files(folder: Path) -> Form:
    own: dict[str, Callable[[], Part]] = {}
    for split, stems in (STEMS | {"test": ("t10k", "test")}).items():
        for stem in stems:
            images = _idx(folder, stem, "images", 3)
            if images is not None and split not in own:
                own[split] = partial(_idx_part, folder, stem, images)
    if "train" not in own:
        raise DataError(f"{folder}: no train-images-idx3-ubyte (nor .gz) in it: add it")
    return Form(own, _missing(own))


def _idx(folder: Path, stem: str, what: str, axes: int) -> Path | None:
    """An idx file as it may be called: train-images-idx3-ubyte, with a dot, with .gz."""
    names = [f"{stem}-{what}{mark}idx{axes}-ubyte" for mark in "-."]
    paths = [folder / f"{name}{ending}" for name in names for ending in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)


def _idx_part(folder: Path, stem: str, images: Path) -> Part:
    answers = _idx(folder, stem, "labels", 1)
    if answers is None:
        raise DataError(f"{images}: no {stem}-labels-idx1-ubyte (nor .gz) beside it: add it")
    named = None
    if is_here(folder / CLASSES):
        named = [line.strip() for line in read_lines(folder / CLASSES) if line.strip()]
    return _array_part(
        str(images), str(answers), _read_idx(answers, 1), named, partial(_read_idx, images, 3)
    )


def _read_idx(path: Path, axes: int) -> Array:
    """Bytes in an idx file: 0, 0, 8 for bytes, the number of axes, their lengths, the content."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DataError(f"{path}: not a whole gzip file, perhaps cut off: copy it again") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): check its permissions") from None
    start = 4 + 4 * axes
    if len(content) < start or content[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path}: it does not begin as an idx{axes}-ubyte file does: copy it again")
    shape: list[int] = np.frombuffer(content, ">u4", axes, offset=4).tolist()
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path}: {len(content) - start:,} bytes where it should have {math.prod(shape):,} by "
            "its own account, perhaps cut off: copy it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _archive(path: Path) -> Form:
    names = _in_archive(path, None)
    own: dict[str, Callable[[], Part]] = {}
    for split in STEMS:
        pair = (f"x_{split}", f"y_{split}")
        if split == "train" or {*pair} & {*names}:
            for name in pair:
                if name not in names:
                    raise DataError(
                        f"{path}: no {name} among its arrays {listed(names)}: it needs x_train and "
                        "y_train, and both of each other split"
                    )
            own[split] = partial(_archive_part, path, *pair, "classes" in names)
    return Form(own, _missing(own))


def _archive_part(path: Path, x: str, y: str, has_names: bool) -> Part:
    named = _in_archive(path, "classes").astype(str).ravel().tolist() if has_names else None
    labels = _in_archive(path, y)
    return _array_part(f"{path}: {x}", f"{path}: {y}", labels, named, partial(_in_archive, path, x))


def _in_archive(path: Path, name: str | None) -> Any:
    """An array of a .npz, or without a name the names of all."""
    try:
        with np.load(path) as arrays:
            return list(arrays.files) if name is None else np.asarray(arrays[name])
    except PermissionError:
        raise UserError(f"cannot read {path}: check its permissions") from None
    except Exception:  # a damaged archive has many ways to fail
        raise DataError(f"{path}: broken, or no .npz of plain arrays: write it again") from None


def _array_part(
    name: str, of_labels: str, labels: Array, named: list[str] | None, load: Callable[[], Array]
) -> Part:
    """Pictures that lie in one array, [n h w] or [n h w c]."""
    labels = _checked(of_labels, labels, named)
    if named and len({*named}) < len(named):
        raise DataError(f"{name}: two of its classes have the same name: rename one")

    def chunks(rows: Sequence[int]) -> Iterator[tuple[str, Pixels]]:
        pixels = load()
        shape = list(pixels.shape)
        if (
            pixels.dtype != np.uint8
            or 0 in shape
            or not (len(shape) == 3 or (len(shape) == 4 and shape[3] in CHANNELS))
        ):
            raise DataError(
                f"{name}: {pixels.dtype} of shape {shape}, where pictures are uint8 [n, height, "
                "width] or [n, height, width, 1 or 3]: write them so"
            )
        if len(pixels) != len(labels):
            raise DataError(
                f"{name}: {len(pixels):,} images, but {len(labels):,} labels: make them equal"
            )
        pixels = pixels.reshape(*shape[:3], -1)
        for start in range(0, len(rows), AT_ONCE):
            yield name, rearrange(pixels[rows[start : start + AT_ONCE]], "n h w c -> n c h w")

    classes = named or [str(number) for number in range(int(labels.max()) + 1)]
    return Part(name, labels, classes, chunks)


def _checked(name: str, labels: Array, named: list[str] | None) -> Labels:
    """Labels as class numbers from 0, on one axis."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise DataError(
            f"{name}: {labels.dtype} of shape {list(labels.shape)}, where labels are the numbers "
            "of classes on one axis: write them so"
        )
    classes = len(named) if named else MOST_CLASSES
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(wrong.argmax())
        raise DataError(
            f"{name}: label {first + 1} is {labels[first]}, not from 0 to {classes - 1}"
        )
    return labels.astype(np.int64)
