"""Tokens become vectors, vectors become scores over tokens."""

import pytest
import torch
from torch import nn

from manyheads.nn.embedding import EmbeddingConfig, LMHead
from manyheads.nn.positions import SinusoidalPosition
from manyheads.nn.residual import Norm


@pytest.mark.parametrize("scale", ["one", "sqrt-dim"])
def test_embedding_is_its_sum(scale: str) -> None:
    """Norm(token · scale + position + segment), in this order."""
    embed = EmbeddingConfig(scale=scale, norm=Norm(), segments=2).build(4, 0.0)  # type: ignore[arg-type]
    table, wave = nn.Embedding(9, 4), SinusoidalPosition(10_000.0, "interleaved")
    tokens, segments = torch.tensor([[3, 1, 4]]), torch.tensor([[0, 0, 1]])
    positions = torch.tensor([[5, 6, 7]])
    found = embed(table, tokens, wave, positions, segments)
    assert embed.segment is not None
    total = table.weight[tokens] * (2.0 if scale == "sqrt-dim" else 1.0)
    total = total + wave.embed(torch.zeros(1, 3, 4), positions) + embed.segment.weight[segments]
    torch.testing.assert_close(found, nn.functional.layer_norm(total, (4,)))


def test_heads_score_every_token() -> None:
    """h Eᵀ with the embedding's own matrix where tied, else h Wᵀ; plus b where there is one."""
    table, hidden = nn.Embedding(9, 4), torch.randn(2, 3, 4)
    tied = LMHead(9, 4, tied=True, bias="trained")
    assert tied.matrix(table) is table.weight
    assert tied.bias is not None
    nn.init.normal_(tied.bias)
    torch.testing.assert_close(tied(hidden, table), hidden @ table.weight.T + tied.bias)
    own = LMHead(9, 4, tied=False, bias="none")
    assert own.weight is not None
    torch.testing.assert_close(own(hidden, table), hidden @ own.weight.T)
