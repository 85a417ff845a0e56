"""The Translate endpoints return the hypotheses, maps and gold alignments of the translator."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from tests.web.small_pages import SENTENCE, SIZES, make_runs
from tests.web.test_server import HERE, LIMITS, ask, problem, tensor

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode.beam import SpecialTokens
from manyheads.decode.translate import Translator
from manyheads.evaluate.alignment import alignment_error, word_maps
from manyheads.loading import LoadedRun, load_torch_run
from manyheads.models.capture import capture
from manyheads.models.decoder_only_seq2seq import DecoderOnlySeq2Seq, DecoderOnlySeq2SeqConfig
from manyheads.phrasebook import sentences
from manyheads.run import read_run, save_run
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.web import app as server
from manyheads.web.translating import error_of, gold_links

BEAM = 3
KINDS = ("translator", "joined", "recurrent")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small runs, and translators of the two other kinds."""
    made = make_runs(tmp_path_factory.mktemp("runs"))
    run = read_run(made / "translator")
    tokenizer = Tokenizer.load(made / "translator" / "tokenizer.json")
    size = tokenizer.vocab_size
    joined = DecoderOnlySeq2SeqConfig(**SIZES, vocab_size=size, dropout=0.0)
    recurrent = RnnConfig(dim=16, layers=1, max_length=128, vocab_size=size)
    torch.manual_seed(2)
    for name, config in (("joined", joined), ("recurrent", recurrent)):
        save_run(replace(run, model=config), tokenizer, config.build(), made / name)
    return made


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(server.build_app(folder, limits=LIMITS), HERE)


def translator_of(opened: LoadedRun) -> Translator:
    model: Any = opened.model
    return Translator(model, opened.tokenizer, opened.decode(beam=BEAM))


