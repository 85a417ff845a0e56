"""Labelled images: each layout of a folder, the rows of each split, and what is refused."""

import gzip
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.helpers import refusal, write

from manyheads.data.images import ImageData, ImageSet, find_images, read_image
from manyheads.errors import DataError, UserError

Array = np.ndarray[Any, Any]


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, pixels: Array | None = None, mode: str = "RGB") -> Path:
    """An image file; without pixels, noise that depends on its name."""
    image = pytest.importorskip("PIL.Image")
    if pixels is None:
        pixels = noise(6, 6, 3, seed=sum(str(path).encode()))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(pixels).convert(mode).save(path)
    return path


def write_idx(path: Path, array: Array) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    write(path, head + array.tobytes())


def write_mnist(
    folder: Path, count: int = 20, tests: int = 4, ending: str = ""
) -> tuple[Array, Array]:
    """Training images and labels of a folder like MNIST's, three classes."""
    pixels, labels = noise(count, 5, 4), (np.arange(count) % 3).astype(np.uint8)
    write_idx(folder / f"train-images-idx3-ubyte{ending}", pixels)
    write_idx(folder / f"train-labels-idx1-ubyte{ending}", labels)
    if tests:
        write_idx(folder / f"t10k-images-idx3-ubyte{ending}", noise(tests, 5, 4, seed=1))
        write_idx(folder / f"t10k-labels-idx1-ubyte{ending}", labels[:tests])
    return pixels, labels


def arrays(count: int = 12, channels: int = 3, classes: int = 3) -> dict[str, Any]:
    shape = (count, 6, 5, channels) if channels else (count, 6, 5)
    return {
        "x_train": noise(*shape),
        "y_train": np.arange(count) % classes,
        "x_test": noise(*shape, seed=1)[:4],
        "y_test": np.array([0, 1, 2, 0]) % classes,
    }


def refused(kind: type[UserError], data: ImageData, split: str = "train") -> str:
    return refusal(kind, data.read, split)


def in_folder(folder: Path, **settings: Any) -> ImageData:
    return ImageData(folder=str(folder), **settings)


def rows_of(part: ImageSet, whole: Array) -> list[int]:
    """The row of each image of a part in an array [n h w]."""
    rows = {image.tobytes(): row for row, image in enumerate(whole)}
    return [rows[image.tobytes()] for image in part.pixels[:, 0]]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files(ending: str, tmp_path: Path) -> None:
    pixels, labels = write_mnist(tmp_path, ending=ending)
    data = in_folder(tmp_path)
    assert data.splits() == ["train", "valid", "test"]
    train, valid, test = (data.read(split) for split in data.splits())
    assert train.classes == ["0", "1", "2"]
    for part in (train, valid):
        assert part.pixels.dtype == np.uint8
        rows = rows_of(part, pixels)
        assert (part.labels == labels[rows]).all()
    both = [*rows_of(train, pixels), *rows_of(valid, pixels)]
    assert sorted(both) == list(range(20))
    assert (test.pixels[:, 0] == noise(4, 5, 4, seed=1)).all()
    assert test.labels.tolist() == [0, 1, 2, 0]
    assert "20 images of 3 classes, 5×4, grey" in train.notes[0]


def test_names_of_classes_in_a_file(tmp_path: Path) -> None:
    write_mnist(tmp_path, tests=0)
    (tmp_path / "classes.txt").write_text("shirt\nshoe\nbag\n", encoding="utf-8")
    assert in_folder(tmp_path).read("train").classes == ["shirt", "shoe", "bag"]
    assert in_folder(tmp_path).splits() == ["train", "valid"]
    assert "no test split" in refused(UserError, in_folder(tmp_path), "test")
    (tmp_path / "classes.txt").write_text("shirt\nshoe\n", encoding="utf-8")
    said = refused(DataError, in_folder(tmp_path))
    assert "train-labels-idx1-ubyte: label 3 is 2" in said
    (tmp_path / "classes.txt").write_text("shirt\nshoe\nshoe\n", encoding="utf-8")
    assert "the same name" in refused(DataError, in_folder(tmp_path))


