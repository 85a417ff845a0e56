"""ELECTRA: a generator and a discriminator that share one embedding table."""

from typing import Any

import pytest
import torch
from tiny import POSITIONS, VOCAB, tiny, words

from manyheads.errors import UserError
from manyheads.models.bert import Bert, BertConfig
from manyheads.models.electra import Electra, generator_config
from manyheads.models.heads import Detect
from manyheads.nn.layers import EmbeddingConfig


def discriminator(position: str = "learned", **changes: Any) -> Bert:
    sizes = {
        "dim": 16,
        "heads": 4,
        "ffn_dim": 24,
        "embed": EmbeddingConfig(segments=2),
        "head": Detect(),
    }
    return tiny(BertConfig, position, "dense", **{**sizes, **changes}).build()


@pytest.mark.parametrize("position", POSITIONS)
def test_generator_and_discriminator_share_embeddings_and_learned_positions(position: str) -> None:
    """Each shared tensor is in `state_dict` once, under the discriminator (`model`)."""
    model = discriminator(position)
    both = Electra(model, 0.5)
    assert both.generator.tokens is model.tokens
    state = both.state_dict()
    assert [name for name, x in state.items() if x.shape == (VOCAB, 16)] == ["model.tokens.weight"]
    assert len({x.untyped_storage().data_ptr() for x in state.values()}) == len(state)
    parameters = list(both.parameters())
    assert len(parameters) == len({id(item) for item in parameters})
    position_names = [name for name in state if "position" in name]
    if position == "learned":
        assert both.generator.encoder.position is model.encoder.position
        assert position_names == ["model.encoder.positions.0.table.weight"]
    assert {name.removeprefix("model.") for name in state if name.startswith("model.")} == set(
        model.state_dict()
    )


def test_both_losses_reach_the_shared_tables() -> None:
    both = Electra(discriminator(), 0.5).double()
    tokens = words(2, 7)
    tables = [both.model.tokens.weight, both.model.encoder.position.table.weight]  # type: ignore[union-attr]
    from_model = torch.autograd.grad(both.model(tokens).square().sum(), tables)
    from_generator = torch.autograd.grad(both.generator(tokens).square().sum(), tables)
    (both.model(tokens).square().sum() + both.generator(tokens).square().sum()).backward()
    for table, g_model, g_generator in zip(tables, from_model, from_generator, strict=True):
        assert bool(g_model.any())
        assert bool(g_generator.any())
        assert table.grad is not None
        torch.testing.assert_close(table.grad, g_model + g_generator)


@pytest.mark.parametrize(
    ("fraction", "heads", "ffn_dim"), [(0.25, 1, 6), (0.5, 2, 12), (1.0, 4, 24), (0.01, 1, 1)]
)
def test_generator_is_a_fraction_as_wide(fraction: float, heads: int, ffn_dim: int) -> None:
    model = discriminator()
    config = generator_config(model.config, fraction)
    assert (config.heads, config.dim, config.head_dim) == (heads, 4 * heads, 4)
    assert (config.ffn_dim, config.layers) == (ffn_dim, model.config.layers)
    assert config.embed.width(config.dim) == 16  # the shared table
    both = Electra(model, fraction)
    assert both.generator(words(2, 5)).shape == (2, 5, VOCAB)
    assert both.generator.hidden(words(2, 5)).shape == (2, 5, 4 * heads)


def test_only_masked_positions_are_filled() -> None:
    both = Electra(discriminator(), 0.5).eval()
    tokens, positions = words(3, 6), torch.tensor([0, 4, 7, 17])
    hidden = both.generator.hidden(tokens)
    filled, samples = both.fill(tokens, positions, hidden)
    assert not samples.requires_grad
    assert torch.equal(filled.flatten()[positions], samples)
    others = torch.ones(18, dtype=torch.bool)
    others[positions] = False
    assert torch.equal(filled.flatten()[others], tokens.flatten()[others])


def test_a_model_without_detect_head_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.head=detect"):
        Electra(tiny(BertConfig).build(), 0.5)
