"""The Music Transformer's relative attention: as the paper writes it, in less memory."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from manyheads.errors import UserError
from manyheads.lab.device_memory import peak_memory
from manyheads.models.gpt import GptConfig
from manyheads.nn.masks import causal, full, make_mask
from manyheads.nn.positions import PositionSizes
from manyheads.nn.relative import Relative, RelativePosition, Vectors
from manyheads.nn.skew import skew, unskew

Path = Callable[[RelativePosition, Tensor], Tensor]


def build(length: int = 12, *, looks_back: bool = True, **settings: object) -> RelativePosition:
    torch.manual_seed(1)
    sizes = PositionSizes(dim=8, heads=2, head_dim=4, max_length=length, causal=looks_back)
    position = Relative(**settings).build(sizes).double()  # type: ignore[arg-type]
    assert isinstance(position, RelativePosition)
    return position


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def skewed(position: RelativePosition, q: Tensor) -> Tensor:
    """As a full pass has it."""
    bias = position.bias(q, make_mask(full, q.shape[2]))
    assert bias is not None
    return bias


def picked(position: RelativePosition, q: Tensor) -> Tensor:
    """The same for positions of which nobody knows that they stand in a row."""
    places = torch.arange(q.shape[2])[None]
    bias = position.score(q, places, places)
    assert bias is not None
    return bias


def naive(position: RelativePosition, q: Tensor, far: int) -> Tensor:
    """A vector for each pair of positions, n × n × c, and its product with the query."""
    places = torch.arange(q.shape[2])
    distance = places[None, :] - places[:, None]
    highest = far if position.both_ways else 0
    table = position.distances.table.expand(q.shape[1], -1, -1)
    vectors = table[:, distance.clamp(-far, highest) + far]
    scores = torch.einsum("bhtc,htsc->bhts", q, vectors) / math.sqrt(q.shape[3])
    return scores if position.both_ways else scores.tril()


@pytest.mark.parametrize("path", [skewed, picked])
@pytest.mark.parametrize("share", ["none", "heads"])
@pytest.mark.parametrize("looks_back", [True, False])
@pytest.mark.parametrize("max_distance", [None, 1, 4, 30])
def test_it_is_the_naive_form(
    path: Path, share: str, looks_back: bool, max_distance: int | None
) -> None:
    """With and without clipping, in lengths below and above the table: values and gradients."""
    position = build(7, looks_back=looks_back, share=share, max_distance=max_distance)
    far = 6 if max_distance is None else max_distance
    for length in (1, 2, 7, 10):
        q = normal(3, 2, length, 4).requires_grad_()
        found, expected = path(position, q), naive(position, q, far)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        given, slope = (q, position.distances.table), normal(*expected.shape)
        for one, other in zip(
            torch.autograd.grad(found, given, slope),
            torch.autograd.grad(expected, given, slope),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_skew_moves_each_row_one_place_further() -> None:
    met = torch.tensor([[10.0, 11, 12], [20, 21, 22], [30, 31, 32]])[None, None]
    back = skew(met)[0, 0].tril()
    assert back.tolist() == [[12, 0, 0], [21, 22, 0], [30, 31, 32]]
    met = torch.arange(15.0).view(1, 1, 3, 5)  # the distances −2 … 2
    assert skew(met)[0, 0].tolist() == [[2, 3, 4], [6, 7, 8], [10, 11, 12]]


def test_unskewed_and_skewed_again_is_the_same() -> None:
    for length in (1, 2, 5):
        square = normal(2, 3, length, length)
        met = unskew(square)
        assert met.shape[-1] == 2 * length - 1
        torch.testing.assert_close(skew(met), square, rtol=0, atol=0)
        assert met.count_nonzero() == square.numel()  # and nothing besides


def test_memory_of_2048_tokens() -> None:
    """Forward and backward, at least eight times less than with a vector for each pair."""
    length, channels = 2048, 32
    q = torch.randn(1, 1, length, channels, requires_grad=True)
    sizes = PositionSizes(dim=channels, heads=1, head_dim=channels, max_length=length, causal=True)
    both_sizes = replace(sizes, causal=False)
    back, both = (RelativePosition(Relative(), own) for own in (sizes, both_sizes))

    def peak(score: Callable[..., Tensor], *given: object) -> int:
        return peak_memory(lambda: score(*given).sum().backward(), q.device)

    usual = peak(naive, back, q, length - 1)  # and as much, or more, both ways
    for position, path in product((back, both), (skewed, picked)):
        assert 8 * peak(path, position, q) <= usual


def test_a_full_pass_is_skewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is picked for it, nor is the device asked: it may be recorded as a graph."""
    monkeypatch.setattr(Vectors, "pick", None)
    sizes = {"vocab_size": 9, "dim": 8, "layers": 3, "heads": 2, "ffn_dim": 8, "max_length": 6}
    for position in (Relative(), Relative(period=4, first=1)):
        model = GptConfig(**sizes, position=position).build()  # type: ignore[arg-type]
        model(torch.randint(9, (2, 6)))


