"""What each position scheme promises."""

import math

import pytest
import torch
from textbook import POSITIONS, t5_bucket
from torch import Tensor

from manyheads.decode.kv_cache import KVCache
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.block import Architecture, Stack
from manyheads.nn.exact_attention import Dense
from manyheads.nn.masks import AttentionMask, Rule, causal, full, make_mask
from manyheads.nn.positions import (
    AlibiPosition,
    BucketPosition,
    Learned,
    LearnedPosition,
    Position,
    PositionSizes,
    Rotary,
    RotaryPosition,
    ShawPosition,
    SinusoidalPosition,
    alibi_slopes,
)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("position", POSITIONS)
def test_only_positions_tell_order(position: str) -> None:
    """Shuffled words come out shuffled alike without positions, and not with any scheme."""
    config = Architecture(
        dim=8, layers=2, heads=2, dropout=0.0, position=POSITIONS[position][0], attention=Dense()
    )
    stack = Stack(config, causal=False).double()
    x, order = normal(2, 6, 8), torch.tensor([3, 0, 5, 1, 4, 2])
    sight = make_mask(full, 6)

    def read(x: Tensor) -> Tensor:
        return stack(stack.position.embed(x, sight.query_positions), sight)

    same = torch.allclose(read(x[:, order]), read(x)[:, order], rtol=0, atol=1e-10)
    assert same == (position == "none")


@pytest.mark.parametrize("position", ["rotary", "rotary-interleaved", "shaw", "t5", "alibi"])
def test_relative_schemes_know_distances_alone(position: str) -> None:
    """A whole stack gives the same when all its positions are moved by the same amount."""
    config = Architecture(
        dim=8, layers=2, heads=2, dropout=0.0, position=POSITIONS[position][0], attention=Dense()
    )
    stack, x = Stack(config, causal=True).double(), normal(2, 6, 8)
    here, there = torch.arange(6)[None], torch.arange(100, 106)[None]
    torch.testing.assert_close(
        stack(x, AttentionMask(causal, here, here)),
        stack(x, AttentionMask(causal, there, there)),
        rtol=0,
        atol=1e-10,
    )


def test_relative_vectors_are_of_each_layer() -> None:
    """Vectors by distance are learned in each layer anew; the others have one scheme for all."""
    for name, (position, _) in POSITIONS.items():
        config = Architecture(dim=8, layers=3, heads=2, position=position, attention=Dense())
        expected = 3 if name in ("shaw", "relative") else 1
        assert len(Stack(config, causal=True).positions) == expected


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotary_depends_on_distance_alone(layout: str) -> None:
    """Moving all positions by the same amount changes no score; moving one side does."""
    rotary, q, k = RotaryPosition(10_000.0, layout), normal(1, 1, 5, 8), normal(1, 1, 7, 8)
    queries, keys = torch.arange(2, 7)[None], torch.arange(7)[None]

    def scores(shift: int, other: int) -> Tensor:
        return rotary.rotate(q, queries + shift) @ rotary.rotate(k, keys + other).mT

    for shift in (1, 17, 4000):
        torch.testing.assert_close(scores(0, 0), scores(shift, shift), rtol=0, atol=1e-10)
    assert not torch.allclose(scores(0, 0), scores(0, 1), atol=1e-3)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_rotary_keeps_lengths(layout: str) -> None:
    """A turned vector is as long as before, and at position zero it is itself."""
    rotary, x = RotaryPosition(10_000.0, layout), normal(2, 3, 9, 8)
    turned = rotary.rotate(x, torch.arange(9)[None])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-10)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    assert not torch.allclose(turned[:, :, 1], x[:, :, 1])


def test_rotary_refuses_odd_heads() -> None:
    """Pairs of channels need an even number of them."""
    with pytest.raises(ValueError, match="even"):
        Rotary().build(PositionSizes(dim=10, heads=2, head_dim=5, max_length=9, causal=True))


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
    found = position.bucket(torch.arange(-300, 301)).tolist()
    expected = [t5_bucket(d, buckets, max_distance, both_ways) for d in range(-300, 301)]
    assert found == expected


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


