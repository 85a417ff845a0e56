"""How `transformers` brings pictures to what a model sees: read from a folder, and written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads.data.images import read_image
from manyheads.decode.beam import Decode
from manyheads.errors import DataError
from manyheads.exchange.families import PREPROCESSOR, read_pixel_statistics
from manyheads.exchange.folder import write_huggingface
from manyheads.exchange.huggingface import import_model
from manyheads.models.heads import Classify
from manyheads.models.vit import Vit, VitConfig
from manyheads.tasks.images import class_probabilities, from_pixels, normalize

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
MEAN, DEVIATION = (0.25, 0.5, 0.75), (0.125, 0.25, 0.375)
TINY = VitConfig(
    dim=8,
    layers=1,
    heads=2,
    image_size=12,
    patch_size=4,
    pixel_mean=MEAN,
    pixel_std=DEVIATION,
    head=Classify(labels=("cat", "dog", "cow")),
)


@pytest.fixture
def model() -> Vit:
    torch.manual_seed(4)
    return TINY.build().eval()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(2).integers(0, 256, (31, 23, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / "one.png")
    return tmp_path / "one.png"


def test_their_processor_gives_the_input_of_our_model(
    model: Vit, picture: Path, tmp_path: Path
) -> None:
    """And so their model answers as ours does; a pixel may round to its neighbour."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "theirs"
    write_huggingface(model, None, Decode(), folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    theirs = processor(image.open(picture), return_tensors="pt")["pixel_values"]
    pixels = read_image(picture, 12, 3)[None]
    ours = normalize(from_pixels(pixels, torch.device("cpu")), model.config)
    assert theirs.shape == ours.shape
    assert float((theirs - ours).abs().max()) <= 1.01 / 255 / min(DEVIATION)
    answer = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        chances = answer(theirs).logits.softmax(-1)[0].tolist()
    assert chances == pytest.approx([*class_probabilities(model, pixels)[0].values()], abs=0.01)


def test_pixel_statistics_are_imported_again(model: Vit, tmp_path: Path) -> None:
    write_huggingface(model, None, Decode(), tmp_path)
    config = import_model(tmp_path).model.config
    assert isinstance(config, VitConfig)
    assert config.pixel_mean == pytest.approx(MEAN)
    assert config.pixel_std == pytest.approx(DEVIATION)
    (tmp_path / PREPROCESSOR).unlink()
    assert import_model(tmp_path).model.config == replace(config, pixel_mean=(), pixel_std=())


def test_unknown_pixel_statistics_are_not_written(model: Vit, tmp_path: Path) -> None:
    model.config = replace(model.config, pixel_mean=(), pixel_std=())
    write_huggingface(model, None, Decode(), tmp_path)
    assert not (tmp_path / PREPROCESSOR).exists()


@pytest.mark.parametrize(
    "table",
    [
        {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
        {"image_mean": 0.5, "image_std": 0.25},
        {"image_mean": None},
        {},
        {"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
        {"do_rescale": False, "image_mean": [100.0] * 3, "image_std": [50.0] * 3},
    ],
)
def test_every_form_is_read_as_theirs(table: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"do_resize": False, "image_mean": 0.5, "image_std": 0.5}
    settings = usual | {name: value for name, value in table.items() if value is not None}
    for name in ("image_mean", "image_std"):
        if not isinstance(settings[name], list):
            settings[name] = [settings[name]] * 3
    pixels = np.random.default_rng(1).integers(0, 256, (3, 5, 5), dtype=np.uint8)
    theirs = transformers.ViTImageProcessor(**settings)(
        pixels, return_tensors="pt", input_data_format="channels_first"
    )["pixel_values"]
    spread = read_pixel_statistics(table, 3)
    mean, deviation = (torch.tensor(spread[n]) for n in ("pixel_mean", "pixel_std"))
    ours = (torch.from_numpy(pixels) / 255 - mean[:, None, None]) / deviation[:, None, None]
    torch.testing.assert_close(ours, theirs[0].float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "table",
    [{"image_mean": [0.5]}, {"image_std": [0.5, 0.5, 0]}, {"image_mean": "a"}],
)
def test_invalid_numbers_are_refused(table: dict[str, Any], model: Vit, tmp_path: Path) -> None:
    write_huggingface(model, None, Decode(), tmp_path)
    (tmp_path / PREPROCESSOR).write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        import_model(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
