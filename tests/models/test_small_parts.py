"""QK-norm, ReLU² and word dropout: parts that a setting switches on."""

import pytest
import torch
from tests.models.tiny import tiny, words

from manyheads.config import override_all
from manyheads.decode.beam import Decode
from manyheads.decode.kv_cache import KVCache
from manyheads.exchange.ctranslate2 import unsupported
from manyheads.models.gpt import GptConfig
from manyheads.nn.layers import ACTIVATIONS


def build(*settings: str) -> torch.nn.Module:
    torch.manual_seed(3)
    return override_all(tiny(GptConfig, "rotary", "dense"), settings).build().double().eval()


def test_qk_norm_makes_the_size_of_queries_and_keys_irrelevant() -> None:
    tokens = words(2, 7)
    for settings, is_equal in ((["qk_norm=true", "norm.eps=1e-12"], True), ([], False)):
        model = build("qkv_bias=false", *settings)
        before = model(tokens)
        with torch.no_grad():
            for block in model.decoder.blocks:
                sizes = block.attention.config.sizes
                block.attention.project.weight[: sizes[0] + sizes[1]] *= 3
        assert torch.allclose(model(tokens), before, atol=1e-5) == is_equal


def test_qk_norm_is_the_formula_in_one_head() -> None:
    model = build("qk_norm=true", "norm.eps=1e-3", "layers=1")
    attention = model.decoder.blocks[0].attention
    with torch.no_grad():
        attention.query_norm.weight.normal_()
    q = torch.randn(2, 2, 5, attention.config.head_dim, dtype=torch.float64)
    expected = q / (q.square().mean(-1, keepdim=True) + 1e-3).sqrt() * attention.query_norm.weight
    torch.testing.assert_close(attention.query_norm(q), expected)


def test_cached_keys_are_normed_once() -> None:
    model, tokens = build("qk_norm=true"), words(2, 7)
    cache = KVCache()
    steps = [model(tokens[:, t : t + 1], cache=cache) for t in range(7)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens))


def test_relu_squared_is_the_square() -> None:
    x = torch.linspace(-2, 2, 9)
    torch.testing.assert_close(ACTIVATIONS["relu-squared"](x), x.clamp(min=0) ** 2)


def test_word_dropout_drops_whole_tokens_in_training_only() -> None:
    model = build("embed.word_dropout=0.5", "dropout=0").train()
    embedding, tokens = model.embedding, words(50, 9)
    position, places = model.decoder.position, torch.arange(9)[None]
    dropped = embedding(model.tokens, tokens, position, places)
    zero = (dropped == 0).all(-1)
    assert 0.3 < zero.double().mean() < 0.7
    torch.testing.assert_close(dropped[~zero], 2 * model.tokens(tokens)[~zero])
    whole = embedding.eval()(model.tokens, tokens, position, places)
    torch.testing.assert_close(whole, model.tokens(tokens))


@pytest.mark.parametrize("setting", ["qk_norm=true", "feedforward.activation=relu-squared"])
def test_ctranslate2_refuses_what_it_cannot_express(setting: str) -> None:
    model = build(setting)
    reason = unsupported(model, Decode())
    assert reason is not None
    assert setting in reason
