"""Generation after prompts: cached steps equal full passes, batches equal single prompts."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tasks.small_texts import SIZES, recipe_trainer
from tests.test_cli import mistake, result
from torch import Tensor
from toys import (
    CORES,
    LONGEST,
    POSITIONS,
    SCHEMES,
    START,
    Recomputing,
    beam_search,
    same,
    toy_tokenizer,
)

from manyheads.decode.beam import Decode, DecoderSession, Hypothesis
from manyheads.decode.decoder import after_prompts
from manyheads.decode.generate import Generator, as_text
from manyheads.decode.sample import Sample
from manyheads.engines import Engine
from manyheads.errors import UserError
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.tokenizer.tokenizer import SPECIALS
from manyheads.tokenizer.train import Characters

PROMPTS = [[7, 8], [9], [10, 8, 8, 13, 14], [7, 9], [11, 12, 7, 8, 9, 10, 11], [14, 14]]
LIMIT = 9
# Weights with which some texts end early, some late and some at the limit.
SEEDS = {
    "none": 20,
    "sinusoidal": 46,
    "learned": 18,
    "rotary": 18,
    "shaw": 12,
    "t5": 9,
    "alibi": 20,
}
schemes = pytest.mark.parametrize(("position", "core"), SCHEMES)
LETTERS = Characters(vocab_size=300).train(["abcdx\n"])


def toy_gpt(position: str = "sinusoidal", core: str = "fused", **changes: Any) -> Gpt:
    """Random weights in float64, large enough that a next token is likely or unlikely."""
    torch.manual_seed(changes.pop("seed", SEEDS[position]))
    sizes = {"vocab_size": len(SPECIALS) + 8, "dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24}
    parts = {"position": POSITIONS[position], "attention": CORES[core], "dropout": 0.0}
    fixed: Any = {"tie": "none", "max_length": LONGEST}
    model = GptConfig(**{**sizes, **parts, **fixed, **changes}).build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
    return model


def generator(position: str = "sinusoidal", core: str = "fused", **decode: Any) -> Generator:
    return Generator(toy_gpt(position, core), toy_tokenizer(), Decode(**decode))


def uncached(model: Gpt, prompt: list[int], limit: int, decode: Decode) -> list[Hypothesis]:
    """The search of one prompt by full passes."""

    def next_logits(homes: Tensor, tokens: Tensor) -> Tensor:
        # `tokens` begin with the last token of the prompt.
        before = torch.tensor(prompt[:-1], dtype=torch.long).expand(len(tokens), -1)
        with torch.no_grad():
            return model(torch.cat([before, tokens], dim=1))[:, -1].float()

    session = Recomputing(next_logits, 1)
    return beam_search(decode)(session, prompt[-1], torch.tensor([limit]))[0]


def test_the_session_implements_the_protocol() -> None:
    assert isinstance(after_prompts(toy_gpt(), torch.tensor([[7]])), DecoderSession)


@schemes
def test_search_equals_full_passes(position: str, core: str) -> None:
    """For prompts of several lengths, greedy and with a beam."""
    for beam in (1, 3):
        cached = generator(position, core, beam=beam)
        expected = [uncached(cached.model, prompt, LIMIT, cached.decode) for prompt in PROMPTS]
        same(cached.search(PROMPTS, LIMIT), expected)
        assert len({len(nbest[0].tokens) for nbest in expected}) > 2


@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_results_do_not_depend_on_batch_size(batch_tokens: int) -> None:
    single = [generator(beam=3).search([prompt], LIMIT)[0] for prompt in PROMPTS]
    same(generator(beam=3, batch_tokens=batch_tokens).search(PROMPTS, LIMIT), single)
    samples = generator().sample(PROMPTS, LIMIT, Sample(seed=4))
    assert generator(batch_tokens=batch_tokens).sample(PROMPTS, LIMIT, Sample(seed=4)) == samples
    assert generator().sample(PROMPTS[2:], LIMIT, Sample(seed=4), first=2) == samples[2:]


@pytest.mark.parametrize("at_limit", ["force-eos", "force-eos-free", "truncate"])
@pytest.mark.parametrize("min_length", [0, 4])
def test_beam_one_temperature_zero_and_streams_are_greedy(at_limit: str, min_length: int) -> None:
    greedy = generator(beam=1, at_limit=at_limit, min_length=min_length)
    best = [nbest[0].tokens for nbest in greedy.search(PROMPTS, LIMIT)]
    assert greedy.sample(PROMPTS, LIMIT, Sample(temperature=0.0)) == best
    assert [list(greedy.stream(prompt, LIMIT)) for prompt in PROMPTS] == best
    sizes = [len(tokens) for tokens in best]
    assert min(sizes) >= min_length
    assert max(sizes) == LIMIT - (at_limit != "truncate")
    assert len(set(sizes)) > 1


def test_a_stream_is_the_sample_of_its_prompt() -> None:
    """Prompts of one seed have their own random numbers, and so have other seeds."""
    model, sample = generator(min_length=LIMIT), Sample(seed=1, temperature=5.0)
    samples = model.sample([PROMPTS[0]] * 3, LIMIT, sample)
    assert [list(model.stream(PROMPTS[0], LIMIT, sample, n)) for n in range(3)] == samples
    seeds = [dataclasses.replace(sample, seed=seed) for seed in (2, 3)]
    others = [list(model.stream(PROMPTS[0], LIMIT, other)) for other in seeds]
    assert len({tuple(tokens) for tokens in [*samples, *others]}) == 5


def test_a_stream_computes_a_token_when_it_is_taken() -> None:
    model, lengths = generator("none", min_length=3), list[int]()
    model.model.decoder.register_forward_hook(lambda m, i, out: lengths.append(out.shape[1]))
    stream = model.stream([7, 8, 9], 100, Sample(seed=1))
    assert lengths == []
    assert len(list(itertools.islice(stream, 3))) == 3
    assert lengths == [2, 1, 1, 1]


def test_no_token_is_computed_after_the_end() -> None:
    model, lengths = generator(), list[int]()
    model.model.decoder.register_forward_hook(lambda m, i, out: lengths.append(out.shape[1]))
    sizes = []
    for prompt in PROMPTS:
        tokens = list(model.stream(prompt, LIMIT))
        assert sum(lengths) == len(prompt) + len(tokens)  # the end is computed, but never read
        sizes.append(len(tokens))
        lengths.clear()
    assert min(sizes) < LIMIT - 1


def test_generation_records_no_gradients() -> None:
    model, recorded = generator(), list[bool]()
    model.model.decoder.register_forward_hook(lambda m, i, out: recorded.append(out.requires_grad))
    model.search(PROMPTS[:2], 3)
    model.sample(PROMPTS[:2], 3, Sample())
    list(model.stream(PROMPTS[0], 3))
    assert recorded
    assert not any(recorded)


def test_an_empty_prompt_is_the_start_token() -> None:
    same(generator().search([[]], LIMIT), generator().search([[START]], LIMIT))
    same(generator(start=9).search([[]], LIMIT), generator().search([[9]], LIMIT))
    assert generator().search([], LIMIT) == []


def test_every_token_may_be_in_a_prompt() -> None:
    model = generator()
    prompts = [[token] for token in range(model.vocabulary)]
    assert len(model.sample(prompts, 1, Sample())) == len(prompts)


@pytest.mark.parametrize("position", POSITIONS)
def test_only_a_learned_table_ends_the_text(position: str) -> None:
    """Past the table, or past the training length, there is one warning."""
    warnings: list[str] = []
    decode = Decode(beam=1, end=0, suppress_tokens=(), at_limit="truncate", min_length=99)
    model = Generator(toy_gpt(position, "dense"), toy_tokenizer(), decode, warnings.append)
    prompt, limit = [7, 8, 9], LONGEST - 2  # the last token needs no position
    assert len(model.search([prompt], limit)[0][0].tokens) == limit
    assert warnings == []
    tokens = model.search([prompt], limit + 1)[0][0].tokens
    assert len(tokens) == (limit if position == "learned" else limit + 1)
    [line] = warnings
    assert str(LONGEST) in line
    assert str(limit + 1) in line


def test_prompts_past_the_context_have_one_warning_a_length() -> None:
    """The same text every time, so that a command can show it once."""
    warnings: list[str] = []
    model = Generator(toy_gpt("rotary", "dense"), toy_tokenizer(), Decode(), warnings.append)
    assert all(model.search([[7] * (LONGEST + 1), [8] * (LONGEST + 1)], 3))
    assert all(model.search([[7] * (2 * LONGEST)], 3))
    assert len(warnings) == 2
    assert len(set(warnings)) == 1


@settings(deadline=None)
@given(
    text=st.text("ab\n", max_size=14),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop(text: str, stops: list[str]) -> None:
    end = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    shown = list(as_text(LETTERS, [], iter(LETTERS.encode(text)), stops))
    assert "".join(shown) == text[:end]
    if not stops:
        assert shown == [*text, ""]


def test_only_a_possible_stop_is_held_back() -> None:
    shown = as_text(LETTERS, [], iter(LETTERS.encode("abcaxabcd")), ["abcd"])
    assert list(shown) == ["", "", "", "abc", "ax", "", "", "", ""]


def test_no_token_is_computed_after_a_stop() -> None:
    model, steps = generator("none", min_length=50), list[int]()
    model.model.decoder.register_forward_hook(lambda m, i, out: steps.append(out.shape[1]))
    words = list(as_text(model.tokenizer, [7], model.stream([7], 20)))
    assert len(steps) == 20
    steps.clear()
    text, stop = "".join(words), "".join(words[4:7])
    stream = as_text(model.tokenizer, [7], model.stream([7], 20), [stop])
    assert "".join(stream) == text[: text.find(stop)]
    assert len(steps) == len((text[: text.find(stop)] + stop).split()) <= 7


@pytest.mark.parametrize(
    ("prompt", "limit", "decode", "name"),
    [
        ([7] * (LONGEST + 1), 3, {}, f"prompt has {LONGEST + 1} tokens"),
        ([7, 99], 3, {}, "token 99"),
        ([-1, 7], 3, {}, "token -1"),
        ([7], 0, {}, "limit"),
        ([7], 3, {"forced_bos": 15}, "decode.forced_bos=15"),
        ([7], 3, {"suppress_tokens": (7, 99)}, "decode.suppress_tokens=99"),
    ],
)
def test_bad_prompts_and_tokens_are_refused(
    prompt: list[int], limit: int, decode: dict[str, Any], name: str
) -> None:
    """Before anything is computed."""
    model = generator("learned", **decode)
    with pytest.raises(UserError, match=name):
        model.search([prompt], limit)
    with pytest.raises(UserError, match=name):
        model.stream(prompt, limit)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A language model of characters that generates the end, or else an a."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("banana bandana\n" * 40, encoding="utf-8")
    settings = ("tokens=characters", "model.max_length=512", "train.steps=1", "train.batch_rows=2")
    folder = f"data.folder={tmp_path / 'text'}"
    recipe_trainer("language", tmp_path / "run", *SIZES, folder, *settings).run()

    def with_fixed_logits(engine: Engine, folder: Path, model: Any) -> Generator:
        logits = torch.zeros(model.vocabulary)
        logits[model.special_tokens.end] = 60.0
        logits[model.tokenizer.token_id("a")] = 40.0
        model.model.logits = lambda hidden: logits.expand(len(hidden), -1).clone()
        return model

    monkeypatch.setattr(Engine, "generator", with_fixed_logits)
    return tmp_path / "run"


@pytest.mark.parametrize("options", [(), ("--beam", 2)])
def test_min_new_tokens_come_before_the_end(options: tuple[object, ...], run: Path) -> None:
    command = ("generate", run, "--prompt", "b", *options)
    assert result(*command) == "b\n"
    assert result(*command, "--min-new-tokens", 7) == "b" + "a" * 7 + "\n"
    # The default limit is at least the minimum.
    assert result(*command, "--min-new-tokens", 250) == "b" + "a" * 250 + "\n"
    assert result(*command, "--min-new-tokens", 6, "--max-new-tokens", 6) == "baaaaaa\n"
    assert "--max-new-tokens=6" in mistake(*command, "--min-new-tokens", 7, "--max-new-tokens", 6)
