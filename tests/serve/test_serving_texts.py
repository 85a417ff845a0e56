"""/v1/completions: a continuation does not depend on the rest of its batch."""

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

from manyheads.decode.generate import Detokenizer, Generator
from manyheads.decode.sample import Sample
from manyheads.engines import Engine
from manyheads.loading import load_torch_run
from manyheads.models.gpt import GptConfig
from manyheads.serve.app import build_app, work_of
from manyheads.serve.continuous import (
    Chunk,
    CompletionRequest,
    Completions,
    LeftPaddedCache,
    left_pad,
    supports_left_padding,
)
from manyheads.serve.scheduler import Bounds, Job
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
    loaded = load_torch_run(folder).with_engine(Engine("auto"))  # as the command loads it
    completions = work_of(loaded, BOUNDS, None, None, None)
    assert isinstance(completions, Completions)
    return completions


@pytest.fixture(scope="module")
def client(work: Completions) -> TestClient:
    return TestClient(build_app("small", work, BOUNDS), "http://localhost")


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    values: dict[str, Any] = answer.json()
    return values


def generated(folder: Path, prompt: Sequence[int], limit: int, sample: Sample) -> list[int]:
    """The tokens that the run's generator samples after a prompt."""
    generator = load_torch_run(folder).generator(at_limit="truncate")
    assert isinstance(generator, Generator)
    return generator.sample([list(prompt)], limit, sample)[0]


@pytest.mark.parametrize(("position", "core"), PARTS)
def test_left_padding_changes_nothing(position: str, core: str) -> None:
    model = tiny(GptConfig, position, core).build().eval()
    if not supports_left_padding(model):
        assert core == "tiled"
        return
    prompts = [words(length).tolist() for length in (3, 7, 1, 4)]
    follow = words(4, 3)
    with torch.no_grad():
        padded, padding = left_pad(prompts, torch.device("cpu"))
        cache = LeftPaddedCache(padding)
        model.hidden(padded[:, :-1], cache=cache)
        steps = [model(padded[:, -1:], cache=cache)]
        steps += [model(follow[:, at : at + 1], cache=cache) for at in range(2)]
        selected = torch.tensor([3, 1])
        cache.select_rows(selected)
        last = model(follow[selected, 2:3], cache=cache)
        for row, prompt in enumerate(prompts):
            full = model(torch.tensor([prompt + follow[row].tolist()]))[0]
            batched = torch.cat([step[row] for step in steps])
            assert torch.allclose(batched, full[len(prompt) - 1 : -1], atol=1e-5)
            if row in selected:
                index = selected.tolist().index(row)
                assert torch.allclose(last[index, 0], full[-1], atol=1e-5)


def computed(work: Completions, requests: Sequence[CompletionRequest]) -> list[list[Chunk]]:
    """The chunks of several requests in one batch."""

    async def run() -> list[list[Chunk]]:
        jobs = [Job(work.check(request)) for request in requests]
        assert work.fits([job.request for job in jobs])
        await asyncio.to_thread(work.compute, jobs)
        return [[chunk async for chunk in job.parts()] for job in jobs]

    return asyncio.run(run())


def test_rows_of_several_requests_do_not_depend_on_each_other(
    folder: Path, work: Completions
) -> None:
    """Different prompts, lengths, temperatures and seeds in one batch."""
    requests = [
        CompletionRequest((work.encode("The"),), 1, 9, Sample(temperature=0.0)),
        CompletionRequest((work.encode(PROMPTS[1]),), 1, 5, Sample(temperature=0.9, seed=4)),
        CompletionRequest((work.encode("A"),), 1, 14, Sample(temperature=1.2, top_p=0.8, seed=4)),
    ]
    for request, chunks in zip(requests, computed(work, requests), strict=True):
        [chunk] = chunks
        tokens = generated(folder, request.prompts[0], request.max_tokens, request.sample)
        prompt = list(request.prompts[0])
        decode = work.generator.tokenizer.decode
        assert chunk.text == decode(prompt + tokens)[len(decode(prompt)) :]
        assert chunk.tokens == len(tokens)


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
    answer = ask(client, model="small", prompt=PROMPTS[:2], n=2, seed=3, max_tokens=4)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "small"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    again = ask(client, model="small", prompt=PROMPTS[:2], n=2, seed=3, max_tokens=4)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert texts[0] != texts[1]  # two samples of one prompt
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["small"]


