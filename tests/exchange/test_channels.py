"""Channels in another order: another model by its numbers, the same by what it says."""

from dataclasses import replace

import pytest
import torch
from tests.exchange.zoo import strengthen

from manyheads.errors import UserError
from manyheads.exchange.huggingface import in_halves
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig, StackOverrides
from manyheads.nn.attention import Dense
from manyheads.nn.layers import EmbeddingConfig, Gated, HeadConfig, Norm
from manyheads.nn.positions import Learned, Rotary, Sinusoidal
from manyheads.nn.scores import Additive, Bilinear

PLAIN = Seq2SeqConfig(vocab_size=20, dim=12, layers=2, heads=3, ffn_dim=7, max_length=16)
CONFIGS = {
    "pre-norm": replace(PLAIN, embed=EmbeddingConfig(scale="sqrt-dim")),
    "post-norm": replace(PLAIN, norm=Norm(placement="post", form="rms")),
    "gated": replace(PLAIN, feedforward=Gated(), bias=False, attention_bias=True),
    "apart": replace(PLAIN, tie="none", target_vocab_size=17, output=HeadConfig(bias="trained")),
    "target": replace(PLAIN, tie="target", embed=EmbeddingConfig(norm=Norm(), segments=2)),
    "inputs": replace(PLAIN, tie="inputs", encoder=StackOverrides(layers=1, heads=2)),
    "few keys": replace(PLAIN, kv_heads=1, head_dim=5, position=Sinusoidal(base=300.0)),
    "bilinear": replace(PLAIN, score=Bilinear(key_size=3)),
    "additive": replace(PLAIN, score=Additive(width=3), attention=Dense()),
    "odd": replace(PLAIN, dim=15),
    "one channel a head": replace(PLAIN, dim=3),
}


def drawn(config: Seq2SeqConfig) -> Seq2Seq:
    model = config.build().double().eval()
    strengthen(model)
    return model


@pytest.mark.parametrize("case", CONFIGS)
def test_the_same_is_said_in_halves(case: str) -> None:
    model = drawn(CONFIGS[case])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    turned = in_halves(model)
    assert turned.config == replace(
        model.config, position=replace(model.config.position, layout="halves")
    )
    source, target = torch.randint(17, (3, 11)), torch.randint(17, (3, 9))
    real = torch.arange(11) < torch.tensor([[11], [4], [7]])
    expected = model(source, target, real)
    torch.testing.assert_close(turned(source, target, real), expected, rtol=1e-12, atol=1e-12)
    assert expected.std() > 0.1
    # The order matters: with the sinusoids of the one, the weights of the other say another thing.
    mixed = turned.config.build().double().eval()
    mixed.load_state_dict(model.state_dict())
    assert not torch.allclose(mixed(source, target, real), expected, atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_nothing_is_shared_and_training_goes_on_as_before() -> None:
    model = drawn(PLAIN).train()
    turned = in_halves(model)
    assert turned.training
    places = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not places & {tensor.data_ptr() for tensor in turned.state_dict().values()}
    assert all(parameter.requires_grad for parameter in turned.parameters())


@pytest.mark.parametrize(
    "config",
    [
        replace(PLAIN, position=Sinusoidal(layout="halves")),
        replace(PLAIN, position=Learned()),
        replace(PLAIN, position=Rotary(), head_dim=4),
        replace(PLAIN, decoder=StackOverrides(position=Learned())),
    ],
)
def test_a_model_without_interleaved_sinusoids_is_refused(config: Seq2SeqConfig) -> None:
    with pytest.raises(UserError, match="interleaved"):
        in_halves(config.build())
