"""Position schemes: their formulas and properties.

tests/nn/test_attention.py compares the bias of each scheme with plain loops, for every attention
implementation.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from textbook import POSITIONS, t5_bucket
from torch import Tensor

from manyheads.config import parse
from manyheads.decode.kv_cache import KVCache
from manyheads.errors import UserError
from manyheads.lab.device_memory import peak_memory
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import Dense
from manyheads.nn.block import Architecture, Stack
from manyheads.nn.masks import AttentionMask, Rule, causal, full, make_mask
from manyheads.nn.positions import (
    AlibiPosition,
    BucketPosition,
    Learned,
    LearnedPosition,
    Position,
    PositionConfig,
    PositionSizes,
    Relative,
    RelativePosition,
    Rotary,
    RotaryPosition,
    ShawPosition,
    SinusoidalPosition,
    alibi_slopes,
    skew,
    unskew,
)

SIZES = PositionSizes(dim=8, heads=2, head_dim=4, max_length=12, causal=True)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(result: Tensor | None, expected: Tensor | None, atol: float = 1e-12) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=atol)


def close_with_gradients(
    result: Tensor | None, expected: Tensor | None, tensors: list[Tensor], seen: Tensor
) -> None:
    """Equal where `seen`, and so are the gradients."""
    assert result is not None
    assert expected is not None
    close(result * seen, expected * seen)
    cotangent = normal(*expected.shape) * seen
    pairs = zip(
        torch.autograd.grad(result, tensors, cotangent),
        torch.autograd.grad(expected, tensors, cotangent),
        strict=True,
    )
    for ours, theirs in pairs:
        close(ours, theirs)


# --- all schemes ---


@pytest.mark.parametrize("name", POSITIONS)
def test_only_positions_give_order(name: str) -> None:
    """Shuffled tokens give shuffled outputs without positions, and not with any scheme."""
    config = Architecture(
        dim=8, layers=2, heads=2, dropout=0.0, position=POSITIONS[name][0], attention=Dense()
    )
    stack = Stack(config, causal=False).double()
    x, order, mask = normal(2, 6, 8), torch.tensor([3, 0, 5, 1, 4, 2]), make_mask(full, 6)

    def encode(x: Tensor) -> Tensor:
        return stack(stack.position.embed(x, mask.query_positions), mask)

    same = torch.allclose(encode(x[:, order]), encode(x)[:, order], rtol=0, atol=1e-10)
    assert same == (name == "none")
    assert len(stack.positions) == (2 if name in ("shaw", "relative") else 1)


@pytest.mark.parametrize("name", ["rotary", "rotary-interleaved", "shaw", "t5", "alibi"])
def test_relative_schemes_know_distances_only(name: str) -> None:
    """A stack gives the same if all its positions are shifted by the same amount."""
    config = Architecture(
        dim=8, layers=2, heads=2, dropout=0.0, position=POSITIONS[name][0], attention=Dense()
    )
    stack, x = Stack(config, causal=True).double(), normal(2, 6, 8)
    here, there = torch.arange(6)[None], torch.arange(100, 106)[None]
    expected = stack(x, AttentionMask(causal, here, here))
    close(stack(x, AttentionMask(causal, there, there)), expected, atol=1e-10)


def test_hooks_are_found_by_inheritance() -> None:
    """Kernels skip the hooks of absolute schemes."""

    class Own(Position):
        def score(self, q: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
            return torch.zeros(1, 1, queries.shape[-1], keys.shape[-1])

    class Further(Own):
        pass

    class Other(Position):
        def embed(self, x: Tensor, positions: Tensor) -> Tensor:
            return -x

    relative = (Own, Further, RotaryPosition, ShawPosition, AlibiPosition, BucketPosition)
    assert not any(kind.is_absolute for kind in relative)
    assert all(kind.is_absolute for kind in (Position, Other, SinusoidalPosition, LearnedPosition))
    assert Further.has_bias
    assert not RotaryPosition.has_bias


@pytest.mark.parametrize(
    "wrong",
    [
        *[("relative", "max_distance", 0), ("shaw", "max_distance", 0)],
        *[("rotary", "base", 0), ("learned", "offset", -1)],
    ],
)
def test_ranges_of_settings(wrong: tuple[str, str, Any]) -> None:
    kind, name, value = wrong
    with pytest.raises(UserError, match=rf"position\.{name}={value}"):
        parse(PositionConfig, {"kind": kind, name: value}, "position")


# --- sinusoidal, learned and rotary ---


def test_sinusoidal_is_the_formula() -> None:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos of the same, or in halves."""
    x = normal(2, 50, 12)
    waves = SinusoidalPosition(10_000.0, "interleaved").embed(x, torch.arange(50)[None]) - x
    halves = SinusoidalPosition(10_000.0, "halves").embed(x, torch.arange(50)[None]) - x
    for pos in range(50):
        for i in range(6):
            angle = pos / 10_000 ** (2 * i / 12)
            pair = [math.sin(angle), math.cos(angle)]
            assert waves[1, pos, 2 * i : 2 * i + 2].tolist() == pytest.approx(pair, abs=1e-10)
            assert halves[0, pos, [i, i + 6]].tolist() == pytest.approx(pair, abs=1e-10)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotary_depends_on_distance_only(layout: str) -> None:
    """Shifting all positions by the same amount changes no score; shifting one side does."""
    rotary, q, k = RotaryPosition(10_000.0, layout), normal(1, 1, 5, 8), normal(1, 1, 7, 8)
    queries, keys = torch.arange(2, 7)[None], torch.arange(7)[None]

    def scores(shift: int, other: int) -> Tensor:
        return rotary.rotate(q, queries + shift) @ rotary.rotate(k, keys + other).mT

    for shift in (1, 17, 4000):
        torch.testing.assert_close(scores(0, 0), scores(shift, shift), rtol=0, atol=1e-10)
    assert not torch.allclose(scores(0, 0), scores(0, 1), atol=1e-3)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotary_keeps_lengths(layout: str) -> None:
    """A rotated vector is as long as before, and at position zero it is itself."""
    rotary, x = RotaryPosition(10_000.0, layout), normal(2, 3, 9, 8)
    rotated = rotary.rotate(x, torch.arange(9)[None])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-10)
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])
    assert not torch.allclose(rotated[:, :, 1], x[:, :, 1])


