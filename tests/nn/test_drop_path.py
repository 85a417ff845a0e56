"""Stochastic depth, embedding dropout and zero-initialised outputs."""

import pytest
import torch

from manyheads.models.gpt import GptConfig
from manyheads.nn.block import Block
from manyheads.nn.layers import DropPath, EmbeddingConfig


def test_drop_path_keeps_the_expectation_and_is_the_identity_in_evaluation() -> None:
    torch.manual_seed(1)
    x, path = torch.ones(4000, 2, 3), DropPath(0.0, 0.25)
    y = path(x)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(y, y[:, :1, :1].expand_as(y))  # a row as one
    assert y.mean() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(path.eval()(x), x)


@pytest.mark.parametrize("init", ["xavier-zero", "normal-zero"])
def test_zero_initialised_blocks_begin_as_the_identity(init: str) -> None:
    settings = {"vocab_size": 20, "dim": 16, "layers": 2, "heads": 2, "drop_path": 0.2}
    model = GptConfig(init=init, embed=EmbeddingConfig(dropout=0.3), **settings).build()  # type: ignore[arg-type]
    assert model.embedding.dropout.p == 0.3
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    assert [block.attention_residual.dropout.rate for block in blocks] == [0.1, 0.2]
    inputs = []
    for part in (*blocks, model.decoder.last_norm):
        part.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model.eval()(torch.randint(20, (2, 5)))
    assert all(torch.equal(x, inputs[0]) for x in inputs)
