"""Our kernel that puts keys and values into their slots, interpreted where Triton is installed."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.kernels import kv_write as placed
from manyheads.kernels.dispatch import agrees
torch.manual_seed(1)
for rows, groups, new, (e, c) in itertools.product((1, 3), (1, 2), (1, 3, 5), ((16, 16), (24, 8))):
    k, v = (torch.randn(rows, new, groups, n).transpose(1, 2) for n in (e, c))
    held = tuple(torch.randn(rows, groups, 12, n) for n in (e, c))
    wanted, slots = [one.clone() for one in held], torch.randperm(12)[:new]
    placed.place(*held, slots, k, v)
    for one, other, x in zip(held, wanted, (k, v)):
        assert torch.equal(one, other.index_copy_(2, slots, x))
assert agrees(lambda: placed.trial(torch.device("cpu")), "placed")
"""


@needs_triton
def test_the_kernel_puts_what_belongs_there() -> None:
    interpret(PROGRAM)