def test_rotary_refuses_odd_heads() -> None:
    """Pairs of channels need an even number of them."""
    with pytest.raises(ValueError, match="even"):
        Rotary().build(replace(SIZES, head_dim=5))


def test_rotary_and_sinusoidal_keep_their_precision() -> None:
    """In float16 the angles of far positions are still computed in float32."""
    far = torch.tensor([[3001]])
    x = torch.ones(1, 1, 1, 8)
    exact = RotaryPosition(10_000.0, "halves").rotate(x, far)
    rough = RotaryPosition(10_000.0, "halves").rotate(x.half(), far)
    torch.testing.assert_close(rough.float(), exact, rtol=0, atol=2e-3)
    exact = SinusoidalPosition(10_000.0, "halves").embed(0 * x[0], far)
    rough = SinusoidalPosition(10_000.0, "halves").embed(0 * x[0].half(), far)
    torch.testing.assert_close(rough.float(), exact, rtol=0, atol=1e-3)


def test_learned_adds_its_row() -> None:
    """Each position adds the row of the table with its number."""
    sizes = PositionSizes(dim=4, heads=1, head_dim=4, max_length=5, causal=True)
    learned, x = Learned().build(sizes), torch.randn(2, 3, 4)
    assert isinstance(learned.table, torch.nn.Embedding)
    moved = learned.embed(x, torch.tensor([[2, 3, 4]]))
    torch.testing.assert_close(moved - x, learned.table.weight[2:].expand(2, -1, -1))


