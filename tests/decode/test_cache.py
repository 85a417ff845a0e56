"""The cache of keys and values: it grows, is reordered and shrinks, and changes no result."""

import pytest
import torch
from torch import Tensor, nn
from toys import CELLS, CORES, POSITIONS, START, toy_model, toy_source

from manyheads.decode.kv_cache import ROOM, KVCache
from manyheads.models.gpt import GptConfig

HEADS, CHANNELS = 2, 3


def drawn(rows: int, positions: int) -> tuple[Tensor, Tensor]:
    """Random keys and values, of different width as a score may want them."""
    return torch.randn(rows, HEADS, positions, CHANNELS), torch.randn(rows, HEADS, positions, 5)


def grow(cache: KVCache, owner: nn.Module, rows: int, *sizes: int) -> tuple[Tensor, Tensor]:
    """Extend by parts of these sizes; gives all that was put in, side by side."""
    parts = [drawn(rows, size) for size in sizes]
    for keys, values in parts:
        cache.extend(owner, keys, values)
        cache.advance(keys.shape[2])
    all_keys, all_values = (torch.cat(side, dim=2) for side in zip(*parts, strict=True))
    return all_keys, all_values


@pytest.mark.parametrize("sizes", [(1,) * (3 * ROOM), (5, 1, 7, 40, 1, 1), (0, 2), (100,)])
def test_what_was_put_in_comes_out(sizes: tuple[int, ...]) -> None:
    """After every extension all positions so far are there in order, far beyond the room."""
    cache, owner = KVCache(), nn.Identity()
    keys, values = drawn(4, 0)
    for size in sizes:
        new_keys, new_values = drawn(4, size)
        keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
        found_keys, found_values = cache.extend(owner, new_keys, new_values)
        cache.advance(size)
        assert torch.equal(found_keys, keys)
        assert torch.equal(found_values, values)
        assert cache.length == keys.shape[2] == found_keys.shape[2]


def test_every_module_has_its_own() -> None:
    """Two layers extend by different keys at the same length, and do not mix."""
    cache = KVCache()
    layers = [nn.Identity(), nn.Identity()]
    put = []
    for _ in range(3):
        new = [drawn(2, 1) for _ in layers]
        put.append(new)
        found = [cache.extend(layer, *pair) for layer, pair in zip(layers, new, strict=True)]
        cache.advance(1)
        for number, (keys, values) in enumerate(found):
            assert torch.equal(keys, torch.cat([step[number][0] for step in put], 2))
            assert torch.equal(values, torch.cat([step[number][1] for step in put], 2))


@pytest.mark.parametrize(
    "rows", [[3, 2, 1, 0], [1, 1, 1, 1], [2, 0, 2, 3], [3], [0, 1, 2, 3, 0, 1]]
)
def test_rows_may_be_kept_repeated_and_dropped(rows: list[int]) -> None:
    """Reordering picks rows like an index, also more or fewer than there were."""
    cache, owner = KVCache(), nn.Identity()
    keys, values = grow(cache, owner, 4, 3, 1)
    cache.reorder(torch.tensor(rows))
    new_keys, new_values = drawn(len(rows), 2)
    found_keys, found_values = cache.extend(owner, new_keys, new_values)
    assert torch.equal(found_keys, torch.cat([keys[rows], new_keys], 2))
    assert torch.equal(found_values, torch.cat([values[rows], new_values], 2))


def test_a_repeated_row_is_a_copy() -> None:
    """Two hypotheses with one parent go their own ways afterwards."""
    cache, owner = KVCache(), nn.Identity()
    grow(cache, owner, 2, 2)
    cache.reorder(torch.tensor([0, 0]))
    keys, values = drawn(2, 1)
    found, _ = cache.extend(owner, keys, values)
    assert torch.equal(found[0, :, :2], found[1, :, :2])
    assert not torch.equal(found[0, :, 2], found[1, :, 2])


def test_the_memory_is_computed_once() -> None:
    """Keys and values of the memory are asked for once a module; only sentences are dropped."""
    cache, owner, other = KVCache(), nn.Identity(), nn.Identity()
    pair, calls = drawn(3, 4), []

    def compute() -> tuple[Tensor, Tensor]:
        calls.append(1)
        return pair

    for _ in range(3):
        assert cache.once(owner, compute)[0] is pair[0]
    assert len(calls) == 1
    cache.once(other, compute)
    assert len(calls) == 2
    cache.reorder(torch.tensor([2, 2, 2, 2, 2, 2]))
    assert torch.equal(cache.once(owner, compute)[0], pair[0])
    cache.keep_sentences(torch.tensor([2, 0]))
    for number in (0, 1):
        assert torch.equal(cache.once(owner, compute)[number], pair[number][[2, 0]])
        assert torch.equal(cache.once(other, compute)[number], pair[number][[2, 0]])
    assert len(calls) == 2


