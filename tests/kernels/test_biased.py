"""Our own kernel, interpreted where Triton is installed; on a GPU tests/test_gpu.py runs it."""

from tests.kernels.interpreted import interpret, needs_triton

PROGRAM = """
import itertools, torch
from manyheads.kernels import biased_attention as biased
for shapes in (biased.FORWARD, biased.KEYS, biased.QUERIES, biased.BIAS):
    for shape in shapes:
        shape.update({name: size for name, size in (("M", 16), ("N", 32)) if name in shape})
        del shape["num_warps"], shape["num_stages"]
torch.manual_seed(1)
for n, causal, padded in itertools.product((16, 50, 128), (False, True), (False, True)):
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 2 * n - 1, requires_grad=True)
    real = torch.arange(n) < torch.tensor([[n], [n - 7]]) if padded else None
    found = biased.biased_attention(q, k, v, bias, real, causal, 0.3)
    place = torch.arange(n)
    scores = q @ k.mT * 0.3 + bias[:, place - place[:, None] + n - 1]
    if causal:
        scores = scores.masked_fill(place > place[:, None], -torch.inf)
    if padded:
        scores = scores.masked_fill(~real[:, None, None], -torch.inf)
    expected, direction = scores.softmax(-1) @ v, torch.randn_like(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    wanted = [q, k, v, bias]
    pairs = zip(*(torch.autograd.grad(x, wanted, direction) for x in (found, expected)))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
"""


@needs_triton
def test_the_kernel_and_its_gradients_are_those_of_the_formula() -> None:
    interpret(PROGRAM)
