"""Our kernel for sum, dropout and norm, interpreted where Triton is installed."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from torch.nn import functional as F
from manyheads.kernels import layer_norm as normed
from manyheads.kernels.layer_norm import add_norm, fork
torch.manual_seed(1)
shapes = ((3, 5, 64), (7, 48), (2, 1, 512), (1, 768), (9, 2048))
for shape, p in itertools.product(shapes, (0.0, 0.3)):
    d = shape[-1]
    x, f = (torch.randn(shape).requires_grad_() for _ in range(2))
    weight, bias = torch.randn(d).requires_grad_(), torch.randn(d).requires_grad_()
    seed = torch.tensor([2**40 + 7]) if p else None
    y, h = add_norm(x, f, weight, bias, seed, p, 1e-5)
    kept = ((h - x).abs() > 1e-4 * f.abs()).float().detach()
    if d > 500:
        assert abs(1 - kept.mean() - p) < 0.06, kept.mean()
    summed = x + kept / (1 - p) * f
    expected = F.layer_norm(summed, (d,), weight, bias, 1e-5)
    torch.testing.assert_close(h, summed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    direction, given = torch.randn_like(y), [x, f, weight, bias]
    pairs = zip(*(torch.autograd.grad(z, given, direction) for z in (y, expected)))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

# Rows and columns are drawn apart from each other, and another seed draws another mask.
ones = torch.ones(64, 256)
masks = [
    add_norm(0 * ones, ones, ones[0], ones[0], torch.tensor([s]), 0.5, 1e-5)[1] > 0 for s in (1, 2)
]
for one, other in (masks, (masks[0], masks[0].roll(1, 0)), (masks[0], masks[0].roll(1, 1))):
    assert abs((one == other).float().mean() - 0.5) < 0.02

# What goes in need not lie row by row, also where it is compiled.
across = torch.randn(16, 6).T
compiled = torch.compile(lambda x: add_norm(x, x, ones[0, :16], ones[0, :16], None, 0.0, 1e-5)[0])
wanted = F.layer_norm(2 * across, (16,)) + 1
torch.testing.assert_close(compiled(across), wanted, rtol=1e-4, atol=1e-4)
torch.library.opcheck(add_norm, (across, across, ones[0, :16], ones[0, :16], None, 0.0, 1e-5))

# Programs with several groups of rows, some of them past the end.
normed._processors, normed.WARPS = lambda x: 3, 1
x, f = (torch.randn(41, 512).requires_grad_() for _ in range(2))
weight = torch.randn(512).requires_grad_()
pairs = zip(*(
    torch.autograd.grad(z, [x, f, weight], torch.ones_like(x))
    for z in (add_norm(x, f, weight, 0 * weight, None, 0.0, 1e-5)[0],
              F.layer_norm(x + f, (512,), weight, 0 * weight, 1e-5))
))
for one, other in pairs:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

# A norm before a part: the gradients of both ways come back in one.
for shape in ((3, 5, 64), (7, 48), (41, 512)):
    x = torch.randn(shape)
    weight, bias, slope, beside = torch.randn(4, shape[-1])
    for call in (fork, torch.compile(fork, fullgraph=True)):
        found = []
        for fused in (True, False):
            given = [one.clone().requires_grad_() for one in (x, weight, bias)]
            if fused:
                y, stream = call(*given, 1e-5, torch.float32)
            else:
                y, stream = F.layer_norm(given[0], (shape[-1],), *given[1:], 1e-5), given[0]
            total = (y.sin() * slope).sum() + (stream.cos() * beside).sum()
            found.append([y, stream, *torch.autograd.grad(total, given)])
        for one, other in zip(*found):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

# One gradient may come back from both ways.
x = torch.randn(4, 32, requires_grad=True)
direction, scale, shift = torch.randn(4, 32), weight[:32], bias[:32]
[one] = torch.autograd.grad(sum(prenorm(x, scale, shift, 1e-5, torch.float32)), x, direction)
[other] = torch.autograd.grad(F.layer_norm(x, (32,), scale, shift, 1e-5) + x, x, direction)
torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

# Either way may be left out.
x = torch.randn(4, 32, requires_grad=True)
y, stream = prenorm(x, weight[:32], bias[:32], 1e-5, torch.float32)
[one] = torch.autograd.grad(stream.sin().sum(), x, retain_graph=True)
torch.testing.assert_close(one, x.cos())
[one] = torch.autograd.grad(y.sin().sum(), x)
[other] = torch.autograd.grad(F.layer_norm(x, (32,), weight[:32], bias[:32], 1e-5).sin().sum(), x)
torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

from manyheads.kernels.dispatch import passes
assert passes(lambda: normed.selftest(torch.device("cpu")), "normed")
"""


@needs_triton
def test_the_kernel_and_its_gradients_are_those_of_the_formula() -> None:
    interpret(PROGRAM)
