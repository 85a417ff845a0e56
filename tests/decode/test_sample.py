"""Sampling: temperature, top-k, top-p, min-p, frequencies and seeds."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import toy_translator

from manyheads.decode.sample import Sample, Sampler, choose, filtered, pick
from manyheads.errors import UserError

# No ties, not even after rounding.
Logits = st.lists(
    st.integers(-96, 96).map(lambda number: number / 16), min_size=2, max_size=12, unique=True
)
LINES = ["a b c", "h", "", "b b b b b b", "c d e f g h a b", "a b c"]


def allowed(logits: list[float], **sample: Any) -> set[int]:
    """The tokens that can still be sampled."""
    remaining = filtered(torch.tensor([logits]), Sample(**sample))[0]
    return {token for token, logit in enumerate(remaining.tolist()) if logit > -math.inf}


def probabilities(logits: list[float], temperature: float = 1.0) -> list[float]:
    return (torch.tensor(logits, dtype=torch.double) / temperature).softmax(-1).tolist()


@given(
    Logits,
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.integers(0, 14),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
@settings(deadline=None)
def test_filters_keep_the_tokens_of_their_definition(
    logits: list[float], temperature: float, k: int, p: float, min_p: float
) -> None:
    """The k best; of them those before which the mass is below p; of them those above min_p."""
    best = sorted(range(len(logits)), key=lambda token: -logits[token])
    best = best[: k or None]
    if temperature == 0:
        expected = best[:1]
    else:
        inner = probabilities([logits[token] for token in best], temperature)
        before = [sum(inner[:rank]) for rank in range(len(best))]
        assume(all(abs(mass - p) > 1e-5 for mass in before))  # rounding decides at the border
        ratios = [share / inner[0] for share in inner]
        assume(all(abs(ratio - min_p) > 1e-5 for ratio in ratios[1:]))
        expected = [
            token
            for token, mass, ratio in zip(best, before, ratios, strict=True)
            if (mass < p or p == 1) and ratio >= min_p
        ]
    sample = {"temperature": temperature, "top_k": k, "top_p": p, "min_p": min_p}
    assert allowed(logits, **sample) == set(expected)


def test_boundaries_of_the_filters() -> None:
    """At the border itself: four equal tokens have exactly ¼ each."""
    for top_p, count in ((0.25, 1), (0.5, 2), (0.75, 3), (0.75 + 1e-6, 4), (1e-6, 1)):
        assert len(allowed([0.0] * 4, top_p=top_p)) == count  # a mass of top_p is enough
    assert allowed([0.0, 0.0, -1.0], min_p=1.0) == {0, 1}  # equal to the best stays
    assert allowed([2.0, 1.0, 0.0], top_k=3) == {0, 1, 2}


def test_pick_takes_the_first_token_above_the_uniform_number() -> None:
    """A token without probability is never picked, not even at 0 or just below 1."""
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.double)
    for uniform, token in ((0.0, 1), (0.249, 1), (0.25, 3), (0.999999, 3), (1 - 1e-16, 3)):
        assert int(pick(weights, torch.tensor([uniform], dtype=torch.double))) == token


@given(Logits, st.floats(0.2, 4.0))
@settings(deadline=None)
def test_temperature_divides_the_logits(logits: list[float], temperature: float) -> None:
    scaled = filtered(torch.tensor([logits]), Sample(temperature=temperature)).softmax(-1)[0]
    assert scaled.tolist() == pytest.approx(probabilities(logits, temperature), abs=1e-5)


def next_tokens(sampler: Sampler, logits: Tensor) -> Tensor:
    return choose(logits, sampler.uniforms(1)[:, 0], sampler.sample)


def test_frequencies_are_probabilities() -> None:
    """Within 4 standard errors, for many steps of one row and one step of many rows."""
    logits = torch.tensor([[-torch.inf, 0.3, -1.0, 2.0, 1.0, -torch.inf, 0.0, -torch.inf]])
    for changes in ({}, {"temperature": 3.0}, {"top_k": 4, "top_p": 0.9, "temperature": 1.5}):
        sample = Sample(seed=11, **changes)
        share = filtered(logits, sample).softmax(-1)[0].double()
        error = (share * (1 - share) / 3000).sqrt()
        steps = Sampler(sample, 1).uniforms(3000)[0]
        for tokens in (
            choose(logits.expand(3000, -1), steps, sample),
            next_tokens(Sampler(sample, 3000), logits.expand(3000, -1)),
        ):
            counts = torch.bincount(tokens, minlength=len(share)).double()
            assert ((counts / 3000 - share).abs() <= 4 * error).all()


def test_rows_have_their_own_random_numbers() -> None:
    """A row gets the same tokens in any batch, whether its numbers come at once or in steps."""
    sample, logits = Sample(seed=5), torch.randn(4, 50)
    batch = Sampler(sample, 4)
    steps = torch.stack([next_tokens(batch, logits) for _ in range(6)], 1)
    for row in range(4):
        uniforms = Sampler(sample, 1, first=row).uniforms(6)[0]
        assert torch.equal(choose(logits[row].expand(6, -1), uniforms, sample), steps[row])
    assert len({tuple(row) for row in steps.tolist()}) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 1.5}],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sample(**wrong)


@pytest.mark.parametrize("position", ["sinusoidal", "t5"])
def test_temperature_zero_is_greedy_translation(position: str) -> None:
    translator = toy_translator(position, beam=1)
    greedy = translator.translate(LINES)
    assert translator.sample(LINES, Sample(temperature=0.0, seed=7)) == greedy
    limits = [translator.decode.limit(len(line.split()) + 1, 99) for line in LINES]
    sizes = [len(line.split()) for line in greedy]
    assert any(size == limit - 1 for size, limit in zip(sizes, limits, strict=True))


def test_a_seed_gives_the_same_text_in_any_batch() -> None:
    sample = Sample(seed=2)
    texts = toy_translator().sample(LINES, sample)
    for batch_tokens in (1, 12):
        assert toy_translator(batch_tokens=batch_tokens).sample(LINES, sample) == texts
    assert toy_translator().sample(LINES[3:], sample, first=3) == texts[3:]
    assert texts[0] != texts[5]  # the same sentence at another position
    translator = toy_translator()
    others = [translator.sample(LINES, Sample(seed=seed)) for seed in range(10)]
    assert len({tuple(texts) for texts in others}) == 10
    for texts in others:
        for line, text in zip(LINES, texts, strict=True):
            assert len(text.split()) < translator.decode.limit(len(line.split()) + 1, 99)
            assert set(text.split()) <= set("abcdefgh")
