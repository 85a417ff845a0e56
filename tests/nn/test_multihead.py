"""Multi-head attention: h separate heads, concatenated, times W^O."""

import pytest
import torch
from textbook import Place, attention, scaled_dot

from manyheads.nn.attention import AttentionConfig, CrossAttention, SelfAttention
from manyheads.nn.exact_attention import Dense, Fused
from manyheads.nn.masks import AttentionMask, causal, full, make_mask
from manyheads.nn.positions import Position
from manyheads.nn.scores import Bilinear, ScaledDot
from manyheads.nn.tiled import Tiled


def sizes(core: Dense | Fused | Tiled, kv_heads: int = 3, head_dim: int = 2) -> AttentionConfig:
    return AttentionConfig(
        dim=6,
        heads=3,
        head_dim=head_dim,
        kv_heads=kv_heads,
        bias=True,
        qkv_bias=True,
        dropout=0.0,
        max_length=8,
        score=ScaledDot(),
        core=core,
    )


CORES = [Dense(), Fused(), Tiled(block=2)]


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.kind)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 2), (1, 2), (3, 4)])
def test_self_attention_is_separate_heads(
    core: Dense | Fused | Tiled, kv_heads: int, head_dim: int
) -> None:
    """Concat(head_1 … head_h) W^O with head_i = Attention(X W_i^Q, X W_i^K, X W_i^V)."""
    module = SelfAttention(sizes(core, kv_heads, head_dim)).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    queries, keys, values = (
        torch.split(part, head_dim) for part in module.project.weight.split(module.config.sizes)
    )
    b_queries, b_keys, b_values = (
        torch.split(part, head_dim) for part in module.project.bias.split(module.config.sizes)
    )
    heads = []
    for i in range(3):
        g = i * kv_heads // 3
        q, k, v = (
            x @ weight.T + bias
            for weight, bias in (
                (queries[i], b_queries[i]),
                (keys[g], b_keys[g]),
                (values[g], b_values[g]),
            )
        )
        _, mixed = attention(
            q[:, None].detach(),
            k[:, None].detach(),
            v[:, None].detach(),
            scaled_dot(None),
            lambda row, i, j: j <= i,
            Place(None),
        )
        heads.append(mixed[:, 0])
    expected = torch.cat(heads, dim=-1) @ module.output.weight.T + module.output.bias
    found = module(x, make_mask(causal, 5), Position())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.kind)
@pytest.mark.parametrize("targets", [2, 4, 7])
def test_cross_attention_reads_the_memory(core: Dense | Fused | Tiled, targets: int) -> None:
    """Queries come from x, keys and values from the memory, however long the two are."""
    module = CrossAttention(sizes(core), memory_dim=8).double()
    x = torch.randn(2, targets, 6, dtype=torch.float64)
    memory = torch.randn(2, 4, 8, dtype=torch.float64)
    real = torch.tensor([[True] * 4, [True, True, False, False]])
    source = torch.arange(4)[None]
    q = module.query(x).view(2, targets, 3, 2).transpose(1, 2)
    k, v = module.project_kv(memory)
    weights = (q @ k.mT / 2**0.5).masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
    expected = module.output((weights @ v).transpose(1, 2).reshape(2, targets, 6))
    found = module(x, memory, AttentionMask(full, source, source, real))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_uneven_groups_are_refused() -> None:
    """Key/value heads that do not divide the heads are a mistake at build."""
    with pytest.raises(ValueError, match="kv_heads"):
        sizes(Dense(), kv_heads=2)


def test_keys_of_another_size() -> None:
    """A score that joins different sizes gives the keys a width of their own."""
    heads = AttentionConfig(
        dim=6,
        heads=3,
        head_dim=2,
        kv_heads=3,
        bias=False,
        qkv_bias=False,
        dropout=0.0,
        max_length=8,
        score=Bilinear(key_size=5),
        core=Dense(),
    )
    module = SelfAttention(heads)
    assert module.project.weight.shape == (3 * (2 + 5 + 2), 6)
    assert module(torch.randn(1, 4, 6), make_mask(full, 4), Position()).shape == (1, 4, 6)
