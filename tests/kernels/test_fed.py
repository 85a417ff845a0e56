"""Our feed-forward part for a GPU, interpreted where Triton is installed; and who takes it."""

import pytest
import torch
from tests.kernels.interpreted import interpret, needs_triton

from manyheads.nn.feedforward import FeedForward

PROGRAM = """
import itertools, torch
from torch.nn import functional as F
from manyheads.kernels.mlp import feed
torch.manual_seed(1)
acts = {"relu": F.relu, "gelu": F.gelu, "gelu-tanh": lambda x: F.gelu(x, approximate="tanh")}

def plain(x, w1, b1, w2, b2, kind):
    return F.linear(acts[kind](F.linear(x, w1, b1)), w2, b2)

compiled = torch.compile(lambda *given: fused_mlp(*given)[0], fullgraph=True)
for shape, kind in itertools.product(((3, 5, 16), (700, 32)), acts):
    sizes = (shape, (200, shape[-1]), (200,), (24, 200), (24,))
    given = [torch.randn(size).requires_grad_() for size in sizes]
    expected = plain(*given, kind)
    direction = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, given, direction)]
    for how in (lambda *given: fused_mlp(*given)[0], compiled):
        found = how(*given, kind)
        slopes = torch.autograd.grad(found, given, direction)
        for one, other in zip((found, *slopes), wanted):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-3)

given[1].requires_grad_(False)  # weights that are not trained get no gradient
found = fused_mlp(*given, "relu")[0]
assert torch.autograd.grad(found.sum(), given[0])[0] is not None

from manyheads.kernels import mlp as fed
from manyheads.kernels.dispatch import passes
assert passes(lambda: fed.selftest(torch.device("cpu")), "fed")
"""


@needs_triton
def test_the_kernel_and_its_gradients_are_those_of_the_formula() -> None:
    interpret(PROGRAM)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu-tanh", "silu"])
def test_a_cpu_is_not_asked(activation: str) -> None:
    part = FeedForward(8, 16, activation, bias=True, dropout=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert not part._has_kernel(torch.randn(2, 3, 8))
