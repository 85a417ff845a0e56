"""The feed-forward sub-layer, and the packed gradients of queries, keys and values."""

import pytest
import torch
from tests.kernels.compare import assert_kernel_equals
from torch import Tensor
from torch.nn import functional as F

from manyheads.kernels.mlp import ACTIVATION_KINDS, fused_mlp
from manyheads.kernels.qkv import pack_qkv_grad, split_qkv
from manyheads.nn.layers import ACTIVATIONS


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's sigmoid
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("shape", [(3, 5, 16), (700, 32)])
def test_fused_mlp(shape: tuple[int, ...], kind: str) -> None:
    sizes = (shape, (200, shape[-1]), (200,), (24, 200), (24,))

    def formula(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(ACTIVATIONS[kind](F.linear(x, w1, b1)), w2, b2)

    inputs = [torch.randn(size) for size in sizes]
    assert_kernel_equals(lambda *x: fused_mlp(*x, kind)[0], formula, inputs)


def test_frozen_weights_get_no_gradient() -> None:
    x, w1, b1, w2, b2 = (torch.randn(s) for s in ((3, 8), (16, 8), (16,), (8, 16), (8,)))
    y = fused_mlp(x.requires_grad_(), w1, b1, w2.requires_grad_(), b2, "relu")[0]
    y.sum().backward()
    assert [w.grad is not None for w in (x, w1, b1, w2, b2)] == [True, False, False, True, False]
    torch.library.opcheck(fused_mlp, (x, w1, b1, w2, b2, "gelu"))


LAYOUTS = {
    "heads": lambda b, n, t, c: torch.randn(b, n, t, c),
    "positions": lambda b, n, t, c: torch.randn(b, t, n, c).transpose(1, 2),
    "channels": lambda b, n, t, c: torch.randn(b, n, c, t).mT,
}


@pytest.mark.parametrize("sizes", [(2, 5, 3, 3, 16), (2, 150, 2, 1, 32), (1, 1, 1, 1, 48)])
def test_pack_qkv_grad(sizes: tuple[int, ...]) -> None:
    b, t, heads, kv_heads, width = sizes
    for layouts in (["heads"] * 3, ["channels"] * 3, ["positions", "positions", "heads"]):
        counts = (heads, kv_heads, kv_heads)
        parts = [LAYOUTS[x](b, n, t, width) for x, n in zip(layouts, counts, strict=True)]
        packed, sums = pack_qkv_grad(*parts)
        expected = torch.cat([x.transpose(1, 2).flatten(2) for x in parts], -1)
        assert packed.is_contiguous()
        assert torch.equal(packed, expected)
        torch.testing.assert_close(sums, expected.sum((0, 1)), rtol=1e-5, atol=1e-4)
    torch.library.opcheck(pack_qkv_grad, tuple(parts))


def test_split_qkv_gives_the_bias_its_gradient() -> None:
    def heads(qkv: Tensor) -> list[Tensor]:
        return [x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in qkv.split([48, 32, 32], -1)]

    def kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        q, k, v = split_qkv(F.linear(x, weight, bias.detach()), bias, 3, 2)
        return q.sin().sum() + (k * k).sum() + v.cos().sum()

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        q, k, v = heads(F.linear(x, weight, bias))
        return q.sin().sum() + (k * k).sum() + v.cos().sum()

    inputs = [torch.randn(2, 9, 8), torch.randn(112, 8), torch.randn(112)]
    assert_kernel_equals(kernel, formula, inputs)
