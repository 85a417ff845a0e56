"""Embedding, norm, residual connection, feed-forward, LM head and initial weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.models.gpt import GptConfig
from manyheads.models.seq2seq import Seq2SeqConfig, StackOverrides
from manyheads.nn.attention import Dense
from manyheads.nn.block import initialise
from manyheads.nn.experts import Experts
from manyheads.nn.layers import EmbeddingConfig, Gated, LMHead, Norm, Plain, Residual
from manyheads.nn.positions import Shaw, SinusoidalPosition
from manyheads.nn.scores import Bilinear, ReducedRank


def normal(*shape: int) -> Tensor:
    return 3 + 2 * torch.randn(*shape, dtype=torch.float64)


def randomise(module: nn.Module) -> Any:
    """Gains and biases that are not one and zero, so that forgetting them shows."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


# --- norm and residual ---


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_norms_by_hand(eps: float) -> None:
    x = normal(2, 3, 6)
    norm = randomise(Norm(eps=eps).build(6))
    mean = x.sum(-1, keepdim=True) / 6
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / 6
    expected = norm.weight * (x - mean) / (variance + eps) ** 0.5 + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-10)
    norm = randomise(Norm(form="rms", eps=eps).build(6))
    expected = norm.weight * x / ((x**2).sum(-1, keepdim=True) / 6 + eps) ** 0.5
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-10)
    assert len(list(norm.parameters())) == 1


@pytest.mark.parametrize("form", ["layer", "rms"])
def test_placements_are_their_equations(form: Any) -> None:
    """pre: x + f(Norm(x)), one more norm at the end; post: Norm(x + f(x))."""
    x = normal(2, 3, 6)
    pre = randomise(Residual(6, Norm(placement="pre", form=form), dropout=0.0))
    torch.testing.assert_close(pre(x, torch.tanh), x + pre.norm(x).tanh())
    post = randomise(Residual(6, Norm(placement="post", form=form), dropout=0.0))
    torch.testing.assert_close(post(x, torch.tanh), post.norm(x + x.tanh()))
    last = Norm(placement="pre", form=form).build_last(4)
    assert isinstance(last, nn.RMSNorm if form == "rms" else nn.LayerNorm)
    assert isinstance(Norm(placement="post", form=form).build_last(4), nn.Identity)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_dropout_is_on_the_branch_only(placement: Any) -> None:
    residual = Residual(6, Norm(placement=placement), dropout=0.999999)
    x = torch.randn(2, 3, 6)
    dropped = residual(x, torch.ones_like)
    torch.testing.assert_close(dropped, x if placement == "pre" else residual.norm(x))
    assert not torch.allclose(residual.eval()(x, torch.exp), dropped)


# --- feed-forward ---

ACTIVATIONS = {
    "relu": lambda x: max(0.0, x),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu-tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("settings", [Plain, Gated])
def test_feedforward_is_its_formula(settings: Any, activation: str, bias: bool) -> None:
    """act(x W₁ + b₁) W₂ + b₂, or (act(x W) ∘ x V) W₂, at each position separately."""
    module = settings(activation=activation).build(4, 7, bias).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)

    def project(name: str, x: Tensor) -> Tensor:
        layer = getattr(module, name)
        return x @ layer.weight.T + (layer.bias if bias else 0)

    def activate(x: Tensor) -> Tensor:
        return x.detach().clone().apply_(ACTIVATIONS[activation])

    inner = project("inner", x)
    hidden = activate(inner) if settings is Plain else activate(project("gate", x)) * inner
    torch.testing.assert_close(module(x), project("outer", hidden), rtol=0, atol=1e-10)
    layers = 2 if settings is Plain else 3
    biases = (4 + 7 * (layers - 1)) * bias
    assert sum(p.numel() for p in module.parameters()) == layers * 4 * 7 + biases


@pytest.mark.parametrize("settings", [Plain(dropout=0.999999), Gated(dropout=0.999999)])
def test_dropout_is_on_the_inner_activations(settings: Plain | Gated) -> None:
    module, x = settings.build(4, 7, True), torch.randn(2, 3, 4)
    dropped = module(x)
    torch.testing.assert_close(dropped, module.outer.bias.expand(2, 3, 4))  # type: ignore[union-attr]
    assert not torch.allclose(module.eval()(x), dropped)


# --- embedding and LM head ---


