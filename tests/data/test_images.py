"""Labelled images: each layout of a folder, the rows of each split, and what is refused."""

import gzip
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.helpers import refusal, write

from manyheads.config import parse
from manyheads.data.images import ImageData, ImageSet, find_images, read_image
from manyheads.errors import DataError, UserError

Array = np.ndarray[Any, Any]
SPLITS = ["train", "valid", "test"]


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def noise_of(path: Path) -> Array:
    return noise(6, 6, 3, seed=sum(str(path).encode()))


def save(path: Path, pixels: Array | None = None, mode: str = "RGB") -> Path:
    """An image file; without pixels, noise that depends on its name."""
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(noise_of(path) if pixels is None else pixels).convert(mode).save(path)
    return path


def save_classes(folder: Path, classes: str, count: int) -> None:
    for name in classes.split():
        for number in range(count):
            save(folder / name / f"{number}.png")


def write_idx(path: Path, array: Array) -> Path:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return write(path, head + array.tobytes())


def write_mnist(
    folder: Path,
    labels: Array,
    *,
    tests: int = 4,
    ending: str = "",
    size: tuple[int, int] = (5, 4),
) -> Array:
    """A folder like MNIST's; the training images."""
    pixels = noise(len(labels), *size)
    write_idx(folder / f"train-images-idx3-ubyte{ending}", pixels)
    write_idx(folder / f"train-labels-idx1-ubyte{ending}", labels)
    if tests:
        write_idx(folder / f"t10k-images-idx3-ubyte{ending}", noise(tests, *size, seed=1))
        write_idx(folder / f"t10k-labels-idx1-ubyte{ending}", labels[:tests])
    return pixels


def class_numbers(count: int) -> Array:
    return (np.arange(count) % 3).astype(np.uint8)


def arrays(channels: int = 3) -> dict[str, Any]:
    shape = (12, 6, 5, channels) if channels else (12, 6, 5)
    return {
        "x_train": noise(*shape),
        "y_train": np.arange(12) % 3,
        "x_test": noise(*shape, seed=1)[:4],
        "y_test": np.array([0, 1, 2, 0]),
    }


def in_folder(folder: Path, **settings: Any) -> ImageData:
    return parse(ImageData, {"folder": str(folder)} | settings, "data")


def refused(kind: type[UserError], data: ImageData, split: str = "train") -> str:
    return refusal(kind, data.read, split)


def rows_of(part: ImageSet, images: Array) -> list[int]:
    """The row of each image of a part in an array [n h w]."""
    rows = {image.tobytes(): row for row, image in enumerate(images)}
    return [rows[image.tobytes()] for image in part.pixels[:, 0]]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files(ending: str, tmp_path: Path) -> None:
    labels = class_numbers(20)
    pixels = write_mnist(tmp_path, labels, ending=ending)
    data = in_folder(tmp_path)
    assert data.splits() == SPLITS
    train, valid, test = (data.read(split) for split in SPLITS)
    assert train.classes == ["0", "1", "2"]
    rows = [rows_of(part, pixels) for part in (train, valid)]
    assert sorted(rows[0] + rows[1]) == list(range(20))
    for part, part_rows in zip((train, valid), rows, strict=True):
        assert part.pixels.dtype == np.uint8
        assert (part.labels == labels[part_rows]).all()
    assert (test.pixels[:, 0] == noise(4, 5, 4, seed=1)).all()
    assert test.labels.tolist() == [0, 1, 2, 0]
    assert "20 images of 3 classes, 5×4, grey" in train.notes[0]


def test_names_of_classes_in_a_file(tmp_path: Path) -> None:
    write_mnist(tmp_path, class_numbers(20), tests=0)
    data = in_folder(tmp_path)
    write(tmp_path / "classes.txt", "shirt\nshoe\nbag\n")
    assert data.read("train").classes == ["shirt", "shoe", "bag"]
    assert data.splits() == ["train", "valid"]
    assert "no test split" in refused(UserError, data, "test")
    write(tmp_path / "classes.txt", "shirt\nshoe\n")
    assert "train-labels-idx1-ubyte: label 3 is 2" in refused(DataError, data)
    write(tmp_path / "classes.txt", "shirt\nshoe\nshoe\n")
    assert "the same name" in refused(DataError, data)


