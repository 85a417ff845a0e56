"""The Image page's numbers are those of the Vision Transformer, of its own pictures and uploads."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from tests.web.small_models import make_models
from tests.web.test_server import HERE, ask, problem, tensor
from torch.nn import functional as F

from manyheads.data.images import ImageData, read_image
from manyheads.loading import LoadedRun, load_torch_run
from manyheads.models.capture import capture
from manyheads.tasks.images import class_probabilities, from_pixels, normalize
from manyheads.tasks.probes import packed as packed_array
from manyheads.web import image
from manyheads.web.app import build_app
from manyheads.web.guard import Limits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(build_app(folder), HERE)


def pictures(opened: LoadedRun) -> Any:
    assert isinstance(opened.run.data, ImageData)
    return opened.run.data.read("valid")


def packed(pixels: np.ndarray, form: str = "PNG") -> str:
    """A grey picture as an upload."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def test_maps_and_classes_are_those_of_the_model(client: TestClient, folder: Path) -> None:
    opened = load_torch_run(folder / "pictures")
    model: Any = opened.model
    valid = pictures(opened)
    actual = ask(client, "/api/image", run="pictures", picture=2)
    with torch.no_grad(), capture(model) as maps:
        model(normalize(from_pixels(valid.pixels[2:3], torch.device("cpu")), model.config))
    weights = tensor(client, actual["trace"], "encoder.self.weights")
    assert torch.allclose(weights, torch.cat(maps["self"]), atol=1e-6)
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    [expected] = class_probabilities(model, valid.pixels[2:3])
    inputs = {item["label"]: item["probability"] for item in actual["output"]["classes"]}
    assert inputs == pytest.approx(expected, abs=1e-6)
    assert actual["label"] == valid.classes[valid.labels[2]]
    assert actual["count"] == len(valid.labels)
    pixels = tensor(client, actual["trace"], "image.pixels")
    assert torch.equal(pixels[..., 0], torch.from_numpy(valid.pixels[2, 0]).float() / 255)
    assert actual["maps"][0]["rows"][:2] == ["class token", "row 1, column 1"]


def test_positions_are_compared_by_their_angle(client: TestClient, folder: Path) -> None:
    table = load_torch_run(folder / "pictures").model.encoder.position.table.weight  # type: ignore[union-attr]
    actual = ask(client, "/api/image", run="pictures")
    similar = tensor(client, actual["trace"], "positions.similarity")
    expected = F.cosine_similarity(table[3], table[9], dim=0)
    assert float(similar[3, 9]) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert torch.allclose(similar.diagonal(), torch.ones(()), atol=1e-5)


def test_an_upload_is_read_as_a_file_is(client: TestClient, folder: Path, tmp_path: Path) -> None:
    valid = pictures(load_torch_run(folder / "pictures"))
    local = ask(client, "/api/image", run="pictures", picture=1)
    sent = ask(client, "/api/image", run="pictures", upload=packed(valid.pixels[1, 0]))
    assert sent["output"] == local["output"]
    assert "label" not in sent
    larger = np.kron(valid.pixels[1, 0], np.ones((5, 5), dtype=np.uint8))
    for form in ("PNG", "JPEG"):  # squeezed to what the model reads
        shown = ask(client, "/api/image", run="pictures", upload=packed(larger, form))
        pixels = tensor(client, shown["trace"], "image.pixels")[..., 0]
        file = tmp_path / f"own.{form.lower()}"
        file.write_bytes(base64.b64decode(packed(larger, form)))
        expected = read_image(file, size=8, channels=1)[0]
        assert torch.equal(pixels, torch.from_numpy(expected) / 255)


def test_what_is_no_picture_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = np.zeros((9, 9), dtype=np.uint8)
    broken = packed(grey)[:40]
    for upload in ("no base64!", "", base64.b64encode(b"GIF89a").decode(), broken):
        answer = client.post("/api/image", json={"run": "pictures", "upload": upload})
        message = problem(answer, 400)
        assert "PNG or JPEG" in message
        assert "/" not in message  # no path of the server
    gif = client.post("/api/image", json={"run": "pictures", "upload": packed(grey, "GIF")})
    assert "PNG or JPEG" in problem(gif, 400)
    monkeypatch.setattr(image, "MOST_PIXELS", 80)
    large = client.post("/api/image", json={"run": "pictures", "upload": packed(grey)})
    assert "9×9" in problem(large, 413)


