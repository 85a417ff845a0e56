"""Our kernel for short texts, interpreted where Triton is installed; test_gpu.py has a GPU."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.kernels.short_attention import merge_heads, dropped_by, short_attention, short_projected
torch.manual_seed(1)
sizes, given = ((5, 5), (16, 16), (64, 64), (7, 40), (1, 33)), (None, "each", "all alike")
for (t, s), past, padded, width in itertools.product(sizes, (False, True), given, (16, 32)):
    if past and t != s:
        continue
    empty_heads_inner = lambda n: torch.randn(3, n, 2, width).transpose(1, 2).requires_grad_()
    q, k, v = empty_heads_inner(t), empty_heads_inner(s), empty_heads_inner(s)
    lengths = {"each": [[s], [max(1, s - 4)], [0]], "all alike": [[max(1, s - 2)]]}
    real = torch.arange(s) < torch.tensor(lengths[padded]) if padded else None
    found = short_attention(q, k, v, real, past, 0.3, None, 0.0)
    seen = torch.ones(3, 1, t, s, dtype=torch.bool)
    if past:
        seen &= torch.arange(s) <= torch.arange(t)[:, None]
    if padded:
        seen &= real[:, None, None]
    blind = ~seen.any(-1, keepdim=True)
    scores = (q @ k.mT * 0.3).masked_fill(~seen & ~blind, -torch.inf)
    expected = scores.softmax(-1).masked_fill(blind, 0.0) @ v
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    direction = torch.randn_like(found)
    pairs = zip(*(
        torch.autograd.grad(x, [q, k, v], direction, retain_graph=True) for x in (found, expected)
    ))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)

    # As they lie after a projection: the same numbers, side by side.
    beside = lambda x: x.transpose(1, 2).flatten(2)
    joined = lambda *parts: torch.cat([*map(beside, parts)], -1).detach()
    slopes = torch.autograd.grad(found, [q, k, v], direction, retain_graph=True)
    ways = [((joined(q), joined(k, v)), (joined(slopes[0]), joined(*slopes[1:])))]
    if t == s:
        ways.append(((joined(q, k, v), None), (joined(*slopes),)))
    for given, wanted in ways:
        given = [one if one is None else one.requires_grad_() for one in given]
        mixed = short_projected(*given, 2, real, past, 0.3, None, 0.0)
        assert torch.equal(mixed, beside(found))
        asked = [one for one in given if one is not None]
        for one, other in zip(torch.autograd.grad(mixed, asked, beside(direction)), wanted):
            assert torch.equal(one, other)

# Dropout: the same in both passes and both forms, another for another seed, row, head and query.
q, k, v, direction = torch.randn(4, 3, 2, 20, 32).unbind()
masks = [dropped_by(q, k, torch.tensor([seed]), 0.3) for seed in (1, 2)]
firsts = [masks[0], masks[0].roll(1, 0), masks[0].roll(1, 1), masks[0].roll(1, 2), masks[1]]
assert abs((masks[0] > 0).double().mean() - 0.7) < 0.04
assert set(masks[0].unique().tolist()) == {0.0, 1 / 0.7}
for other in firsts[1:]:
    assert abs((firsts[0] == other).double().mean() - 0.58) < 0.05
seed, found = torch.tensor([1]), []
for way in ("heads", "projected", "formula"):
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    if way == "heads":
        mixed = short_attention(*given, None, True, 0.3, seed, 0.3)
    elif way == "projected":
        whole = torch.cat([merge_heads(x) for x in given], -1)
        mixed = short_projected(whole, None, 2, None, True, 0.3, seed, 0.3)
        mixed = mixed.unflatten(-1, (2, -1)).transpose(1, 2)
    else:
        scores = (given[0] @ given[1].mT * 0.3).masked_fill(~torch.ones(20, 20).tril().bool(), -1e9)
        mixed = (scores.softmax(-1) * masks[0].float()) @ given[2]
    found.append([mixed, *torch.autograd.grad(mixed, given, direction)])
for one, other, wanted in zip(*found):
    torch.testing.assert_close(one, wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(other, wanted, rtol=0, atol=2e-5)

# Self- and cross-attention take it where it can compute them, and nowhere else.
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn import attention, cores
from manyheads.nn.attention import CrossAttention, SelfAttention
from manyheads.nn.masks import causal, full, make_mask
from manyheads.nn.positions import Position, PositionSizes, Rotary
from manyheads.nn.scores import Bilinear, ScaledDot
real = torch.arange(12) < torch.tensor([[12], [5]])
sizes = PositionSizes(dim=32, heads=2, head_dim=16, max_length=64, causal=True)
x, memory, used = torch.randn(2, 12, 32), torch.randn(2, 12, 32), []
asked = cores.mix_projected
def spied(*given):
    used.append(asked(*given) is not None)
    return asked(*given)
attention.mix_projected = spied
def compare(module, *given, expected):
    found = []
    for short in (True, False):
        cores._is_short = lambda q, k, v, *rest: short and q.shape[:2] == k.shape[:2]
        used.clear()
        out = module(*given)
        assert any(used) == (short and expected), (used, expected)
        wanted = [one for one in (*module.parameters(), given[0]) if one.requires_grad]
        found.append([out, *torch.autograd.grad(out.sin().sum(), wanted)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
x.requires_grad_()
for score, position, expected in (
    (ScaledDot(), Position(), True),
    (Bilinear(), Position(), False),
    (ScaledDot(), Rotary().build(sizes), False),
):
    heads = Seq2SeqConfig(vocab_size=9, dim=32, heads=2, score=score).attention_config()
    compare(SelfAttention(heads), x, make_mask(causal, 12, padding_mask=real), position, expected=expected)
heads = Seq2SeqConfig(vocab_size=9, dim=32, heads=2).attention_config()
compare(CrossAttention(heads, 32), x, memory, make_mask(full, 12, padding_mask=real), expected=True)
compare(CrossAttention(heads, 32), x[:, :7], memory, make_mask(full, 12, padding_mask=real), expected=True)
compare(CrossAttention(heads, 32), x, memory[:1], make_mask(full, 12, padding_mask=real[:1]), expected=False)

# Compiled, from what does not lie row by row.
x = torch.randn(12, 96, 2).permute(2, 0, 1).requires_grad_()
call = lambda x: short_projected(x, None, 2, None, True, 0.3, None, 0.0)
found = [call(x), torch.compile(call)(x)]
for pair in (found, [torch.autograd.grad(y.sin().sum(), x)[0] for y in found]):
    torch.testing.assert_close(*pair)
torch.library.opcheck(short_projected, (x, None, 2, None, True, 0.3, None, 0.0))
"""


@needs_triton
def test_the_kernel_and_its_gradients_are_those_of_the_formula() -> None:
    interpret(PROGRAM)