@pytest.mark.parametrize("channels", [0, 1, 3])
@pytest.mark.parametrize("column", [False, True])
def test_arrays_in_one_file(column: bool, channels: int, tmp_path: Path) -> None:
    content = arrays(channels=channels)
    whole = content["x_train"].reshape(12, 6, 5, -1)
    if column:
        content["y_train"] = content["y_train"][:, None].astype(np.uint8)
    names = np.array(["cat", "dog", "emu"])
    valid = {
        "x_valid": noise(*content["x_train"].shape, seed=2)[:3],
        "y_valid": np.array([2, 1, 0]),
    }
    np.savez(tmp_path / "set.npz", **content, **valid, classes=names)
    data = in_folder(tmp_path)
    assert data.splits() == ["train", "valid", "test"]
    train = data.read("train")
    assert train.classes == ["cat", "dog", "emu"]
    assert (train.pixels == whole.transpose(0, 3, 1, 2)).all()
    assert train.labels.tolist() == [0, 1, 2] * 4
    assert data.read("valid").labels.tolist() == [2, 1, 0]
    assert data.read("test").labels.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("valid", ["valid", "val", "dev"])
def test_folders_of_classes(valid: str, tmp_path: Path) -> None:
    for split, count in (("train", 3), (valid, 2), ("test", 1)):
        for name in ("dog", "cat"):
            for number in range(count):
                save(tmp_path / split / name / f"{number}.png")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("mine")
    (tmp_path / "train" / "cat" / ".hidden.png").write_bytes(b"")
    (tmp_path / "train" / ".git").mkdir()
    data = in_folder(tmp_path)
    assert data.splits() == ["train", "valid", "test"]
    for split, stem, count in (("train", "train", 3), ("valid", valid, 2), ("test", "test", 1)):
        part = data.read(split)
        assert part.classes == ["cat", "dog"]
        assert part.labels.tolist() == [0] * count + [1] * count
        for row, pixels in enumerate(part.pixels):
            name = part.classes[row // count]
            path = tmp_path / stem / name / f"{row % count}.png"
            wanted = noise(6, 6, 3, seed=sum(str(path).encode()))
            assert (pixels == wanted.transpose(2, 0, 1)).all()
    assert any("1 files other than" in note for note in data.read("train").notes)


def test_images_outside_the_classes_are_reported(tmp_path: Path) -> None:
    """Next to the classes, next to the splits, and in subfolders of a class."""
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            for number in range(3):
                save(tmp_path / split / name / f"{number}.png")
    data, alone = in_folder(tmp_path), in_folder(tmp_path / "train")
    assert not any(
        "left out" in note for note in (*data.read("train").notes, *alone.read("train").notes)
    )
    save(tmp_path / "train" / "loose.png")
    save(tmp_path / "train" / "cat" / "more" / "deep.jpg")
    save(tmp_path / "train" / ".hidden.png")
    [said] = [note for note in alone.read("valid").notes if "left out" in note]
    assert said.startswith("2 images left out")
    assert said.endswith("(cat/more/deep.jpg, loose.png)")
    save(tmp_path / "beside.png")
    [said] = [note for note in data.read("train").notes if "left out" in note]
    assert said.startswith("3 images left out")
    assert "beside.png" in said
    assert not any("left out" in note for note in data.read("test").notes)  # once is enough


def test_the_images_of_a_folder(tmp_path: Path) -> None:
    wanted = [save(tmp_path / name) for name in ("a/1.png", "a/b/2.JPG", "c.jpeg")]
    for name in (".git/x.png", ".d.png", "notes.png.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert find_images(tmp_path) == wanted
    assert find_images(wanted[0]) == [wanted[0]]
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()
    for path, said in ((nowhere, "no file"), (empty, "is a folder")):
        assert find_images(path) == [path]
        with pytest.raises(UserError, match=said):
            read_image(path, 4, 1)


def test_classes_without_splits_are_divided_into_three(tmp_path: Path) -> None:
    pixels = noise(40, 4, 4)
    for row in range(40):
        save(tmp_path / str(row % 2 + 9) / f"{row:02}.png", pixels[row], "L")
    data = in_folder(tmp_path, valid_fraction=0.2)
    parts = {split: data.read(split) for split in data.splits()}
    assert list(parts) == ["train", "valid", "test"]
    assert parts["train"].classes == ["9", "10"]  # as numbers
    rows = {split: rows_of(part, pixels) for split, part in parts.items()}
    assert sorted(row for found in rows.values() for row in found) == list(range(40))
    assert len(rows["test"]) == 8
    for split, part in parts.items():
        assert part.labels.tolist() == [row % 2 for row in rows[split]]
        assert (np.bincount(part.labels) == len(part.labels) / 2).all()


def test_held_out_rows_repeat_and_have_every_class(tmp_path: Path) -> None:
    pixels, labels = write_mnist(tmp_path, 60)
    found = {}
    for share in (0.01, 0.1, 0.5):
        data = in_folder(tmp_path, valid_fraction=share)
        found[share] = rows_of(data.read("valid"), pixels)
        assert found[share] == rows_of(data.read("valid"), pixels)
        assert not {*found[share]} & {*rows_of(data.read("train"), pixels)}
        assert np.bincount(labels[found[share]]).tolist() == [max(1, round(20 * share))] * 3
    assert found[0.5] != list(range(30))


def test_a_smaller_training_set_is_balanced_and_part_of_a_larger_one(tmp_path: Path) -> None:
    pixels = noise(50, 4, 4)
    labels = np.array([0] * 30 + [1] * 15 + [2] * 5, dtype=np.uint8)
    write_idx(tmp_path / "train-images-idx3-ubyte", pixels)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels)
    whole = in_folder(tmp_path)
    valid, train = whole.read("valid"), rows_of(whole.read("train"), pixels)
    sizes = {3: [1, 1, 1], 9: [3, 3, 3], 10: [4, 3, 3], 16: [6, 6, 4], 44: [27, 13, 4], 99: None}
    taken = {}
    for count, wanted in sizes.items():
        data = in_folder(tmp_path, max_train=count)
        taken[count] = rows_of(data.read("train"), pixels)
        assert len(taken[count]) == min(count, len(train))
        if wanted:
            assert np.bincount(labels[taken[count]]).tolist() == wanted
        assert data.read("valid").digest() == valid.digest()
    for smaller, larger in combinations(sizes, 2):
        assert {*taken[smaller]} <= {*taken[larger]} <= {*train}
    first = [row for label in range(3) for row in [r for r in train if labels[r] == label][:3]]
    assert taken[9] != sorted(first)  # drawn, not the first that come
    said = refused(UserError, in_folder(tmp_path, max_train=2))
    assert "data.max_train=2" in said
    assert "at least 3" in said


def test_images_are_resized(tmp_path: Path) -> None:
    for number, (height, width) in enumerate(((6, 6), (9, 5), (4, 12), (7, 7))):
        pixels = np.full((height, width, 3), 40 * number + 20, dtype=np.uint8)
        pixels[:, : width // 2] = 0
        save(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", pixels)
    part = in_folder(tmp_path, size=8).read("train")
    assert part.pixels.shape[1:] == (3, 8, 8)
    assert not part.pixels[..., :2].any()  # the left of a picture stays left
    level = part.pixels[:, 0, 0, 7].tolist()
    assert {*level} <= {20, 60, 100, 140}
    said = refused(DataError, in_folder(tmp_path))
    assert "data.size=32" in said
    assert ".png: " in said
    assert "pixels where" in said


def test_grey_where_the_others_are_colour(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(3):
            save(tmp_path / "train" / name / f"{number}.png")
    grey = save(tmp_path / "train" / "b" / "9.png", noise(6, 6), "L")
    save(tmp_path / "valid" / "a" / "0.png")
    said = refused(DataError, in_folder(tmp_path))
    assert said.startswith(f"{grey}: grey where ")
    assert "data.channels=3" in said
    colour = in_folder(tmp_path, channels=3).read("train")
    assert (colour.pixels[-1] == noise(6, 6)).all()
    made = in_folder(tmp_path, channels=1).read("train")
    assert made.pixels.shape == (7, 1, 6, 6)
    assert (made.pixels[-1, 0] == noise(6, 6)).all()
    exact = np.tensordot(np.array([0.299, 0.587, 0.114]), colour.pixels[0].astype(float), 1)
    assert np.abs(made.pixels[0, 0] - exact).max() <= 0.51


def test_transparent_pixels_are_shown_on_white(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((2, 2, 4), dtype=np.uint8)
    pixels[0, :, 3] = 255
    image.fromarray(pixels).save(tmp_path / "ink.png")
    one = read_image(tmp_path / "ink.png", 2, 3)
    assert (one[:, 0] == 0).all()
    assert (one[:, 1] == 255).all()


def test_the_orientation_of_a_camera_is_applied(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[:4] = 250
    exif = image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    image.fromarray(pixels).save(tmp_path / "side.png", exif=exif)
    one = read_image(tmp_path / "side.png", 8, 1)[0]
    assert (one == np.rot90(pixels[..., 0], -1)).all()


def test_broken_images_are_refused(tmp_path: Path) -> None:
    whole = save(tmp_path / "train" / "a" / "0.png").read_bytes()
    save(tmp_path / "train" / "a" / "1.png")
    for number in range(2):
        save(tmp_path / "train" / "b" / f"{number}.png")
    path = tmp_path / "train" / "a" / "0.png"
    middle = len(whole) // 2
    changed = bytes([*whole[:middle], whole[middle] ^ 255, *whole[middle + 1 :]])
    for content in (b"", b"not an image", whole[:middle], whole[:40], changed):
        path.write_bytes(content)
        said = refused(DataError, in_folder(tmp_path, valid_fraction=0.01), "train")
        assert said.startswith(f"{path}: ")
        with pytest.raises(DataError, match="empty" if not content else "broken"):
            read_image(path, 6, 3)
    with pytest.raises(UserError, match=r"no file .*nowhere\.png"):
        read_image(tmp_path / "nowhere.png", 6, 3)
    deep = noise(4, 4).astype(np.uint16) * 257
    pytest.importorskip("PIL.Image").fromarray(deep).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        read_image(tmp_path / "deep.png", 4, 1)


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.png").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install 'manyheads\[images\]'"):
        read_image(tmp_path / "x.png", 4, 1)
    write_mnist(tmp_path)
    assert in_folder(tmp_path).read("test").labels.tolist() == [0, 1, 2, 0]


def test_incomplete_folders_of_classes_are_refused(tmp_path: Path) -> None:
    data = in_folder(tmp_path)
    said = refused(DataError, data)
    assert said.startswith(f"{tmp_path}: no folders of classes")
    assert ".npz" in said
    (tmp_path / "test").mkdir()
    assert "no folder train next to (test)" in refused(DataError, data)
    (tmp_path / "train").mkdir()
    assert refused(DataError, data).startswith(f"{tmp_path / 'train'}: no folders of classes")
    for number in range(3):
        save(tmp_path / "train" / "a" / f"{number}.png")
    assert "one class" in refused(DataError, data)
    (tmp_path / "train" / "b").mkdir()
    said = refused(DataError, data)
    assert said.startswith(f"{tmp_path / 'train' / 'b'}: no image")
    save(tmp_path / "train" / "b" / "0.png")
    save(tmp_path / "train" / "b" / "1.png")
    assert len(data.read("train").labels) == 3
    assert refused(DataError, data, "test").startswith(f"{tmp_path / 'test'}: no folders")
    save(tmp_path / "test" / "c" / "0.png")
    assert refused(DataError, data).startswith(f"{tmp_path / 'test' / 'c'}: ")


def test_a_class_with_one_image_is_trained_on(tmp_path: Path) -> None:
    save(tmp_path / "rare" / "0.png")
    save(tmp_path / "also" / "0.png")
    assert "no class has two" in refused(DataError, in_folder(tmp_path), "valid")
    for number in range(9):
        save(tmp_path / "common" / f"{number}.png")
    parts = {split: in_folder(tmp_path).read(split) for split in ("train", "valid", "test")}
    assert parts["train"].classes == ["also", "common", "rare"]
    assert np.bincount(parts["train"].labels).tolist() == [1, 7, 1]
    assert parts["valid"].labels.tolist() == parts["test"].labels.tolist() == [1]


def test_broken_idx_files_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = in_folder(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    whole, answers = images.read_bytes(), labels.read_bytes()
    for content in (b"", whole[:9], whole[:-1], whole + b"x", b"\x00\x00\x0d" + whole[3:], answers):
        images.write_bytes(content)
        assert refused(DataError, data).startswith(f"{images}: ")
    images.write_bytes(whole)
    write_idx(labels, np.arange(19).astype(np.uint8) % 3)
    said = refused(DataError, data)
    assert said.startswith(f"{images}: 20 ")
    assert "19 labels" in said
    labels.unlink()
    assert "train-labels-idx1-ubyte" in refused(UserError, data)
    labels.write_bytes(answers)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.array([0, 1, 7, 0], dtype=np.uint8))
    said = refused(DataError, data, "test")
    assert "t10k-images-idx3-ubyte: image 3 has the class '7'" in said
    images.unlink()
    (tmp_path / f"{images.name}.gz").write_bytes(gzip.compress(whole)[:-9])
    assert "gzip" in refused(DataError, data)
    (tmp_path / f"{images.name}.gz").unlink()
    assert "no train-images-idx3-ubyte" in refused(DataError, data)


@pytest.mark.parametrize(
    ("change", "words"),
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
def test_wrong_arrays_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    content = {name: array for name, array in (arrays() | change).items() if array is not None}
    np.savez(tmp_path / "set.npz", **content)
    said = refused(DataError, in_folder(tmp_path))
    assert said.startswith(str(tmp_path / "set.npz"))
    assert words in said


@pytest.mark.parametrize(("label", "name"), [(2, "'2'"), (3, "'3'"), (9, "'9'")])
def test_a_class_that_was_never_trained(label: int, name: str, tmp_path: Path) -> None:
    """Also where its number is one more than there are, or stands between those of others."""
    content = arrays(count=10) | {"y_test": np.array([0, 1, label, 0])}
    content["y_train"] = np.array([0, 1] * 5)
    if label == 3:
        content["y_train"] = np.array([0, 1, 2, 2, 1] * 2)
    if label == 2:
        content["y_train"][-1] = 4
    np.savez(tmp_path / "set.npz", **content)
    said = refused(DataError, in_folder(tmp_path), "test")
    assert f"image 3 has the class {name}" in said


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    middle = 300  # among the pixels
    for content in (
        b"",
        b"no archive",
        whole[:-30],
        whole[:middle] + b"xxxx" + whole[middle + 4 :],
    ):
        path.write_bytes(content)
        assert refused(DataError, in_folder(tmp_path)).startswith(f"{path}: broken")
    np.savez(tmp_path / "other.npz", **arrays())
    assert "several .npz (other.npz, set.npz)" in refused(UserError, in_folder(tmp_path))


def test_a_digest_depends_on_pixels_labels_and_classes() -> None:
    pixels, labels = noise(4, 1, 3, 3), np.array([0, 1, 0, 1])
    others = [
        ImageSet(noise(4, 1, 3, 3, seed=1), labels, ["a", "b"]),
        ImageSet(pixels, labels[::-1], ["a", "b"]),
        ImageSet(pixels, labels, ["a", "c"]),
        ImageSet(pixels.reshape(4, 1, 1, 9), labels, ["a", "b"]),
    ]
    same = ImageSet(pixels.copy(), labels.copy(), ["a", "b"], ("a note",))
    digests = {part.digest() for part in (ImageSet(pixels, labels, ["a", "b"]), same, *others)}
    assert len(digests) == 5


def test_a_folder_must_be_one(tmp_path: Path) -> None:
    assert "data.folder is needed" in refused(UserError, ImageData())
    (tmp_path / "x.npz").write_bytes(b"")
    assert "is a file" in refused(UserError, in_folder(tmp_path / "x.npz"))
    assert "is not a folder" in refused(UserError, in_folder(tmp_path / "nowhere"))
    assert "did you mean 'valid'" in refused(UserError, in_folder(tmp_path), "vali")