def test_what_the_run_has_not_is_refused(client: TestClient, folder: Path) -> None:
    beyond = {"run": "pictures", "picture": 99}
    assert "picture" in problem(client.post("/api/image", json=beyond), 400)
    assert "vit" in problem(client.post("/api/image", json={"run": "writer"}), 400)
    small = TestClient(build_app(folder, limits=Limits(tokens=8)), HERE)
    assert "patches" in problem(small.post("/api/image", json={"run": "pictures"}), 413)
    small = TestClient(build_app(folder, limits=Limits(trace_bytes=1000)), HERE)
    assert "maps" in problem(small.post("/api/image", json={"run": "pictures"}), 413)
    small = TestClient(build_app(folder, limits=Limits(body_bytes=1000)), HERE)
    upload = packed(np.random.default_rng(1).integers(0, 255, (64, 64), dtype=np.uint8))
    sent = small.post("/api/image", json={"run": "pictures", "upload": upload})
    assert "longer" in problem(sent, 413)


def test_pictures_that_are_gone_are_told(tmp_path: Path) -> None:
    models = make_models(tmp_path)
    for file in (models / "data" / "pictures").iterdir():
        file.unlink()
    image._read_split.cache_clear()
    local = TestClient(build_app(models), HERE)
    answer = local.post("/api/image", json={"run": "pictures"})
    assert answer.status_code in (400, 422)
    assert local.get("/health").status_code == 200


def test_a_hidden_patch_has_the_mean_colour(client: TestClient, folder: Path) -> None:
    opened = load_torch_run(folder / "pictures")
    pixels = pictures(opened).pixels[1:2].copy()
    full = ask(client, "/api/image", run="pictures", picture=1)
    size = full["size"] // full["side"]
    pixels[0, :, size : 2 * size, 2 * size : 3 * size] = pixels[0].mean((1, 2), keepdims=True)
    [expected] = class_probabilities(opened.model, pixels)  # type: ignore[arg-type]
    actual = ask(client, "/api/image", run="pictures", picture=1, hidden=full["side"] + 2)
    chances = {item["label"]: item["probability"] for item in actual["output"]["classes"]}
    assert chances == pytest.approx(expected, abs=1e-6)
    assert actual["output"] != full["output"]
    wrong = {"run": "pictures", "picture": 1, "hidden": full["side"] ** 2}
    assert "hidden" in problem(client.post("/api/image", json=wrong), 400)


def test_pictures_of_the_probes_stand_in_for_those_that_are_gone(tmp_path: Path) -> None:
    models = make_models(tmp_path)
    images = pictures(load_torch_run(models / "pictures"))
    shown = np.moveaxis(images.pixels[1:3], 1, -1)
    labels = [images.classes[int(label)] for label in images.labels[1:3]]
    examples = [
        {"kind": "images", "label": label, "size": list(one.shape), "pixels": packed_array(one)}
        for label, one in zip(labels, shown, strict=True)
    ]
    (models / "pictures" / "probes").mkdir()
    (models / "pictures" / "probes" / "sentences.json").write_text(json.dumps(examples))
    for file in (models / "data" / "pictures").iterdir():
        file.unlink()
    image._read_split.cache_clear()
    local = TestClient(build_app(models), HERE)
    for number, label in enumerate(labels):
        answer = ask(local, "/api/image", run="pictures", picture=number)
        assert (answer["source"], answer["count"], answer["label"]) == ("probes", 2, label)
        pixels = 255 * tensor(local, answer["trace"], "image.pixels")
        assert np.array_equal(pixels.round(), shown[number])
    assert "0 to 1" in problem(
        local.post("/api/image", json={"run": "pictures", "picture": 2}), 400
    )
