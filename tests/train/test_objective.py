"""Head and loss in one equal PyTorch's two, in value and in every gradient, a chunk at a time."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.batching import IGNORE_INDEX
from manyheads.kernels import linear_cross_entropy as objective
from manyheads.train.step import cross_entropy

ROWS, DIM, CLASSES = 13, 6, 11
EXACT = {"rtol": 1e-10, "atol": 1e-10}

# Chunks that end inside, at and past the last row, and one row at a time.
CHUNKS = pytest.mark.parametrize("chunk", [1, 5, 12, 13, 14, 1024])
SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1])
BIAS = pytest.mark.parametrize("biased", [True, False])


def parts(biased: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden = torch.randn(ROWS, DIM, dtype=dtype, requires_grad=True)
    matrix = torch.randn(CLASSES, DIM, dtype=dtype, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True) if biased else None
    return hidden, matrix, bias


def reference(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, wanted: Tensor, smoothing: float
) -> Tensor:
    logits = F.linear(hidden, matrix, bias)
    return F.cross_entropy(logits, wanted, label_smoothing=smoothing, reduction="sum")


@CHUNKS
@SMOOTHING
@BIAS
def test_value_and_gradients_equal_pytorchs(
    biased: bool, smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "ROWS_PER_CHUNK", {"cpu": chunk, "cuda": chunk})
    hidden, matrix, bias = parts(biased)
    wanted = torch.randint(CLASSES, (ROWS,))
    inputs = [tensor for tensor in (hidden, matrix, bias) if tensor is not None]
    loss = cross_entropy(hidden, matrix, wanted, bias=bias, smoothing=smoothing)
    expected = reference(hidden, matrix, bias, wanted, smoothing)
    torch.testing.assert_close(loss.objective, expected, **EXACT)
    plain = reference(hidden, matrix, bias, wanted, 0.0)
    torch.testing.assert_close(loss.nll, plain, **EXACT)
    assert loss.count == ROWS
    # The loop divides by the tokens of all micro-batches before it goes backward.
    found = torch.autograd.grad(loss.objective / 7, inputs)
    for one, other in zip(found, torch.autograd.grad(expected / 7, inputs), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@SMOOTHING
@BIAS
def test_gradcheck(biased: bool, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "ROWS_PER_CHUNK", {"cpu": 5, "cuda": 5})
    wanted = torch.randint(CLASSES, (ROWS,))

    def value(hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return cross_entropy(hidden, matrix, wanted, bias=bias, smoothing=smoothing).objective

    inputs = [tensor for tensor in parts(biased) if tensor is not None]
    assert torch.autograd.gradcheck(value, inputs)


def test_each_side_can_be_frozen() -> None:
    hidden, matrix, _ = parts(False)
    wanted = torch.randint(CLASSES, (ROWS,))
    whole = torch.autograd.grad(cross_entropy(hidden, matrix, wanted).objective, (hidden, matrix))
    (only,) = torch.autograd.grad(
        cross_entropy(hidden, matrix.detach(), wanted).objective, (hidden,)
    )
    assert torch.equal(only, whole[0])
    (only,) = torch.autograd.grad(
        cross_entropy(hidden.detach(), matrix, wanted).objective, (matrix,)
    )
    assert torch.equal(only, whole[1])


@SMOOTHING
def test_without_gradients_the_value_is_the_same_and_nothing_else_is_computed(
    smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, matrix, bias = parts(True)
    wanted = torch.randint(CLASSES, (ROWS,))
    trained = cross_entropy(hidden, matrix, wanted, bias=bias, smoothing=smoothing)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(torch, "mm", never)
    with pytest.raises(AssertionError, match="a gradient"):  # what is watched is the right thing
        cross_entropy(hidden, matrix, wanted, bias=bias, smoothing=smoothing)
    with torch.no_grad():
        looked = cross_entropy(hidden, matrix, wanted, bias=bias, smoothing=smoothing)
    detached = cross_entropy(hidden.detach(), matrix.detach(), wanted, smoothing=smoothing)
    assert torch.equal(looked.objective, trained.objective)
    assert torch.equal(looked.nll, trained.nll)
    assert not looked.objective.requires_grad
    assert not detached.objective.requires_grad


def test_a_tied_matrix_gathers_its_gradient_from_both_its_uses() -> None:
    table = nn.Embedding(CLASSES, DIM, dtype=torch.float64)
    tokens, wanted = torch.randint(CLASSES, (2, ROWS))
    grads = []
    for function in (
        lambda hidden: cross_entropy(hidden, table.weight, wanted, smoothing=0.1).objective,
        lambda hidden: reference(hidden, table.weight, None, wanted, 0.1),
    ):
        table.zero_grad()
        function(table(tokens).tanh()).backward()
        assert table.weight.grad is not None
        grads.append(table.weight.grad)
    torch.testing.assert_close(grads[0], grads[1], **EXACT)


def test_the_nll_has_no_gradient() -> None:
    hidden, matrix, _ = parts(False)
    loss = cross_entropy(hidden, matrix, torch.randint(CLASSES, (ROWS,)), smoothing=0.1)
    assert loss.objective.requires_grad
    assert not loss.nll.requires_grad


def test_no_rows_cost_nothing() -> None:
    _, matrix, _ = parts(False)
    loss = cross_entropy(matrix.new_zeros(0, DIM), matrix, torch.zeros(0, dtype=torch.long))
    assert (float(loss.objective.detach()), float(loss.nll), loss.count) == (0.0, 0.0, 0)


def test_huge_scores_stay_finite() -> None:
    """log Σ e^z must not overflow: softmax on its own would."""
    hidden, matrix, _ = parts(False, torch.float32)
    wanted = torch.randint(CLASSES, (ROWS,))
    loss = cross_entropy(1e4 * hidden, matrix, wanted, smoothing=0.1)
    loss.objective.backward()
    assert torch.isfinite(loss.objective)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_bfloat16_hidden_states_sum_in_float32() -> None:
    hidden, matrix, bias = parts(True, torch.float32)
    wanted = torch.randint(CLASSES, (ROWS,))
    small = hidden.detach().bfloat16().requires_grad_()
    loss = cross_entropy(small, matrix, wanted, bias=bias, smoothing=0.1)
    loss.objective.backward()
    assert loss.objective.dtype == torch.float32
    assert small.grad is not None
    assert matrix.grad is not None
    assert (small.grad.dtype, matrix.grad.dtype) == (torch.bfloat16, torch.float32)
    expected = reference(hidden, matrix, bias, wanted, 0.1)
    # bfloat16 keeps 8 bits: products of a few units are right to about 1 %.
    torch.testing.assert_close(loss.objective, expected, rtol=0.02, atol=0.0)
    (exact,) = torch.autograd.grad(expected, (matrix,))
    torch.testing.assert_close(matrix.grad, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("chunk", [5, 1024])
@SMOOTHING
def test_what_is_not_scored_counts_for_nothing(
    smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is left out, wants nothing, or was never there."""
    monkeypatch.setattr(objective, "ROWS_PER_CHUNK", {"cpu": chunk, "cuda": chunk})
    hidden, matrix, bias = parts(biased=True)
    assert bias is not None
    wanted, scored = torch.randint(CLASSES, (ROWS,)), torch.arange(ROWS) % 3 > 0
    settings = {"bias": bias, "smoothing": smoothing}
    alone = cross_entropy(hidden[scored], matrix, wanted[scored], **settings)
    nothing = wanted.masked_fill(~scored, IGNORE_INDEX)
    others = [
        cross_entropy(hidden, matrix, wanted, loss_mask=scored, **settings),
        cross_entropy(hidden, matrix, nothing, count=int(scored.sum()), **settings),
        cross_entropy(hidden[None], matrix, nothing[None], loss_mask=scored[None], **settings),
    ]
    expected = torch.autograd.grad(alone.objective, (hidden, matrix, bias))
    for other in others:
        assert other.count == int(scored.sum())
        torch.testing.assert_close(other.nll, alone.nll, **EXACT)
        found = torch.autograd.grad(other.objective, (hidden, matrix, bias))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, **EXACT)
