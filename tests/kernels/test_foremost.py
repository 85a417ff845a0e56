"""Our kernels for rows of logits, interpreted where Triton is installed."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.kernels import topk as foremost
from manyheads.kernels.topk import foremost, logsumexp
from manyheads.kernels.dispatch import passes
torch.manual_seed(1)
for (lanes, part), (rows, width), kind in itertools.product(
    ((1024, 1024), (32, 1024), (32, 50), (1024, 7)),
    ((3, 5), (2, 16), (4, 33), (2, 1000)),
    ("any", "few kinds", "most are never"),
):
    room.LANES, room.PART = lanes, part
    z = torch.randn(rows, width + 3)[:, :width]  # part of something wider
    if kind == "few kinds":
        z = z.round()  # with many that are equal
    if kind == "most are never":
        z = z.clone()
        z[:, 2:] = -torch.inf
    if width == 33:
        z = z.bfloat16().float()
        for one, other in zip(topk(z.bfloat16(), 5), topk(z, 5)):
            assert torch.equal(one, other)
        torch.testing.assert_close(logsumexp(z.bfloat16()), logsumexp(z))
    torch.testing.assert_close(logsumexp(z), z.logsumexp(-1, keepdim=True))
    for most in {1, min(5, width), min(10, width)}:
        best, places = topk(z, most)
        assert torch.equal(best, z.topk(most, dim=-1).values)
        assert torch.equal(places, z.sort(dim=-1, descending=True, stable=True).indices[:, :most])
for rows, width, most in itertools.product((1, 5, 320), (1, 40, 3000, 50257), (1, 10, 32)):
    room.PART = 1024
    parts, each = room._parts(rows, width, most)
    assert (parts - 1) * each < width <= parts * each
    assert parts == 1 or (width - (parts - 1) * each >= most and rows * parts <= 128)
assert passes(lambda: room.selftest(torch.device("cpu")), "foremost")

# A step of a search, and the likeliest token, are the same by them.
from manyheads.decode import logits as asked
from manyheads.decode.beam import continuations
z, alive = torch.randn(6, 1000), torch.randn(2, 3)
alive[1, 1:] = -torch.inf
found = []
for ours in (True, False):
    asked.has_kernel = lambda values: ours
    found.append([asked.likeliest(z), *continuations(alive, z, asked.logsumexp(z))])
for one, other in zip(*found):
    torch.testing.assert_close(one, other)
"""


@needs_triton
def test_the_kernels_compute_the_formulas() -> None:
    interpret(PROGRAM)
