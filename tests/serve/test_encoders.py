"""Encoders and classifiers over HTTP, and the counters of a server."""

import base64
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.web.small_models import make_models

from manyheads.loading import load
from manyheads.serve.app import build_app, work_of
from manyheads.serve.scheduler import Bounds
from manyheads.web.guard import AccessPolicy

BOUNDS = Bounds(rows=4, tokens=200)
TEXTS = ["The small dog.", "A cat and a dog.", "A dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def client_of(folder: Path, door: AccessPolicy | None = None) -> TestClient:
    work = work_of(load(folder), BOUNDS, None, None, None)
    return TestClient(build_app("small", work, BOUNDS, door), "http://localhost")


def test_embeddings_are_those_of_embed(folder: Path) -> None:
    client, expected = client_of(folder / "reader"), load(folder / "reader").embed(TEXTS)
    answer = client.post("/v1/embeddings", json={"input": TEXTS, "model": "small"}).json()
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    vectors = np.array([row["embedding"] for row in answer["data"]])
    assert np.allclose(vectors, expected, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] > len(TEXTS)
    packed = client.post("/v1/embeddings", json={"input": TEXTS[1], "encoding_format": "base64"})
    vector = np.frombuffer(base64.b64decode(packed.json()["data"][0]["embedding"]), "<f4")
    assert np.allclose(vector, expected[1], atol=1e-5)


def test_labels_are_those_of_classify(folder: Path) -> None:
    client, loaded = client_of(folder / "labels"), load(folder / "labels")
    expected = [answer[0] for answer in loaded.classify(TEXTS)]
    rows = client.post("/classify", json={"text": TEXTS}).json()["results"]
    for row, prediction in zip(rows, expected, strict=True):
        assert row["label"] == prediction.label
        assert row["scores"] == pytest.approx(prediction.scores, abs=1e-6)
    assert client.post("/classify", json={"text": TEXTS[0]}).json() == rows[0]
    assert "embedding" in client.post("/v1/embeddings", json={"input": "A dog"}).json()["data"][0]


def test_an_image_is_classified(folder: Path) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    from manyheads.tasks.images import class_probabilities

    client, model = client_of(folder / "pictures"), load(folder / "pictures").labeller()
    config = model.config
    shape = (config.image_size, config.image_size, config.channels)
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels.squeeze()).save(file, "PNG")
    image = base64.b64encode(file.getvalue()).decode()
    answer = client.post("/classify", json={"image": image})
    [expected] = class_probabilities(model, pixels.transpose(2, 0, 1)[None])
    assert answer.json()["scores"] == pytest.approx(expected, abs=1e-6)
    assert client.post("/classify", json={"image": "x"}).status_code == 400


@pytest.mark.parametrize(
    ("run", "path", "body", "status", "word"),
    [
        ("reader", "/classify", {"text": "A dog"}, 400, "no head"),
        ("reader", "/v1/embeddings", {"input": ["a"] * 5}, 400, "5 texts"),
        ("reader", "/v1/embeddings", {"input": "dog " * 300}, 400, "tokens"),
        ("reader", "/v1/embeddings", {"input": [" "]}, 400, "empty"),
        ("reader", "/v1/embeddings", {"input": 3}, 400, "input"),
        ("reader", "/v1/embeddings", {"input": []}, 400, "input"),
        ("labels", "/classify", {}, 400, "text"),
        ("reader", "/v1/embeddings", {"input": "a", "dimensions": 2}, 400, "dimensions"),
        ("reader", "/v1/embeddings", {"input": "a", "encoding_format": "x"}, 400, "float"),
        ("reader", "/v1/embeddings", {"input": "a", "model": "x"}, 404, "small"),
        ("reader", "/translate", {"q": "a"}, 404, "/v1/embeddings"),
        ("pictures", "/v1/embeddings", {"input": "a"}, 404, "/classify"),
        ("writer", "/classify", {"text": "a"}, 404, "/v1/completions"),
        ("writer", "/v1/chat/completions", {"messages": []}, 404, "/v1/completions"),
    ],
)
def test_wrong_requests_are_refused(
    folder: Path, run: str, path: str, body: dict[str, object], status: int, word: str
) -> None:
    answer = client_of(folder / run).post(path, json=body)
    assert answer.status_code == status
    assert word in answer.text


def test_metrics_count_requests(folder: Path) -> None:
    client = client_of(folder / "reader")
    for text in TEXTS:
        client.post("/v1/embeddings", json={"input": text})
    client.post("/v1/embeddings", json={})
    for number in range(5):
        client.get(f"/invented/{number}")
    lines = client.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['manyheads_requests_total{path="/v1/embeddings",status="200"}'] == "3"
    assert values['manyheads_requests_total{path="/v1/embeddings",status="400"}'] == "1"
    assert values['manyheads_requests_total{path="other",status="404"}'] == "5"
    assert values["manyheads_batches_total"] == "3"
    assert values["manyheads_request_seconds_count"] == "9"
    assert values['manyheads_request_seconds_bucket{le="+Inf"}'] == "9"
    assert values["manyheads_jobs_running"] == values["manyheads_jobs_waiting"] == "0"


def test_metrics_need_the_token(folder: Path) -> None:
    door = AccessPolicy.at("0.0.0.0", "secret")
    client = client_of(folder / "reader", door)
    assert client.get("/metrics").status_code in (401, 403)
    headers = {"Authorization": "Bearer secret"}
    assert client.get("/metrics", headers=headers).status_code == 200
