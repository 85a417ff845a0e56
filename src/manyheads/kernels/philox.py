# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Dropout inside our kernels: what is dropped hangs on a seed alone.

Both passes draw it, and nothing is kept in between. A counter of Philox gives four numbers.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)  # of Philox: the fewest that its authors trust


@triton.jit
def dropout_scale(SEED, rows, share, D: tl.constexpr):
    """1 / (1 − p) where a number is kept and 0 where it is dropped, for D numbers of these rows."""
    quarter = tl.arange(0, D // 4)
    at = rows[:, None] * (D // 4) + quarter[None, :]
    a, b, c, d = tl.randint4x(tl.load(SEED), at, ROUNDS)
    drawn = tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows.shape[0], D)
    # The upper 24 bits, which float32 holds exactly.
    chance = ((drawn >> 8) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216)
    return tl.where(chance >= share, 1.0 / (1.0 - share), 0.0)
