"""The self-test of every kernel passes in the interpreter, and fails if the kernel is wrong."""

import pytest
import torch

from manyheads.kernels import dispatch, gemv
from manyheads.kernels.dispatch import passes

NAMES = {
    "append_attention",
    "biased_attention",
    "decode_attention",
    "gemv",
    "layer_norm",
    "mlp",
    "qkv",
    "short_attention",
    "short_attention_dropout",
    "softmax_grad",
    "topk",
    "write_kv",
}


def test_every_kernel_has_a_selftest() -> None:
    assert set(dispatch._SELFTESTS) == NAMES


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's sigmoid
@pytest.mark.parametrize("name", sorted(NAMES))
def test_selftests_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "MAX_COLUMNS", 128)  # the interpreter reduces number by number
    assert passes(lambda: dispatch._SELFTESTS[name](torch.device("cpu")), name)
