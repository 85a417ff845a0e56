"""Writing after prompts: cached steps are full passes, batches are their prompts, streams too."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import (
    CORES,
    LONGEST,
    POSITIONS,
    SCHEMES,
    START,
    NextLogits,
    Recomputing,
    beam_search,
    same,
    toy_tokenizer,
)

from manyheads.decode.beam import Decode, DecoderSession, Hypothesis
from manyheads.decode.decoder import GptSession
from manyheads.decode.generate import Generator, as_text, until
from manyheads.decode.sample import Sample
from manyheads.errors import UserError
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.tokenizer.tokenizer import SPECIALS

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


def after(model: Gpt, prompt: list[int]) -> NextLogits:
    """Next logits by a whole pass over the prompt and what follows it: no cache."""

    def next_logits(homes: Tensor, written: Tensor) -> Tensor:
        # What is written begins with the prompt's last token.
        begun = torch.tensor(prompt[:-1], dtype=torch.long).expand(len(written), -1)
        with torch.no_grad():
            return model(torch.cat([begun, written], dim=1))[:, -1].float()

    return next_logits


def recomputed(model: Gpt, prompt: list[int], limit: int, decode: Decode) -> list[Hypothesis]:
    """The search of one prompt by full passes."""
    session = Recomputing(after(model, prompt), 1)
    return beam_search(decode)(session, prompt[-1], torch.tensor([limit]))[0]


def test_the_session_keeps_the_protocol() -> None:
    assert isinstance(GptSession(toy_gpt(), torch.tensor([[7]])), DecoderSession)


@pytest.mark.parametrize("beam", [1, 3])
@schemes
def test_prompts_of_any_length_get_what_full_passes_give(
    position: str, core: str, beam: int
) -> None:
    """A prompt read at once, a cache that is reordered, neighbours of other lengths: no matter."""
    made = generator(position, core, beam=beam)
    wanted = [recomputed(made.model, prompt, LIMIT, made.decode) for prompt in PROMPTS]
    same(made.search(PROMPTS, LIMIT), wanted)
    assert len({tuple(line[0].tokens) for line in wanted}) > 3
    assert len({len(line[0].tokens) for line in wanted}) > 2


@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_the_size_of_batches_does_not_matter(batch_tokens: int) -> None:
    """Prompts come back in their order, whatever goes through the model together."""
    alone = [generator(beam=3).search([prompt], LIMIT)[0] for prompt in PROMPTS]
    same(generator(beam=3, batch_tokens=batch_tokens).search(PROMPTS, LIMIT), alone)
    drawn = generator().sample(PROMPTS, LIMIT, Sample(seed=4))
    assert generator(batch_tokens=batch_tokens).sample(PROMPTS, LIMIT, Sample(seed=4)) == drawn
    assert generator().sample(PROMPTS[2:], LIMIT, Sample(seed=4), first=2) == drawn[2:]


@pytest.mark.parametrize("at_limit", ["force-eos", "force-eos-free", "truncate"])
@pytest.mark.parametrize("shortest", [0, 4])
def test_greedy_in_three_ways(at_limit: str, shortest: int) -> None:
    """Beam 1, drawing at temperature 0 and the stream write the same tokens."""
    made = generator(beam=1, at_limit=at_limit, min_length=shortest)
    best = [line[0].tokens for line in made.search(PROMPTS, LIMIT)]
    assert made.sample(PROMPTS, LIMIT, Sample(temperature=0.0)) == best
    assert [list(made.stream(prompt, LIMIT)) for prompt in PROMPTS] == best
    sizes = [len(tokens) for tokens in best]
    assert min(sizes) >= shortest
    assert max(sizes) == LIMIT - (at_limit != "truncate")
    assert len(set(sizes)) > 1


def test_a_stream_is_the_sample() -> None:
    """Token by token it draws what `sample` draws for the first prompt."""
    made = generator()
    for seed, prompt in enumerate(PROMPTS):
        sample = Sample(seed=seed, top_k=6)
        assert list(made.stream(prompt, LIMIT, sample)) == made.sample([prompt], LIMIT, sample)[0]


def test_a_stream_of_a_later_prompt_has_random_numbers_of_its_own() -> None:
    made, sample = generator(min_length=LIMIT), Sample(seed=1, temperature=5.0)
    whole = made.sample([PROMPTS[0]] * 3, LIMIT, sample)
    found = [list(made.stream(PROMPTS[0], LIMIT, sample, number)) for number in range(3)]
    assert found == whole
    # The second prompt of a seed is not the first one of the next.
    nexts = [dataclasses.replace(sample, seed=seed) for seed in (2, 3)]
    others = [list(made.stream(PROMPTS[0], LIMIT, one)) for one in nexts]
    assert len({tuple(tokens) for tokens in [*found, *others]}) == 5


def test_a_stream_reads_no_further_than_it_is_asked() -> None:
    """Each token costs one step, taken when the token is wanted."""
    made, read = generator("none", min_length=3), list[int]()
    made.model.decoder.register_forward_hook(lambda m, i, out: read.append(out.shape[1]))
    stream = made.stream([7, 8, 9], 100, Sample(seed=1))
    assert read == []
    assert len(list(itertools.islice(stream, 3))) == 3
    assert read == [2, 1, 1, 1]


def test_writing_keeps_no_graph() -> None:
    """Nothing is recorded for a backward pass, in any way of writing."""
    made, recorded = generator(), list[bool]()
    made.model.decoder.register_forward_hook(lambda m, i, out: recorded.append(out.requires_grad))
    made.search(PROMPTS[:2], 3)
    made.sample(PROMPTS[:2], 3, Sample())
    list(made.stream(PROMPTS[0], 3))
    assert recorded
    assert not any(recorded)


def test_an_empty_prompt_is_the_start() -> None:
    """The tokenizer's start token, or the one of the settings."""
    same(generator().search([[]], LIMIT), generator().search([[START]], LIMIT))
    other = generator(start=9).search([[]], LIMIT)
    same(other, generator().search([[9]], LIMIT))
    assert generator().search([], LIMIT) == []


