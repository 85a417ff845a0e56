"""Labelled images: folders of classes, idx files (as MNIST), arrays in a `.npz`.

Labels are read first, and pixels when it is known which rows are needed.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Int, Shaped, UInt8
from torch.nn import functional as F

from manyheads.config import Between, Count
from manyheads.data.augmentation import Augment, Mixing
from manyheads.data.corpus import (
    STEMS,
    SplitData,
    check_folder,
    check_split,
    hold_out,
    is_here,
    join_names,
    read_bytes,
    read_lines,
)
from manyheads.errors import DataError, UserError, import_optional

Pixels = UInt8[np.ndarray, "_n _channels _height _width"]  # images may differ in size
Array = Shaped[np.ndarray, "..."]

SUFFIXES = (".png", ".jpg", ".jpeg")
CHANNELS = {1: "grey", 3: "colour"}
CLASSES = "classes.txt"
MAX_CLASSES = 2**16
LAYOUTS = "folders of classes (train/CLASS/*.png), idx files as MNIST's, or one .npz"
LUMA = (19595, 38470, 7471)  # 0.299 red, 0.587 green and 0.114 blue, in units of 2⁻¹⁶


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of one split with their class indices."""

    pixels: UInt8[np.ndarray, "n channels height width"]
    labels: Int[np.ndarray, " n"]
    classes: list[str]
    notes: tuple[str, ...] = ()

    def digest(self) -> str:
        """A hash of images, labels and classes."""
        total = hashlib.sha256(repr((self.pixels.shape, self.classes)).encode())
        total.update(np.ascontiguousarray(self.pixels).data)
        total.update(np.ascontiguousarray(self.labels).data)
        return total.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """The labels of a split as in its files; `load` reads the pixels of some rows.

    `load` gives (file name, images) for one file after another.
    """

    name: str
    labels: Int[np.ndarray, " _"]
    classes: list[str]
    load: Callable[[Sequence[int]], Iterator[tuple[str, Pixels]]]
    notes: tuple[str, ...] = ()


