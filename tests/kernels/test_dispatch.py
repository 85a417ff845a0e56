"""A kernel is used if it supports the call and passed its self-test on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads import ops
from manyheads.kernels import dispatch
from manyheads.kernels.dispatch import Implementation, first_supported, verified
from manyheads.kernels.selftest import passes

EXPECTED = torch.tensor([3.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize("result", [EXPECTED * 1.1, EXPECTED * float("nan"), -EXPECTED])
def test_a_wrong_kernel_is_left_out_with_a_warning(result: Tensor) -> None:
    assert passes(lambda: [(EXPECTED.float() * 1.01, EXPECTED)], "some")
    with pytest.warns(UserWarning, match="some"):
        assert not passes(lambda: [(EXPECTED, EXPECTED), (result, EXPECTED)], "some")


def test_a_kernel_that_does_not_compile_is_left_out_unless_memory_is_the_reason() -> None:
    def fails(error: Exception) -> Any:
        raise error

    with pytest.warns(UserWarning, match="no compiler"):
        assert not passes(lambda: fails(RuntimeError("no compiler")), "some")
    with pytest.raises(torch.OutOfMemoryError):
        passes(lambda: fails(torch.OutOfMemoryError()), "some")


def test_each_device_is_tested_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A passed test holds for later processes too, a failed one is repeated there."""
    tested: list[int | None] = []

    def selftest(kernel: str, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        tested.append(device.index)
        return [(EXPECTED * (2 - device.index), EXPECTED)]

    monkeypatch.setattr(dispatch, "_VERIFIED", {})
    monkeypatch.setattr(dispatch, "run_selftest", selftest)
    monkeypatch.setattr(dispatch, "passed_tests", lambda index: tmp_path / str(index))
    with pytest.warns(UserWarning, match="some"):
        assert [verified("some", index) for index in (0, 1, 0, 1)] == [False, True, False, True]
    assert tested == [0, 1]
    dispatch._VERIFIED.clear()  # as in a new process
    with pytest.warns(UserWarning, match="some"):
        assert [verified("some", index) for index in (0, 1)] == [False, True]
    assert verified("other", 1)
    assert tested == [0, 1, 0, 1]


def test_passed_tests_do_not_hold_for_another_device_driver_compiler_or_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    folder = dispatch.passed_tests.__wrapped__
    first = folder(0)
    assert folder(0) == first
    assert first.is_relative_to(tmp_path)
    monkeypatch.setattr("triton.__version__", "0")
    second = folder(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    third = folder(0)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 1, raising=False)
    fourth = folder(0)
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.setattr(dispatch, "__file__", str(source / "dispatch.py"))
    assert len({first, second, third, fourth, folder(0)}) == 5


def test_the_first_implementation_that_supports_and_passes_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def implementation(supported: int, kernel: str | None) -> Implementation[Any]:
        return Implementation(lambda call: call <= supported, lambda call: call, kernel)

    options = implementation(9, "wrong"), implementation(5, "right"), implementation(9, None)

    def chosen() -> list[str | None]:
        return [first_supported(options, call, EXPECTED).kernel for call in (5, 6)]

    monkeypatch.setattr(dispatch, "verified", lambda kernel, index: kernel == "right")
    assert chosen() == [None, None]  # on a CPU
    monkeypatch.setattr(dispatch, "runs_triton", lambda x: True)
    assert chosen() == ["right", None]


def test_no_kernel_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if Triton is installed."""
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    x = torch.randn(2, 2, 3, 16).bfloat16()
    assert not ops.has_fused_topk(x[0, 0])
    with torch.no_grad():
        position, counter = torch.zeros(1), torch.zeros(4)
        assert ops.append_attention(x, x, x, x, x, position, counter, 1.0) is None
