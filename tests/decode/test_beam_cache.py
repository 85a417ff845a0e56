"""A cache whose hypotheses never move gives what one gives that copies them at every step."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode import beam_cache
from manyheads.decode.beam_cache import BeamCache, cache_for
from manyheads.decode.kv_cache import KVCache
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.exact_attention import Dense, Fused
from manyheads.nn.feedforward import Plain
from manyheads.nn.positions import Alibi, Buckets, Learned, NoPosition, Rotary, Shaw, Sinusoidal
from manyheads.nn.relative import Relative

SCHEMES = [
    *(NoPosition(), Sinusoidal(), Learned(), Rotary(), Shaw(), Buckets(), Alibi(), Relative()),
]
SENTENCES, BEAMS = 4, 3


def gpt(**changes: Any) -> Gpt:
    torch.manual_seed(1)
    sizes = {"vocab_size": 30, "dim": 16, "layers": 2, "heads": 4, "max_length": 32}
    return GptConfig(**{**sizes, **changes}).build().double().eval()


def choices(sentences: int, steps: int) -> list[torch.Tensor]:
    """Rows to go on from: all beams of each sentence from its own, some sentences gone."""
    draw = torch.Generator().manual_seed(2)
    rows, left = [torch.arange(sentences).repeat_interleave(BEAMS)], sentences
    for step in range(steps):
        kept = torch.arange(left) if step % 3 or left < 3 else torch.arange(left)[1:]
        parents = torch.randint(BEAMS, (len(kept), BEAMS), generator=draw)
        rows.append((kept[:, None] * BEAMS + parents).flatten())
        left = len(kept)
    return rows


@torch.no_grad()
def logits(model: Gpt, cache: KVCache, prompt: int, steps: int = 6) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    found = [model(torch.randint(30, (SENTENCES, prompt), generator=draw), cache=cache)[:, -1]]
    for rows in choices(SENTENCES, steps):
        cache.reorder(rows)
        tokens = torch.randint(30, (len(rows), 1), generator=draw)
        found.append(model(tokens, cache=cache)[:, -1])
    return found


@pytest.mark.parametrize("prompt", [1, 5])
@pytest.mark.parametrize("position", SCHEMES, ids=lambda one: one.kind)
def test_hypotheses_that_stay_are_hypotheses_that_move(position: Any, prompt: int) -> None:
    model = gpt(position=position, core=Dense())
    stay, move = logits(model, BeamCache(), prompt), logits(model, KVCache(), prompt)
    for one, other in zip(stay, move, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert (stay[1][0] - stay[1][1]).abs().max() > 1e-3  # two beams of a sentence differ


@pytest.mark.parametrize("core", [Dense(), Fused()], ids=lambda one: one.kind)
@pytest.mark.parametrize("position", SCHEMES, ids=lambda one: one.kind)
def test_slots_that_are_nobodys_are_given_up(
    position: Any, core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a sentence that leaves, and what is seen is the same."""
    if (position.kind, core.kind) == ("shaw", "fused"):
        return
    monkeypatch.setattr(beam_cache, "FREED", 3)
    model, cache, held = gpt(position=position, core=core), BeamCache(), []
    advance = cache.advance
    monkeypatch.setattr(cache, "advance", lambda n: (advance(n), held.append(cache._slots)))
    stay, move = logits(model, cache, 4, 24), logits(model, KVCache(), 4, 24)
    for one, other in zip(stay, move, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert any(after < before for before, after in pairwise(held))
    assert held[-1] < 4 + 25 * BEAMS


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 2}, {"feedforward": Plain(activation="gelu")}]
)
def test_with_the_fused_core_and_shared_heads(changes: dict[str, Any]) -> None:
    model = gpt(**changes)
    stay, move = logits(model, BeamCache(), 3), logits(model, KVCache(), 3)
    for one, other in zip(stay, move, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_is_cut_is_read_again() -> None:
    model, cache = gpt(), BeamCache()
    text = torch.randint(30, (2, 6))
    model(text.flip(1), cache=cache)
    cache.cut(0)
    model(text[:, :4], cache=cache)
    model(text[:, :2], cache=cache)
    cache.cut(4)
    found = model(text[:, 4:], cache=cache)
    torch.testing.assert_close(found, model(text)[:, 4:], rtol=0, atol=1e-12)


def test_a_step_copies_no_keys_unless_a_sentence_leaves() -> None:
    model, cache = gpt(), BeamCache()
    with torch.no_grad():
        model(torch.zeros(SENTENCES, 2, dtype=torch.long), cache=cache)
        every = torch.arange(SENTENCES * BEAMS)
        cache.reorder(every // BEAMS)
        model(torch.zeros(len(every), 1, dtype=torch.long), cache=cache)
        before = [keys.data_ptr() for _, keys, _ in cache.held()]
        cache.reorder(every.flip(0).view(SENTENCES, BEAMS).flip(0).flatten())
        assert [keys.data_ptr() for _, keys, _ in cache.held()] == before
        cache.reorder(every[BEAMS:])
        assert all(len(keys) == SENTENCES - 1 for _, keys, _ in cache.held())


def test_what_remembers_something_else_keeps_the_other_cache() -> None:
    assert isinstance(cache_for(gpt()), BeamCache)
    rnn = RnnConfig(vocab_size=30, dim=16).build()
    assert type(cache_for(rnn)) is KVCache
