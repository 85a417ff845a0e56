"""The growing cache: it grows, is reordered and shrinks, and changes no result."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CELLS, CORES, POSITIONS, toy_model, toy_source

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode.decoder import after_prompts, after_sources
from manyheads.decode.kv_cache import GROWTH, KVCache
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.attention import Dense, Fused
from manyheads.nn.experts import Experts
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    Relative,
    Rotary,
    Shaw,
    Sinusoidal,
)

HEADS, CHANNELS = 2, 3
SENTENCES, BEAMS = 4, 3
SCHEMES = [NoPosition(), Sinusoidal(), Learned(), Rotary(), Shaw(), Buckets(), Alibi(), Relative()]
MODELS: dict[str, dict[str, Any]] = {
    **{position.kind: {"position": position, "attention": Dense()} for position in SCHEMES},
    "fused": {"attention": Fused()},
    "kv_heads": {"kv_heads": 2},
    "experts": {"feedforward": Experts(experts=2)},
}


def random_kv(rows: int, positions: int) -> tuple[Tensor, Tensor]:
    """Random keys and values, of different width as some scores need them."""
    return torch.randn(rows, HEADS, positions, CHANNELS), torch.randn(rows, HEADS, positions, 5)


@pytest.mark.parametrize("sizes", [(1,) * (3 * GROWTH), (5, 1, 7, 40, 1, 1), (0, 2), (100,)])
def test_append_returns_all_positions_in_order(sizes: tuple[int, ...]) -> None:
    """For two modules at once, far beyond the first buffer; bytes count filled slots only."""
    cache, modules = KVCache(), [nn.Identity(), nn.Identity()]
    expected = [random_kv(4, 0) for _ in modules]
    for size in sizes:
        for number, module in enumerate(modules):
            new = random_kv(4, size)
            keys, values = (torch.cat(pair, 2) for pair in zip(expected[number], new, strict=True))
            expected[number] = keys, values
            all_keys, all_values = cache.append(module, *new)
            assert torch.equal(all_keys, keys)
            assert torch.equal(all_values, values)
        cache.advance(size)
        assert cache.length == expected[0][0].shape[2]
        assert cache.bytes() == cache.length * 2 * 4 * 4 * HEADS * (CHANNELS + 5)


@pytest.mark.parametrize("rows", [[3, 2, 1, 0], [1, 1, 1, 1], [3], [0, 1, 2, 3, 0]])
def test_select_rows(rows: list[int]) -> None:
    """A row that is kept twice is two rows from then on."""
    cache, module, (keys, values) = KVCache(), nn.Identity(), random_kv(4, 4)
    cache.append(module, keys, values)
    cache.advance(4)
    cache.select_rows(torch.tensor(rows))
    new = random_kv(len(rows), 2)
    all_keys, all_values = cache.append(module, *new)
    assert torch.equal(all_keys, torch.cat([keys[rows], new[0]], 2))
    assert torch.equal(all_values, torch.cat([values[rows], new[1]], 2))


@pytest.mark.parametrize("shared", [False, True])
def test_cross_attention_is_projected_once(shared: bool) -> None:
    """Reordering hypotheses does not touch it; sentences may leave."""
    cache, modules = KVCache(shared=shared), [nn.Identity(), nn.Identity()]
    pair, calls = random_kv(3, 4), list[int]()

    def project() -> tuple[Tensor, Tensor]:
        calls.append(1)
        return pair

    for module in modules * 2:
        assert cache.cross_kv(module, project)[0] is pair[0]
    cache.reorder(torch.zeros(3, 2, dtype=torch.long))
    assert torch.equal(cache.cross_kv(modules[0], project)[0], pair[0])
    cache.keep_sentences(torch.tensor([2, 0]))
    for module in modules:
        selected = cache.cross_kv(module, project)
        assert all(torch.equal(x, y[[2, 0]]) for x, y in zip(selected, pair, strict=True))
    assert len(calls) == 2


def gpt(**changes: Any) -> Gpt:
    torch.manual_seed(1)
    sizes = {"vocab_size": 30, "dim": 16, "layers": 2, "heads": 4, "max_length": 64}
    return GptConfig(**{**sizes, **changes}).build().double().eval()


@torch.no_grad()
def follow(model: Gpt, cache: KVCache | None, prompt: int, steps: int = 6) -> list[Tensor]:
    """Logits of each step of a random search, by a cache or by full passes; sentences leave."""
    random = torch.Generator().manual_seed(3)
    texts = torch.randint(30, (SENTENCES, 1, prompt), generator=random)
    if cache is not None:
        model(texts[:, 0], cache=cache)
    results, left = [], SENTENCES
    for step in range(steps):
        sentences = torch.arange(left)[1 if step % 3 == 1 and left > 2 else 0 :]
        left = len(sentences)
        parents = torch.randint(BEAMS, (left, BEAMS), generator=random)
        texts = texts[sentences].expand(-1, BEAMS, -1)
        texts = texts.gather(1, parents[..., None].expand(-1, -1, texts.shape[2]))
        new = torch.randint(30, parents.shape, generator=random)
        texts = torch.cat([texts, new[..., None]], 2)
        if cache is None:
            logits = model(texts.flatten(0, 1))[:, -1].view(*parents.shape, -1)
        else:
            cache.keep_sentences(sentences)
            cache.reorder(parents)
            logits = model(new, cache=cache)
        results.append(logits)
    return results


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_hypotheses_attend_to_their_past(changes: dict[str, Any], shared: bool) -> None:
    """Whether their keys and values stay in their slots or are copied."""
    model = gpt(**changes)
    for prompt in (1, 5):
        cached, full = follow(model, KVCache(shared=shared), prompt), follow(model, None, prompt)
        torch.testing.assert_close(cached, full, rtol=0, atol=1e-12)


def test_a_step_copies_no_keys_unless_a_sentence_leaves() -> None:
    model, cache = gpt(), KVCache(shared=True)
    parents = torch.zeros(SENTENCES, BEAMS, dtype=torch.long)
    with torch.no_grad():
        model(torch.zeros(SENTENCES, 2, dtype=torch.long), cache=cache)
        cache.reorder(parents)
        model(parents, cache=cache)
        before = [keys.data_ptr() for _, keys, _ in cache.items()]
        cache.reorder(parents + 1)
        assert [keys.data_ptr() for _, keys, _ in cache.items()] == before
        cache.keep_sentences(torch.arange(1, SENTENCES))
        cache.reorder(parents[1:])
        assert all(len(keys) == SENTENCES - 1 for _, keys, _ in cache.items())


def test_only_exact_attention_without_experts_shares_slots() -> None:
    prompt, source = torch.zeros(1, 1, dtype=torch.long), toy_source(2)
    assert after_prompts(gpt(), prompt).cache.shared
    assert not after_prompts(gpt(feedforward=Experts()), prompt).cache.shared
    rnn = RnnConfig(vocab_size=30, dim=16).build()
    assert not after_sources(rnn, *source).cache.shared
    assert after_sources(toy_model(), *source).cache.shared


@pytest.mark.parametrize(("position", "core"), CELLS)
def test_a_language_model_continues_from_its_cache(position: str, core: str) -> None:
    """After rows were selected, far beyond the first buffer."""
    parts = {"position": POSITIONS[position], "attention": CORES[core], "dropout": 0.0}
    sizes = {"vocab_size": 9, "dim": 8, "layers": 1, "heads": 2, "max_length": 4 * GROWTH}
    model = GptConfig(**sizes, **parts).build().double().eval()
    cache, tokens = KVCache(), torch.randint(9, (3, 2))
    with torch.no_grad():
        model(tokens, cache=cache)
        for size in (1, 1, GROWTH, 1, GROWTH, 1):
            rows = torch.randint(3, (3,))
            cache.select_rows(rows)
            new = torch.randint(9, (3, size))
            tokens = torch.cat([tokens[rows], new], dim=1)
            torch.testing.assert_close(model(new, cache=cache), model(tokens)[:, -size:])
