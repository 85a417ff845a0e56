"""Our kernel for the gradients of projections, interpreted where Triton is installed."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.kernels import qkv as beside
from manyheads.kernels.qkv import join, part
torch.manual_seed(1)
shapes = ((2, 5, 3, 3, 16), (3, 300, 4, 2, 32), (1, 1, 1, 1, 48), (2, 290, 2, 2, 64))
orders = (3 * ["heads"], 3 * ["places"], 3 * ["channels"], ["places", "places", "heads"])
for (b, t, heads, keys, head), order in itertools.product(shapes, orders):
    def drawn(n, order):
        if order == "heads":
            return torch.randn(b, n, t, head)
        if order == "places":
            return torch.randn(b, t, n, head).transpose(1, 2)
        return torch.randn(b, n, head, t).mT
    parts = [drawn(*how) for how in zip((heads, keys, keys), order)]
    wanted = torch.cat([x.transpose(1, 2).flatten(2) for x in parts], -1)
    found, sums = join(*parts)
    assert torch.equal(found, wanted) and found.is_contiguous()
    torch.testing.assert_close(sums, wanted.sum((0, 1)), rtol=1e-5, atol=1e-4)
    torch.library.opcheck(join, tuple(parts))

# A projection whose bias gets its gradient by way of its parts.
layer = torch.nn.Linear(8, 7 * 16)
x = torch.randn(2, 9, 8)
def parted(x):
    projected = torch.nn.functional.linear(x, layer.weight, layer.bias.detach())
    return part(projected, layer.bias, 3, 2)
def plain(x):
    parts = layer(x).split([48, 32, 32], -1)
    return tuple(one.unflatten(-1, (-1, 16)).transpose(1, 2) for one in parts)
found = []
for call in (plain, parted, torch.compile(parted, fullgraph=True)):
    given = x.clone().requires_grad_()
    q, k, v = call(given)
    total = q.sin().sum() + (k * k).sum() + v.cos().sum()
    found.append([q, k, v, *torch.autograd.grad(total, [given, layer.weight, layer.bias])])
for wanted, one, other in zip(*found):
    torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other, wanted, rtol=1e-5, atol=1e-5)

# The same in self-attention, whatever of it is trained.
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.attention import SelfAttention
from manyheads.nn.masks import causal, make_mask
from manyheads.nn.positions import Position
for keys, frozen in itertools.product((1, 2, 4), ((), ("weight",), ("bias",))):
    heads = Seq2SeqConfig(vocab_size=9, dim=64, heads=4, kv_heads=keys).attention_config()
    module = SelfAttention(heads)
    torch.nn.init.normal_(module.project.bias)
    for name in frozen:
        getattr(module.project, name).requires_grad_(False)
    x, direction = torch.randn(2, 2, 9, 64).unbind()
    found = []
    for ours in (True, False):
        module._has_kernel = lambda *given, ours=ours: ours
        given = x.clone().requires_grad_()
        out = module(given, make_mask(causal, 9), Position())
        trained = [one for one in module.parameters() if one.requires_grad]
        found.append([out, *torch.autograd.grad(out, [given, *trained], direction)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

from manyheads.kernels.dispatch import passes
assert passes(lambda: beside.selftest(torch.device("cpu")), "beside")
"""


@needs_triton
def test_gradients_are_laid_side_by_side_and_summed() -> None:
    interpret(PROGRAM)
