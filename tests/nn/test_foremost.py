"""Our kernels for rows of logits, interpreted where Triton is installed."""

from tests.nn.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.nn import foremost as room
from manyheads.nn.foremost import foremost, log_mass
from manyheads.nn.trusted import agrees
torch.manual_seed(1)
for lanes, (rows, width), kind in itertools.product(
    (1024, 16), ((3, 5), (2, 16), (4, 33), (2, 1000)), ("any", "few kinds", "most are never")
):
    room.LANES = lanes
    z = torch.randn(rows, width + 3)[:, :width]  # part of something wider
    if kind == "few kinds":
        z = z.round()  # with many that are equal
    if kind == "most are never":
        z = z.clone()
        z[:, 2:] = -torch.inf
    if width == 33:
        z = z.bfloat16().float()
        for one, other in zip(foremost(z.bfloat16(), 5), foremost(z, 5)):
            assert torch.equal(one, other)
        torch.testing.assert_close(log_mass(z.bfloat16()), log_mass(z))
    torch.testing.assert_close(log_mass(z), z.logsumexp(-1, keepdim=True))
    for most in {1, min(5, width), min(10, width)}:
        best, places = foremost(z, most)
        assert torch.equal(best, z.topk(most, dim=-1).values)
        assert torch.equal(z.gather(1, places), best)
        assert all(len(row.unique()) == most for row in places)
assert agrees(lambda: room.trial(torch.device("cpu")), "foremost")
"""


@needs_triton
def test_the_kernels_compute_the_formulas() -> None:
    interpret(PROGRAM)
