# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the programs of a kernel have summed, each over its rows, put together.

PyTorch's own sum of so few rows takes longer, and clears flags of its own before.
"""

import triton
import triton.language as tl
from torch import Tensor

from manyheads.kernels.dispatch import device_guard

ROWS, COLUMNS = 64, 16


@triton.jit
def _total(PARTS, TOTAL, rows, width, M: tl.constexpr, C: tl.constexpr):
    columns = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([M, C], tl.float32)
    for start in range(0, rows, M):
        at = start + tl.arange(0, M)
        there = (at < rows)[:, None] & (columns < width)[None, :]
        total += tl.load(PARTS + at[:, None] * width + columns[None, :], mask=there, other=0.0)
    tl.store(TOTAL + columns, tl.sum(total, 0), mask=columns < width)


def sum_rows(parts: Tensor) -> Tensor:
    """Σ over the rows of parts [n d], float32 and contiguous; for use inside an operator."""
    rows, width = parts.shape
    found = parts.new_empty(width)
    with device_guard(parts):
        _total[(triton.cdiv(width, COLUMNS),)](parts, found, rows, width, M=ROWS, C=COLUMNS)
    return found