def test_learned_refuses_past_its_end() -> None:
    """A text longer than the table is one clear error in every model, cached or not."""
    sizes = {"vocab_size": 9, "dim": 8, "layers": 1, "heads": 2, "max_length": 4}
    short, long = torch.ones(1, 4, dtype=torch.long), torch.ones(1, 5, dtype=torch.long)
    gpt = GptConfig(**sizes, position=Learned()).build()
    bert = BertConfig(**sizes, position=Learned()).build()
    seq2seq = Seq2SeqConfig(**sizes, position=Learned()).build()
    refusal = pytest.raises(ValueError, match=r"^5 positions, but the learned ones end at 4")
    for model in (gpt, bert):
        model(short)
        with refusal:
            model(long)
    seq2seq(short, short)
    for pair in ((short, long), (long, short)):
        with refusal:
            seq2seq(*pair)
    with torch.no_grad():
        cache = KVCache()
        gpt(short, cache=cache)
        with refusal:
            gpt(short[:, :1], cache=cache)


@pytest.mark.parametrize("position", ["none", "sinusoidal", "rotary", "shaw", "t5", "alibi"])
def test_others_have_no_end(position: str) -> None:
    """A scheme without a table of positions goes past model.max_length."""
    config = GptConfig(
        vocab_size=9,
        dim=8,
        layers=1,
        heads=2,
        max_length=4,
        position=POSITIONS[position][0],
        attention=Dense(),
    )
    assert config.build()(torch.ones(1, 9, dtype=torch.long)).isfinite().all()


# --- ALiBi and T5 ---


def test_alibi_slopes_of_the_paper() -> None:
    """Eight heads have 1/2 … 1/256; twelve have those and four of the sixteen in between."""
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(8) == pytest.approx(eight)
    sixteen = [2 ** (-i / 2) for i in range(1, 17)]
    assert alibi_slopes(16) == pytest.approx(sixteen)
    assert alibi_slopes(12) == pytest.approx([*eight, *sixteen[0:8:2]])
    assert alibi_slopes(1) == [2**-8]


def test_alibi_slopes_keep_the_precision_of_the_queries() -> None:
    """In float64 the slopes are exact to float64, also where they are no powers of two."""
    sizes = PositionSizes(dim=16, heads=16, head_dim=1, max_length=2, causal=True)
    alibi: Position = POSITIONS["alibi"][0].build(sizes).double()
    ones = torch.ones(1, 16, 1, 1, dtype=torch.float64)
    bias = alibi.score(ones, torch.tensor([[1]]), torch.tensor([[0]]))
    assert bias is not None
    expected = [-(2 ** (-i / 2)) for i in range(1, 17)]
    assert bias.flatten().tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 40), (6, 5), (64, 256)])
def test_t5_buckets_are_the_published_ones(
    buckets: int, max_distance: int, both_ways: bool
) -> None:
    """The bucket of each distance is that of T5, computed in whole numbers."""
    position = BucketPosition(buckets, max_distance, 2, both_ways)
    result = position.bucket(torch.arange(-300, 301)).tolist()
    expected = [t5_bucket(d, buckets, max_distance, both_ways) for d in range(-300, 301)]
    assert result == expected


def test_t5_buckets_of_the_paper() -> None:
    """32 buckets up to 128: exact up to 7 (15 one way), then wider, the last from 128 on."""
    wide = BucketPosition(32, 128, 2, True)
    near = [0, -1, -7, -8, -11, -12, -127, -128, -5000, 1, 7, 8, 5000]
    assert wide.bucket(torch.tensor(near)).tolist() == [
        *(0, 1, 7, 8, 8, 9, 15, 15, 15),
        *(17, 23, 24, 31),
    ]
    back = BucketPosition(32, 128, 2, False)
    assert back.bucket(torch.tensor([5, 0, -15, -16, -5000])).tolist() == [0, 0, 15, 16, 31]


# --- a vector for each distance ---