def test_keeping_sentences_leaves_hypotheses_alone() -> None:
    """Self-attention's rows are hypotheses: they are dropped by reordering, not by sentence."""
    cache, owner = KVCache(), nn.Identity()
    keys, _ = grow(cache, owner, 4, 2)
    cache.keep_sentences(torch.tensor([1]))
    new_keys, new_values = drawn(4, 1)
    found, _ = cache.extend(owner, new_keys, new_values)
    assert torch.equal(found, torch.cat([keys, new_keys], 2))


def test_bytes_are_counted() -> None:
    """What the cache holds is at least what was put in, and at most the room beyond it."""
    cache, owner = KVCache(), nn.Identity()
    assert cache.bytes() == 0
    position = 4 * 2 * HEADS * (CHANNELS + 5)  # 4 bytes, two rows
    for size, exactly in ((6, True), (1, False), (30, False)):
        grow(cache, owner, 2, size)
        assert cache.bytes() >= cache.length * position
        assert cache.bytes() <= (cache.length + max(ROOM, cache.length)) * position
        assert not exactly or cache.bytes() == cache.length * position
    before = cache.bytes()
    memory = drawn(3, 7)
    cache.once(nn.Identity(), lambda: memory)
    assert cache.bytes() - before == 4 * 3 * 7 * HEADS * (CHANNELS + 5)
    cache.keep_sentences(torch.tensor([0]))
    assert cache.bytes() - before == 4 * 1 * 7 * HEADS * (CHANNELS + 5)


@pytest.mark.parametrize(("position", "core"), CELLS)
def test_reordered_steps_are_a_full_pass(position: str, core: str) -> None:
    """Chunk, reorder with repeats, steps, drop a sentence, step: the same as full passes."""
    model, (source, real) = toy_model(position, core), toy_source(6, 3)
    beams, cache = 3, KVCache()
    homes = torch.tensor([0, 0, 0, 1, 1, 1])
    target = torch.cat([torch.full((6, 1), START), torch.randint(7, 15, (6, 2))], dim=1)
    with torch.no_grad():
        memory = model.encode(source, real)
        found = model.logits(model.decode(target, memory, cache=cache))
        torch.testing.assert_close(found, model(source[homes], target, real[homes]))
        for rows in ([2, 0, 0, 4, 4, 4], [0, 1, 2, 5, 4, 3], [1, 1, 0, 3, 3, 5]):
            cache.reorder(torch.tensor(rows))
            new = torch.randint(7, 15, (6, 1))
            target = torch.cat([target[rows], new], dim=1)
            found = model.logits(model.decode(new, memory, cache=cache))
            wanted = model(source[homes], target, real[homes])[:, -1:]
            torch.testing.assert_close(found, wanted)
        kept = torch.tensor([1])
        cache.reorder(torch.arange(beams, 2 * beams))
        cache.keep_sentences(kept)
        memory = model.encode(source[kept], real[kept])
        new = torch.randint(7, 15, (beams, 1))
        target = torch.cat([target[beams:], new], dim=1)
        found = model.logits(model.decode(new, memory, cache=cache))
        wanted = model(source[homes[beams:]], target, real[homes[beams:]])[:, -1:]
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("position", "core"), CELLS)
def test_a_language_model_goes_on_from_its_cache(position: str, core: str) -> None:
    """A cached language model after a reorder, far beyond the room, equals a full pass."""
    parts = {"position": POSITIONS[position], "core": CORES[core], "dropout": 0.0}
    sizes = {"vocab_size": 9, "dim": 8, "layers": 1, "heads": 2, "max_length": 4 * ROOM}
    model = GptConfig(**sizes, **parts).build().double().eval()
    cache, tokens = KVCache(), torch.randint(9, (3, 2))
    with torch.no_grad():
        model(tokens, cache=cache)
        for size in (1, 1, ROOM, 1, ROOM, 1):
            rows = torch.randint(3, (3,))
            cache.reorder(rows)
            new = torch.randint(9, (3, size))
            tokens = torch.cat([tokens[rows], new], dim=1)
            found = model(new, cache=cache)
            torch.testing.assert_close(found, model(tokens)[:, -size:])
    assert cache.length == tokens.shape[1]
