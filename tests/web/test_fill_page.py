"""The Fill page's words are those that `manyheads fill` gives."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.web.small_models import make_models
from tests.web.test_server import HERE, ask, problem

from manyheads.loading import load_torch_run
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
    encoder = load_torch_run(folder / "reader").encoder()
    [expected] = encoder.fill([TEXT], fill.TOP)
    actual = ask(client, "/api/fill", run="reader", text=TEXT)
    assert len(actual["masks"]) == 2
    for mask, guesses in zip(actual["masks"], expected, strict=True):
        assert [item["piece"] for item in mask["top"]] == [guess.word for guess in guesses]
        chances = [item["probability"] for item in mask["top"]]
        assert chances == pytest.approx([guess.probability for guess in guesses])
        assert mask["hidden"] is None
    assert actual["text"] == encoder.filled(TEXT, expected)


def test_a_hidden_word_is_told_with_its_place(client: TestClient, folder: Path) -> None:
    encoder = load_torch_run(folder / "reader").encoder()
    [[first, _]] = encoder.fill([TEXT], 1000)
    rank = next(n for n, guess in enumerate(first) if guess.word.strip() == "small")
    beside = ask(client, "/api/fill", run="reader", text=TEXT, hidden=["small", ""])
    actual = ask(client, "/api/fill", run="reader", text=TEXT, hidden=["small", "aeroplane"])
    small, none = (mask["hidden"] for mask in actual["masks"])
    # A mask without a hidden word has no rank.
    assert [mask["hidden"] for mask in beside["masks"]] == [small, None]
    assert small["rank"] == rank + 1
    assert small["probability"] == pytest.approx(first[rank].probability)
    assert none == {"word": "aeroplane", "piece": None, "rank": None, "probability": None}


def test_a_hidden_word_is_the_token_that_it_is_in_its_place(
    client: TestClient, folder: Path
) -> None:
    """Not one that only looks like it: a word at the beginning has no space, one inside has one."""
    encoder = load_torch_run(folder / "reader").encoder()
    vocabulary = encoder.tokenizer.subwords(range(encoder.tokenizer.vocab_size))
    assert {"cat", " cat", " dog", "dog"} - {*vocabulary} == {"dog"}
    for text, word, piece in (
        ("The small [MASK].", "dog", " dog"),
        ("[MASK] and a cat.", "dog", None),  # two tokens there
        ("A dog and a [MASK].", "cat", " cat"),
        ("[MASK] and a dog.", "cat", "cat"),
    ):
        [[guesses]] = encoder.fill([text], 1000)
        [mask] = ask(client, "/api/fill", run="reader", text=text, hidden=[word])["masks"]
        ranks = [rank for rank, item in enumerate(guesses, start=1) if item.word == piece]
        assert (mask["hidden"]["piece"], mask["hidden"]["rank"]) == (piece, *(ranks or [None]))


def test_runs_with_the_head_are_named(client: TestClient) -> None:
    runs = client.get("/api/runs").json()["runs"]
    assert [run["name"] for run in runs if "fill" in run["can"]] == ["reader"]


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
