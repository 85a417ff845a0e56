"""The solutions: adapters from the stubs to Manyheads' own modules."""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

import manyheads
from manyheads.nn.layers import EmbeddingConfig, FeedForward, Norm, Residual
from manyheads.nn.positions import Position, RotaryPosition, SinusoidalPosition
from manyheads.tasks.classification import label_loss
from manyheads.train import optimizer
from manyheads.train.optimizer import Train


def causal_mask(t: int) -> Tensor:
    q = torch.zeros(1, 1, t, 4)
    return manyheads.attention_weights(q, q, rule="causal")[0, 0] > 0


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return manyheads.attend(q, k, v, rule="causal")


def multi_head(x: Tensor, projection: Tensor, h: int) -> Tensor:
    q, k, v = rearrange(x @ projection, "b t (n h c) -> n b h t c", n=3, h=h)
    return rearrange(manyheads.attend(q, k, v, rule="causal"), "b h t c -> b t (h c)")


def cross_attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return manyheads.attend(q, k, v, real=real)


def token_embedding(tokens: Tensor, table: Tensor) -> Tensor:
    embedding = EmbeddingConfig(scale="sqrt-dim").build(table.shape[1], dropout=0.0)
    positions = torch.arange(tokens.shape[1])[None]
    return embedding(nn.Embedding.from_pretrained(table), tokens, Position(), positions)


def sinusoidal_positions(t: int, d: int) -> Tensor:
    position = SinusoidalPosition(10000.0, "interleaved")
    return position.embed(torch.zeros(1, t, d), torch.arange(t)[None])[0]


def rotary_positions(x: Tensor) -> Tensor:
    return RotaryPosition(10000.0, "interleaved").rotate(x, torch.arange(x.shape[2])[None])


def layer_norm(x: Tensor, eps: float) -> Tensor:
    return Norm(eps=eps).build(x.shape[-1])(x)


def feed_forward(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    module = FeedForward(up.shape[1], up.shape[0], "relu", True, 0.0)
    weights = {
        "inner.weight": up,
        "inner.bias": up_bias,
        "outer.weight": down,
        "outer.bias": down_bias,
    }
    module.load_state_dict(weights)
    return module(x)


def residual(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    return Residual(x.shape[-1], Norm(placement="pre", eps=1e-5), dropout=0.0)(x, f)


def learning_rate(steps: Tensor, d: int, warmup: int) -> Tensor:
    train = Train(schedule="transformer", learning_rate=None, warmup_steps=warmup)
    return torch.tensor([optimizer.learning_rate(train, d, step) for step in steps.tolist()])


def label_smoothing(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return label_loss(logits, labels, smoothing).objective