# Readers of the splits that have files, and the splits to hold out from train, in this order.
Layout = tuple[dict[str, Callable[[], ImageFiles]], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class ImageData(SplitData[Path]):
    """A folder of labelled images in one of three layouts, recognized by its content.

    Folders of classes: train/CLASS/*.png (or .jpg, .jpeg), optionally with valid (or val, dev)
    and test next to train; or CLASS/*.png, from which a test split is held out too. Idx files:
    train-images-idx3-ubyte and train-labels-idx1-ubyte, t10k-… for the test, plain or .gz,
    optionally with the names of the classes in classes.txt. Or one .npz with x_train and y_train,
    optionally with x_valid, y_valid, x_test, y_test and classes.

    A held-out split has the same fraction of each class.
    """

    size: Annotated[Count | None, "Resize images to squares of this side"] = None
    channels: Annotated[int | None, Between(1, 3), "Convert to 1 (grey) or 3 (colour)"] = None
    max_train: Annotated[
        int | None, Between(2), "Train on so many images, balanced by class; a prefix of more"
    ] = None
    augment: Annotated[Augment, "Augmentation in training"] = field(default_factory=Augment)
    mixing: Annotated[Mixing, "Mixing of training images"] = field(default_factory=Mixing)
    kind: ClassVar[str] = "images"

    def __post_init__(self) -> None:
        if self.channels not in (None, *CHANNELS):
            raise UserError(f"data.channels={self.channels} must be 1 (grey) or 3 (colour)")

    def splits(self) -> list[str]:
        readers, held_out = open_folder(self.folder)
        return [split for split in STEMS if split in {*readers, *held_out}]

    def read(self, split: str) -> ImageSet:
        """The images of a split."""
        check_split(split, STEMS)
        readers, held_out = open_folder(self.folder)
        train = readers["train"]()
        if len(np.unique(train.labels)) < 2:
            raise DataError(f"{train.name}: all images have one class: add images of a second")
        notes: list[str] = []
        if split in readers and split != "train":
            files = readers[split]()
            _check_classes(files, train)
            rows = list(range(len(files.labels)))
        elif split == "train" or split in held_out:
            files = train
            rows, notes = self._choose_rows(train, split, held_out)
        else:
            raise UserError(f"{self.folder} has no test split: add its files, or use --split valid")
        pixels = self._load(files, rows, train)
        _, channels, height, width = pixels.shape
        counts = f"{len(files.labels):,} images of {len(np.unique(files.labels))} classes"
        note = f"{files.name}: {counts}, {height}×{width}, {CHANNELS[channels]}"
        absent = [name for n, name in enumerate(train.classes) if n not in files.labels]
        if absent:
            notes.append(f"no image of the classes {join_names(absent)}")
        return ImageSet(pixels, files.labels[rows], train.classes, (note, *files.notes, *notes))

    def _choose_rows(
        self, train: ImageFiles, split: str, held_out: tuple[str, ...]
    ) -> tuple[list[int], list[str]]:
        """The rows of the training files that are a split, and notes about them."""
        labels: list[int] = train.labels.tolist()
        rows = {"train": list(range(len(labels)))}
        notes: list[str] = []
        for other in held_out:
            rows["train"], rows[other] = _hold_out(labels, rows["train"], self.valid_fraction)
            if not rows[other]:
                raise DataError(
                    f"{train.name}: no class has two images, so none can be held out for "
                    f"'{other}': add images, or files for that split"
                )
            notes.append(f"{len(rows[other]):,} of them held out for '{other}'")
        counts = Counter(labels)
        single = [name for n, name in enumerate(train.classes) if counts[n] == 1]
        if single and held_out:
            notes.append(f"classes with one image, which is not held out: {join_names(single)}")
        if split == "train" and self.max_train is not None:
            rows["train"] = _balance(labels, rows["train"], self.max_train)
            notes.append(f"{len(rows['train']):,} of them for training, by data.max_train")
        return rows[split], notes

    def _load(self, files: ImageFiles, rows: Sequence[int], train: ImageFiles) -> Pixels:
        """The pixels of some rows, all with the size and channels of the first training image."""
        first = next(train.load([0])) if files is not train else None
        converted = []
        for name, pixels in files.load(rows):
            first = first or (name, pixels)
            self._check_shape(name, pixels, *first)
            converted.append(_convert(pixels, self.size, self.channels))
        return np.concatenate(converted)

    def _check_shape(self, name: str, pixels: Pixels, first: str, expected: Pixels) -> None:
        (channels, *sides), (first_channels, *first_sides) = pixels.shape[1:], expected.shape[1:]
        if self.channels is None and channels != first_channels:
            raise DataError(
                f"{name}: {CHANNELS[channels]} where {first} is {CHANNELS[first_channels]}: set "
                "data.channels=1 (grey) or data.channels=3 (colour)"
            )
        if self.size is None and sides != first_sides:
            raise DataError(
                f"{name}: {sides[0]}×{sides[1]} pixels where {first} has "
                f"{first_sides[0]}×{first_sides[1]}: resize all, for example with data.size=32"
            )


def read_image(path: Path, size: int, channels: int) -> UInt8[np.ndarray, "channels height width"]:
    return _convert(load_image(path), size, channels)[0]


def _convert(pixels: Pixels, size: int | None, channels: int | None) -> Pixels:
    """Images resized to a square, and in grey or colour; None changes nothing."""
    if channels == 1 and pixels.shape[1] == 3:
        grey = np.einsum("nchw,c->nhw", pixels, np.array(LUMA, dtype=np.uint32))
        pixels = rearrange((grey + 2**15) >> 16, "n h w -> n 1 h w").astype(np.uint8)
    if channels == 3 and pixels.shape[1] == 1:
        pixels = repeat(pixels, "n 1 h w -> n c h w", c=3)
    if size is not None and pixels.shape[2:] != (size, size):
        images = torch.from_numpy(np.ascontiguousarray(pixels))
        # Antialiasing: a pixel of a smaller image is the mean of all that it covers.
        pixels = F.interpolate(images, (size, size), mode="bilinear", antialias=True).numpy()
    return pixels


def _hold_out(labels: list[int], rows: list[int], fraction: float) -> tuple[list[int], list[int]]:
    """Rows for training and rows held out: a fraction of each class with two images or more."""
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(labels[row], []).append(row)
    chosen: set[int] = set()
    for label, class_rows in members.items():
        if len(class_rows) > 1:
            indices = hold_out(len(class_rows), fraction, seed=label)[1]
            chosen |= {class_rows[index] for index in indices}
    return [row for row in rows if row not in chosen], sorted(chosen)


def _balance(labels: list[int], rows: list[int], count: int) -> list[int]:
    """`count` of the rows: classes take turns, each with its next row of a seeded order."""
    classes = len({labels[row] for row in rows})
    if count < classes:
        raise UserError(f"data.max_train={count} must be at least {classes}, one for each class")
    taken: Counter[int] = Counter()
    turns: list[tuple[int, int, int]] = []
    for row in Random(0).sample(rows, len(rows)):
        turns.append((taken[labels[row]], labels[row], row))
        taken[labels[row]] += 1
    return sorted(row for _, _, row in sorted(turns)[:count])


def _check_classes(files: ImageFiles, train: ImageFiles) -> None:
    unknown = np.flatnonzero(~np.isin(files.labels, train.labels))
    if len(unknown):
        label = int(files.labels[unknown[0]])
        name = train.classes[label] if label < len(train.classes) else str(label)
        raise DataError(
            f"{files.name}: image {unknown[0] + 1} has the class '{name}', which does not occur in "
            f"{train.name}: add training images of it, or remove this one"
        )


def open_folder(name: str) -> Layout:
    """The layout of a folder."""
    if not name:
        raise UserError(f"data.folder is needed: {LAYOUTS}, e.g. data.folder=mnist")
    folder = check_folder(name)
    archives = sorted(folder.glob("*.npz"))
    if len(archives) > 1:
        names = join_names([path.name for path in archives])
        raise UserError(f"data.folder={name} has several .npz {names}: leave one in it")
    if archives:
        return _open_archive(archives[0])
    if any("idx3-ubyte" in path.name for path in folder.iterdir()):
        return _open_idx(folder)
    return _open_class_folders(folder)


# Folders of classes


def _open_class_folders(folder: Path) -> Layout:
    splits = {
        split: folder / stem
        for split, stems in STEMS.items()
        for stem in reversed(stems)  # the first wins
        if (folder / stem).is_dir()
    }
    if splits and "train" not in splits:
        names = [path.name for path in splits.values()]
        raise DataError(f"{folder}: no folder train next to {join_names(names)}: add it")
    train = splits.get("train", folder)
    classes = [path.name for path in _subfolders(train)]
    if not classes:
        raise DataError(f"{train}: no folders of classes in it: use {LAYOUTS}")
    if all(name.isdecimal() for name in classes):
        classes.sort(key=int)
    for path in splits.values():
        unknown = [subfolder for subfolder in _subfolders(path) if subfolder.name not in classes]
        if unknown:
            raise DataError(
                f"{unknown[0]}: this class is not in {train}; add it there, or remove it"
            )
    if not splits:
        return {"train": partial(_read_classes, folder, classes, folder)}, ("test", "valid")
    # Images next to the splits are reported once, with the training split.
    readers = {
        split: partial(_read_classes, path, classes, folder if split == "train" else path)
        for split, path in splits.items()
    }
    return {**readers}, () if "valid" in splits else ("valid",)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")


def _is_image(path: Path) -> bool:
    is_visible = path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    return is_visible and not path.is_dir()


def _read_classes(folder: Path, classes: list[str], root: Path) -> ImageFiles:
    """The images of a split; those outside folders of classes in `root` are reported."""
    files: list[Path] = []
    labels: list[int] = []
    others = 0
    for path in _subfolders(folder):
        inside = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        images = [file for file in inside if _is_image(file)]
        if not images:
            raise DataError(
                f"{path}: no image ({', '.join(SUFFIXES)}) in this folder: add some, or remove it"
            )
        others += sum(not file.is_dir() for file in inside) - len(images)
        files += images
        labels += [classes.index(path.name)] * len(images)
    if not files:
        raise DataError(f"{folder}: no folders of classes in it: use {LAYOUTS}")
    notes = [f"{others:,} files other than {', '.join(SUFFIXES)} left out"] if others else []
    loose = {file for file in root.iterdir() if _is_image(file)} | {*find_images(folder)}
    loose -= {*files}
    if loose:
        names = join_names([str(file.relative_to(root)) for file in sorted(loose)], 3)
        notes.append(f"{len(loose):,} images left out, not directly in a folder of a class {names}")

    def load(rows: Sequence[int]) -> Iterator[tuple[str, Pixels]]:
        for row in rows:
            yield str(files[row]), load_image(files[row])

    return ImageFiles(str(folder), np.array(labels, dtype=np.int64), classes, load, tuple(notes))


def find_images(path: Path) -> list[Path]:
    """The image files of a folder and its subfolders, in order, without hidden ones.

    A path that is not a folder, or has no image, stands for itself: `load_image` reports it.
    """
    images = []
    for file in path.rglob("*") if path.is_dir() else ():
        folders = file.relative_to(path).parent.parts
        if _is_image(file) and not any(name.startswith(".") for name in folders):
            images.append(file)
    return sorted(images) or [path]


def load_image(path: Path) -> Pixels:
    """The image of a file, grey or colour; transparent pixels are shown on white."""
    import_optional("PIL", "images")
    from PIL import Image, ImageOps

    if path.is_dir():
        raise UserError(
            f"{path} is a folder, not an image: give image files ({', '.join(SUFFIXES)}), or a "
            "folder of them"
        )
    if not path.is_file():
        raise UserError(f"no file {path}: check the path")
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty: replace or remove it")
    try:
        with Image.open(path) as file:
            # Cameras store a rotated image and its orientation.
            image: Any = ImageOps.exif_transpose(file)
            image.load()
    except PermissionError:
        raise UserError(f"cannot read {path}: check its permissions") from None
    except Exception:  # each decoder of Pillow has errors of its own
        raise DataError(f"{path}: broken, or not an image: replace or remove it") from None
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{path}: more than 8 bits per channel: save it with 8")
    mode = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    pixels = np.array(image.convert(mode)).reshape(image.height, image.width, -1)
    return rearrange(pixels, "height width channels -> 1 channels height width")


# Idx files, and arrays in a .npz


def _open_idx(folder: Path) -> Layout:
    names = read_lines(folder / CLASSES) if is_here(folder / CLASSES) else []
    classes = [name.strip() for name in names if name.strip()]
    readers: dict[str, Callable[[], ImageFiles]] = {}
    for split, stems in (STEMS | {"test": ("t10k", "test")}).items():
        for stem in reversed(stems):  # the first wins
            x, y = _find_idx(folder, f"{stem}-images", 3), _find_idx(folder, f"{stem}-labels", 1)
            if x.is_file():
                loads = partial(_read_idx, x, 3), partial(_read_idx, y, 1)
                readers[split] = partial(_read_arrays, str(x), str(y), *loads, classes)
    if "train" not in readers:
        raise DataError(f"{folder}: no train-images-idx3-ubyte (nor .gz) in it: add it")
    return readers, () if "valid" in readers else ("valid",)


def _find_idx(folder: Path, stem: str, axes: int) -> Path:
    """An idx file by any of its names: train-images-idx3-ubyte, with a dot, with .gz."""
    names = [f"{stem}{mark}idx{axes}-ubyte" for mark in "-."]
    paths = [folder / f"{name}{ending}" for name in names for ending in ("", ".gz")]
    return next((path for path in paths if path.is_file()), paths[0])


def _read_idx(path: Path, axes: int) -> Array:
    """An idx file: bytes 0, 0, 8 (for uint8) and the number of axes, their lengths, the content."""
    content = read_bytes(path)
    start = 4 + 4 * axes
    if len(content) < start or content[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path}: not an idx{axes}-ubyte file: copy it again")
    shape: list[int] = np.frombuffer(content, ">u4", axes, offset=4).tolist()
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path}: {len(content) - start:,} bytes where its header says {math.prod(shape):,}: "
            "copy it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _open_archive(path: Path) -> Layout:
    names = _load_npz(path, None)
    classes = _load_npz(path, "classes").astype(str).ravel().tolist() if "classes" in names else []
    readers: dict[str, Callable[[], ImageFiles]] = {}
    for split in STEMS:
        x, y = f"x_{split}", f"y_{split}"
        missing = {x, y} - {*names}
        if missing and (split == "train" or len(missing) == 1):
            raise DataError(
                f"{path}: no {min(missing)} among its arrays {join_names(names)}: it needs x_train "
                "and y_train, and both arrays of each other split"
            )
        if not missing:
            loads = partial(_load_npz, path, x), partial(_load_npz, path, y)
            readers[split] = partial(_read_arrays, f"{path}: {x}", f"{path}: {y}", *loads, classes)
    return readers, () if "valid" in readers else ("valid",)


