"""Our product with one row, interpreted where Triton is installed."""

from tests.nn.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from torch.nn import functional as F
from manyheads.nn.single import Single
torch.manual_seed(1)
for (outputs, inputs), biased in itertools.product(((1, 8), (13, 40), (9, 2500)), (True, False)):
    weight = torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    part = Single(weight, bias)
    for shape in ((inputs,), (1, 1, inputs), (3, inputs)):
        x = torch.randn(shape)
        torch.testing.assert_close(part(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)

exact = Single(weight.double(), None)
x = torch.randn(inputs, dtype=torch.float64)
torch.testing.assert_close(exact(x), weight.double() @ x, rtol=1e-13, atol=1e-13)

from manyheads.nn import single
from manyheads.nn.trusted import agrees
assert agrees(lambda: single.trial(torch.device("cpu")), "single")
"""


@needs_triton
def test_the_kernel_computes_the_formula() -> None:
    interpret(PROGRAM)
