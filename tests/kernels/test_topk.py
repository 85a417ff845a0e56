"""Top-k, log-sum-exp and the gradient of cross-entropy, over rows of logits."""

from itertools import product
from typing import Any

import pytest
import torch

from manyheads import ops
from manyheads.kernels import topk as kernels
from manyheads.kernels.linear_cross_entropy import GradCall, _run_torch, _run_triton
from manyheads.kernels.topk import logsumexp, topk


@pytest.mark.parametrize("kind", ["any", "ties", "mostly −∞"])
@pytest.mark.parametrize(("rows", "width"), [(3, 5), (2, 16), (4, 33), (2, 200)])
def test_topk_and_logsumexp(
    rows: int, width: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = torch.randn(rows, width + 3)[:, :width]  # not contiguous
    if kind == "ties":
        z = z.round()
    if kind == "mostly −∞":
        z = z.clone()
        z[:, 2:] = -torch.inf
    torch.testing.assert_close(logsumexp(z), z.logsumexp(-1, keepdim=True))
    torch.testing.assert_close(logsumexp(z.bfloat16()), logsumexp(z.bfloat16().float()))
    order = z.sort(dim=-1, descending=True, stable=True).indices
    for lanes, columns in ((1024, 1024), (32, 50)):
        monkeypatch.setattr(kernels, "MAX_LANES", lanes)
        monkeypatch.setattr(kernels, "MIN_COLUMNS_PER_PROGRAM", columns)
        for k in {1, min(10, width)}:
            values, indices = topk(z, k)
            assert torch.equal(values, z.topk(k, dim=-1).values)
            assert torch.equal(indices, order[:, :k])  # ties by the lowest index


def test_splits_cover_a_row() -> None:
    for rows, width, k in product((1, 5, 320), (1, 40, 3000, 50257), (1, 10, 32)):
        splits, split_width = kernels._split(rows, width, k)
        assert (splits - 1) * split_width < width <= splits * split_width
        assert splits == 1 or width - (splits - 1) * split_width >= k
        assert splits == 1 or rows * splits <= kernels.TARGET_PROGRAMS


def test_ops_are_the_same_by_kernels(request: pytest.FixtureRequest) -> None:
    z = torch.randn(6, 1000)
    plain = [ops.argmax(z), *ops.topk(z, 7), ops.logsumexp(z)]
    request.getfixturevalue("on_cpu")
    calls: Any = request.getfixturevalue("calls")
    for result, expected in zip(
        [ops.argmax(z), *ops.topk(z, 7), ops.logsumexp(z)], plain, strict=True
    ):
        torch.testing.assert_close(result, expected)
    assert calls == ["topk", "topk"]


SIZES = [(7, 5), (300, 5), (9000, 5), (8192, 0), (16390, 8195)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("classes", "padding"), SIZES)
def test_cross_entropy_grad(classes: int, padding: int, smoothing: float) -> None:
    for scale in (3, 300):
        logits = scale * torch.randn(9, classes + padding)
        labels = torch.randint(classes, (9,))
        logits[:, classes:], labels[3], labels[4], labels[5] = 5, -1, 0, classes - 1
        nll, uniform, grad = _run_torch(GradCall(logits.double(), labels, classes, smoothing, True))
        for training in (False, True):
            call = GradCall(logits.clone(), labels, classes, smoothing, training)
            result = _run_triton(call)
            torch.testing.assert_close(result[0].double(), nll, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(result[1].double(), uniform, rtol=1e-5, atol=1e-5)
            expected = grad.float() if training else logits
            torch.testing.assert_close(result[2], expected, rtol=1e-4, atol=1e-5)


def test_ignored_rows_may_hold_anything() -> None:
    logits, labels = torch.randn(2, 300), torch.tensor([-1, 7])
    logits[0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    nll, uniform, grad = _run_triton(GradCall(logits, labels, 300, 0.1, True))
    assert torch.isfinite(nll + uniform)
    assert (grad[0] == 0).all()
    assert (grad[1] != 0).all()
