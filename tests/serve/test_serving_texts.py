"""Continuations for programs: a row in a batch is what it is alone, whoever stands beside it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from tests.models.tiny import PARTS, tiny, words
from tests.web.small_pages import make_runs

from manyheads.decode.generate import Generator
from manyheads.decode.sample import Sample
from manyheads.loading import load_torch_run
from manyheads.models.gpt import GptConfig
from manyheads.serve.app import build_app, work_of
from manyheads.serve.batching import Bounds, Job
from manyheads.serve.completing import (
    Chunk,
    CompletionRequest,
    Completions,
    Detokenizer,
    LeftPaddedCache,
    left_pad,
    supports_left_padding,
)
from manyheads.tokenizer.tokenizer import Tokenizer

BOUNDS = Bounds(rows=8, tokens=600)
PATH = "/v1/completions"
PROMPTS = ["The", "The small dog sees the old", "A cat"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs")) / "deep" / "writer"


@pytest.fixture(scope="module")
def work(folder: Path) -> Completions:
    found = work_of(load_torch_run(folder), BOUNDS, None, None, None)
    assert isinstance(found, Completions)
    return found


@pytest.fixture(scope="module")
def client(work: Completions) -> TestClient:
    return TestClient(build_app("small", work, BOUNDS), "http://localhost")


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def alone(folder: Path, prompt: Sequence[int], limit: int, sample: Sample) -> list[int]:
    """The tokens that the run's own generator writes after a prompt."""
    generator = load_torch_run(folder).generator(at_limit="truncate")
    assert isinstance(generator, Generator)
    return generator.sample([list(prompt)], limit, sample)[0]


@pytest.mark.parametrize(("position", "core"), PARTS)
def test_prompts_of_different_lengths_are_read_as_if_alone(position: str, core: str) -> None:
    model = tiny(GptConfig, position, core).build().eval()
    if not supports_left_padding(model):
        assert core == "tiled"
        return
    prompts = [words(length).tolist() for length in (3, 7, 1, 4)]
    follow = words(4, 3)
    with torch.no_grad():
        whole, absent = left_pad(prompts, torch.device("cpu"))
        cache = LeftPaddedCache(absent)
        model.hidden(whole[:, :-1], cache=cache)
        found = [model(whole[:, -1:], cache=cache)]
        found += [model(follow[:, at : at + 1], cache=cache) for at in range(2)]
        kept = torch.tensor([3, 1])
        cache.select_rows(kept)
        last = model(follow[kept, 2:3], cache=cache)
        for row, prompt in enumerate(prompts):
            full = model(torch.tensor([prompt + follow[row].tolist()]))[0]
            together_ = torch.cat([step[row] for step in found])
            assert torch.allclose(together_, full[len(prompt) - 1 : -1], atol=1e-5)
            if row in kept:
                place = kept.tolist().index(row)
                assert torch.allclose(last[place, 0], full[-1], atol=1e-5)


def written(work: Completions, asks: Sequence[CompletionRequest]) -> list[list[Chunk]]:
    """What several requests get in one batch."""

    async def run() -> list[list[Chunk]]:
        jobs = [Job(work.check(one)) for one in asks]
        assert work.fits([job.request for job in jobs])
        await asyncio.to_thread(work.compute, jobs)
        return [[piece async for piece in job.parts()] for job in jobs]

    return asyncio.run(run())


def test_rows_of_several_requests_are_what_each_is_alone(folder: Path, work: Completions) -> None:
    """Different prompts, lengths, temperatures and seeds in one batch."""
    asks = [
        CompletionRequest((work.encode("The"),), 1, 9, Sample(temperature=0.0)),
        CompletionRequest((work.encode(PROMPTS[1]),), 1, 5, Sample(temperature=0.9, seed=4)),
        CompletionRequest((work.encode("A"),), 1, 14, Sample(temperature=1.2, top_p=0.8, seed=4)),
    ]
    for one, pieces in zip(asks, written(work, asks), strict=True):
        [piece] = pieces
        tokens = alone(folder, one.prompts[0], one.max_tokens, one.sample)
        prompt = list(one.prompts[0])
        decode = work.generator.tokenizer.decode
        assert piece.text == decode(prompt + tokens)[len(decode(prompt)) :]
        assert piece.tokens == len(tokens)


def test_every_form_of_a_prompt(client: TestClient, work: Completions) -> None:
    texts = [choice["text"] for choice in ask(client, prompt=PROMPTS, **GREEDY)["choices"]]
    assert len(texts) == len(PROMPTS)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = list(work.encode(prompt))
        for form in (prompt, [prompt], ids, [ids]):
            assert ask(client, prompt=form, **GREEDY)["choices"][0]["text"] == text
    empty = [ask(client, prompt=form, **GREEDY)["choices"][0]["text"] for form in ("", [[]], None)]
    assert len(set(empty)) == 1


def test_the_answer_has_its_documented_shape(client: TestClient) -> None:
    found = ask(client, model="small", prompt=PROMPTS[:2], n=2, seed=3, max_tokens=4)
    assert found["object"] == "text_completion"
    assert found["model"] == "small"
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in found["choices"]} <= {"stop", "length"}
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    again = ask(client, model="small", prompt=PROMPTS[:2], n=2, seed=3, max_tokens=4)
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert texts[0] != texts[1]  # the two of one prompt are drawn apart
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["small"]
    assert client.get("/v1/models/small").json() == listed["data"][0]
    assert client.get("/v1/models/other").status_code == 404


