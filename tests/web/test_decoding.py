"""The tree that the Decode page shows is the search's own, and its chances are the model's."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from tests.web.small_pages import SENTENCE, make_runs
from tests.web.test_server import HERE, LIMITS, ask, problem

from manyheads.data.translation import PhrasebookData
from manyheads.decode.beam import NEVER, Decode, Hypothesis
from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample, filtered
from manyheads.decode.translate import Translator
from manyheads.loading import LoadedRun, load_torch_run
from manyheads.phrasebook import sentences
from manyheads.web import app as server
from manyheads.web import decoding
from manyheads.web.beam_tree import trace_search
from manyheads.web.generation import Generation
from manyheads.web.translating import HELD_OUT

LIMIT = 12
JSON = {"Content-Type": "application/json"}
RUNS = ("translator", "deep/writer")
WAYS = (
    {"beam": 1},
    {"beam": 4},
    {"beam": 3, "length_penalty": 0.0, "stopping": "exact"},
    {"beam": 4, "length_penalty": 2.0, "stopping": "heuristic", "at_limit": "truncate"},
    {"beam": 2, "penalty": "length", "length_penalty": -1.0, "at_limit": "force-eos-free"},
    {"beam": 4, "min_length": 5},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(server.build_app(folder, limits=LIMITS), HERE)


def generation_in(opened: LoadedRun, decode: Decode) -> Generation:
    """As the page makes it; both kinds with a limit that is soon reached."""
    if opened.run.task == "language":
        return Generation(opened, decode, opened.tokenizer.encode(SENTENCE), LIMIT)
    decode = replace(decode, max_length_ratio=0.0, max_length_extra=LIMIT)
    source = opened.tokenizer.encode(SENTENCE)
    return Generation(opened, decode, [*source, opened.tokenizer.end], LIMIT)


def library_search(generation: Generation) -> Any:
    """The hypotheses that the library finds for the same."""
    if generation.continues:
        generator = Generator(generation.model, generation.tokenizer, generation.decode)
        return generator.search([generation.read], LIMIT)[0]
    return Translator(generation.model, generation.tokenizer, generation.decode).search([SENTENCE])[
        0
    ]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_tree_is_what_the_search_did(folder: Path, name: str, way: dict[str, Any]) -> None:
    """Its ends are the results, to the last bit; every step is the best of twice the beam."""
    opened = load_torch_run(folder / name)
    generation = generation_in(opened, opened.decode(**way))
    tree = trace_search(
        generation.search(), generation.begin(), generation.start, generation.limits()
    )
    assert tree.hypotheses == library_search(generation)
    for hypothesis, end in zip(tree.hypotheses, tree.ends, strict=True):
        node = tree.nodes[end]
        assert (node.log_probability, node.score) == (hypothesis.log_probability, hypothesis.score)
        assert node.state == "ended"
    beam = generation.decode.beam
    for step in range(1, tree.nodes[-1].step + 1):
        weighed = [node for node in tree.nodes if node.step == step]
        assert len(weighed) <= 2 * beam
        logs = [node.log_probability for node in weighed]
        assert logs == sorted(logs, reverse=True)
        survivors = [node for node in weighed if node.state == "kept"]
        pruned = [node for node in weighed if node.state == "pruned"]
        assert len(survivors) <= beam
        end = generation.special_tokens.end
        lost = [node.log_probability for node in pruned if node.token != end]
        for rank, node in enumerate(weighed):
            last = node.token == end or step == LIMIT
            assert (node.state == "ended") == (last and rank < beam)
        if survivors and step < LIMIT:
            assert max(lost, default=NEVER) <= survivors[-1].log_probability
    for node in tree.nodes:
        if node.parent >= 0:
            assert tree.nodes[node.parent].state == "kept"
            assert tree.nodes[node.parent].step == node.step - 1


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_of_the_tree_are_the_models(client: TestClient, name: str) -> None:
    """A forward pass over the tokens up to a node gives its log P."""
    actual = ask(client, "/api/decode", run=name, text=SENTENCE, beam=3, limit=6)
    nodes = actual["nodes"]
    opened = client.app.app.state.library  # type: ignore[attr-defined]
    with opened.model(name) as run, torch.no_grad():
        decode = run.decode(beam=3)
        source = run.tokenizer.encode(SENTENCE)
        read = source if name != "translator" else [*source, run.tokenizer.end]
        generation = Generation(run, decode, read, actual["limit"])
        for number in range(0, len(nodes), 5):
            tokens, at = [], number
            while at >= 0:
                tokens.insert(0, nodes[at]["token"])
                at = nodes[at]["parent"]
            chances = generation.logits(tokens[:-1]).log_softmax(-1)
            expected = sum(float(row[token]) for row, token in zip(chances, tokens, strict=True))
            assert nodes[number]["log_probability"] == pytest.approx(expected, abs=2e-4)
            assert nodes[number]["piece"] == run.tokenizer.subwords(tokens)[-1]
    assert [node["place"] for node in nodes if node["place"]]
    best = next(node for node in nodes if node["place"] == 1)
    assert best["score"] == actual["beam"][0]["score"]


@pytest.mark.parametrize("name", RUNS)
def test_greedy_beam_and_chance_are_the_librarys(
    client: TestClient, folder: Path, name: str
) -> None:
    chance = {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "seed": 3}
    actual = ask(client, "/api/decode", run=name, text=SENTENCE, beam=2, limit=8, **chance)
    opened, sample = load_torch_run(folder / name), Sample(**chance)  # type: ignore[arg-type]
    model: Any = opened.model
    if name == "translator":
        greedy = Translator(model, opened.tokenizer, opened.decode(beam=1))
        assert actual["greedy"][0]["text"] == greedy.translate([SENTENCE])[0]
        drawn = greedy.sample([SENTENCE] * 3, sample)
        assert [item["text"] for item in actual["sampling"]] == drawn
    else:
        ids = opened.tokenizer.encode(SENTENCE)
        writer = Generator(model, opened.tokenizer, opened.decode(beam=1))
        assert actual["greedy"][0]["tokens"] == writer.search([ids], 8)[0][0].tokens
        expected = writer.sample([ids] * 3, 8, sample)
        assert [item["tokens"] for item in actual["sampling"]] == expected
    assert len({item["text"] for item in actual["sampling"]}) > 1
    again = ask(client, "/api/decode", run=name, text=SENTENCE, beam=2, limit=8, **chance)
    assert again == actual


def test_chances_before_and_after_are_those_that_are_drawn_from(
    client: TestClient, folder: Path
) -> None:
    opened = load_torch_run(folder / "deep/writer")
    ids = opened.tokenizer.encode(SENTENCE)
    banned = Generator(opened.model, opened.tokenizer, opened.run.decode).special_tokens.suppressed  # type: ignore[arg-type]
    with torch.no_grad():
        logits = opened.model(torch.tensor([ids]))[0, -1:]
    before = logits.softmax(-1)[0]
    logits[:, banned] = NEVER
    ways: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.3})
    for way in (*ways, {"temperature": 0.0}, {"temperature": 2.0, "top_k": 9, "min_p": 0.4}):
        requested = {"run": "deep/writer", "text": SENTENCE, "count": 50, **way}
        actual = ask(client, "/api/next", **requested)
        after = filtered(logits, Sample(**way)).softmax(-1)[0]
        assert actual["left"] == int((after > 0).sum())
        assert actual["mass"] == pytest.approx(float(before[after > 0].sum()), rel=1e-4)
        for item in actual["top"]:
            assert item["before"] == pytest.approx(float(before[item["token"]]), rel=1e-4)
            assert item["after"] == pytest.approx(float(after[item["token"]]), rel=1e-4)


def test_a_tree_begins_with_the_tokens_that_are_given(client: TestClient) -> None:
    requested = {"run": "translator", "text": SENTENCE, "beam": 3}
    free = ask(client, "/api/decode", **requested)
    pruned = next(node for node in free["nodes"] if node["step"] == 1 and node["state"] == "pruned")
    held = ask(client, "/api/decode", **requested, prefix=[pruned["token"]])
    [first] = [node for node in held["nodes"] if node["step"] == 1]
    assert first["state"] == "kept"
    assert first["log_probability"] == pruned["log_probability"]
    written = [*held["beam"], *held["greedy"], *held["sampling"]]
    assert all(item["tokens"][0] == pruned["token"] for item in written)


def test_settings_that_make_no_sense_are_refused(client: TestClient) -> None:
    requested = {"run": "translator", "text": SENTENCE}
    wrong: tuple[dict[str, Any], ...] = (
        *({"temperature": -1}, {"temperature": "warm"}, {"temperature": 10**400}, {"top_p": 0}),
        *({"top_k": -1}, {"seed": -1}, {"beam": 9}, {"beam": 0}, {"limit": 65}, {"min_p": 2}),
        *({"limit": 0}, {"temperature": 1e-40}, {"temperature": math.nan}),
        *({"prefix": "x"}, {"prefix": [10**9]}, {"text": 5}),
    )
    for item in wrong:
        body = json.dumps({**requested, **item})
        problem(client.post("/api/decode", content=body, headers=JSON), 400)
    assert "tokens" in problem(
        client.post("/api/decode", json={**requested, "text": "dog " * 45}), 413
    )
    assert "bert" in problem(client.post("/api/decode", json={**requested, "run": "reader"}), 400)
    problem(client.post("/api/decode", json={**requested, "run": "gone"}), 404)


def test_the_example_of_a_run_is_one_that_greedy_search_misses(
    folder: Path,
) -> None:
    opened = load_torch_run(folder / "translator")
    run = opened.run
    opened = replace(opened, run=replace(run, decode=replace(run.decode, beam=4)))
    pairs = {pair.source: pair.target for pair in sentences("en-de", "test", 12)}

    def hypotheses(beam: int) -> dict[str, Any]:
        search = Translator(opened.model, opened.tokenizer, opened.decode(beam=beam)).search
        return {text: best for text, [best, *_] in zip(pairs, search(list(pairs)), strict=True)}

    greedy, best = hypotheses(1), hypotheses(4)
    missed = [text for text in pairs if best[text].score > greedy[text].score + 1e-4]
    assert missed  # a model of 30 steps is uncertain
    assert decoding.missed_text(opened, pairs) == missed[0]
    # A text that the beam translates as its reference comes before the others.
    reference = opened.tokenizer.decode(best[missed[-1]].tokens)
    assert decoding.missed_text(opened, {**pairs, missed[-1]: reference}) == missed[-1]
    # Without a beam no text is missed: the one of which the search is least certain.
    alone = replace(opened, run=replace(opened.run, decode=replace(opened.run.decode, beam=1)))
    least = min(pairs, key=lambda text: greedy[text].score)
    assert decoding.missed_text(alone, pairs) == least


def test_the_length_penalty_does_not_decide_in_the_example_if_it_can_be_helped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = load_torch_run(folder / "translator")
    run = opened.run
    opened = replace(opened, run=replace(run, decode=replace(run.decode, beam=4)))
    reference, other = (opened.tokenizer.target.encode(word) for word in ("cat", "dog"))
    # log P and score of greedy search, then of the beam; tokens of both.
    found = {
        "longer": ((-1.41, -0.85, other), (-1.47, -0.82, reference)),
        "greedy is right": ((-4.0, -2.5, reference), (-3.5, -2.2, other)),
        "likelier": ((-4.0, -2.5, other), (-3.5, -2.2, [*other, *other])),
    }

    def search(translator: Translator, texts: Sequence[str], n_best: int) -> list[Any]:
        at = int(translator.decode.beam > 1)
        made = (found[text][at] for text in texts)
        return [[Hypothesis(tokens, log, score)] for log, score, tokens in made]

    monkeypatch.setattr(decoding.Translator, "search", search)
    texts = dict.fromkeys(found, opened.tokenizer.decode(reference))
    assert decoding.missed_text(opened, texts) == "likelier"
    del texts["likelier"]
    assert decoding.missed_text(opened, texts) == "longer"


def test_only_runs_with_a_phrasebook_have_such_an_example(client: TestClient, folder: Path) -> None:
    assert client.get("/api/missed", params={"run": "deep/writer"}).json() == {"text": None}
    data = PhrasebookData(test_pairs=3, valid_pairs=4)
    text = client.get("/api/missed", params={"run": "translator"}).json()["text"]
    pairs = [p for split in HELD_OUT for p in sentences(data.pair, split, 4)]
    references = {p.source: p.target for p in sorted(pairs, key=lambda p: len(p.source))}
    assert text in references
    assert text == decoding.missed_text(load_torch_run(folder / "translator"), references)
