"""A deep LSTM encoder–decoder with residual connections (GNMT, Wu et al. 2016).

The encoder's first layer is bidirectional, the others forward. The decoder's lowest layer attends
to the encoder's top; every layer above it gets the context as a second input:

    c_t = Σ_s α_ts x̄_s,  α_ts = softmax_s(wᵀ tanh(A y_t + B x̄_s))
    y^{l}_t = LSTM^l([y^{l−1}_t; c_t]) (+ y^{l−1}_t from the third layer on, on either side)

y_t is the lowest layer's output, which gets no context. All states start at zero.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from manyheads.baselines.baseline import BaselineModel
from manyheads.baselines.luong_attention import LuongAttention
from manyheads.baselines.rnn import RecurrentConfig, run_bidirectional, run_lstm
from manyheads.config import Between
from manyheads.models.seq2seq import EncoderOutput
from manyheads.nn.attention import StateCache
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


class Gnmt(BaselineModel):
    """Stacked LSTMs; all decoder layers but the lowest get the lowest layer's context."""

    config: GnmtConfig
    has_host_sync: ClassVar[bool] = True  # for the lengths of its sequences

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__(config)
        dim, layers = config.dim, config.layers
        self.both_ways = nn.LSTM(dim, dim // 2, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(1, layers))
        self.build_target_table()
        self.lowest = nn.LSTM(dim, dim, batch_first=True)
        self.attention = LuongAttention(config.score, config.dim)
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * dim, dim, batch_first=True) for _ in range(1, layers)
        )
        self.build_head()

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """The encoder's top layer; forward layers read padding only after the text."""
        x = run_bidirectional(self.both_ways, self.embed(self.tokens, source), source_real)
        for index, layer in enumerate(self.encoder, start=1):
            y, _ = layer(self.dropout(x))
            x = y + x if index >= RESIDUAL_FROM else y
        return EncoderOutput.of(x, source_real)

    def decoder_states(
        self, target: Tensor, memory: EncoderOutput, cache: StateCache | None
    ) -> Hidden:
        x = run_lstm(self.lowest, self.embed(self.target_table, target), cache)
        context = self.attention(x, memory.states, memory.mask)
        for index, layer in enumerate(self.decoder, start=1):
            y = run_lstm(layer, self.dropout(torch.cat([x, context], dim=-1)), cache)
            x = y + x if index >= RESIDUAL_FROM else y
        return x