@pytest.mark.parametrize("length", [1, 4, 6, 11])
@pytest.mark.parametrize("looks_back", [True, False])
@pytest.mark.parametrize("settings", [{}, {"period": 4, "first": 1}, {"period": 3, "first": 5}])
def test_skewed_is_picked(settings: dict[str, int], looks_back: bool, length: int) -> None:
    """Values and gradients; and under a causal rule wherever a query sees."""
    position = build(7, looks_back=looks_back, **settings)
    q, slope = normal(2, 2, length, 4).requires_grad_(), normal(2, 2, length, length).tril()
    expected = picked(position, q)
    torch.testing.assert_close(skewed(position, q), expected, rtol=0, atol=1e-12)
    found = position.bias(q, make_mask(causal, length))
    assert found is not None
    assert found.isfinite().all()
    torch.testing.assert_close(found.tril(), expected.tril(), rtol=0, atol=1e-12)
    given = [q, *position.parameters()]
    for one, other in zip(
        torch.autograd.grad(found, given, slope),
        torch.autograd.grad(expected, given, slope),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("looks_back", [True, False])
@pytest.mark.parametrize("settings", [{}, {"max_distance": 3}, {"max_distance": 3, "period": 4}])
def test_any_pairs_are_those_of_the_full_pass(looks_back: bool, settings: dict[str, int]) -> None:
    """A step, a chunk, a block, keys in another order, rows that stand elsewhere."""
    position, q = build(looks_back=looks_back, **settings), normal(2, 2, 9, 4)
    whole = skewed(position, q)
    for queries, keys in (
        ([8], range(9)),
        (range(4, 9), range(9)),
        (range(3, 6), range(3, 6)),
        ([2, 7], [8, 0, 3, 3]),
    ):
        rows, columns = torch.tensor([*queries]), torch.tensor([*keys])
        found = position.score(q[:, :, rows], rows[None], columns[None])
        torch.testing.assert_close(found, whole[:, :, rows][..., columns], rtol=0, atol=1e-12)
    rows = torch.tensor([[0, 1, 2], [6, 7, 8]])
    found = position.score(torch.stack([q[0, :, :3], q[1, :, 6:]]), rows, rows)
    expected = torch.stack([whole[0, :, :3, :3], whole[1, :, 6:, 6:]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_step_of_voices_is_told_from_a_distance() -> None:
    """A key at the same distance may be in the same step or in the last: by where both stand."""
    position = build(looks_back=False, period=4, first=1)
    q = normal(1, 2, 1, 4)

    def added(i: int, j: int) -> Tensor:
        bias = position.score(q, torch.tensor([[i]]), torch.tensor([[j]]))
        assert bias is not None
        return bias

    for i, j in ((2, 1), (5, 4), (3, 9)):
        assert torch.equal(added(i, j), added(i + 4, j + 4))  # a step later all is the same
    # 1 … 4 are the voices of one step: within it, and across its beginning.
    assert torch.equal(added(2, 1), added(3, 2))
    assert not torch.allclose(added(2, 1), added(5, 4))
    plain = build(looks_back=False)
    here = torch.tensor([[5]])
    assert torch.equal(
        *(plain.score(q, here + n, here + n - 1) for n in (0, 1))  # type: ignore[arg-type]
    )


def test_a_table_has_a_vector_for_each_distance() -> None:
    """(−n, 0] looking back, (−n, n) both ways; in each head, or one for all."""
    assert build(7).distances.table.shape == (2, 7, 4)
    assert build(7, looks_back=False).distances.table.shape == (2, 13, 4)
    assert build(7, share="heads").distances.table.shape == (1, 7, 4)
    assert build(7, max_distance=3).distances.table.shape == (2, 4, 4)
    position = build(7, max_distance=5, period=4)
    assert position.steps.table.shape == (2, 3, 4)  # five positions back are at most two steps
    assert position.voices.table.shape == (2, 7, 4)


def test_every_vector_can_be_trained() -> None:
    """A pass of the full length reaches each of them, and no key to come."""
    position, q = build(8, period=4, first=1), normal(1, 2, 8, 4).requires_grad_()
    bias = skewed(position, q)
    assert (bias.triu(1) == 0).all()
    (bias * normal(8, 8)).sum().backward()
    for vectors in (position.distances, position.steps, position.voices):
        assert vectors.table.grad is not None
        assert (vectors.table.grad != 0).any(-1).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_distance": 0}, r"position\.max_distance=0 must be at least 1"),
        ({"period": 1}, r"position\.period=1 must be at least 2"),
        ({"first": -1}, r"position\.first=-1 must be at least 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Relative(**settings)  # type: ignore[arg-type]
