"""Attention with a bias by distance, and the gradient of its table."""

from typing import Any

import pytest
import torch
from tests.kernels.compare import assert_kernel_equals
from torch import Tensor

from manyheads.kernels import biased_attention as kernels


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [16, 50, 128])
def test_output_and_gradients(
    length: int, causal: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 64 if length == 128 else 16  # several blocks, and few: the interpreter is slow
    for name in ("FORWARD", "KEYS", "QUERIES", "BIAS"):
        blocks: Any = [{"M": size} if name == "BIAS" else {"M": size, "N": 32}] * 2
        monkeypatch.setattr(kernels, name, blocks)
    q, k, v = torch.randn(3, 2, 2, length, 16)
    table = torch.randn(2, 2 * length - 1)
    padding_mask = torch.arange(length) < torch.tensor([[length], [length - 7]]) if padded else None

    def formula(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        at = torch.arange(length)
        scores = q @ k.mT * 0.3 + table[:, at - at[:, None] + length - 1]
        if causal:
            scores = scores.masked_fill(at > at[:, None], -torch.inf)
        if padding_mask is not None:
            scores = scores.masked_fill(~padding_mask[:, None, None], -torch.inf)
        return scores.softmax(-1) @ v

    assert_kernel_equals(
        lambda *x: kernels.biased_attention(*x, padding_mask, causal, 0.3),
        formula,
        (q, k, v, table),
    )
