"""The growing cache: it grows, is reordered and shrinks, and changes no result."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CELLS, CORES, POSITIONS, START, toy_model, toy_source

from manyheads.baselines.rnn import RnnConfig
from manyheads.decode import kv_cache
from manyheads.decode.decoder import GptSession, Seq2SeqSession
from manyheads.decode.kv_cache import GROWTH, KVCache
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.exact_attention import Dense, Fused
from manyheads.nn.experts import Experts
from manyheads.nn.positions import Alibi, Buckets, Learned, NoPosition, Rotary, Shaw, Sinusoidal
from manyheads.nn.relative import Relative

HEADS, CHANNELS = 2, 3
SENTENCES, BEAMS = 4, 3
SCHEMES = [
    *(NoPosition(), Sinusoidal(), Learned(), Rotary(), Shaw(), Buckets(), Alibi(), Relative()),
]


def random_kv(rows: int, positions: int) -> tuple[Tensor, Tensor]:
    """Random keys and values, of different width as a score may want them."""
    return torch.randn(rows, HEADS, positions, CHANNELS), torch.randn(rows, HEADS, positions, 5)


@pytest.mark.parametrize("sizes", [(1,) * (3 * GROWTH), (5, 1, 7, 40, 1, 1), (0, 2), (100,)])
def test_what_is_appended_comes_out_in_order(sizes: tuple[int, ...]) -> None:
    """Of two modules at once, far beyond the first buffer."""
    cache, modules = KVCache(), [nn.Identity(), nn.Identity()]
    wanted = [random_kv(4, 0) for _ in modules]
    for size in sizes:
        for number, module in enumerate(modules):
            new = random_kv(4, size)
            keys, values = (torch.cat(pair, 2) for pair in zip(wanted[number], new, strict=True))
            wanted[number] = keys, values
            found = cache.append(module, *new)
            assert torch.equal(found[0], keys)
            assert torch.equal(found[1], values)
        cache.advance(size)
        assert cache.length == wanted[0][0].shape[2]


@pytest.mark.parametrize("rows", [[3, 2, 1, 0], [1, 1, 1, 1], [2, 0, 2, 3], [3], [0, 1, 2, 3, 0]])
def test_rows_are_selected_by_an_index(rows: list[int]) -> None:
    """A row that is kept twice is two rows from then on."""
    cache, module, (keys, values) = KVCache(), nn.Identity(), random_kv(4, 4)
    cache.append(module, keys, values)
    cache.advance(4)
    cache.select_rows(torch.tensor(rows))
    new = random_kv(len(rows), 2)
    found = cache.append(module, *new)
    assert torch.equal(found[0], torch.cat([keys[rows], new[0]], 2))
    assert torch.equal(found[1], torch.cat([values[rows], new[1]], 2))


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
        found = cache.cross_kv(module, project)
        assert all(torch.equal(x, y[[2, 0]]) for x, y in zip(found, pair, strict=True))
    assert len(calls) == 2


def test_bytes_are_counted() -> None:
    cache, module, position = KVCache(), nn.Identity(), 4 * 2 * HEADS * (CHANNELS + 5)
    assert cache.bytes() == 0
    for size in (6, 1, 30):
        cache.append(module, *random_kv(2, size))
        cache.advance(size)
        assert cache.bytes() == cache.length * position
    memory = random_kv(3, 7)
    cache.cross_kv(nn.Identity(), lambda: memory)
    assert cache.bytes() == cache.length * position + 7 * 3 * position // 2


def steps(sentences: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sentences to keep and parents of each beam: all at first, later some have left."""
    random = torch.Generator().manual_seed(2)
    found, left = list[tuple[Tensor, Tensor]](), sentences
    for step in range(count):
        kept = torch.arange(left) if step % 3 != 1 or left < 3 else torch.arange(left)[1:]
        left = len(kept)
        found.append((kept, torch.randint(BEAMS, (left, BEAMS), generator=random)))
    return found


def gpt(**changes: Any) -> Gpt:
    torch.manual_seed(1)
    sizes = {"vocab_size": 30, "dim": 16, "layers": 2, "heads": 4, "max_length": 64}
    return GptConfig(**{**sizes, **changes}).build().double().eval()


