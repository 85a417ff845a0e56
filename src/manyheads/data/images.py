"""Labelled images: folders of classes, idx files (as MNIST), arrays in a `.npz`."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Int, Shaped, UInt8
from torch.nn import functional as F

from manyheads.config import Between, Count
from manyheads.data.augmentation import Augment, Mixing
from manyheads.data.batching import digest_of
from manyheads.data.corpus import STEMS, SplitData, SplitItems, check_folder, check_split, hold_out
from manyheads.data.files import find_file, is_here, join_names, read_bytes, read_lines
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
class ImageSet(SplitItems):
    """The images of one split with their class indices."""

    pixels: UInt8[np.ndarray, "n channels height width"]
    labels: Int[np.ndarray, " n"]
    classes: list[str]
    notes: tuple[str, ...] = ()
    unit: ClassVar[str] = "images"

    def items(self) -> Iterable[bytes]:
        return (image.tobytes() for image in self.pixels)

    def digest(self) -> str:
        """A hash of images, labels and classes."""
        return digest_of(self.pixels, self.labels, prefix=repr((self.pixels.shape, self.classes)))


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """The labels of a split as in its files, and its images: one array, or a file for each."""

    name: str
    labels: Int[np.ndarray, " _"]
    classes: list[str]
    images: Pixels | list[Path]

    def load(self, rows: Sequence[int]) -> Iterator[tuple[str, Pixels]]:
        """(file name, images) of some rows, file by file: photographs in full size need memory."""
        if not isinstance(self.images, list):
            yield self.name, self.images[rows]
            return
        for row in rows:
            yield str(self.images[row]), load_image(self.images[row])


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
        """The images of a split, all with the size and channels of the first training image."""
        check_split(split, STEMS)
        readers, held_out = open_folder(self.folder)
        files = train = readers["train"]()
        if len(np.unique(train.labels)) < 2:
            raise DataError(f"{train.name}: all images have one class: add images of a second")
        notes: list[str] = []
        if split in readers and split != "train":
            files = readers[split]()
            _check_classes(files, train)
            rows = list(range(len(files.labels)))
        elif split == "train" or split in held_out:
            parts = {"train": list(range(len(train.labels)))}
            for other in held_out:
                parts["train"], parts[other] = self._hold_out(train, parts["train"], other)
                notes.append(f"{len(parts[other]):,} of them held out for '{other}'")
            rows = parts[split]
        else:
            raise UserError(f"{self.folder} has no test split: add its files, or use --split valid")
        [first] = train.load([0])
        pixels = np.concatenate([self._convert(image, first) for image in files.load(rows)])
        _, channels, height, width = pixels.shape
        counts = f"{len(files.labels):,} images of {len(np.unique(files.labels))} classes"
        note = f"{files.name}: {counts}, {height}×{width}, {CHANNELS[channels]}"
        return ImageSet(pixels, files.labels[rows], train.classes, (note, *notes))

    def _hold_out(
        self, train: ImageFiles, rows: list[int], split: str
    ) -> tuple[list[int], list[int]]:
        """Rows for training and rows held out: a fraction of each class with two or more images."""
        members: dict[int, list[int]] = {}
        for row in rows:
            members.setdefault(int(train.labels[row]), []).append(row)
        chosen: set[int] = set()
        for label, class_rows in members.items():
            if len(class_rows) > 1:
                indices = hold_out(len(class_rows), self.valid_fraction, seed=label)[1]
                chosen |= {class_rows[index] for index in indices}
        if not chosen:
            raise DataError(
                f"{train.name}: no class has two images, so none can be held out for '{split}': "
                "add images, or files for that split"
            )
        return [row for row in rows if row not in chosen], sorted(chosen)

    def _convert(self, image: tuple[str, Pixels], first: tuple[str, Pixels]) -> Pixels:
        """Images in the configured size and channels, which must be those of the first image."""
        (name, pixels), (first_name, expected) = image, first
        (channels, *sides), (first_channels, *first_sides) = pixels.shape[1:], expected.shape[1:]
        if self.channels is None and channels != first_channels:
            raise DataError(
                f"{name}: {CHANNELS[channels]} where {first_name} is {CHANNELS[first_channels]}: "
                "set data.channels=1 (grey) or data.channels=3 (colour)"
            )
        if self.size is None and sides != first_sides:
            raise DataError(
                f"{name}: {sides[0]}×{sides[1]} pixels where {first_name} has "
                f"{first_sides[0]}×{first_sides[1]}: resize all, for example with data.size=32"
            )
        return convert(pixels, self.size, self.channels)


def _check_classes(files: ImageFiles, train: ImageFiles) -> None:
    unknown = np.flatnonzero(~np.isin(files.labels, train.labels))
    if len(unknown):
        label = int(files.labels[unknown[0]])
        name = train.classes[label] if label < len(train.classes) else str(label)
        raise DataError(
            f"{files.name}: image {unknown[0] + 1} has the class '{name}', which does not occur in "
            f"{train.name}: add training images of it, or remove this one"
        )


def convert(pixels: Pixels, size: int | None, channels: int | None) -> Pixels:
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


def read_image(path: Path, size: int, channels: int) -> UInt8[np.ndarray, "channels height width"]:
    return convert(load_image(path), size, channels)[0]


def load_image(path: Path) -> Pixels:
    """The image of a file, grey or colour; transparent pixels are shown on white."""
    import_optional("PIL", "images")
    from PIL import Image, ImageOps

    content = read_bytes(path)
    try:
        # Cameras store a rotated image and its orientation.
        image: Any = ImageOps.exif_transpose(Image.open(BytesIO(content)))
        image.load()
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


# --- Folders of classes ---


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
    classes = _subfolders(train)
    if all(name.isdecimal() for name in classes):
        classes.sort(key=int)
    held_out = () if "valid" in splits else ("valid",) if splits else ("test", "valid")
    return {
        split: partial(_read_classes, path, classes, train)
        for split, path in (splits or {"train": folder}).items()
    }, held_out


def _subfolders(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return [name for name in names if name[0] not in "._"]


def _read_classes(folder: Path, classes: list[str], train: Path) -> ImageFiles:
    files: list[Path] = []
    labels: list[int] = []
    for name in _subfolders(folder):
        path = folder / name
        if name not in classes:
            raise DataError(f"{path}: this class is not in {train}; add it there, or remove it")
        images = find_images(path)
        if images == [path]:
            raise DataError(
                f"{path}: no image ({', '.join(SUFFIXES)}) in this folder: add some, or remove it"
            )
        files += images
        labels += [classes.index(name)] * len(images)
    if not files:
        raise DataError(f"{folder}: no folders of classes in it: use {LAYOUTS}")
    return ImageFiles(str(folder), np.array(labels, dtype=np.int64), classes, files)


def find_images(path: Path) -> list[Path]:
    """The image files of a folder and its subfolders, in order, without hidden ones.

    A path that is not a folder, or has no image, stands for itself: `load_image` reports it.
    """
    images = []
    for file in path.rglob("*") if path.is_dir() else ():
        is_hidden = any(name.startswith(".") for name in file.relative_to(path).parts)
        if file.suffix.lower() in SUFFIXES and not is_hidden:
            images.append(file)
    return sorted(images) or [path]


# --- Idx files, and arrays in a .npz ---


def _open_idx(folder: Path) -> Layout:
    names = read_lines(folder / CLASSES) if is_here(folder / CLASSES) else []
    classes = [name.strip() for name in names if name.strip()]
    readers: dict[str, Callable[[], ImageFiles]] = {}
    for split, stems in (STEMS | {"test": ("t10k", "test")}).items():
        for stem in reversed(stems):  # the first wins
            x, y = folder / f"{stem}-images-idx3-ubyte", folder / f"{stem}-labels-idx1-ubyte"
            if is_here(x):
                loads = partial(_read_idx, x, 3), partial(_read_idx, y, 1)
                readers[split] = partial(_read_arrays, str(x), str(y), *loads, classes)
    if "train" not in readers:
        raise DataError(f"{folder}: no train-images-idx3-ubyte (nor .gz) in it: add it")
    return readers, () if "valid" in readers else ("valid",)


def _read_idx(path: Path, axes: int) -> Array:
    """An idx file: bytes 0, 0, 8 (for uint8) and the number of axes, their lengths, the content."""
    content = read_bytes(find_file(path))
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
    content = BytesIO(read_bytes(path))
    try:
        with np.load(content) as arrays:
            return list(arrays.files) if name is None else np.asarray(arrays[name])
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
    pixels, labels = load_images(), load_labels()
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
    shape = list(pixels.shape)
    has_axes = len(shape) == 3 or (len(shape) == 4 and shape[3] in CHANNELS)
    if pixels.dtype != np.uint8 or 0 in shape or not has_axes:
        raise DataError(
            f"{name}: {pixels.dtype} of shape {shape}, but images must be uint8 [n, height, width] "
            "or [n, height, width, 1 or 3]"
        )
    if len(pixels) != len(labels):
        raise DataError(
            f"{name}: {len(pixels):,} images, but {len(labels):,} labels: make them equal"
        )
    images = rearrange(pixels.reshape(*shape[:3], -1), "n h w c -> n c h w")
    classes = classes or [str(number) for number in range(int(labels.max()) + 1)]
    return ImageFiles(name, labels.astype(np.int64), classes, images)
