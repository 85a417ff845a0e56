"""A kernel of ours is used where a trial on the device came out right."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from manyheads.kernels import dispatch as trusted
from manyheads.kernels.dispatch import has_hooks, passes, trusted

RIGHT = torch.tensor([3.0, 4.0], dtype=torch.float64)


def pairs(found: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(RIGHT, RIGHT), (found, RIGHT)]


def test_what_is_near_is_right() -> None:
    assert passes(lambda: pairs(RIGHT.float() * 1.01), "short")


@pytest.mark.parametrize("found", [RIGHT * 1.1, RIGHT * float("nan"), -RIGHT])
def test_what_is_apart_or_no_number_is_left_alone_and_told(found: Tensor) -> None:
    with pytest.warns(
        UserWarning, match=r"without our kernel in kernels/short_attention\.py: it is off by"
    ):
        assert not passes(lambda: pairs(found), "short")


def test_what_cannot_be_compiled_is_left_alone_and_told() -> None:
    def selftest() -> list[tuple[Tensor, Tensor]]:
        raise RuntimeError("no compiler here")

    with pytest.warns(UserWarning, match="no compiler here"):
        assert not passes(selftest, "short")


def test_a_full_memory_says_nothing_about_a_kernel() -> None:
    def selftest() -> list[tuple[Tensor, Tensor]]:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        passes(selftest, "short")


@pytest.mark.parametrize(
    "listen",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_whoever_listens_is_noticed(listen: str) -> None:
    parts = nn.LayerNorm(2), nn.Dropout(0.1)
    assert has_hooks(*parts)
    handle = getattr(parts[1], listen)(lambda *given: None)
    assert not has_hooks(*parts)
    handle.remove()
    assert has_hooks(*parts)


def test_each_device_is_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what came of it decides."""
    asked: list[int | None] = []

    def selftest(device: torch.device) -> list[tuple[Tensor, Tensor]]:
        asked.append(device.index)
        return pairs(RIGHT if device.index == 1 else 2 * RIGHT)

    monkeypatch.setitem(sys.modules, "manyheads.nn.other", SimpleNamespace(trial=selftest))
    monkeypatch.setattr(room, "FOUND", {})
    with pytest.warns(UserWarning, match="other"):
        found = [trusted("other", index) for index in (0, 1, 0, 1)]
    assert found == [False, True, False, True]
    assert asked == [0, 1]