@torch.no_grad()
def follow(model: Gpt, cache: KVCache | None, prompt: int, count: int = 6) -> list[Tensor]:
    """Logits after each step of a random search, by a cache or by full passes."""
    random = torch.Generator().manual_seed(3)
    texts = torch.randint(30, (SENTENCES, 1, prompt), generator=random)
    if cache is not None:
        model(texts[:, 0], cache=cache)
    found = []
    for number, (kept, parents) in enumerate(steps(SENTENCES, count)):
        texts = texts[kept].expand(-1, BEAMS, -1) if not number else texts[kept]
        texts = texts.gather(1, parents[..., None].expand(-1, -1, texts.shape[2]))
        new = torch.randint(30, parents.shape, generator=random)
        texts = torch.cat([texts, new[..., None]], 2)
        if cache is None:
            logits = model(texts.flatten(0, 1))[:, -1].view(*parents.shape, -1)
        else:
            cache.keep_sentences(kept)
            cache.reorder(parents)
            logits = model(new, cache=cache)
        found.append(logits)
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("prompt", [1, 5])
@pytest.mark.parametrize("position", SCHEMES, ids=lambda one: one.kind)
def test_hypotheses_read_their_own_past(position: Any, prompt: int, shared: bool) -> None:
    """Whether their keys and values stay where they are or are copied."""
    model = gpt(position=position, attention=Dense())
    found, wanted = follow(model, KVCache(shared=shared), prompt), follow(model, None, prompt)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2}, {"feedforward": Experts(experts=2)}])
@pytest.mark.parametrize("shared", [False, True])
def test_fused_attention_shared_heads_and_experts(changes: dict[str, Any], shared: bool) -> None:
    model = gpt(**changes)
    found, wanted = follow(model, KVCache(shared=shared), 3), follow(model, None, 3)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("core", [Dense(), Fused()], ids=lambda one: one.kind)
@pytest.mark.parametrize("position", SCHEMES, ids=lambda one: one.kind)
def test_unused_slots_are_given_up(
    position: Any, core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (position.kind, core.kind) == ("shaw", "fused"):
        return
    monkeypatch.setattr(kv_cache, "UNUSED", 3)
    model, cache, filled = gpt(position=position, attention=core), KVCache(shared=True), list[int]()
    advance = cache.advance
    monkeypatch.setattr(cache, "advance", lambda: (advance(), filled.append(cache._slots)))
    for one, other in zip(follow(model, cache, 4, 24), follow(model, None, 4, 24), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert any(after < before for before, after in pairwise(filled))
    assert filled[-1] < 4 + 24 * BEAMS


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


@torch.no_grad()
def test_positions_that_were_cut_are_read_again() -> None:
    model, cache = gpt(), KVCache()
    text = torch.randint(30, (2, 6))
    model(text.flip(1), cache=cache)
    cache.truncate(0)
    model(text[:, :4], cache=cache)
    model(text[:, :2], cache=cache)
    cache.truncate(4)
    found = model(text[:, 4:], cache=cache)
    torch.testing.assert_close(found, model(text)[:, 4:], rtol=0, atol=1e-12)


def test_only_exact_attention_without_experts_shares() -> None:
    prompt, source = torch.zeros(1, 1, dtype=torch.long), toy_source(2)
    assert GptSession(gpt(), prompt).cache.shared
    assert not GptSession(gpt(feedforward=Experts()), prompt).cache.shared
    rnn = RnnConfig(vocab_size=30, dim=16).build()
    assert not Seq2SeqSession(rnn, *source).cache.shared
    assert Seq2SeqSession(toy_model(), *source).cache.shared


@pytest.mark.parametrize(("position", "core"), CELLS)
def test_steps_of_a_session_are_a_full_pass(position: str, core: str) -> None:
    """Reordered with repeats, and after a sentence has left."""
    model, (source, real) = toy_model(position, core), toy_source(6, 3)
    with torch.no_grad():
        session = Seq2SeqSession(model, source, real)
        target = torch.full((2, 1, 1), START)
        session.step(target[:, :, 0].expand(-1, 3))
        target = target.expand(-1, 3, -1)
        for rows in ([[2, 0, 0], [1, 1, 1]], [[0, 1, 2], [2, 1, 0]], [[1, 1, 0], [0, 0, 2]]):
            parents = torch.tensor(rows)[-len(target) :]
            session.reorder(parents)
            new = torch.randint(7, 15, parents.shape)
            target = target.gather(1, parents[..., None].expand_as(target))
            target = torch.cat([target, new[..., None]], dim=2)
            found = session.step(new)
            wanted = model(
                source.repeat_interleave(3, 0), target.flatten(0, 1), real.repeat_interleave(3, 0)
            )
            torch.testing.assert_close(found.flatten(0, 1), wanted[:, -1])
            if rows[0] == [0, 1, 2]:
                source, real, target = source[1:], real[1:], target[1:]
                session.keep_sentences(torch.tensor([1]))


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
            found = model(new, cache=cache)
            torch.testing.assert_close(found, model(tokens)[:, -size:])
    assert cache.length == tokens.shape[1]