@pytest.mark.parametrize("channels", [0, 1, 3])
def test_arrays_in_one_file(channels: int, tmp_path: Path) -> None:
    content = arrays(channels)
    pixels = content["x_train"].reshape(12, 6, 5, -1)
    if channels == 1:  # as Keras has them
        content["y_train"] = content["y_train"][:, None].astype(np.uint8)
    content |= {"x_valid": content["x_train"][:3], "y_valid": np.array([2, 1, 0])}
    np.savez(tmp_path / "set.npz", **content, classes=np.array(["cat", "dog", "emu"]))
    data = in_folder(tmp_path)
    assert data.splits() == SPLITS
    train = data.read("train")
    assert train.classes == ["cat", "dog", "emu"]
    assert (train.pixels == pixels.transpose(0, 3, 1, 2)).all()
    labels = [data.read(split).labels.tolist() for split in SPLITS]
    assert labels == [[0, 1, 2] * 4, [2, 1, 0], [0, 1, 2, 0]]


@pytest.mark.parametrize("valid", ["valid", "val", "dev"])
def test_folders_of_classes(valid: str, tmp_path: Path) -> None:
    splits = {"train": ("train", 3), "valid": (valid, 2), "test": ("test", 1)}
    for stem, count in splits.values():
        save_classes(tmp_path / stem, "dog cat", count)
    write(tmp_path / "train" / "cat" / "notes.txt", "mine")
    write(tmp_path / "train" / "cat" / ".hidden.png", "")
    (tmp_path / "train" / ".git").mkdir()
    data = in_folder(tmp_path)
    assert data.splits() == SPLITS
    for split, (stem, count) in splits.items():
        part = data.read(split)
        assert part.classes == ["cat", "dog"]
        assert part.labels.tolist() == [0] * count + [1] * count
        for row, pixels in enumerate(part.pixels):
            path = tmp_path / stem / part.classes[row // count] / f"{row % count}.png"
            assert (pixels == noise_of(path).transpose(2, 0, 1)).all()


def test_the_images_of_a_folder(tmp_path: Path) -> None:
    images = [save(tmp_path / name) for name in ("a/1.png", "a/b/2.JPG", "c.jpeg")]
    for name in (".git/x.png", ".d.png", "notes.png.txt"):
        write(tmp_path / name, "")
    assert find_images(tmp_path) == images
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()
    for path in (images[0], nowhere, empty):
        assert find_images(path) == [path]
        if path != images[0]:
            assert f"cannot read {path}" in refusal(UserError, read_image, path, 4, 1)


def test_classes_without_splits_are_divided_into_three(tmp_path: Path) -> None:
    pixels = noise(40, 4, 4)
    for row in range(40):
        save(tmp_path / str(row % 2 + 9) / f"{row:02}.png", pixels[row], "L")
    data = in_folder(tmp_path, valid_fraction=0.2)
    parts = {split: data.read(split) for split in data.splits()}
    assert list(parts) == SPLITS
    assert parts["train"].classes == ["9", "10"]  # as numbers
    rows = {split: rows_of(part, pixels) for split, part in parts.items()}
    assert sorted(row for part in rows.values() for row in part) == list(range(40))
    assert len(rows["test"]) == 8
    for split, part in parts.items():
        assert part.labels.tolist() == [row % 2 for row in rows[split]]
        assert (np.bincount(part.labels) == len(part.labels) / 2).all()


def test_held_out_rows_repeat_and_have_every_class(tmp_path: Path) -> None:
    labels = class_numbers(60)
    pixels = write_mnist(tmp_path, labels)
    for fraction in (0.01, 0.1, 0.5):
        data = in_folder(tmp_path, valid_fraction=fraction)
        rows = rows_of(data.read("valid"), pixels)
        assert rows == rows_of(data.read("valid"), pixels)
        assert not {*rows} & {*rows_of(data.read("train"), pixels)}
        assert np.bincount(labels[rows]).tolist() == [max(1, round(20 * fraction))] * 3
    assert len({tuple(row // 3 for row in rows if row % 3 == n) for n in range(3)}) == 3


def test_a_class_with_one_image_is_trained_on(tmp_path: Path) -> None:
    save_classes(tmp_path, "rare also", 1)
    assert "no class has two" in refused(DataError, in_folder(tmp_path), "valid")
    save_classes(tmp_path, "common", 9)
    train, valid, test = (in_folder(tmp_path).read(split) for split in SPLITS)
    assert train.classes == ["also", "common", "rare"]
    assert np.bincount(train.labels).tolist() == [1, 7, 1]
    assert valid.labels.tolist() == test.labels.tolist() == [1]


def test_images_are_resized_and_converted(tmp_path: Path) -> None:
    for number, (height, width) in enumerate(((6, 6), (9, 5), (4, 12), (7, 7))):
        pixels = np.full((height, width, 3), 40 * number + 20, dtype=np.uint8)
        pixels[:, : width // 2] = 0
        save(tmp_path / "sizes" / "train" / "ab"[number % 2] / f"{number}.png", pixels)
    part = in_folder(tmp_path / "sizes", size=8).read("train")
    assert part.pixels.shape[1:] == (3, 8, 8)
    assert not part.pixels[..., :2].any()  # the left half stays left
    assert {*part.pixels[:, 0, 0, 7].tolist()} <= {20, 60, 100, 140}
    assert "data.size=" in refused(DataError, in_folder(tmp_path / "sizes"))
    folder = tmp_path / "colours"
    save_classes(folder / "train", "a b", 3)
    save_classes(folder / "valid", "a", 1)
    grey = save(folder / "train" / "b" / "9.png", noise(6, 6), "L")
    message = refused(DataError, in_folder(folder))
    assert message.startswith(f"{grey}: grey where ")
    assert "data.channels=3" in message
    colour, converted = (in_folder(folder, channels=n).read("train").pixels for n in (3, 1))
    assert (colour[-1] == noise(6, 6)).all()
    assert converted.shape == (7, 1, 6, 6)
    assert (converted[-1, 0] == noise(6, 6)).all()
    exact = np.tensordot(np.array([0.299, 0.587, 0.114]), colour[0].astype(float), 1)
    assert np.abs(converted[0, 0] - exact).max() <= 0.51


def test_only_one_image_at_a_time_is_in_memory_in_full_size(tmp_path: Path) -> None:
    side, count = 128, 20
    for number in range(count):
        save(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", noise(side, side, 3))
    data = in_folder(tmp_path, size=4)
    data.read("train")  # imports Pillow
    tracemalloc.start()
    data.read("train")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < count * side**2 * 3 / 2


def test_transparency_and_orientation_are_applied(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((2, 2, 4), dtype=np.uint8)
    pixels[0, :, 3] = 255
    image.fromarray(pixels).save(tmp_path / "ink.png")
    assert read_image(tmp_path / "ink.png", 2, 3).tolist() == [[[0, 0], [255, 255]]] * 3
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[:4] = 250
    exif = image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    image.fromarray(pixels).save(tmp_path / "side.png", exif=exif)
    turned = read_image(tmp_path / "side.png", 8, 1)[0]
    assert (turned == np.rot90(pixels[..., 0], -1)).all()


def test_broken_images_are_refused(tmp_path: Path) -> None:
    save_classes(tmp_path / "train", "a b", 2)
    path = tmp_path / "train" / "a" / "0.png"
    complete = path.read_bytes()
    middle = len(complete) // 2
    changed = bytes([*complete[:middle], complete[middle] ^ 255, *complete[middle + 1 :]])
    for content in (b"", b"not an image", complete[:middle], complete[:40], changed):
        path.write_bytes(content)
        data = in_folder(tmp_path, valid_fraction=0.01)
        assert refused(DataError, data).startswith(f"{path}: ")
        assert refusal(DataError, read_image, path, 6, 3).startswith(f"{path}: ")
    deep = noise(4, 4).astype(np.uint16) * 257
    pytest.importorskip("PIL.Image").fromarray(deep).save(path)
    assert "8 bits" in refusal(DataError, read_image, path, 4, 1)


def test_without_pillow_arrays_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.png", "x")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "manyheads[images]" in refusal(UserError, read_image, tmp_path / "x.png", 4, 1)
    write_mnist(tmp_path, class_numbers(20))
    assert in_folder(tmp_path).read("test").labels.tolist() == [0, 1, 2, 0]


def test_incomplete_folders_of_classes_are_refused(tmp_path: Path) -> None:
    data, train, test = in_folder(tmp_path), tmp_path / "train", tmp_path / "test"
    assert refused(DataError, data).startswith(f"{tmp_path}: no folders of classes")
    test.mkdir()
    assert "no folder train" in refused(DataError, data)
    train.mkdir()
    assert refused(DataError, data).startswith(f"{train}: no folders of classes")
    save_classes(train, "a", 3)
    assert "one class" in refused(DataError, data)
    (train / "b").mkdir()
    assert refused(DataError, data).startswith(f"{train / 'b'}: no image")
    save_classes(train, "b", 2)
    assert len(data.read("train").labels) == 3
    assert refused(DataError, data, "test").startswith(f"{test}: no folders")
    save_classes(test, "c", 1)
    assert refused(DataError, data, "test").startswith(f"{test / 'c'}: ")


def test_broken_idx_files_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, class_numbers(20))
    data = in_folder(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    complete, answers = images.read_bytes(), labels.read_bytes()
    wrong_type = b"\x00\x00\x0d" + complete[3:]
    for content in (b"", complete[:9], complete[:-1], complete + b"x", wrong_type, answers):
        images.write_bytes(content)
        assert refused(DataError, data).startswith(f"{images}: ")
    images.write_bytes(complete)
    write_idx(labels, class_numbers(19))
    assert "20 images, but 19 labels" in refused(DataError, data)
    labels.unlink()
    assert labels.name in refused(UserError, data)
    labels.write_bytes(answers)
    images.unlink()
    (tmp_path / f"{images.name}.gz").write_bytes(gzip.compress(complete)[:-9])
    assert "gzip" in refused(DataError, data)
    (tmp_path / f"{images.name}.gz").unlink()
    assert "no train-images-idx3-ubyte" in refused(DataError, data)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x_train": None}, "no x_train among its arrays (y_train, x_test, y_test)"),
        ({"y_test": None}, "no y_test among its arrays"),
        ({"x_train": np.zeros((12, 6, 5), dtype=np.float32)}, "x_train: float32"),
        ({"x_train": np.zeros((12, 3, 6, 5), dtype=np.uint8)}, "x_train: uint8 of shape [12, 3"),
        ({"x_train": np.zeros((11, 6, 5), dtype=np.uint8)}, "11 images, but"),
        ({"y_train": np.arange(12) - 1}, "y_train: label 1 is -1"),
        ({"y_train": np.arange(12) / 2}, "y_train: float64"),
        ({"y_train": np.array([None] * 12)}, "not a .npz of plain arrays"),
        ({"x_train": np.zeros((0, 6, 5), dtype=np.uint8), "y_train": np.zeros(0, int)}, "[0]"),
        ({"classes": np.array(["a", "b"])}, "y_train: label 3 is 2"),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    content = {name: array for name, array in (arrays() | change).items() if array is not None}
    np.savez(tmp_path / "set.npz", **content)
    message = refused(DataError, in_folder(tmp_path))
    assert message.startswith(str(tmp_path / "set.npz"))
    assert problem in message


@pytest.mark.parametrize(("label", "largest"), [(2, 4), (3, 1), (9, 1)])
def test_a_class_without_training_images_is_refused(
    label: int, largest: int, tmp_path: Path
) -> None:
    """Its number may be beyond those of the others, or between them."""
    labels = {"y_train": np.array([0, 1] * 5 + [0, largest]), "y_test": np.array([0, 1, label, 0])}
    np.savez(tmp_path / "set.npz", **(arrays() | labels))
    assert f"image 3 has the class '{label}'" in refused(DataError, in_folder(tmp_path), "test")


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez_compressed(path, **arrays())
    complete = path.read_bytes()
    changed = complete[:300] + b"xxxx" + complete[304:]  # among the pixels
    for content in (b"", b"no archive", complete[:-30], changed):
        path.write_bytes(content)
        assert refused(DataError, in_folder(tmp_path)).startswith(f"{path}: broken")
    np.savez(tmp_path / "other.npz", **arrays())
    assert "(other.npz, set.npz)" in refused(UserError, in_folder(tmp_path))


def test_a_digest_depends_on_pixels_labels_and_classes() -> None:
    pixels, labels = noise(4, 1, 3, 3), np.array([0, 1, 0, 1])
    part = ImageSet(pixels, labels, ["a", "b"])
    others = [
        ImageSet(noise(4, 1, 3, 3, seed=1), labels, ["a", "b"]),
        ImageSet(pixels, labels[::-1], ["a", "b"]),
        ImageSet(pixels, labels, ["a", "c"]),
        ImageSet(pixels.reshape(4, 1, 1, 9), labels, ["a", "b"]),
    ]
    same = ImageSet(pixels.copy(), labels.copy(), ["a", "b"], ("a note",))
    assert part.digest() == same.digest()
    assert len({item.digest() for item in (part, *others)}) == 5


def test_folders_and_settings_that_are_refused(tmp_path: Path) -> None:
    assert "data.folder is needed" in refused(UserError, ImageData())
    file = write(tmp_path / "x.npz", "")
    assert "is a file" in refused(UserError, in_folder(file))
    assert "is not a folder" in refused(UserError, in_folder(tmp_path / "nowhere"))
    assert "did you mean 'valid'" in refused(UserError, in_folder(tmp_path), "vali")
    for settings in ({"channels": 2}, {"size": 0}):
        [name] = settings
        message = refusal(UserError, parse, ImageData, settings, "data")
        assert message.startswith(f"data.{name}=")
