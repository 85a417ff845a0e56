"""The quick checks find wrong types, wrong shapes and letters of two sizes, as the slow ones do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from tests.checks import CORE, checked, trusting, unchecked

from manyheads.nn import attend as attention
from manyheads.nn.shapes import Hidden, Logits

Rows = jaxtyping.Float[torch.Tensor, "b"]


def looked_at(part: Any) -> Any:
    """As the import hook writes it before a function or a class."""
    return checked(typechecker=beartype)(part)


@looked_at
def joined(x: Hidden, y: Hidden, times: int = 1) -> Hidden:
    return x.repeat(times, 1, 1) + y


@looked_at
def nested(x: Hidden) -> Logits:
    return joined(x[:1], x[:1]).expand(len(x), -1, -1)


@looked_at
@dataclass(frozen=True)
class Numbers:
    count: int
    rows: Rows


class Counter:
    @looked_at
    def later(self, other: "Counter", upto: int) -> "Counter":  # not there yet
        return other

    @looked_at
    def count(self, upto: int) -> Iterator[int]:
        yield from range(upto)


def test_what_is_right_passes() -> None:
    x = torch.zeros(2, 3, 4)
    assert joined(x, x).shape == x.shape
    assert nested(x).shape == x.shape  # the letters of one call are not those of the next
    assert Numbers(count=1, rows=torch.zeros(3)).count == 1
    assert list(Counter().count(3)) == [0, 1, 2]
    counter = Counter()
    assert counter.later(counter, 3) is counter


@pytest.mark.parametrize(
    "call",
    [
        lambda x: joined(x, x[0]),
        lambda x: joined(x, x.long()),
        lambda x: joined(x, x[:, :1]),  # broadcasts, but t is 3 and 1
        lambda x: joined(x[:1], x[:1], times=2),  # the result has another b
        lambda x: joined(x, x, times="1"),
        lambda x: Numbers(count=1.5, rows=x[0, 0]),  # type: ignore[arg-type]
        lambda x: Numbers(count=1, rows=x),
        lambda x: Counter().count("3"),
        lambda x: Counter().count(upto=None),
        lambda x: Counter().later(Counter(), "3"),
    ],
)
def test_what_is_wrong_does_not(call: Any) -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises((BeartypeCallHintViolation, jaxtyping.TypeCheckError)):
        call(x)


def test_checks_can_be_left_out() -> None:
    x = torch.zeros(2, 3, 4)
    with unchecked():
        assert joined(x, x[:, :1]).shape == x.shape
    with pytest.raises(BeartypeCallHintViolation):
        joined(x, x[:, :1])


def test_the_core_may_be_trusted(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--jaxtyping-packages", None):
        pytest.skip("run without the hook that adds the checks")
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    with trusting(CORE), pytest.raises(RuntimeError):  # PyTorch's own error
        attention.attend(q, k, k[:, :, :4])


def test_the_package_is_checked(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--jaxtyping-packages", None):
        pytest.skip("run without the hook that adds the checks")
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    assert attention.attend(q, k, k).shape == q.shape
    with pytest.raises(BeartypeCallHintViolation):
        attention.attend(q, k, k[:, :, :4])
