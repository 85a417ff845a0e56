# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Dropout inside kernels: the mask is a function of a seed and of the element's index (Philox).

Forward and backward pass compute the same mask, so none is stored.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)  # of Philox 4×32: the fewest that pass its authors' tests


@triton.jit
def dropout_scale(SEED, rows, p, D: tl.constexpr):
    """1 / (1 − p) where an element is kept, 0 where it is dropped: D columns of these rows."""
    quarter = tl.arange(0, D // 4)
    counters = rows[:, None] * (D // 4) + quarter[None, :]
    a, b, c, d = tl.randint4x(tl.load(SEED), counters, ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows.shape[0], D)
    # The upper 24 bits, which float32 holds exactly.
    uniform = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216)
    return tl.where(uniform >= p, 1.0 / (1.0 - p), 0.0)
