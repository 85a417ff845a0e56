"""Cross-entropy and R-Drop, fused with the output layer, equal PyTorch's, chunk by chunk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_runs import records, trainer, write_recipe
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.data.batching import IGNORE_INDEX
from manyheads.errors import UserError
from manyheads.kernels import linear_cross_entropy
from manyheads.tasks.translation import translation_losses
from manyheads.train.consistency import consistency, cut_off
from manyheads.train.optimizer import Train
from manyheads.train.step import cross_entropy

ROWS, DIM, CLASSES = 13, 6, 11
EXACT = {"rtol": 1e-10, "atol": 1e-10}
SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1])
BIAS = pytest.mark.parametrize("biased", [True, False])


def parts(biased: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden = torch.randn(ROWS, DIM, dtype=dtype, requires_grad=True)
    matrix = torch.randn(CLASSES, DIM, dtype=dtype, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True) if biased else None
    return hidden, matrix, bias


def reference(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
) -> Tensor:
    logits = F.linear(hidden, matrix, bias)
    return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")


def set_chunk(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(linear_cross_entropy, "ROWS_PER_CHUNK", {"cpu": rows, "cuda": rows})


def assert_same_gradients(one: Tensor, other: Tensor, inputs: list[Tensor]) -> None:
    pairs = zip(torch.autograd.grad(one, inputs), torch.autograd.grad(other, inputs), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, **EXACT)


# Chunks that end inside, at and past the last row, and one row at a time.
@pytest.mark.parametrize("chunk", [1, 5, 12, 13, 14, 1024])
@SMOOTHING
@BIAS
def test_value_and_gradients_equal_pytorchs(
    biased: bool, smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_chunk(monkeypatch, chunk)
    hidden, matrix, bias = parts(biased)
    labels = torch.randint(CLASSES, (ROWS,))
    loss = cross_entropy(hidden, matrix, labels, bias=bias, smoothing=smoothing)
    expected = reference(hidden, matrix, bias, labels, smoothing)
    torch.testing.assert_close(loss.objective, expected, **EXACT)
    torch.testing.assert_close(loss.nll, reference(hidden, matrix, bias, labels, 0.0), **EXACT)
    assert loss.count == ROWS
    assert not loss.nll.requires_grad
    # The loop divides by the counts of all micro-batches before it goes backward.
    inputs = [tensor for tensor in (hidden, matrix, bias) if tensor is not None]
    assert_same_gradients(loss.objective / 7, expected / 7, inputs)


def test_each_side_can_be_frozen_and_a_tied_matrix_gets_both_gradients() -> None:
    hidden, matrix, _ = parts(False)
    labels = torch.randint(CLASSES, (ROWS,))
    loss = cross_entropy(hidden, matrix, labels).objective
    both = torch.autograd.grad(loss, (hidden, matrix))
    frozen = cross_entropy(hidden, matrix.detach(), labels).objective
    assert torch.equal(*torch.autograd.grad(frozen, (hidden,)), both[0])
    frozen = cross_entropy(hidden.detach(), matrix, labels).objective
    assert torch.equal(*torch.autograd.grad(frozen, (matrix,)), both[1])
    table = nn.Embedding(CLASSES, DIM, dtype=torch.float64)
    states = table(torch.randint(CLASSES, (ROWS,))).tanh()
    tied = cross_entropy(states, table.weight, labels, smoothing=0.1).objective
    expected = reference(states, table.weight, None, labels, 0.1)
    ours = torch.autograd.grad(tied, table.weight, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, table.weight), **EXACT)


def test_without_gradients_nothing_but_the_value_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, matrix, bias = parts(True)
    labels = torch.randint(CLASSES, (ROWS,))
    trained = cross_entropy(hidden, matrix, labels, bias=bias, smoothing=0.1)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(torch, "mm", never)
    with pytest.raises(AssertionError, match="a gradient"):  # `mm` is what gradients call
        cross_entropy(hidden, matrix, labels, bias=bias, smoothing=0.1)
    with torch.no_grad():
        value = cross_entropy(hidden, matrix, labels, bias=bias, smoothing=0.1)
    assert torch.equal(value.objective, trained.objective)
    assert torch.equal(value.nll, trained.nll)
    assert not value.objective.requires_grad


def test_extremes() -> None:
    """No rows cost nothing, huge logits stay finite, bfloat16 states are summed in float32."""
    hidden, matrix, bias = parts(True, torch.float32)
    labels = torch.randint(CLASSES, (ROWS,))
    empty = cross_entropy(hidden[:0], matrix, labels[:0])
    assert (float(empty.objective.detach()), float(empty.nll), empty.count) == (0.0, 0.0, 0)
    huge = cross_entropy(1e4 * hidden, matrix, labels, smoothing=0.1).objective
    assert torch.isfinite(huge)
    assert torch.isfinite(torch.autograd.grad(huge, hidden)[0]).all()
    states = hidden.detach().bfloat16().requires_grad_()
    loss = cross_entropy(states, matrix, labels, bias=bias, smoothing=0.1).objective
    of_states, of_matrix = torch.autograd.grad(loss, (states, matrix))
    dtypes = (loss.dtype, of_states.dtype, of_matrix.dtype)
    assert dtypes == (torch.float32, torch.bfloat16, torch.float32)
    expected = reference(hidden, matrix, bias, labels, 0.1)
    # bfloat16 has 8 bits: products of a few units are right to about 1 %.
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.0)
    exact = torch.autograd.grad(expected, matrix)[0]
    torch.testing.assert_close(of_matrix, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("chunk", [5, 1024])
@SMOOTHING
def test_masked_and_ignored_labels_count_for_nothing(
    smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_chunk(monkeypatch, chunk)
    hidden, matrix, bias = parts(biased=True)
    assert bias is not None
    labels, mask = torch.randint(CLASSES, (ROWS,)), torch.arange(ROWS) % 3 > 0
    settings = {"bias": bias, "smoothing": smoothing}
    expected = cross_entropy(hidden[mask], matrix, labels[mask], **settings)
    ignored = labels.masked_fill(~mask, IGNORE_INDEX)
    for other in (
        cross_entropy(hidden, matrix, labels, loss_mask=mask, **settings),
        cross_entropy(hidden, matrix, ignored, count=int(mask.sum()), **settings),
        cross_entropy(hidden[None], matrix, ignored[None], loss_mask=mask[None], **settings),
    ):
        assert other.count == int(mask.sum())
        torch.testing.assert_close(other.nll, expected.nll, **EXACT)
        retained = expected.objective * 1
        ours = torch.autograd.grad(other.objective, (hidden, matrix, bias))
        theirs = torch.autograd.grad(retained, (hidden, matrix, bias), retain_graph=True)
        torch.testing.assert_close(ours, theirs, **EXACT)


# --- R-Drop and SimCut ---


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("pairs"))


@BIAS
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_consistency_is_the_kl_divergence_in_one_or_both_directions(
    biased: bool, chunk: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_chunk(monkeypatch, chunk)
    _, matrix, bias = parts(biased)
    hidden = torch.randn(6, 5, DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 5) < 0.7
    loss = consistency(
        hidden,
        matrix,
        mask,
        bias=bias,
        count=int(mask.sum()),
        weight=2.5,
        symmetric=symmetric,
    )
    log_probs = F.linear(hidden, matrix, bias).log_softmax(-1)
    p, q = log_probs[:3][mask], log_probs[3:][mask]
    both = [F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((q, p), (p, q))]
    expected = (both[0] + both[1]) / 2 if symmetric else both[0]
    assert expected.item() > 0.1
    assert (loss.count, loss.weight) == (int(mask.sum()), 2.5)
    torch.testing.assert_close(loss.objective, expected, **EXACT)
    inputs = [hidden, matrix] if bias is None else [hidden, matrix, bias]
    assert_same_gradients(loss.objective, expected, inputs)


def test_without_dropout_both_passes_agree(recipe: Path, tmp_path: Path) -> None:
    actual = trainer(recipe, tmp_path / "run", "train.rdrop_alpha=5")
    model: Any = actual.model.double()
    (batch,) = actual.task.batches(0)
    train = Train(rdrop_alpha=5.0)
    assert float(translation_losses(model.train(), batch, train)["agreement"].nll) > 1e-3
    same = translation_losses(model.eval(), batch, train)
    [plain] = translation_losses(model, batch, Train()).values()
    assert abs(float(same["agreement"].nll)) < 1e-9
    for name in ("objective", "nll", "count"):
        torch.testing.assert_close(getattr(same["tokens"], name), getattr(plain, name))
    assert {name: loss.count for name, loss in same.items()} == actual.task.counts(batch)


def test_simcut_cuts_only_the_second_pass(recipe: Path, tmp_path: Path) -> None:
    actual = trainer(recipe, tmp_path / "run", "train.simcut_alpha=3")
    model: Any = actual.model.double().eval()
    (batch,) = actual.task.batches(0)
    [plain] = translation_losses(model, batch, Train()).values()
    for p, agrees in ((0.0, True), (0.5, False)):
        losses = translation_losses(model, batch, Train(simcut_alpha=3.0, simcut_p=p))
        torch.testing.assert_close(losses["tokens"].objective, plain.objective)
        assert (abs(float(losses["agreement"].nll)) < 1e-9) == agrees
        assert losses["agreement"].weight == 3.0
    assert not model.tokens._forward_hooks
    assert {name: loss.count for name, loss in losses.items()} == actual.task.counts(batch)


def test_cut_off_zeroes_vectors_with_its_probability() -> None:
    table = torch.nn.Embedding(5, 3)
    tokens = torch.randint(5, (200, 50))
    with cut_off({table}, 0.25):
        first, second = table(tokens).chunk(2)
    assert torch.equal(first, table(tokens[:100]))
    cut = (second == 0).all(-1)
    assert torch.equal(second[~cut], table(tokens[100:])[~cut])
    assert abs(float(cut.double().mean()) - 0.25) < 0.03  # 5000 vectors: 5 standard deviations


def test_a_run_reports_both_terms(recipe: Path, tmp_path: Path) -> None:
    trainer(recipe, tmp_path / "run", "train.rdrop_alpha=4", "train.steps=6").run()
    rows = [row for row in records(tmp_path / "run") if row["split"] == "train"]
    assert rows
    for row in rows:
        assert row["agreement_loss"] > 0
        assert row["loss"] == pytest.approx(row["tokens_loss"] + 2 * row["agreement_loss"])


def test_rdrop_needs_dropout_and_a_translator(recipe: Path, tmp_path: Path) -> None:
    sides = ("model.encoder.dropout=0", "model.decoder.dropout=0")
    for wrong in (("model.dropout=0",), sides):
        with pytest.raises(UserError, match=r"model\.dropout"):
            trainer(recipe, tmp_path / "run", "train.rdrop_alpha=1", *wrong)
    for enough in ("model.attention_dropout=0.1", "model.decoder.dropout=0.1"):
        trainer(recipe, tmp_path / enough, "train.rdrop_alpha=1", "model.dropout=0", enough)
    with pytest.raises(UserError, match=r"train\.rdrop_alpha"):
        trainer(Path("language"), tmp_path / "run", "data.folder=texts", "train.rdrop_alpha=1")
    assert not (tmp_path / "run").exists()


def test_ignored_labels_are_not_counted() -> None:
    """With or without a loss mask: the count is that of the scored positions."""
    torch.manual_seed(1)
    hidden, matrix = torch.randn(6, 4), torch.randn(5, 4)
    labels = torch.tensor([0, IGNORE_INDEX, 3, 4, IGNORE_INDEX, 2])
    loss = cross_entropy(hidden, matrix, labels)
    masked = cross_entropy(hidden, matrix, labels, loss_mask=labels != IGNORE_INDEX)
    assert loss.count == masked.count == 4
    torch.testing.assert_close(loss.nll, masked.nll)
