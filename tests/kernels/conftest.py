"""Kernels on CPU tensors, in Triton's interpreter; tests/test_gpu.py runs them on a GPU."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETS = find_spec("triton") is not None and not torch.cuda.is_available()
if not INTERPRETS:
    collect_ignore_glob = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.stem != "test_dispatch"
    ]


def _patch_bfloat16_dot() -> None:
    """Triton 3.9's interpreter holds bfloat16 as integers and multiplies those: convert first."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def to_float32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(  # type: ignore[method-assign]
        self, to_float32(a), to_float32(b), *rest
    )


if INTERPRETS:
    _patch_bfloat16_dot()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the guards of kernels accept CPU tensors, also in float32, without self-tests."""
    from manyheads import ops, optimize
    from manyheads.kernels import attention, dispatch, linear_cross_entropy
    from manyheads.optimize import fused, gemv

    modules = (ops, optimize, fused, gemv, attention, dispatch, linear_cross_entropy)
    accept = {
        "runs_triton": lambda x: True,
        "verified": lambda name, index: True,
        "HALF_PRECISION": (torch.bfloat16, torch.float16, torch.float32),
    }
    for module in modules:
        for name, value in accept.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def _record(record: list[str], name: str, kernel: Any, *args: Any) -> Any:
    record.append(name)
    return kernel(*args)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran, of those that modules and ops use."""
    record: list[str] = []
    for module, name in (
        ("short_attention", "short_attention"),
        ("mlp", "fused_mlp"),
        ("layer_norm", "add_norm"),
        ("layer_norm", "prenorm"),
        ("gemv", "gemv"),
        ("gemv", "norm_row"),
        ("append_attention", "append_attention"),
        ("append_attention", "write_kv"),
        ("topk", "topk"),
    ):
        kernels = import_module(f"manyheads.kernels.{module}")
        monkeypatch.setattr(kernels, name, partial(_record, record, name, getattr(kernels, name)))
    return record