def test_log_probabilities_are_those_of_the_model(client: TestClient, work: Completions) -> None:
    found = ask(client, prompt=PROMPTS[1], logprobs=3, echo=True, temperature=1, seed=2)
    [choice] = found["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(PROMPTS[1])
    prompt = list(work.encode(PROMPTS[1]))
    sample = Sample(temperature=1.0, seed=2)
    ids = prompt + work.generator.sample([prompt], 16, sample)[0]
    assert told["tokens"] == work.generator.tokenizer.pieces(ids)
    with torch.no_grad():
        logs = work.generator.model(torch.tensor([ids]))[0].log_softmax(-1)
    wanted = [float(logs[at - 1, token]) for at, token in enumerate(ids)][1:]
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
    assert told["top_logprobs"][0] is None
    for at, likeliest in enumerate(told["top_logprobs"][1:]):
        assert max(likeliest.values()) == pytest.approx(float(logs[at].max()), abs=1e-4)
        assert len(likeliest) <= 3
    assert len({len(values) for values in told.values()}) == 1
    assert told["text_offset"] == sorted(told["text_offset"])
    scored = ask(client, prompt=PROMPTS[1], logprobs=0, echo=True, max_tokens=0)["choices"][0]
    assert scored["text"] == PROMPTS[1]
    count = len(prompt)
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted[: count - 1], abs=1e-4)


def events(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_is_the_whole_text_in_whole_characters(client: TestClient) -> None:
    how = {"prompt": PROMPTS, "temperature": 1.5, "seed": 9, "max_tokens": 24}
    whole = [choice["text"] for choice in ask(client, **how)["choices"]]
    found = events(client, **how, stream_options={"include_usage": True})
    texts = ["", "", ""]
    pieces = 0
    for event in found[:-1]:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
        pieces += 1
    assert texts == whole
    assert pieces > 3 * len(PROMPTS)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == ask(client, **how)["usage"]
    ends = [event["choices"][0]["finish_reason"] for event in found[:-1]]
    assert len([end for end in ends if end]) == len(PROMPTS)


def test_a_stop_text_ends_the_text_and_is_not_in_it(client: TestClient) -> None:
    whole = ask(client, prompt="The", temperature=1.2, seed=5, max_tokens=40)["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:2]
    before = whole[: whole.find(stop)]
    how = {"prompt": "The", "temperature": 1.2, "seed": 5, "max_tokens": 40}
    for given in (stop, [stop, "\x00 never"]):
        [choice] = ask(client, **how, stop=given)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    streamed = events(client, **how, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in streamed) == before


def test_characters_of_several_tokens_come_at_once(work: Completions) -> None:
    tokenizer = work.generator.tokenizer
    text = "schläft 🙂 日本 STOP after"
    growing = Detokenizer(tokenizer, [], ["STOP"])
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(growing.add(token))
        assert "\ufffd" not in pieces[-1]
        if growing.stopped:
            break
    assert "".join([*pieces, growing.end()]) == "schläft 🙂 日本 "
    held = Detokenizer(tokenizer, [], ["STOP"])
    assert "".join(held.add(token) for token in tokenizer.encode("a STO")) == "a "
    assert held.end() == "STO"
    assert not held.stopped


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": [10**6]}, "token 1000000"),
        ({"prompt": [-1]}, "token -1"),
        ({"prompt": "dog " * 10_000}, "tokens of the prompt"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 100}, "too many"),
        ({"n": True}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"echo": "yes"}, "echo"),
        ({"stream": 1}, "stream"),
        ({"suffix": "x"}, "suffix"),
        ({"temperature": 1e-38}, "temperature"),
        ({"top_p": 1e-320}, "top_p"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"best_of": 3}, "best_of"),
        ({"model": 3}, "model"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
    ],
)
def test_wrong_values_are_refused(client: TestClient, wrong: dict[str, Any], word: str) -> None:
    answer = client.post(PATH, json={"prompt": "The", **wrong})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]
    if "tokens of the prompt" in error["message"]:
        assert error["code"] == "context_length_exceeded"
    assert client.get("/health").status_code == 200


def test_who_has_gone_is_written_no_further(work: Completions) -> None:
    async def run() -> int:
        ask = CompletionRequest((work.encode("The"),), 1, 60, Sample(temperature=1.0), stream=True)
        job = Job(work.check(ask))
        told: list[Any] = []
        job.send = told.append  # type: ignore[method-assign]
        sent = len(told)

        def leave(piece: Any) -> None:
            told.append(piece)
            job.cancelled = True

        job.send = leave  # type: ignore[method-assign]
        await asyncio.to_thread(work.compute, [job])
        return len(told) - sent

    assert asyncio.run(run()) <= 2  # the piece after which it went, and the end


def test_learned_positions_bound_what_stands_together(folder: Path) -> None:
    """A long prompt and a long answer of another would go past the table: not in one batch."""
    opened = load_torch_run(folder)
    model = tiny(
        GptConfig, "learned", vocab_size=opened.tokenizer.vocab_size, max_length=20
    ).build()
    found = Completions(opened, BOUNDS)
    found.generator = Generator(model, Tokenizer.load(folder / "tokenizer.json"), opened.decode())
    found.context = 20
    greedy = Sample(temperature=0.0)
    long = found.check(CompletionRequest((tuple(range(5, 20)),), 1, 5, greedy))
    short = found.check(CompletionRequest(((7,),), 1, 19, greedy))
    assert found.fits([long])
    assert found.fits([short])
    assert not found.fits([long, short])
    for one in (long, short):
        assert written(found, [one])[0][0].finish in ("length", "stop")