def _load_npz(path: Path, name: str | None) -> Any:
    """An array of a .npz, or without a name the names of all."""
    try:
        with np.load(path) as arrays:
            return list(arrays.files) if name is None else np.asarray(arrays[name])
    except PermissionError:
        raise UserError(f"cannot read {path}: check its permissions") from None
    except Exception:  # a damaged archive fails in many ways
        raise DataError(f"{path}: broken, or not a .npz of plain arrays: save it again") from None


def _read_arrays(
    name: str,
    labels_name: str,
    load_images: Callable[[], Array],
    load_labels: Callable[[], Array],
    classes: list[str],
) -> ImageFiles:
    """Images in one array, [n h w] or [n h w c]; without names, classes are numbers."""
    labels = load_labels()
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        shape = list(labels.shape)
        raise DataError(
            f"{labels_name}: {labels.dtype} of shape {shape}, but labels must be class indices [n]"
        )
    if len({*classes}) < len(classes):
        raise DataError(f"{name}: two of its classes have the same name: rename one")
    limit = len(classes) or MAX_CLASSES
    wrong = np.flatnonzero((labels < 0) | (labels >= limit))
    if len(wrong):
        raise DataError(
            f"{labels_name}: label {wrong[0] + 1} is {labels[wrong[0]]}, not from 0 to {limit - 1}"
        )

    def load(rows: Sequence[int]) -> Iterator[tuple[str, Pixels]]:
        pixels = load_images()
        shape = list(pixels.shape)
        has_axes = len(shape) == 3 or (len(shape) == 4 and shape[3] in CHANNELS)
        if pixels.dtype != np.uint8 or 0 in shape or not has_axes:
            raise DataError(
                f"{name}: {pixels.dtype} of shape {shape}, but images must be uint8 [n, height, "
                "width] or [n, height, width, 1 or 3]"
            )
        if len(pixels) != len(labels):
            raise DataError(
                f"{name}: {len(pixels):,} images, but {len(labels):,} labels: make them equal"
            )
        yield name, rearrange(pixels.reshape(*shape[:3], -1)[rows], "n h w c -> n c h w")

    classes = classes or [str(number) for number in range(int(labels.max()) + 1)]
    return ImageFiles(name, labels.astype(np.int64), classes, load)
