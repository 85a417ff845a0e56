"""Drawing tokens: temperature, top-k, top-p, the right frequencies, and seeds."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import toy_translator

from manyheads.decode.sample import Sample, Sampler, choose, filtered
from manyheads.errors import UserError

# No ties, not even after rounding.
Logits = st.lists(
    st.integers(-96, 96).map(lambda number: number / 16), min_size=2, max_size=12, unique=True
)
LINES = ["a b c", "h", "", "b b b b b b", "c d e f g h a b", "a b c"]


def kept(logits: list[float], **sample: Any) -> set[int]:
    """The tokens that can still be drawn."""
    found = filtered(torch.tensor([logits]), Sample(**sample))[0]
    return {token for token, logit in enumerate(found.tolist()) if logit > -math.inf}


def shares(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def best_first(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: -logits[token])


@given(Logits, st.integers(1, 14))
@settings(deadline=None)
def test_top_k_keeps_the_k_best(logits: list[float], k: int) -> None:
    """Exactly k tokens stay, the likeliest ones; all of them where there are no more."""
    assert kept(logits, top_k=k) == set(best_first(logits)[:k])


@given(Logits, st.floats(0.01, 0.99), st.sampled_from([0.5, 1.0, 2.0]))
@settings(deadline=None)
def test_top_p_keeps_the_smallest_nucleus(
    logits: list[float], p: float, temperature: float
) -> None:
    """The likeliest tokens, one after the other, until their mass at the temperature reaches p."""
    wanted, mass, share = set(), 0.0, shares(logits, temperature)
    for token in best_first(logits):
        assume(abs(mass - p) > 1e-5)  # on the border, rounding may decide
        if mass >= p:
            break
        wanted.add(token)
        mass += share[token]
    assert kept(logits, top_p=p, temperature=temperature) == wanted


@given(Logits, st.integers(1, 8), st.floats(0.05, 0.95))
@settings(deadline=None)
def test_the_nucleus_is_taken_within_the_top_k(logits: list[float], k: int, p: float) -> None:
    """With both, top-p sees the shares that the k best have among themselves."""
    best = best_first(logits)[:k]
    inner = shares([logits[token] for token in best])
    wanted, mass = set(), 0.0
    for token, share in zip(best, inner, strict=True):
        assume(abs(mass - p) > 1e-5)
        if mass >= p:
            break
        wanted.add(token)
        mass += share
    assert kept(logits, top_k=k, top_p=p) == wanted


@given(Logits, st.floats(0.01, 1.0), st.floats(0.2, 4.0))
@settings(deadline=None)
def test_min_p_is_a_share_of_the_likeliest(
    logits: list[float], min_p: float, temperature: float
) -> None:
    """What has at least min_p of the best probability stays, at the temperature."""
    share = shares(logits, temperature)
    assume(all(abs(p / max(share) - min_p) > 1e-5 for p in share if p < max(share)))
    wanted = {token for token, p in enumerate(share) if p >= min_p * max(share)}
    assert kept(logits, min_p=min_p, temperature=temperature) == wanted


def test_the_likeliest_token_always_stays() -> None:
    """A nucleus smaller than the likeliest token is that token."""
    assert kept([0.0, 3.0, 1.0], top_p=1e-6) == {1}


@given(Logits, st.floats(0.2, 4.0))
@settings(deadline=None)
def test_temperature_divides_the_logits(logits: list[float], temperature: float) -> None:
    """softmax(logits / temperature), and every token stays."""
    found = filtered(torch.tensor([logits]), Sample(temperature=temperature)).softmax(-1)[0]
    assert found.tolist() == pytest.approx(shares(logits, temperature), abs=1e-5)


@given(Logits)
@settings(deadline=None)
def test_temperature_zero_is_the_likeliest_token(logits: list[float]) -> None:
    """Nothing but the best token can be drawn, whatever the seed."""
    best = best_first(logits)[0]
    assert kept(logits, temperature=0.0) == {best}
    assert int(draw(Sampler(Sample(temperature=0.0, seed=3), 1), torch.tensor([logits]))) == best


def draw(sampler: Sampler, logits: Tensor) -> Tensor:
    """The next token of each row."""
    return choose(logits, sampler.uniforms(1)[:, 0], sampler.sample)


def fits(drawn: Tensor, probabilities: Tensor) -> None:
    """No count is more than 4 standard errors off, and what has no chance is never drawn."""
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    share = probabilities.double()
    error = (share * (1 - share) / len(drawn)).sqrt()
    assert ((counts / len(drawn) - share).abs() <= 4 * error).all()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"top_k": 4, "top_p": 0.9, "temperature": 1.5},
    {"min_p": 0.3},
]


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_draws_are_as_frequent_as_they_are_likely(chosen: dict[str, Any]) -> None:
    """Many draws of one row, and one draw of each of many rows, have the right frequencies."""
    logits = torch.tensor([[-torch.inf, 0.3, -1.0, 2.0, 1.0, -torch.inf, 0.0, -torch.inf]])
    sample = Sample(seed=11, **chosen)
    wanted = filtered(logits, sample).softmax(-1)[0]
    one = Sampler(sample, 1)
    fits(torch.cat([draw(one, logits) for _ in range(3000)]), wanted)
    fits(draw(Sampler(sample, 3000), logits.expand(3000, -1)), wanted)


def test_rows_have_random_numbers_of_their_own() -> None:
    """A row draws the same alone and in a batch."""
    logits = torch.randn(4, 50)
    sample = Sample(seed=5)
    together, steps = Sampler(sample, 4), []
    for _ in range(6):
        steps.append(draw(together, logits))
    found = torch.stack(steps)
    for row in range(4):
        alone = Sampler(sample, 1, first=row)
        own = [int(draw(alone, logits[row : row + 1])) for _ in range(6)]
        assert found[:, row].tolist() == own
    assert len({tuple(column) for column in found.T.tolist()}) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 1.5}],
    ids=str,
)
def test_wrong_ways_to_draw_are_refused(wrong: dict[str, Any]) -> None:
    """A setting outside its range is a mistake that names it."""
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sample(**wrong)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "t5"])
def test_drawing_without_chance_is_greedy_translation(position: str) -> None:
    """At temperature 0 a translator draws what beam 1 finds, up to the same limits."""
    translator = toy_translator(position, beam=1)
    greedy = translator.translate(LINES)
    assert translator.sample(LINES, Sample(temperature=0.0, seed=7)) == greedy
    limits = [translator.decode.limit(len(line.split()) + 1, 99) for line in LINES]
    sizes = [len(line.split()) for line in greedy]
    assert any(size == limit - 1 for size, limit in zip(sizes, limits, strict=True))


@pytest.mark.parametrize("batch_tokens", [1, 12, 4096])
def test_a_seed_gives_the_same_text_in_any_batches(batch_tokens: int) -> None:
    """What is drawn for a sentence hangs on the seed and its number, not on its neighbours."""
    sample = Sample(seed=2)
    whole = toy_translator().sample(LINES, sample)
    assert toy_translator(batch_tokens=batch_tokens).sample(LINES, sample) == whole
    later = toy_translator().sample(LINES[3:], sample, first=3)
    assert later == whole[3:]
    assert whole[0] != whole[5]  # the same sentence in another place draws anew


def test_other_seeds_give_other_texts() -> None:
    """Ten seeds, ten sets of translations, none longer than its limit, no special token."""
    translator = toy_translator()
    drawn = [translator.sample(LINES, Sample(seed=seed)) for seed in range(10)]
    assert len({tuple(texts) for texts in drawn}) == 10
    for texts in drawn:
        for line, text in zip(LINES, texts, strict=True):
            limit = translator.decode.limit(len(line.split()) + 1, 99)
            assert len(text.split()) <= limit - 1
            assert set(text.split()) <= set("abcdefgh")
