"""The lens: its last row is the model's own output, and the stream is the sum of its parts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from tests.web.small_models import SENTENCE, make_models
from tests.web.test_server import HERE, ask, problem
from torch import Tensor

from manyheads.decode.translate import Translator
from manyheads.loading import LoadedRun, load_torch_run
from manyheads.web import lens
from manyheads.web.app import build_app
from manyheads.web.forward import SizeLimit

TARGET = "Der kleine Hund."
DECODERS = ("translator", "joined", "writer", "post")
ROOM = SizeLimit(100, 2**24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(build_app(folder), HERE)


def output(opened: LoadedRun) -> Tensor:
    """P of the next token by calling the model; a translator gets the target too."""
    tokenizer, model = opened.tokenizer, opened.model
    source = tokenizer.encode(SENTENCE)
    with torch.no_grad():
        if opened.run.task == "language":
            return model(torch.tensor([source]))[0].softmax(-1)  # type: ignore[no-any-return]
        marks = Translator(model, tokenizer, opened.run.decode).special_tokens  # type: ignore[arg-type]
        decoder_ids = [marks.start, *tokenizer.encode(TARGET)]
        logits = model(torch.tensor([marks.source(source)]), torch.tensor([decoder_ids]))
        return logits[0].softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", DECODERS)
def test_the_last_row_is_what_the_model_says(client: TestClient, folder: Path, name: str) -> None:
    opened = load_torch_run(folder / name)
    actual = ask(client, "/api/lens", run=name, text=SENTENCE, target=TARGET)
    expected = output(opened)
    best, ids = expected.topk(lens.TOP)
    assert len(actual["top"]) == actual["layers"] + 1 == 3
    assert actual["top"][-1] == ids.tolist()
    assert torch.allclose(torch.tensor(actual["probabilities"][-1]), best, atol=1e-6)
    entropy = -(expected * expected.log2()).sum(-1)
    assert actual["entropy"][-1] == pytest.approx(entropy.tolist(), abs=1e-4)
    labels = opened.tokenizer.encode(TARGET if opened.run.task != "language" else SENTENCE)
    first = 0 if opened.run.task != "language" else 1
    chances = [float(expected[at, token]) for at, token in enumerate(labels[first:])]
    assert actual["wanted"][-1][: len(chances)] == pytest.approx(chances, abs=1e-6)
    assert actual["pieces"][str(int(ids[0, 0]))] == opened.tokenizer.subwords([int(ids[0, 0])])[0]
    # And the rows before are others: a layer does something.
    assert actual["probabilities"][0] != actual["probabilities"][-1]


@pytest.mark.parametrize("name", ["translator", "writer"])
def test_the_stream_is_the_embedding_and_what_is_added(folder: Path, name: str) -> None:
    opened = load_torch_run(folder / name)
    with torch.inference_mode():
        actual = lens.decoder_states(opened, SENTENCE, TARGET, ROOM)
        for layer in range(2):
            added = sum(part[layer] for part in actual.added.values())
            after = actual.states[layer] + added
            assert torch.allclose(after, actual.states[layer + 1], atol=1e-4)
        reported = lens.lens_table(opened, actual)
    parts = {"attention", "feedforward"} | ({"cross"} if name == "translator" else set())
    assert actual.added.keys() == parts
    assert reported["norm"][0][0] == pytest.approx(float(actual.states[0, 0].norm()), rel=1e-5)


def test_after_the_norm_a_part_is_what_went_into_the_sum(folder: Path) -> None:
    opened = load_torch_run(folder / "post")
    block: Any = opened.model.decoder.blocks[1]  # type: ignore[union-attr, index]
    with torch.inference_mode():
        actual = lens.decoder_states(opened, SENTENCE, None, ROOM)
        middle = block.attention_residual.norm(actual.states[1] + actual.added["attention"][1])
        after = block.feedforward_residual.norm(middle + actual.added["feedforward"][1])
    assert torch.allclose(after, actual.states[2], atol=1e-4)


def test_the_model_is_left_as_it_was(folder: Path) -> None:
    opened = load_torch_run(folder / "writer")
    before = [len(part._forward_hooks) for part in opened.model.modules()]
    with torch.inference_mode():
        lens.decoder_states(opened, SENTENCE, None, ROOM)
    assert [len(part._forward_hooks) for part in opened.model.modules()] == before


def test_a_translator_writes_by_itself(client: TestClient, folder: Path) -> None:
    opened = load_torch_run(folder / "translator")
    translator = Translator(opened.model, opened.tokenizer, opened.run.decode)  # type: ignore[arg-type]
    written = translator.search([SENTENCE], n_best=1)[0][0].tokens
    actual = ask(client, "/api/lens", run="translator", text=SENTENCE)
    assert actual["inputs"][1:] == opened.tokenizer.subwords(written)


def test_entropy_is_in_bits(client: TestClient) -> None:
    actual = ask(client, "/api/lens", run="writer", text="")
    assert len(actual["inputs"]) == 1
    assert actual["wanted"][-1] == [None]
    assert 0 < actual["entropy"][-1][0] <= math.log2(320)


def test_what_has_no_lens_is_refused(client: TestClient) -> None:
    for name in ("reader", "pictures"):
        answer = client.post("/api/lens", json={"run": name, "text": SENTENCE})
        assert "decoder" in problem(answer, 400)
    long = {"run": "writer", "text": "dog " * 200}
    assert "tokens" in problem(client.post("/api/lens", json=long), 413)
    long = {"run": "translator", "text": "dog", "target": "dog " * 200}
    assert "target" in problem(client.post("/api/lens", json=long), 413)
    assert "not found" in problem(client.post("/api/lens", json={"run": "gone"}), 404)
