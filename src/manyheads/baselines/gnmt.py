"""A deep LSTM encoder–decoder with residuals, whose attention every layer but the lowest hears.

Google's Neural Machine Translation System (Wu et al. 2016). The encoder's first layer reads both
ways, the others forward. The lowest layer of the decoder asks the encoder's top, so that the layers
above it need not wait for each other's last step:

    c_t = Σ_s α_ts x̄_s,  α_ts = softmax_s(wᵀ tanh(A y_t + B x̄_s))
    y^{l}_t = LSTM^l([y^{l−1}_t; c_t]) (+ y^{l−1}_t from the third layer on, on either side)

y_t is the lowest layer's own output; it hears of no context. All states begin with zeros.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.baselines.luong_attention import MemoryAttention
from manyheads.baselines.rnn import RecurrentConfig, initialise_lstm, lengths_of, read_both_ways
from manyheads.errors import UserError
from manyheads.models.seq2seq import EncoderDecoderBase, EncoderOutput
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.masks import AttentionMask, full, make_mask
from manyheads.nn.scores import Additive, ScoreConfig
from manyheads.nn.shapes import Hidden
from manyheads.nn.states import StateCache

RESIDUAL_FROM = 2  # the third layer, counted from 0


@dataclass(frozen=True, kw_only=True)
class GnmtConfig(RecurrentConfig):
    """Deep LSTMs with residuals."""

    layers: int = 4
    score: ScoreConfig = field(default_factory=Additive)
    kind: ClassVar[str] = "gnmt"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 2:
            raise UserError(
                f"model.layers={self.layers} must be at least 2: the lowest layer asks the source, "
                "and those above it hear the answer"
            )

    def build(self) -> "Gnmt":
        return Gnmt(self)


class Context(MemoryAttention):
    """c_t of the lowest layer's output."""

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__(config.score, config.attention, config.dim, config.max_length)

    def forward(self, x: Tensor, memory: Tensor, mask: AttentionMask) -> Tensor:
        return self.context(x, memory, memory, mask)


class Gnmt(EncoderDecoderBase):
    """LSTMs that read, and LSTMs that write and hear what the lowest of them found."""

    has_host_sync: ClassVar[bool] = True  # for the lengths of its sequences

    def __init__(self, config: GnmtConfig) -> None:
        super().__init__()
        self.config: GnmtConfig = config
        dim, layers = config.dim, config.layers
        self.scale = math.sqrt(dim)  # the tables have entries of N(0, 1/d), gates want N(0, 1)
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
        for part in self.modules():
            if isinstance(part, nn.LSTM):
                initialise_lstm(part)

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """The top of the encoder; padding behind a text is read after it, and looked at by none."""
        x = self.dropout(self.tokens(source) * self.scale)
        x = read_both_ways(self.both_ways, x, source_real)
        for number, layer in enumerate(self.encoder, start=1):
            read, _ = layer(self.dropout(x))
            x = read + x if number >= RESIDUAL_FROM else read
        return EncoderOutput(
            x, make_mask(full, source.shape[1], padding_mask=source_real, device=source.device)
        )

    def decode(
        self,
        target: Tensor,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Hidden:
        """The top of the decoder; with a cache, at the places after those that it has read."""
        if target_real is not None:
            lengths_of(target_real)  # padding behind the text is read after it, and changes nothing
        x = self.dropout(self.target_table(target) * self.scale)
        x = read_on(self.lowest, x, cache)
        context = self.attention(x, memory.states, memory.mask)
        for number, layer in enumerate(self.decoder, start=1):
            read = read_on(layer, self.dropout(torch.cat([x, context], dim=-1)), cache)
            x = read + x if number >= RESIDUAL_FROM else read
        if cache is not None:
            cache.advance(target.shape[1])
        return self.dropout(x)


def read_on(lstm: nn.Module, x: Tensor, cache: StateCache | None) -> Tensor:
    """The states of a layer at these places, after those that the cache has read."""
    states = None if cache is None else cache.state(lstm)
    read: Tensor
    read, newest = lstm(x, states)
    if cache is not None:
        cache.set_state(lstm, newest)
    return read