def test_log_probabilities_are_those_of_the_model(client: TestClient, work: Completions) -> None:
    answer = ask(client, prompt=PROMPTS[1], logprobs=3, temperature=1, seed=2)
    logprobs = answer["choices"][0]["logprobs"]
    prompt = list(work.encode(PROMPTS[1]))
    generated = work.generator.sample([prompt], 16, Sample(temperature=1.0, seed=2))[0]
    assert logprobs["tokens"] == work.generator.tokenizer.subwords(generated)
    with torch.no_grad():
        logits = work.generator.model(torch.tensor([prompt + generated]))[0, len(prompt) - 1 :]
    logs = logits.log_softmax(-1)
    expected = [float(logs[at, token]) for at, token in enumerate(generated)]
    assert logprobs["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    for at, alternatives in enumerate(logprobs["top_logprobs"]):
        assert max(alternatives.values()) == pytest.approx(float(logs[at].max()), abs=1e-4)
        assert len(alternatives) <= 3
    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def events(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_is_the_text_in_complete_characters(client: TestClient) -> None:
    options = {"prompt": PROMPTS, "temperature": 1.5, "seed": 9, "max_tokens": 24}
    full = [choice["text"] for choice in ask(client, **options)["choices"]]
    streamed = events(client, **options, stream_options={"include_usage": True})
    texts = ["", "", ""]
    chunks = 0
    for event in streamed[:-1]:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
        chunks += 1
    assert texts == full
    assert chunks > 3 * len(PROMPTS)
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == ask(client, **options)["usage"]
    ends = [event["choices"][0]["finish_reason"] for event in streamed[:-1]]
    assert len([end for end in ends if end]) == len(PROMPTS)


def test_a_stop_text_ends_the_text_and_is_not_in_it(client: TestClient) -> None:
    full = ask(client, prompt="The", temperature=1.2, seed=5, max_tokens=40)["choices"][0]["text"]
    stop = full[len(full) // 2 :][:2]
    before = full[: full.find(stop)]
    options = {"prompt": "The", "temperature": 1.2, "seed": 5, "max_tokens": 40}
    for stops in (stop, [stop, "\x00 never"]):
        [choice] = ask(client, **options, stop=stops)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    streamed = events(client, **options, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in streamed) == before


def test_characters_of_several_tokens_come_at_once(work: Completions) -> None:
    tokenizer = work.generator.tokenizer
    text = "schläft 🙂 日本 STOP after"
    detokenizer = Detokenizer(tokenizer, [], ["STOP"])
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(detokenizer.add(token))
        assert "\ufffd" not in pieces[-1]
        if detokenizer.stopped:
            break
    assert "".join([*pieces, detokenizer.end()]) == "schläft 🙂 日本 "
    other = Detokenizer(tokenizer, [], ["STOP"])
    assert "".join(other.add(token) for token in tokenizer.encode("a STO")) == "a "
    assert other.end() == "STO"
    assert not other.stopped


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
        ({"n": 100}, "too many"),
        ({"n": True}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"echo": True}, "echo"),
        ({"stream": 1}, "stream"),
        ({"suffix": "x"}, "suffix"),
        ({"temperature": 1e-38}, "temperature"),
        ({"top_p": -1e-320}, "top_p"),
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


def test_generation_stops_when_the_client_disconnects(work: Completions) -> None:
    async def run() -> int:
        request = CompletionRequest(
            (work.encode("The"),), 1, 60, Sample(temperature=1.0), stream=True
        )
        job = Job(work.check(request))
        sent: list[Any] = []

        def disconnect(chunk: Any) -> None:
            sent.append(chunk)
            job.cancelled = True

        job.send = disconnect  # type: ignore[method-assign]
        await asyncio.to_thread(work.compute, [job])
        return len(sent)

    assert asyncio.run(run()) <= 2  # the first chunk, and the end


def test_learned_positions_limit_a_batch(folder: Path) -> None:
    """A long prompt and a long continuation of another request would exceed the table."""
    loaded = load_torch_run(folder)
    model = tiny(
        GptConfig, "learned", vocab_size=loaded.tokenizer.vocab_size, max_length=20
    ).build()
    completions = Completions(loaded, BOUNDS)
    completions.generator = Generator(
        model, Tokenizer.load(folder / "tokenizer.json"), loaded.decode()
    )
    completions.context = 20
    greedy = Sample(temperature=0.0)
    long = completions.check(CompletionRequest((tuple(range(5, 20)),), 1, 5, greedy))
    short = completions.check(CompletionRequest(((7,),), 1, 19, greedy))
    assert completions.fits([long])
    assert completions.fits([short])
    assert not completions.fits([long, short])
    for request in (long, short):
        assert computed(completions, [request])[0][0].finish in ("length", "stop")
