"""Our kernel for the steps of writing, interpreted where Triton is installed."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.kernels import decode_attention as decode_attention
from manyheads.kernels.decode_attention import decode_attention
torch.manual_seed(1)
sizes = ((1, 1, 1, 1, 40), (2, 3, 3, 1, 64), (2, 4, 2, 1, 65), (3, 2, 2, 5, 130))
sizes += ((1, 8, 1, 3, 90), (2, 8, 2, 2, 33))
masks = (None, "each", "of a row", "all alike")
sizes += ((1, 2, 2, 1, 700),)  # by many programs, of which some see nothing
ways = itertools.product(sizes, masks, (256, 8, 1), (128, 0))
for (b, h, g, t, s), masked, room.ENOUGH, room.MANY in ways:
    q = torch.randn(b, t, h, 16).transpose(1, 2)  # heads beside each other, as projected
    k, v = torch.randn(2, b, g, s + 7, 16)[:, :, :, :s]  # part of a larger room
    shapes = {"each": (b, 1, t, s), "of a row": (b, 1, 1, s), "all alike": (1, 1, 1, s)}
    seen = torch.rand(shapes[masked]) < 0.4 if masked else None
    if masked == "each":
        seen[0, 0, 0] = False  # a query that sees nothing
    if masked == "all alike" and s > 600:
        seen[..., 64:300] = False
    if masked == "of a row":
        seen[..., s // 3 :] = False  # a room that is not filled yet
    found = decode_attention(q, k, v, seen, 0.3)
    keys, values = (x.repeat_interleave(h // g, 1) for x in (k, v))
    scores = q @ keys.mT * 0.3
    if masked:
        scores = scores.masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0.0) @ values
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
for keys, programs in itertools.product((1, 64, 65, 128, 700, 4000), (1, 12, 128, 256, 300)):
    room.ENOUGH = 256
    parts, each = room._parts(keys, programs)
    assert parts * each >= keys > (parts - 1) * each
    assert parts == 1 or parts * programs <= 256
one = decode_attention(q, k, v, torch.ones(1, 1, 1, 1, dtype=torch.bool), 0.3)
torch.testing.assert_close(one, decode_attention(q, k, v, None, 0.3))
"""


@needs_triton
def test_the_kernel_computes_the_formula() -> None:
    interpret(PROGRAM)