def test_skew_shifts_each_row_by_one_column_more() -> None:
    table = torch.tensor([[10.0, 11, 12], [20, 21, 22], [30, 31, 32]])[None, None]
    assert skew(table)[0, 0].tril().tolist() == [[12, 0, 0], [21, 22, 0], [30, 31, 32]]
    table = torch.arange(15.0).view(1, 1, 3, 5)  # the distances −2 … 2
    assert skew(table)[0, 0].tolist() == [[2, 3, 4], [6, 7, 8], [10, 11, 12]]
    for length in (1, 2, 5):
        square = normal(2, 3, length, length)
        table = unskew(square)
        assert table.shape[-1] == 2 * length - 1
        close(skew(table), square, atol=0)
        assert table.count_nonzero() == square.numel()


def test_shaw_clips() -> None:
    """All distances from max_distance on share one vector, and each side has its own."""
    shaw, q, query = ShawPosition(3, 4).double(), normal(1, 2, 1, 4), torch.tensor([[50]])

    def at(*distances: int) -> list[Tensor]:
        keys = query + torch.tensor([distances])
        scores = shaw.score(q, query, keys)
        eye = torch.eye(len(distances), dtype=torch.float64)[None, None]
        values = shaw.value(eye, query.expand(1, len(distances)), keys)
        assert scores is not None
        assert values is not None
        return [scores[0, 0, 0], values[0, 0, :, 0]]

    for clipped in (*at(3, 4, 40), *at(-3, -4, -40)):
        assert clipped.unique().numel() == 1
    for distinct in at(-3, -2, -1, 0, 1, 2, 3):
        assert distinct.unique().numel() == 7


@pytest.mark.parametrize("max_distance", [1, 4, 30])
@pytest.mark.parametrize("rule", [causal, full], ids=str)
def test_shaw_by_skewing_is_shaw_by_gathering(max_distance: int, rule: Rule) -> None:
    """In lengths below and above the clipping: values and gradients of all that is allowed."""
    shaw = ShawPosition(max_distance, 4).double()
    for length in (1, 2, 9):
        mask, seen = make_mask(rule, length), torch.ones(length, length, dtype=torch.bool)
        seen, positions = seen if rule is full else seen.tril(), mask.query_positions
        q, weights = normal(3, 2, length, 4), normal(3, 2, length, length)
        q.requires_grad_(), weights.requires_grad_()
        gathered = shaw.score(q, positions, positions)
        close_with_gradients(shaw.bias(q, mask), gathered, [q, shaw.keys], seen)
        gathered = shaw.value(weights * seen, positions, positions)
        skewed = shaw.value_bias(weights * seen, mask)
        close_with_gradients(skewed, gathered, [weights, shaw.values], torch.ones(1))


def build(length: int = 12, *, looks_back: bool = True, **settings: Any) -> RelativePosition:
    torch.manual_seed(1)
    sizes = replace(SIZES, max_length=length, causal=looks_back)
    position = Relative(**settings).build(sizes).double()
    assert isinstance(position, RelativePosition)
    return position


def skewed(position: RelativePosition, q: Tensor) -> Tensor:
    """As in a full pass."""
    bias = position.bias(q, make_mask(full, q.shape[2]))
    assert bias is not None
    return bias


def gathered(position: RelativePosition, q: Tensor) -> Tensor:
    """The same for arbitrary positions."""
    positions = torch.arange(q.shape[2])[None]
    bias = position.score(q, positions, positions)
    assert bias is not None
    return bias


def naive(position: RelativePosition, q: Tensor, far: int) -> Tensor:
    """A vector for each pair of positions, n × n × c, and its product with the query."""
    positions = torch.arange(q.shape[2])
    distance = positions[None, :] - positions[:, None]
    highest = position.distances.highest
    vectors = position.distances.table[:, distance.clamp(-far, highest) + far]
    return torch.einsum("bhtc,htsc->bhts", q, vectors) / math.sqrt(q.shape[3])


