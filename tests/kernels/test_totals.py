"""What the programs of a kernel have summed, put together; interpreted where Triton is there."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.kernels.reduce import sum_rows
torch.manual_seed(1)
for rows, width in itertools.product((1, 64, 65, 200), (1, 16, 50)):
    parts = torch.randn(rows, width)
    torch.testing.assert_close(sum_rows(parts), parts.sum(0), rtol=1e-5, atol=1e-5)
"""


@needs_triton
def test_totals_are_sums_of_rows() -> None:
    interpret(PROGRAM)