@pytest.mark.parametrize("both_ways", [True, False])
def test_t5_buckets_grow_with_distance(both_ways: bool) -> None:
    """Further off is never a lower bucket, each bucket is used, and the two ways share none."""
    position = BucketPosition(32, 128, 2, both_ways)
    back = position.bucket(-torch.arange(300))
    ahead = position.bucket(torch.arange(1, 300))
    assert (back.diff() >= 0).all()
    assert (ahead.diff() >= 0).all()
    if both_ways:
        assert sorted({*back.tolist(), *ahead.tolist()}) == [*range(16), *range(17, 32)]
        assert not {*back.tolist()} & {*ahead.tolist()}
    else:
        assert sorted({*back.tolist()}) == [*range(32)]
        assert (ahead == 0).all()


def test_shaw_clips() -> None:
    """All distances from max_distance on share one vector, and each side has its own."""
    shaw, q = ShawPosition(3, 4).double(), normal(1, 2, 1, 4)
    here = torch.tensor([[50]])

    def at(*distances: int) -> list[Tensor]:
        scores = shaw.score(q, here, here + torch.tensor([distances]))
        values = shaw.value(
            torch.eye(len(distances), dtype=torch.float64)[None, None],
            here.expand(1, len(distances)),
            here + torch.tensor([distances]),
        )
        assert scores is not None
        assert values is not None
        return [scores[0, 0, 0], values[0, 0, :, 0]]

    for found in at(3, 4, 40):
        assert found.unique().numel() == 1
    for found in at(-3, -4, -40):
        assert found.unique().numel() == 1
    for found in at(-3, -2, -1, 0, 1, 2, 3):
        assert found.unique().numel() == 7


@pytest.mark.parametrize("max_distance", [1, 4, 30])
@pytest.mark.parametrize("rule", [causal, full])
def test_shaw_by_skewing_is_shaw_by_gathering(max_distance: int, rule: Rule) -> None:
    """In lengths below and above the clipping: values and gradients of all that is seen."""
    torch.manual_seed(1)
    shaw = ShawPosition(max_distance, 4).double()
    for length in (1, 2, 9):
        sight = make_mask(rule, length)
        places, seen = sight.query_positions, torch.ones(length, length, dtype=torch.bool)
        seen = seen if rule is full else seen.tril()
        q = normal(3, 2, length, 4).requires_grad_()
        raw = normal(3, 2, length, length).requires_grad_()
        weights = raw * seen
        pairs = [
            (shaw.bias(q, sight), shaw.score(q, places, places), (q, shaw.keys)),
            (
                shaw.spread(weights, sight),
                shaw.value(raw * seen, places, places),
                (raw, shaw.values),
            ),
        ]
        for found, expected, given in pairs:
            assert found is not None
            assert expected is not None
            if given[0] is q:
                found, expected = found * seen, expected * seen
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            slope = normal(*expected.shape)
            for one, other in zip(
                torch.autograd.grad(found, given, slope),
                torch.autograd.grad(expected, given, slope),
                strict=True,
            ):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_scheme_that_attention_sees_is_known_by_its_hooks() -> None:
    """Kernels that take projections as they lie leave the hooks out."""

    class Own(Position):
        def score(self, q: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
            return torch.zeros(1, 1, queries.shape[-1], keys.shape[-1])

    class Further(Own):
        pass

    class Other(Position):
        def embed(self, x: Tensor, positions: Tensor) -> Tensor:
            return -x

    assert not any(kind.is_absolute for kind in (Own, Further, RotaryPosition, ShawPosition))
    assert not any(kind.is_absolute for kind in (AlibiPosition, BucketPosition))
    assert all(kind.is_absolute for kind in (Position, Other, SinusoidalPosition, LearnedPosition))
