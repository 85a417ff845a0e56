"""The Fill page's words are those that `manyheads fill` gives."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.web.small_models import make_models
from tests.web.test_server import HERE, ask, problem

from manyheads.opened import open_run
from manyheads.web import fill
from manyheads.web.app import build_app

TEXT = "The [MASK] dog sees the <mask>."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(build_app(folder), HERE)


def test_the_words_are_those_of_the_command(client: TestClient, folder: Path) -> None:
    encoder = open_run(folder / "reader").encoder()
    [expected] = encoder.fill([TEXT], fill.TOP)
    found = ask(client, "/api/fill", run="reader", text=TEXT)
    assert len(found["masks"]) == 2
    for mask, guesses in zip(found["masks"], expected, strict=True):
        assert [one["piece"] for one in mask["top"]] == [guess.word for guess in guesses]
        chances = [one["probability"] for one in mask["top"]]
        assert chances == pytest.approx([guess.probability for guess in guesses])
        assert mask["hidden"] is None
    assert found["text"] == encoder.filled(TEXT, expected)


def test_a_hidden_word_is_told_with_its_place(client: TestClient, folder: Path) -> None:
    encoder = open_run(folder / "reader").encoder()
    [[first, _]] = encoder.fill([TEXT], 1000)
    rank = next(n for n, guess in enumerate(first) if guess.word.strip() == "small")
    found = ask(client, "/api/fill", run="reader", text=TEXT, hidden=["small", "aeroplane"])
    small, none = (mask["hidden"] for mask in found["masks"])
    assert small["rank"] == rank + 1
    assert small["probability"] == pytest.approx(first[rank].probability)
    assert none == {"word": "aeroplane", "rank": None, "probability": None}


def test_runs_with_the_head_are_named(client: TestClient) -> None:
    assert client.get("/api/fill").json() == {"runs": ["reader"]}


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"run": "reader", "text": "The dog."}, 400, "no mask"),
        ({"run": "labels", "text": TEXT}, 400, "head for masked"),
        ({"run": "translator", "text": TEXT}, 400, "head for masked"),
        ({"run": "reader", "text": "[MASK]" * 17}, 413, "masks"),
        ({"run": "reader", "text": "dog " * 100 + "[MASK]"}, 413, "tokens"),
        ({"run": "reader", "text": TEXT, "hidden": "small"}, 400, "list"),
        ({"run": "reader", "text": 3}, 400, "text"),
    ],
)
def test_what_cannot_be_filled_is_refused(
    client: TestClient, body: dict[str, object], status: int, word: str
) -> None:
    assert word in problem(client.post("/api/fill", json=body), status)
