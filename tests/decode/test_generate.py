"""Writing after prompts: cached steps are full passes, batches are their prompts, streams too."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import (
    BANNED,
    CORES,
    END,
    LONGEST,
    POSITIONS,
    SCHEMES,
    START,
    NextLogits,
    Recomputing,
    same,
    toy_tokenizer,
)

from manyheads.decode.beam import BeamSearch, Decode, Hypothesis, Stepper
from manyheads.decode.generate import Generator, GptStepper
from manyheads.decode.sample import Sample
from manyheads.errors import Mistake
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.tokens import SPECIALS

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
    sizes = {"vocab_size": len(SPECIALS) + 8, "dim": 16, "layers": 2, "heads": 2, "hidden": 24}
    parts = {"position": POSITIONS[position], "core": CORES[core], "dropout": 0.0}
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
    search = BeamSearch(decode, start=prompt[-1], end=END, banned=BANNED)
    return search(Recomputing(after(model, prompt), 1, decode.beam), torch.tensor([limit]))[0]


def test_the_stepper_is_a_stepper() -> None:
    """It keeps the promise that beam search relies on."""
    assert isinstance(GptStepper(toy_gpt(), torch.tensor([[7]])), Stepper)


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


@pytest.mark.parametrize("at_limit", ["end", "free-end", "cut"])
@pytest.mark.parametrize("shortest", [0, 4])
def test_greedy_in_three_ways(at_limit: str, shortest: int) -> None:
    """Beam 1, drawing at temperature 0 and the stream write the same tokens."""
    made = generator(beam=1, at_limit=at_limit, shortest=shortest)
    best = [line[0].tokens for line in made.search(PROMPTS, LIMIT)]
    assert made.sample(PROMPTS, LIMIT, Sample(temperature=0.0)) == best
    assert [list(made.stream(prompt, LIMIT)) for prompt in PROMPTS] == best
    sizes = [len(tokens) for tokens in best]
    assert min(sizes) >= shortest
    assert max(sizes) == LIMIT - (at_limit != "cut")
    assert len(set(sizes)) > 1


def test_a_stream_is_the_sample() -> None:
    """Token by token it draws what `sample` draws for the first prompt."""
    made = generator()
    for seed, prompt in enumerate(PROMPTS):
        sample = Sample(seed=seed, top_k=6)
        assert list(made.stream(prompt, LIMIT, sample)) == made.sample([prompt], LIMIT, sample)[0]


def test_a_stream_of_a_later_prompt_has_random_numbers_of_its_own() -> None:
    made, sample = generator(shortest=LIMIT), Sample(seed=1, temperature=5.0)
    whole = made.sample([PROMPTS[0]] * 3, LIMIT, sample)
    found = [list(made.stream(PROMPTS[0], LIMIT, sample, number)) for number in range(3)]
    assert found == whole
    # The second prompt of a seed is not the first one of the next.
    nexts = [dataclasses.replace(sample, seed=seed) for seed in (2, 3)]
    others = [list(made.stream(PROMPTS[0], LIMIT, one)) for one in nexts]
    assert len({tuple(tokens) for tokens in [*found, *others]}) == 5


def test_a_stream_reads_no_further_than_it_is_asked() -> None:
    """Each token costs one step, taken when the token is wanted."""
    made, read = generator("none", shortest=3), list[int]()
    made.model.decoder.register_forward_hook(lambda m, i, out: read.append(out.shape[1]))
    stream = made.stream([7, 8, 9], 100, Sample(seed=1))
    assert read == [2]
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


def test_without_a_table_writing_goes_on_for_ever() -> None:
    """Positions that are computed have no end; learned ones end the text, and that is said."""
    said: list[str] = []
    prompt = [7, 8, 9]
    for position in POSITIONS:
        decode = Decode(beam=1, end=0, banned=(), at_limit="cut", shortest=99)
        made = Generator(toy_gpt(position, "dense"), toy_tokenizer(), decode, said.append)
        written = made.search([prompt], 2 * LONGEST)[0][0].tokens
        # The last token of all is written and never read.
        room = LONGEST - len(prompt) + 1
        assert len(written) == (room if position == "learned" else 2 * LONGEST)
    assert len(said) == 1
    assert f"{LONGEST}" in said[0]
    assert f"{room}" in said[0]


@pytest.mark.parametrize(
    ("prompt", "limit", "decode", "said"),
    [
        ([7] * (LONGEST + 1), 3, {}, f"a prompt of {LONGEST + 1} tokens"),
        ([7, 99], 3, {}, "token 99"),
        ([7], 0, {}, "limit"),
        ([7], 3, {"first": 15}, "decode.first=15"),
        ([7], 3, {"banned": (7, 99)}, "decode.banned=99"),
    ],
)
def test_what_cannot_be_written_is_refused(
    prompt: list[int], limit: int, decode: dict[str, Any], said: str
) -> None:
    """One line that names the trouble, before anything is computed."""
    made = generator("learned", **decode)
    with pytest.raises(Mistake, match=said):
        made.search([prompt], limit)
    with pytest.raises(Mistake, match=said):
        made.stream(prompt, limit)
