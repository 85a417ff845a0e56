"""Labelled pictures to learn from: which are whose split, brought to one size and form."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Int, UInt8
from torch.nn import functional as F

from manyheads.config import nearest
from manyheads.data.augmentation import Augment, Mixing
from manyheads.data.corpus import STEMS, hold_out
from manyheads.data.image_files import (
    CHANNELS,
    Form,
    Part,
    Pixels,
    listed,
    open_folder,
    open_picture,
)
from manyheads.errors import DataError, UserError, check_at_least

LUMA = (19595, 38470, 7471)  # 0.299 red, 0.587 green and 0.114 blue, in parts of 2¹⁶


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of one split, each with the number of its class."""

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
        if not 0 < self.held_out < 1:
            raise UserError(f"data.held_out={self.held_out} must be above 0, below 1")
        check_at_least("data.size", self.size, 1)
        check_at_least("data.max_train", self.max_train, 2)
        if self.channels not in (None, *CHANNELS):
            raise UserError(f"data.channels={self.channels} must be 1 (grey) or 3 (colour)")

    def splits(self) -> list[str]:
        form = open_folder(self.folder)
        return [split for split in STEMS if split == "train" or split in {*form.own, *form.held}]

    def read(self, split: str) -> Pictures:
        """The pictures of a split."""
        if split not in STEMS:
            raise UserError(f"there is no split '{split}': {nearest(split, STEMS)}")
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
    """The picture of a file, squeezed to a square, grey (1) or colour (3)."""
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
        raise UserError(
            f"data.max_train={count} leaves a class without a picture: choose {classes} or more"
        )
    taken: Counter[int] = Counter()
    turns: list[tuple[int, int, int]] = []
    for row in Random(0).sample(rows, len(rows)):
        turns.append((taken[labels[row]], labels[row], row))
        taken[labels[row]] += 1
    return sorted(row for _, _, row in sorted(turns)[:count])


def _counted(part: Part, classes: list[str]) -> str:
    """How many classes these are, and which of them have no picture here."""
    there = {*np.unique(part.labels).tolist()}
    without = [name for number, name in enumerate(classes) if number not in there]
    if not without:
        return f"{len(classes)} classes"
    return f"{len(there)} of {len(classes)} classes, none of {listed(without)}"


def _check_known(part: Part, train: Part) -> None:
    """Refuse a class that is to be found and was never trained."""
    unknown = np.flatnonzero(~np.isin(part.labels, train.labels))
    if len(unknown):
        label = int(part.labels[unknown[0]])
        name = train.classes[label] if label < len(train.classes) else str(label)
        raise DataError(
            f"{part.name}: picture {unknown[0] + 1} is of the class '{name}', of which "
            f"{train.name} has none: add some there, or take it away"
        )
