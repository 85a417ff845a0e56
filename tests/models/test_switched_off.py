"""Residual connections, norms, gain and bias, and the attention of an RNN can be switched off."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from tests.models.tiny import VOCAB, tiny, words
from tests.test_cli import TINY, call, result
from torch.nn import functional as F

from manyheads.baselines.rnn import RnnConfig
from manyheads.config import override_all
from manyheads.decode.kv_cache import KVCache
from manyheads.models.bert import BertConfig
from manyheads.models.capture import has_cross_attention
from manyheads.models.gpt import GptConfig
from manyheads.nn.attention import SelfAttention
from manyheads.run import model_digest

VARIANTS = {
    "no residual, pre": ["residual=none"],
    "no residual, post": ["residual=none", "norm=post"],
    "no norm": ["norm=none"],
    "no gain": ["norm.affine=false"],
    "no gain, rms": ["norm.affine=false", "norm.form=rms"],
    "neither": ["residual=none", "norm=none"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_blocks_are_the_formula(name: str) -> None:
    torch.manual_seed(2)
    config = override_all(tiny(BertConfig, "none", "dense", head=None), VARIANTS[name])
    model = config.build().double()
    tokens = words(2, 7)
    x = model.embedding(model.tokens, tokens, model.encoder.position, torch.arange(7)[None])

    def norm(x: torch.Tensor) -> torch.Tensor:
        if config.norm.placement == "none":
            return x
        centred = x - x.mean(-1, keepdim=True) if config.norm.form == "layer" else x
        return centred / (centred.square().mean(-1, keepdim=True) + config.norm.eps).sqrt()

    for block in model.encoder.blocks:
        for part in (block.attention, block.feedforward):

            def inside(y: torch.Tensor, part: Any = part) -> torch.Tensor:
                if not isinstance(part, SelfAttention):
                    return part(y)
                q, k, v = rearrange(part.project(y), "b t (n h c) -> n b h t c", n=3, h=2)
                mixed = F.scaled_dot_product_attention(q, k, v)
                return part.output(rearrange(mixed, "b h t c -> b t (h c)"))

            kept = x if config.residual == "add" else 0.0
            x = kept + inside(norm(x)) if config.norm.placement == "pre" else norm(kept + inside(x))
    if config.norm.placement == "pre":
        x = norm(x)
    torch.testing.assert_close(model(tokens), x, rtol=0, atol=1e-11)
    if "gain" in name or "norm" in name:
        assert not [key for key in model.state_dict() if "norm" in key]


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_passes_equal_full_ones(name: str) -> None:
    model = override_all(tiny(GptConfig), VARIANTS[name]).build().double()
    tokens, cache = words(2, 9), KVCache()
    parts = [model(chunk, cache=cache) for chunk in tokens.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-11)


def test_defaults_keep_the_digest_of_older_weights() -> None:
    plain = tiny(GptConfig)
    assert model_digest(plain) != model_digest(replace(plain, residual="none"))
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": 8, "layers": 1, "max_length": 16}
    rnn = RnnConfig(**sizes)
    assert model_digest(rnn) != model_digest(replace(rnn, attention="none"))


def test_an_rnn_without_attention_sees_the_source_through_one_state() -> None:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": 8, "layers": 1, "max_length": 16}
    model = RnnConfig(**sizes, dropout=0.0, attention="none").build().double()
    assert not has_cross_attention(model)
    source, target = words(2, 6), words(2, 5)
    memory = model.encode(source)
    states = memory.states.clone()
    states[:, 1:-1] = 0  # the states between the ends are not read
    changed = replace(memory, states=states)
    equal = model.decode(target, changed), model.decode(target, memory)
    torch.testing.assert_close(*equal, rtol=0, atol=0)
    with_attention = RnnConfig(**sizes, dropout=0.0).build().double()
    with_attention.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(
        with_attention.decode(target, changed), with_attention.decode(target, memory)
    )


@pytest.mark.parametrize(
    "settings",
    [("model.residual=none", "model.norm=none"), ("model=rnn", "model.attention=none")],
)
def test_commands_know_them(settings: tuple[str, ...], tmp_path: Path) -> None:
    run, rest = (
        tmp_path / "run",
        [word for word in TINY if "heads" not in word and "ffn" not in word],
    )
    sizes = TINY if "model=rnn" not in settings else rest
    result("train", "phrasebook", *sizes, *settings, "--out", run, "--device", "cpu")
    stdin = b"The dog sleeps.\n"
    expected = result("translate", run, "--engine", "torch", "--device", "cpu", stdin=stdin)
    assert result("translate", run, "--device", "cpu", stdin=stdin) == expected
    assert "bleu" in result("evaluate", run, "--device", "cpu")
    assert "parameters" in result("info", run)
    for program in ("ctranslate2", "huggingface"):
        code, _, err = call("export", run, "--to", program, "--out", tmp_path / program)
        assert code == 2, err