@pytest.mark.parametrize("name", KINDS)
def test_hypotheses_are_the_translators(client: TestClient, folder: Path, name: str) -> None:
    actual = ask(client, "/api/translate", run=name, text=SENTENCE, beam=BEAM)
    opened = load_torch_run(folder / name)
    [expected] = translator_of(opened).search([SENTENCE])
    assert [item["score"] for item in actual["hypotheses"]] == [item.score for item in expected]
    texts = opened.tokenizer.decode_batch([item.tokens for item in expected])
    assert [item["text"] for item in actual["hypotheses"]] == texts
    each = sum(actual["log_probabilities"])
    assert each == pytest.approx(expected[0].log_probability, abs=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_the_alignment_is_the_captured_map(client: TestClient, folder: Path, name: str) -> None:
    """Of the second hypothesis: each head, a layer's mean, and the mean of all."""
    actual = ask(client, "/api/translate", run=name, text=SENTENCE, beam=BEAM, which=1)
    assert actual["which"] == 1
    opened = load_torch_run(folder / name)
    translator, model = translator_of(opened), opened.model
    [hypotheses] = translator.search([SENTENCE])
    written, marks = hypotheses[1].tokens, translator.special_tokens
    source = marks.source(opened.tokenizer.encode(SENTENCE))
    inputs = torch.tensor([[marks.start, *written][: len(actual["pieces"])]])
    with torch.no_grad(), capture(model) as maps:
        model(torch.tensor([source]), inputs)
    if isinstance(model, DecoderOnlySeq2Seq):
        saved = [layer[:, :, len(source) :, : len(source)] for layer in maps["self"]]
    else:
        saved = maps["cross"]
    expected = torch.cat(saved)
    shape = [actual["alignment"]["layers"], actual["alignment"]["heads"]]
    assert [*shape, len(actual["pieces"]), len(actual["source"])] == list(expected.shape)
    trace = actual["trace"]
    full = tensor(client, trace, "alignment.weights")
    torch.testing.assert_close(full, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tensor(client, trace, "alignment.mean"), full.mean(1))
    torch.testing.assert_close(tensor(client, trace, "alignment.all"), full.mean((0, 1)))
    if not isinstance(model, DecoderOnlySeq2Seq):
        torch.testing.assert_close(full.sum(-1), torch.ones(full.shape[:-1]))


@pytest.mark.parametrize("name", KINDS)
def test_a_prefix_begins_every_hypothesis(client: TestClient, folder: Path, name: str) -> None:
    """And each has the log P that the whole model gives it, the prefix included."""
    opened = load_torch_run(folder / name)
    prefix = opened.tokenizer.encode("Die alte")
    actual = ask(client, "/api/translate", run=name, text=SENTENCE, beam=BEAM, prefix=prefix)
    assert actual["tokens"][: len(prefix)] == prefix
    assert all(item["text"].startswith("Die alte") for item in actual["hypotheses"])
    scores = [item["score"] for item in actual["hypotheses"]]
    assert scores == sorted(scores, reverse=True)
    best = actual["hypotheses"][0]["log_probability"]
    assert best == pytest.approx(sum(actual["log_probabilities"]), abs=1e-3)


def test_what_was_found_freely_is_found_with_its_own_beginning(client: TestClient) -> None:
    free = ask(client, "/api/translate", run="translator", text=SENTENCE, beam=1)
    for size in (1, 3, len(free["tokens"]) - 1):
        requested = {"run": "translator", "text": SENTENCE, "beam": 1}
        held = ask(client, "/api/translate", **requested, prefix=free["tokens"][:size])
        assert held["hypotheses"] == free["hypotheses"]


def test_the_next_token_is_the_models(client: TestClient, folder: Path) -> None:
    opened = load_torch_run(folder / "translator")
    model, marks = opened.model, SpecialTokens(opened.tokenizer, opened.run.decode)
    prefix = opened.tokenizer.encode("Der kleine")
    requested = {"run": "translator", "text": SENTENCE, "prefix": prefix, "count": 10}
    actual = ask(client, "/api/next", **requested)
    source = marks.source(opened.tokenizer.encode(SENTENCE))
    with torch.no_grad():
        logits = model(torch.tensor([source]), torch.tensor([[marks.start, *prefix]]))[0, -1]
    best, ids = logits.softmax(-1).topk(10)
    assert [item["token"] for item in actual["top"]] == ids.tolist()
    assert [item["before"] for item in actual["top"]] == pytest.approx(best.tolist(), rel=1e-4)
    assert actual["left"] == len(logits) - len(marks.suppressed)


def test_gold_links_stand_beside_the_words_of_an_own_sentence(
    client: TestClient, folder: Path
) -> None:
    [pair, *_] = sentences("en-de", "test", 3)
    actual = ask(client, "/api/gold", run="translator", text=f" {pair.source} ")
    assert actual["looked"] == 4 + 3 + 3  # the training split is searched last
    assert actual["pair"]["target"] == pair.target
    opened = load_torch_run(folder / "translator")
    model: Any = opened.model
    trace = actual["pair"]["trace"]
    links = tensor(client, trace, "gold")
    assert {(s, t) for t, s in links.nonzero().tolist()} == pair.alignment
    [(_, maps)] = word_maps(model, opened.tokenizer, [pair])
    torch.testing.assert_close(tensor(client, trace, "words.weights"), maps)
    expected = alignment_error(model, opened.tokenizer, [pair]).rates
    for row, local in zip(actual["pair"]["errors"]["weights"], expected, strict=True):
        assert row == pytest.approx(local, abs=1e-6)
    assert actual["pair"]["rows"] == [pair.target[a:b] for a, b in pair.target_words]


def test_there_is_no_gold_for_other_sentences_and_other_models(client: TestClient) -> None:
    [pair, *_] = sentences("en-de", "test", 3)
    strange = ask(client, "/api/gold", run="translator", text="Colourless ideas sleep.")
    assert strange["phrasebook"]
    assert strange["pair"] is None
    one_sequence = ask(client, "/api/gold", run="joined", text=pair.source)
    assert one_sequence["pair"]["errors"] is None
    assert not ask(client, "/api/gold", run="deep/writer", text=pair.source)["phrasebook"]


def test_the_error_is_none_for_a_map_of_gold() -> None:
    [pair] = sentences("en-de", "test", 1)
    links = gold_links(pair)
    single = links * torch.arange(1, links.shape[1] + 1)
    wrong = 1 - links
    hits = (links.sum(-1) > 0).sum()
    best = 1 - 2 * hits / (len(links) + links.sum())
    assert float(error_of(single, links)) == pytest.approx(float(best))
    assert float(error_of(wrong, links)) == 1.0


def test_what_cannot_be_translated_is_refused_in_words(client: TestClient) -> None:
    requested = {"run": "translator", "text": SENTENCE}
    for path in ("/api/translate", "/api/next"):
        for prefix in ("12", [1.5], [True], [-1], [10**6], [0], [2, 5]):
            problem(client.post(path, json={**requested, "prefix": prefix}), 400)
        problem(client.post(path, json={**requested, "prefix": [40] * 60}), 413)
        problem(client.post(path, json={**requested, "beam": 9}), 400)
        problem(client.post(path, json={**requested, "beam": 0}), 400)
        assert "tokens" in problem(client.post(path, json={**requested, "text": "dog " * 45}), 413)
        problem(client.post(path, json={**requested, "run": "../translator"}), 404)
        assert "bert" in problem(client.post(path, json={**requested, "run": "reader"}), 400)
    assert "gpt" in problem(
        client.post("/api/translate", json={**requested, "run": "deep/writer"}), 400
    )
    problem(client.post("/api/translate", json={**requested, "which": 99}), 400)
    problem(client.post("/api/gold", json={"run": "gone"}), 404)
