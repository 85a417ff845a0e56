"""A deep LSTM encoder–decoder with residual connections (GNMT, Wu et al. 2016).

The encoder's first layer is bidirectional, the others forward. The decoder's lowest layer attends
to the encoder's top; every layer above it gets the context as a second input:

    c_t = Σ_s α_ts x̄_s,  α_ts = softmax_s(wᵀ tanh(A y_t + B x̄_s))
    y^{l}_t = LSTM^l([y^{l−1}_t; c_t]) (+ y^{l−1}_t from the third layer on, on either side)

y_t is the lowest layer's output, which gets no context. All states start at zero.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from manyheads.baselines.luong_attention import LuongAttention
from manyheads.baselines.rnn import (
    RecurrentConfig,
    initialise_lstm,
    run_bidirectional,
    text_lengths,
)
from manyheads.config import Between
from manyheads.models.seq2seq import EncoderDecoderBase, EncoderOutput
from manyheads.nn.attention import StateCache
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.masks import AttentionMask
from manyheads.nn.scores import Additive, ScoreConfig
from manyheads.nn.shapes import Hidden

RESIDUAL_FROM = 2  # the third layer, counted from 0


@dataclass(frozen=True, kw_only=True)
class GnmtConfig(RecurrentConfig):
    """Deep LSTMs with residual connections."""

    layers: Annotated[int, Between(2), "Layers of the encoder, and of the decoder"] = 4
    score: Annotated[ScoreConfig, "Score of a query and a key"] = field(default_factory=Additive)
    kind: ClassVar[str] = "gnmt"

    def build(self) -> "Gnmt":
        return Gnmt(self)


class Context(LuongAttention):
    """c_t of the lowest layer's output."""

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__(config.score, config.attention, config.dim, config.max_length)

    def forward(self, x: Tensor, memory: Tensor, mask: AttentionMask) -> Tensor:
        return self.context(x, memory, memory, mask)


class Gnmt(EncoderDecoderBase):
    """Stacked LSTMs; all decoder layers but the lowest get the lowest layer's context."""

    has_host_sync: ClassVar[bool] = True  # for the lengths of its sequences

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__()
        self.config: GnmtConfig = config
        dim, layers = config.dim, config.layers
        self.scale = math.sqrt(dim)  # embeddings start as N(0, 1/d); gates expect N(0, 1)
        self.dropout = nn.Dropout(config.dropout)
        self.tokens = nn.Embedding(config.vocabulary, dim)
        self.both_ways = nn.LSTM(dim, dim // 2, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(1, layers))
        if not config.shares_inputs:
            self.target_tokens = nn.Embedding(config.vocabulary, dim)
        self.lowest = nn.LSTM(dim, dim, batch_first=True)
        self.attention = Context(config)
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * dim, dim, batch_first=True) for _ in range(1, layers)
        )
        self.head = LMHead(config.vocabulary, dim, tied=config.shares_inputs, bias="none")
        initialise(self, "xavier", layers)
        for module in self.modules():
            if isinstance(module, nn.LSTM):
                initialise_lstm(module)

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """The encoder's top layer; forward layers read padding only after the text."""
        x = self.dropout(self.tokens(source) * self.scale)
        x = run_bidirectional(self.both_ways, x, source_real)
        for index, layer in enumerate(self.encoder, start=1):
            y, _ = layer(self.dropout(x))
            x = y + x if index >= RESIDUAL_FROM else y
        return EncoderOutput.of(x, source_real)

    def decode(
        self,
        target: Tensor,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Hidden:
        """The decoder's top layer; with a cache, at the positions after the cached ones."""
        if target_real is not None:
            text_lengths(target_real)  # padding after a text does not change its states
        x = self.dropout(self.target_table(target) * self.scale)
        x = run_lstm(self.lowest, x, cache)
        context = self.attention(x, memory.states, memory.mask)
        for index, layer in enumerate(self.decoder, start=1):
            y = run_lstm(layer, self.dropout(torch.cat([x, context], dim=-1)), cache)
            x = y + x if index >= RESIDUAL_FROM else y
        if cache is not None:
            cache.advance(target.shape[1])
        return self.dropout(x)


def run_lstm(lstm: nn.Module, x: Tensor, cache: StateCache | None) -> Tensor:
    """A layer's outputs, continued from the cached state."""
    states = None if cache is None else cache.state(lstm)
    out: Tensor
    out, newest = lstm(x, states)
    if cache is not None:
        cache.set_state(lstm, newest)
    return out