@pytest.mark.parametrize("path", [skewed, gathered])
@pytest.mark.parametrize("looks_back", [True, False])
@pytest.mark.parametrize("max_distance", [None, 1, 4, 30])
def test_relative_is_the_naive_form(
    path: Callable[..., Tensor], looks_back: bool, max_distance: int | None
) -> None:
    """With and without clipping, in lengths below and above the table: values and gradients."""
    position = build(7, looks_back=looks_back, max_distance=max_distance)
    for length in (1, 2, 7, 10):
        q = normal(3, 2, length, 4).requires_grad_()
        expected = naive(position, q, max_distance or 6)
        tensors = [q, position.distances.table]
        seen = torch.ones(length, length).tril() if looks_back else torch.ones(1)
        close_with_gradients(path(position, q), expected, tensors, seen)


@pytest.mark.parametrize("looks_back", [True, False])
def test_any_pairs_are_those_of_the_full_pass(looks_back: bool) -> None:
    """A step, a chunk, a block, keys in another order, rows at other positions."""
    position, q = build(looks_back=looks_back, max_distance=3), normal(2, 2, 9, 4)
    square = gathered(position, q)
    for queries, keys in (([8], range(9)), (range(4, 9), range(9)), ([2, 7], [8, 0, 3, 3])):
        rows, columns = torch.tensor([*queries]), torch.tensor([*keys])
        bias = position.score(q[:, :, rows], rows[None], columns[None])
        close(bias, square[:, :, rows][..., columns])
    rows = torch.tensor([[0, 1, 2], [6, 7, 8]])
    bias = position.score(torch.stack([q[0, :, :3], q[1, :, 6:]]), rows, rows)
    close(bias, torch.stack([square[0, :, :3, :3], square[1, :, 6:, 6:]]))


def test_a_full_pass_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it wait for the device: it may be captured as a CUDA graph."""
    monkeypatch.setattr(RelativePosition, "score", None)
    sizes: Any = {"vocab_size": 9, "dim": 8, "layers": 3, "heads": 2, "max_length": 6}
    GptConfig(**sizes, position=Relative()).build()(torch.randint(9, (2, 6)))


def test_memory_of_2048_tokens() -> None:
    """Forward and backward, at least eight times less than with a vector for each pair."""
    length, channels = 2048, 32
    q = torch.randn(1, 1, length, channels, requires_grad=True)
    sizes = PositionSizes(dim=channels, heads=1, head_dim=channels, max_length=length, causal=True)
    back = RelativePosition(length - 1, sizes)
    both = RelativePosition(length - 1, replace(sizes, causal=False))

    def peak(score: Callable[..., Tensor], *arguments: object) -> int:
        return peak_memory(lambda: score(*arguments).sum().backward(), q.device)

    most = peak(naive, back, q, length - 1) / 8
    for position, path in product((back, both), (skewed, gathered)):
        assert peak(path, position, q) <= most


def test_tables_have_a_vector_for_each_distance() -> None:
    """(−n, 0] if causal, (−n, n) otherwise, in each head; and each can be trained."""
    assert build(7).distances.table.shape == (2, 7, 4)
    assert build(7, looks_back=False).distances.table.shape == (2, 13, 4)
    assert build(7, max_distance=3).distances.table.shape == (2, 4, 4)
    position, q = build(8), normal(1, 2, 8, 4)
    (skewed(position, q).tril() * normal(8, 8)).sum().backward()
    assert position.distances.table.grad is not None
    assert (position.distances.table.grad != 0).any(-1).all()


def test_removed_settings_are_read_if_they_change_nothing() -> None:
    """Run folders of 0.1 name them with their defaults."""
    table = {"kind": "relative", "share": "none", "first": 0}
    assert parse(PositionConfig, table, "position") == Relative()
    with pytest.raises(UserError, match=r"position\.share"):
        parse(PositionConfig, {**table, "share": "heads"}, "position")