@pytest.mark.parametrize("position", POSITIONS)
def test_without_a_table_writing_goes_on_for_ever(position: str) -> None:
    """Positions that are computed have no end; learned ones end the text. Either is said."""
    said: list[str] = []
    prompt = [7, 8, 9]
    decode = Decode(beam=1, end=0, suppress_tokens=(), at_limit="truncate", min_length=99)
    made = Generator(toy_gpt(position, "dense"), toy_tokenizer(), decode, said.append)
    # The last token of all is written and never read.
    room = LONGEST - len(prompt) + 1
    assert len(made.search([prompt], room)[0][0].tokens) == room
    assert said == []
    written = made.search([prompt], room + 1)[0][0].tokens
    assert len(written) == (room if position == "learned" else room + 1)
    [line] = said
    assert f"{LONGEST}" in line
    assert f"{room + 1}" in line
    assert ("untested" in line) == (position != "learned")


@pytest.mark.parametrize("position", ["rotary", "none"])
def test_a_prompt_past_the_context_is_read_and_that_is_said_once_a_length(position: str) -> None:
    said: list[str] = []
    made = Generator(toy_gpt(position, "dense"), toy_tokenizer(), Decode(), said.append)
    assert all(made.search([[7] * (LONGEST + 1), [8] * (LONGEST + 1)], 3))
    assert all(made.search([[7] * (2 * LONGEST)], 3))
    assert len(said) == 2
    assert len(set(said)) == 1  # so that a command can say it once


@settings(deadline=None)
@given(
    text=st.text("ab\n", max_size=14),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(0, 4), min_size=1),
)
def test_a_text_ends_before_the_first_stop_however_it_comes(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    """What is shown is never taken back, so it is right after every piece."""
    pieces, begin = list[str](), 0
    for size in itertools.islice(itertools.cycle(sizes), len(text)):
        pieces.append(text[begin : begin + size])
        begin += size
    pieces.append(text[begin:])
    whole = text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
    shown = list(until(iter(pieces), stops))
    assert "".join(shown) == whole
    if not stops:
        assert shown == [*pieces, ""]


def test_what_cannot_begin_a_stop_is_shown_at_once() -> None:
    shown = until(iter(["ab", "c", "ax", "ab", "cd"]), ["abcd"])
    assert list(shown) == ["", "", "abcax", "", ""]


def test_nothing_is_computed_after_a_stop() -> None:
    """The tokens of a stop text cost their steps, and no more are taken."""
    made, read = generator("none", min_length=50), list[int]()
    made.model.decoder.register_forward_hook(lambda m, i, out: read.append(out.shape[1]))
    words = list(as_text(made.tokenizer, [7], made.stream([7], 20)))
    assert len(read) == 20
    read.clear()
    text, stop = "".join(words), "".join(words[4:7])
    stream = as_text(made.tokenizer, [7], made.stream([7], 20))
    assert "".join(until(stream, [stop])) == text[: text.find(stop)]
    assert len(read) == len((text[: text.find(stop)] + stop).split()) <= 7


@pytest.mark.parametrize(
    ("prompt", "limit", "decode", "said"),
    [
        ([7] * (LONGEST + 1), 3, {}, f"prompt has {LONGEST + 1} tokens"),
        ([7, 99], 3, {}, "token 99"),
        ([7], 0, {}, "limit"),
        ([7], 3, {"forced_bos": 15}, "decode.forced_bos=15"),
        ([7], 3, {"suppress_tokens": (7, 99)}, "decode.suppress_tokens=99"),
    ],
)
def test_what_cannot_be_written_is_refused(
    prompt: list[int], limit: int, decode: dict[str, Any], said: str
) -> None:
    """One line that names the trouble, before anything is computed."""
    made = generator("learned", **decode)
    with pytest.raises(UserError, match=said):
        made.search([prompt], limit)
    with pytest.raises(UserError, match=said):
        made.stream(prompt, limit)