@pytest.mark.parametrize("scale", ["one", "sqrt-dim"])
def test_embedding_is_its_sum(scale: Any) -> None:
    """Norm(token · scale + position + segment), in this order."""
    embed = EmbeddingConfig(scale=scale, norm=Norm(), segments=2).build(4, 0.0)
    table, wave = nn.Embedding(9, 4), SinusoidalPosition(10_000.0, "interleaved")
    tokens, segments = torch.tensor([[3, 1, 4]]), torch.tensor([[0, 0, 1]])
    positions = torch.tensor([[5, 6, 7]])
    assert embed.segment is not None
    total = table.weight[tokens] * (2.0 if scale == "sqrt-dim" else 1.0)
    total = total + wave.embed(torch.zeros(1, 3, 4), positions) + embed.segment.weight[segments]
    result = embed(table, tokens, wave, positions, segments)
    torch.testing.assert_close(result, F.layer_norm(total, (4,)))


def test_heads_score_every_token() -> None:
    """h Eᵀ if tied to the embedding, else h Wᵀ; plus b if there is one."""
    table, hidden = nn.Embedding(9, 4), torch.randn(2, 3, 4)
    tied = LMHead(9, 4, tied=True, bias="trained")
    assert tied.matrix(table) is table.weight
    assert tied.bias is not None
    nn.init.normal_(tied.bias)
    torch.testing.assert_close(tied(hidden, table), hidden @ table.weight.T + tied.bias)
    untied = LMHead(9, 4, tied=False, bias="none", scale=0.5)
    assert untied.weight is not None
    torch.testing.assert_close(untied(hidden, table), hidden / 2 @ untied.weight.T)


# --- initial weights ---

SIZES: Any = {"vocab_size": 400, "dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 96}


def has_std(weight: Tensor, std: float) -> bool:
    return bool(abs(weight.std() / std - 1) < 0.05)


@pytest.mark.parametrize("feedforward", [Plain(), Gated(), Experts(experts=2)])
@pytest.mark.parametrize("scheme", ["xavier", "normal", "normal-scaled"])
def test_initial_weights(scheme: Any, feedforward: Any) -> None:
    """Each projection by its own fans or N(0, 0.02²), and GPT-2's factor on residual branches."""
    model = GptConfig(**SIZES, init=scheme, feedforward=feedforward).build()
    block: Any = model.decoder.blocks[1]
    q, k, v = block.attention.project.weight.split([64, 32, 32])
    inner, outer = block.feedforward.inner.weight, block.feedforward.outer.weight
    if scheme == "xavier":
        for weight in (q, k, v, block.attention.output.weight, inner, outer):
            fans = sum(weight.shape[-2:])
            assert has_std(weight, math.sqrt(2 / fans))
        assert has_std(model.tokens.weight, 64**-0.5)
    else:
        assert all(has_std(weight, 0.02) for weight in (q, k, v, inner, model.tokens.weight))
        residual = 0.02 / math.sqrt(2 * 3) if scheme == "normal-scaled" else 0.02
        assert has_std(block.attention.output.weight, residual)
        assert has_std(outer, residual)
    for name, parameter in model.named_parameters():
        assert not name.endswith("bias") or not parameter.any()


def test_cross_attention_counts_its_own_fans() -> None:
    model = Seq2SeqConfig(**SIZES, init="xavier").build()
    cross: Any = model.decoder.blocks[0].cross
    assert has_std(cross.query.weight, math.sqrt(2 / 128))
    for weight in cross.project.weight.split([32, 32]):
        assert has_std(weight, math.sqrt(2 / (64 + 32)))


@pytest.mark.parametrize("config", [Bilinear(key_size=24), ReducedRank(rank=8, key_size=24)])
def test_initial_scores_have_unit_variance(config: Bilinear | ReducedRank) -> None:
    score = config.build(64, 16)
    scores = score(torch.randn(4, 64, 30, 16), torch.randn(4, 64, 30, 24))
    assert has_std(scores, 1.0)


def test_initial_factors_of_reduced_rank() -> None:
    """U q has unit variance, and V k the variance 1/rank."""
    score: Any = ReducedRank(rank=8, key_size=24).build(64, 16)
    assert has_std(score.query, 16**-0.5)
    assert has_std(score.key, (24 * 8) ** -0.5)


def test_a_matrix_without_a_rule_is_an_error() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 3))

    model = GptConfig(**SIZES).build()
    model.decoder.blocks[0].feedforward = Forgotten()
    with pytest.raises(TypeError, match=r"decoder\.blocks\.0\.feedforward\.weight of Forgotten"):
        initialise(model, "xavier", 3)
    covered = GptConfig(**SIZES, position=Shaw(), score=Bilinear(), attention=Dense())
    assert covered.build()


def test_gpt2_factor_of_an_encoder_decoder_counts_both_stacks() -> None:
    side = StackOverrides(layers=9)
    model = Seq2SeqConfig(**SIZES, init="normal-scaled", encoder=side).build()
    for block in (model.encoder.blocks[8], model.decoder.blocks[2]):
        assert has_std(block.attention.output.weight, 0.02 / math.sqrt(2 * 12))  # type: ignore[union-attr]
