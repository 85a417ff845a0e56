"""R-Drop: two readings of a batch, each with other dropout, and how far apart they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_runs import records, trainer, write_recipe
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import UserError
from manyheads.kernels import linear_cross_entropy as objective
from manyheads.tasks.translation import translation_losses
from manyheads.train.rdrop import rdrop_kl


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("pairs"))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("at_once", [4, 1024])
def test_it_is_the_divergence_in_both_directions(
    biased: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, in pieces too, of the predictions that count alone."""
    monkeypatch.setattr(objective, "ROWS_PER_CHUNK", {"cpu": at_once, "cuda": at_once})
    torch.manual_seed(1)
    hidden, matrix, bias = normal(6, 5, 8), normal(11, 8), normal(11) if biased else None
    scored = torch.rand(3, 5) < 0.7
    loss = rdrop_kl(hidden, matrix, scored, bias=bias, count=int(scored.sum()), weight=2.5)
    logs = F.linear(hidden, matrix, bias).log_softmax(-1)
    p, q = logs[:3][scored], logs[3:][scored]
    both = [F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))]
    expected = (both[0] + both[1]) / 2
    assert expected.item() > 0.1
    assert (loss.count, loss.weight) == (int(scored.sum()), 2.5)
    torch.testing.assert_close(loss.objective, expected, rtol=0, atol=1e-12)
    given = (hidden, matrix) if bias is None else (hidden, matrix, bias)
    for one, other in zip(
        torch.autograd.grad(loss.objective, given),
        torch.autograd.grad(expected, given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_readings_differ_by_their_dropout_alone(recipe: Path, tmp_path: Path) -> None:
    """Without it they agree, and the loss is that of one reading."""
    found = trainer(recipe, tmp_path / "run", "train.rdrop_alpha=5")
    model: Any = found.model.double()
    (batch,) = found.task.batches(0)
    apart = translation_losses(model.train(), batch, 0.1, 5.0)
    assert float(apart["agreement"].nll) > 1e-3
    same = translation_losses(model.eval(), batch, 0.1, 5.0)
    [plain] = translation_losses(model, batch, 0.1, 0.0).values()
    assert abs(float(same["agreement"].nll)) < 1e-9
    for name in ("objective", "nll", "count"):
        torch.testing.assert_close(getattr(same["tokens"], name), getattr(plain, name))
    assert {name: loss.count for name, loss in same.items()} == found.task.counts(batch)


def test_a_run_tells_how_far_apart_they_are(recipe: Path, tmp_path: Path) -> None:
    trainer(recipe, tmp_path / "run", "train.rdrop_alpha=4", "train.steps=6").run()
    rows = [row for row in records(tmp_path / "run") if row["split"] == "train"]
    assert rows
    for row in rows:
        assert row["agreement_loss"] > 0
        assert row["loss"] == pytest.approx(row["tokens_loss"] + 2 * row["agreement_loss"])


def test_what_it_is_not_for_is_refused(recipe: Path, tmp_path: Path) -> None:
    for given, said in (
        (["train.rdrop_alpha=-1"], "must be at least 0"),
        (["train.rdrop_alpha=1", "model.dropout=0"], "set model.dropout"),
        (
            ["train.rdrop_alpha=1", "model.encoder.dropout=0", "model.decoder.dropout=0"],
            "set model.dropout",
        ),
    ):
        with pytest.raises(UserError, match=said):
            trainer(recipe, tmp_path / "run", *given)
    for own in ("model.attention_dropout=0.1", "model.decoder.dropout=0.1"):
        trainer(recipe, tmp_path / own, "train.rdrop_alpha=1", "model.dropout=0", own)
    with pytest.raises(UserError, match=r"train\.rdrop_alpha"):
        trainer(Path("language"), tmp_path / "run", "data.folder=texts", "train.rdrop_alpha=1")
    assert not (tmp_path / "run").exists()
