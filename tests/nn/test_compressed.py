"""Memory-compressed attention: equal to loops over blocks, and no look into what is to come."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.decode.kv_cache import KVCache
from manyheads.errors import UserError
from manyheads.models.capture import capture
from manyheads.models.gpt import Gpt, GptConfig
from manyheads.nn.compressed import CompressedCore, MemoryCompressed
from manyheads.nn.exact_attention import AttentionSizes
from manyheads.nn.local import Local
from manyheads.nn.masks import AttentionMask, Rule, both, causal, full, make_mask, window
from manyheads.nn.positions import (
    Alibi,
    Buckets,
    Learned,
    NoPosition,
    Position,
    Rotary,
    Shaw,
    Sinusoidal,
)
from manyheads.nn.relative import PositionConfig, Relative
from manyheads.nn.scores import Additive, Bilinear, ScaledDot, Score, ScoreConfig

HEADS, KV, CHANNELS = 4, 2, 5
rules = pytest.mark.parametrize("rule", [full, causal], ids=lambda rule: rule.kind)


def core_of(stride: int = 3, key_dim: int = CHANNELS, *, past: bool = False) -> CompressedCore:
    """With kernels far from the mean, so that every number of them matters."""
    torch.manual_seed(7)
    sizes = AttentionSizes(
        heads=HEADS,
        kv_heads=KV,
        head_dim=CHANNELS,
        key_dim=key_dim,
        max_length=64,
        causal=past,
    )
    core = MemoryCompressed(stride, layers="M").build(sizes)
    assert isinstance(core, CompressedCore)
    with torch.no_grad():
        for kernel in core.parameters():
            kernel.normal_(std=0.5)
    return core.double()


def draw(length: int, queries: int | None = None, key_dim: int = CHANNELS) -> list[Tensor]:
    sizes = ((HEADS, queries or length, CHANNELS), (KV, length, key_dim), (KV, length, CHANNELS))
    return [torch.randn(2, *size, dtype=torch.float64) for size in sizes]


def score_of(config: ScoreConfig) -> Score:
    return config.build(HEADS, CHANNELS).double()


SCALED = score_of(ScaledDot())


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def by_hand(
    core: CompressedCore, q: Tensor, k: Tensor, v: Tensor, rule: Rule, real: Tensor, score: Score
) -> Tensor:
    """One row, head, query and block after the other."""
    out = torch.zeros_like(q)
    length, stride = k.shape[2], core.stride
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            keys, values, ends, there = [], [], [], []
            for begin in range(0, length, stride):
                places = [p for p in range(begin, min(begin + stride, length)) if real[row, p]]
                key, value = torch.zeros(k.shape[3]).double(), torch.zeros(v.shape[3]).double()
                for p in places:
                    key = key + core.keys[shared, :, :, p - begin] @ k[row, shared, p]
                    value = value + core.values[shared, :, :, p - begin] @ v[row, shared, p]
                keys.append(key)
                values.append(value)
                ends.append(begin + stride - 1)
                there.append(bool(places))
            # A score may have weights for each head: it gets all heads, and one is read.
            met = score(
                q[row : row + 1], torch.stack(keys).expand(1, q.shape[1], len(keys), -1).clone()
            )[0, head]
            for i in range(q.shape[2]):
                seen = [
                    j
                    for j, end in enumerate(ends)
                    if there[j] and (rule.kind == "full" or end <= i)
                ]
                if seen:
                    weights = torch.stack([met[i, j] for j in seen]).softmax(0)
                    mixed = [w * values[j] for w, j in zip(weights, seen, strict=True)]
                    out[row, head, i] = torch.stack(mixed).sum(0)
    return out


# --- what it computes ---


@rules
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 6, 7])
def test_it_is_a_loop_over_blocks(rule: Rule, stride: int, length: int) -> None:
    core, (q, k, v) = core_of(stride, past=rule.is_causal), draw(length)
    real = torch.arange(length) < torch.tensor([[length], [max(1, length - 3)]])
    for given in (None, real):
        found = core(q, k, v, make_mask(rule, length, padding_mask=given), SCALED, Position())
        every = torch.ones_like(real) if given is None else given
        agree(found, by_hand(core, q, k, v, rule, every, SCALED))


@pytest.mark.parametrize(
    "score", [Bilinear(key_size=3), Additive(width=4, key_size=3)], ids=lambda score: score.kind
)
def test_any_score_meets_the_blocks(score: ScoreConfig) -> None:
    core, (q, k, v), built = core_of(key_dim=3), draw(7, key_dim=3), score_of(score)
    core.check(built, Position())
    found = core(q, k, v, make_mask(causal, 7), built, Position())
    agree(found, by_hand(core, q, k, v, causal, torch.ones(2, 7).bool(), built))


def test_a_stride_of_one_with_no_kernel_is_attention() -> None:
    core, (q, k, v) = core_of(1), draw(9)
    with torch.no_grad():
        for kernel in core.parameters():
            kernel.copy_(torch.eye(CHANNELS)[None, :, :, None].expand_as(kernel))
    found = core(q, k, v, make_mask(causal, 9), SCALED, Position())
    keys, values = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
    agree(found, expected)


@rules
def test_the_weights_are_those_of_the_blocks(rule: Rule) -> None:
    core, (q, k, v) = core_of(), draw(8)
    sight = make_mask(rule, 8)
    weights = core.weights(q, k, sight, SCALED, Position())
    assert weights.shape == (2, HEADS, 8, 3)
    blocks = core._compress(v, core.values, sight).repeat_interleave(HEADS // KV, 1)
    agree(weights @ blocks, core(q, k, v, sight, SCALED, Position()))
    total = weights.sum(-1)
    seeing = torch.arange(8) >= (0 if rule.kind == "full" else 2)
    agree(total, seeing.double().expand_as(total))


def test_the_full_rule_sees_every_block() -> None:
    core, (q, k, v) = core_of(), draw(8)
    for part in (k, v):
        part.requires_grad_()
    out = core(q, k, v, make_mask(full, 8), SCALED, Position())
    for query in range(8):
        for grad in torch.autograd.grad(out[:, :, query].sum(), (k, v), retain_graph=True):
            assert grad.abs().sum((1, 3)).min() > 0


def test_a_query_that_sees_no_block_gets_zeros_and_gives_no_gradient() -> None:
    core, parts = core_of(), [x.requires_grad_() for x in draw(5)]
    real = torch.tensor([[True] * 5, [False] * 5])
    sight = make_mask(causal, 5, padding_mask=real)
    out = core(*parts, sight, SCALED, Position())
    assert not out[0, :, :2].any()
    assert not out[1].any()
    assert out[0, :, 2:].all()
    out.square().sum().backward()
    for part in parts:
        assert part.grad is not None
        assert part.grad.isfinite().all()
        assert not part.grad[1].any()
    assert not parts[0].grad[0, :, :2].any()  # type: ignore[index]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9, 10])
@pytest.mark.parametrize("stride", [2, 3])
def test_no_block_reveals_a_later_token(stride: int, length: int) -> None:
    core, (q, k, v) = core_of(stride, past=True), draw(length)
    for part in (k, v):
        part.requires_grad_()
    out = core(q, k, v, make_mask(causal, length), SCALED, Position())
    for query in range(length):
        whole = (query + 1) // stride * stride  # positions of the blocks that are complete
        found = torch.autograd.grad(out[:, :, query].square().sum(), (k, v), retain_graph=True)
        for grad in found:
            assert not grad[:, :, whole:].any()
        assert whole == 0 or found[1][:, :, :whole].abs().sum((1, 3)).min() > 0


@rules
def test_padding_behind_changes_nothing(rule: Rule) -> None:
    """Neither what stands there nor how much: of what comes out, and of the gradients."""
    core, parts = core_of(), draw(8)
    found = []
    for length, filling in ((8, 0.0), (8, 5.0), (12, -3.0)):
        q, k, v = (torch.full((2, x.shape[1], length, x.shape[3]), filling).double() for x in parts)
        for padded, part in zip((q, k, v), parts, strict=True):
            padded[0, :, :8], padded[1, :, :4] = part[0], part[1, :, :4]
        core.zero_grad()
        real = torch.arange(length) < torch.tensor([[8], [4]])
        out = core(q, k, v, make_mask(rule, length, padding_mask=real), SCALED, Position())
        out = torch.cat([out[0, :, :8], out[1, :, :4]], dim=1)
        out.square().sum().backward()
        found.append([out, *(p.grad for p in core.parameters() if p.grad is not None)])
    for other in found[1:]:
        assert len(other) == 3
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-11)
    alone = [x[1:, :, :4] for x in parts]
    agree(core(*alone, make_mask(rule, 4), SCALED, Position())[0], found[0][0][:, 8:])


@pytest.mark.parametrize("rows", [1, 2])
def test_a_key_counts_where_it_stands(rows: int) -> None:
    """Padding in the middle of a row, positions by row: the same blocks as without it."""
    core, (q, k, v) = core_of(), (x[:rows] for x in draw(7, queries=2))
    source = [4, 2][:rows]
    places = torch.tensor([[0, 1, 2, 3, n, n + 1, n + 2] for n in source])
    real = torch.ones(rows, 7).bool()
    real[:, :4] = torch.arange(4) < torch.tensor(source)[:, None]
    found = core(q, k, v, AttentionMask(causal, places[:, -2:], places, real), SCALED, Position())
    for row, length in enumerate(source):
        kept = [*range(length), 4, 5, 6]
        dense = [x[row : row + 1, :, kept] for x in (k, v)]
        sight = AttentionMask(causal, places[row : row + 1, -2:], torch.arange(length + 3)[None])
        agree(found[row], core(q[row : row + 1], *dense, sight, SCALED, Position())[0])


# --- in a model ---


def gpt(position: PositionConfig | None = None, **core: Any) -> Gpt:
    torch.manual_seed(5)
    chosen = MemoryCompressed(**{"stride": 2, "size": 4, **core})
    sizes = {"vocab_size": 13, "dim": 8, "layers": 3, "heads": 2, "kv_heads": 1, "ffn_dim": 12}
    config = GptConfig(
        **sizes,  # type: ignore[arg-type]
        max_length=24,
        dropout=0.0,
        attention=chosen,
        position=position or Sinusoidal(),
    )
    return config.build().double()


@pytest.mark.parametrize("layers", ["M", "LM"])
@pytest.mark.parametrize("chunks", [(1,) * 11, (5, 1, 4, 1)], ids=len)
def test_cached_is_full(layers: str, chunks: tuple[int, ...]) -> None:
    model, tokens, cache = gpt(layers=layers), torch.randint(13, (2, 11)), KVCache()
    with torch.no_grad():
        found = [model(chunk, cache=cache) for chunk in tokens.split(list(chunks), dim=1)]
        agree(torch.cat(found, dim=1), model(tokens))


@pytest.mark.parametrize("layers", ["M", "LM"])
def test_no_gradient_from_the_future(layers: str) -> None:
    model = gpt(layers=layers)
    entered: list[Tensor] = []
    model.tokens.register_forward_hook(lambda _, __, out: entered.append(out))
    logits = model(torch.randint(13, (2, 11)))
    for place in range(11):
        [grad] = torch.autograd.grad(logits[:, place].sum(), entered[0], retain_graph=True)
        assert not grad[:, place + 1 :].any()
        assert grad[:, place].any()


def test_the_pattern_goes_over_the_layers() -> None:
    sizes = AttentionSizes(heads=2, kv_heads=2, head_dim=4, key_dim=4, max_length=9)
    built = [MemoryCompressed().build(replace(sizes, layer=layer)) for layer in range(5)]
    assert ["ML"[isinstance(core, Local)] for core in built] == list("LMLML")
    model = gpt(layers="LLM")
    kinds = [type(block.attention.core).__name__ for block in model.decoder.blocks]  # type: ignore[union-attr]
    assert kinds == ["Local", "Local", "CompressedCore"]
    with torch.no_grad(), capture(model) as maps:
        model(torch.randint(13, (1, 9)))
    assert [tuple(found.shape[2:]) for found in maps["self"]] == [(9, 9), (9, 9), (9, 5)]


def test_a_block_is_its_mean_at_first() -> None:
    core = CompressedCore(
        3, AttentionSizes(heads=2, kv_heads=2, head_dim=64, key_dim=64, max_length=9)
    )
    x = torch.randn(4, 2, 9, 64)
    found = core._compress(x, core.values, make_mask(full, 9)).detach()
    mean = x.unflatten(2, (3, 3)).mean(3)
    away = (found - mean).square().mean().sqrt()
    assert 0.01 < float(away) < 0.2 < float(mean.square().mean().sqrt())
    assert not torch.equal(core.keys[0], core.keys[1])


def test_every_kernel_learns() -> None:
    model = gpt(layers="M").train()
    model(torch.randint(13, (2, 9))).square().sum().backward()
    grads = [p.grad for name, p in model.named_parameters() if ".core." in name]
    assert len(grads) == 6
    assert all(grad is not None and grad.any() for grad in grads)


# --- what is refused ---


@pytest.mark.parametrize("rule", [window(2), both(causal, window(2))], ids=lambda rule: rule.kind)
def test_another_rule_is_refused(rule: Rule) -> None:
    with pytest.raises(UserError, match=r"choose another model\.attention"):
        core_of()(*draw(5), make_mask(rule, 5), SCALED, Position())


@pytest.mark.parametrize(
    "position",
    [Rotary(), Shaw(), Buckets(buckets=6, max_distance=5), Alibi(), Relative()],
    ids=lambda x: x.kind,
)
def test_a_position_of_single_keys_is_refused(position: PositionConfig) -> None:
    with pytest.raises(UserError, match="choose one that is added") as found:
        gpt(position)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("position", [NoPosition(), Learned(), Sinusoidal()], ids=lambda x: x.kind)
def test_a_position_of_embeddings_is_taken(position: PositionConfig) -> None:
    assert gpt(position)(torch.randint(13, (1, 7))).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stride": 0}, "core.stride=0"),
        ({"size": 0}, "core.size=0"),
        ({"layers": ""}, "choose e.g. LM"),
        ({"layers": "LMX"}, "core.layers=LMX"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        MemoryCompressed(**settings)
