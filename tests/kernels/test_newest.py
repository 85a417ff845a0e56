"""Our kernel for the newest position of a text, interpreted where Triton is installed."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.kernels import append_attention as newest
from manyheads.kernels.append_attention import newest
from manyheads.kernels.dispatch import passes
torch.manual_seed(1)
for (b, h, g), slots, room.KEYS in itertools.product(
    ((1, 1, 1), (2, 3, 3), (2, 4, 2), (1, 8, 1)), (9, 64, 70, 300), (16, 32)
):
    held = [torch.full((b, g, slots, 16), torch.nan) for _ in range(2)]  # nobody may look there
    come = torch.zeros(b * h, dtype=torch.int32)
    seen = [torch.empty(b, g, 0, 16) for _ in range(2)]
    some = {0, 1, 15, 16, 31, 32, slots - 1}  # in 300, by more programs than are read at once
    for at in sorted(some & {*range(slots)}):
        if at > seen[0].shape[2]:  # what a prompt would have filled
            more = [torch.randn(b, g, at - seen[0].shape[2], 16) for _ in range(2)]
            seen = [torch.cat([one, two], 2) for one, two in zip(seen, more)]
            for one, x in zip(held, seen):
                one[:, :, :at] = x
        # As projected: q, k and v beside each other, heads beside each other.
        row = torch.randn(b, 1, (h + 2 * g) * 16).split([h * 16, g * 16, g * 16], -1)
        q, k, v = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in row)
        seen = [torch.cat([one[:, :, :at], x], 2) for one, x in zip(seen, (k, v))]
        found = append_attention(q, k, v, *held, torch.tensor([at]), come, 0.3)
        keys, values = (x.repeat_interleave(h // g, 1) for x in seen)
        expected = (q @ keys.mT * 0.3).softmax(-1) @ values
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for one, x in zip(held, seen):
            assert torch.equal(one[:, :, : at + 1], x)
            assert one[:, :, at + 1 :].isnan().all()
        assert not come.any()
assert room.served(1, 16, 256) and room.served(4, 12, 256) and not room.served(64, 12, 256)
assert passes(lambda: room.selftest(torch.device("cpu")), "newest")
"""

STEPS = """
import torch
from manyheads.decode import static_cache
from manyheads.decode.static_cache import StaticCache
from manyheads.models.gpt import GptConfig
from manyheads.kernels import append_attention as newest

calls, one_kernel = [], room.newest
room.newest = lambda *given: (calls.append(1), one_kernel(*given))[1]
torch.manual_seed(1)
sizes = dict(vocab_size=30, dim=32, heads=2, layers=2, hidden=40, max_length=64)
for position, kv_heads, served in (("learned", 2, True), ("rotary", 1, True), ("alibi", 2, False)):
    from manyheads.config import parse
    from manyheads.nn.relative import PositionConfig
    placed = parse(PositionConfig, position, "position")
    model = GptConfig(**sizes, kv_heads=kv_heads, position=placed).build().eval()
    text = torch.randint(3, 30, (2, 40))
    with torch.no_grad():
        wanted = model(text)
        for ours in (True, False):
            static_cache.append_attention = room.newest if ours else lambda *given: None
            cache, steps = StaticCache(2, 1, 64, torch.device("cpu")), []
            calls.clear()
            for at in range(40):
                steps.append(model(text[:, at : at + 1], cache=cache))
            assert len(calls) == (40 * 2 if ours and served else 0)
            torch.testing.assert_close(torch.cat(steps, 1), wanted, rtol=1e-4, atol=1e-4)
"""


@needs_triton
def test_the_kernel_computes_the_formula() -> None:
    interpret(PROGRAM)


@needs_triton
def test_a_model_writes_by_it_what_it_writes_without() -> None:
    interpret(STEPS)
