"""Recurrent networks: translators with attention (Luong et al., GNMT) and a language model."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from manyheads.baselines.baseline import (
    BaselineModel,
    BaselineSizes,
    LuongAttention,
    initialise_lstms,
    text_lengths,
)
from manyheads.config import Between, Count
from manyheads.errors import UserError
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import EncoderOutput
from manyheads.nn.attention import Cache, States
from manyheads.nn.block import Model, initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.masks import AttentionMask
from manyheads.nn.scores import Additive, Bilinear, ScoreConfig
from manyheads.nn.shapes import Hidden, Logits, PaddingMask, Tokens

RESIDUAL_FROM = 2  # GNMT: the third layer, counted from 0


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(BaselineSizes):
    """An LSTM encoder–decoder with attention; each direction of the encoder has width dim / 2."""

    score: Annotated[ScoreConfig, "Score of a query and a key"] = field(default_factory=Bilinear)

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise UserError(f"model.dim={self.dim} must be even: each direction has half of it")
        key_size = self.score.key_dim(self.dim)
        if key_size != self.dim:
            raise UserError(
                f"model.score.key_size={key_size} must be model.dim={self.dim}, the width of the "
                "encoder's states: leave it out"
            )


def run_lstm(
    lstm: nn.Module,
    x: Tensor,
    cache: Cache | None,
    first: Callable[[], States | None] = lambda: None,
) -> Tensor:
    """The outputs of an LSTM, continued from the cached state; `first` gives the initial one."""
    states = None if cache is None else cache.state(lstm)
    out: Tensor
    out, newest = lstm(x, first() if states is None else states)
    if cache is not None:
        cache.set_state(lstm, newest)
    return out


def run_bidirectional(
    lstm: nn.LSTM, x: Float[Tensor, "b t input"], real: PaddingMask | None
) -> Hidden:
    """[→h; ←h] at each position; no direction reads padding, whose states are zero."""
    if real is None:
        states: Tensor = lstm(x)[0]
        return states
    lengths = text_lengths(real).cpu()
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


# ---------------------------------------------------------------------------------------------
# The encoder–decoder that the Transformer replaced: LSTMs with attention between them
#
# The encoder reads the source in both directions, h̄_s. The decoder's state h_t starts from the
# encoder's last state and attends to all h̄ (Luong's global attention):
#
#     α_ts = softmax_s(score(h_t, h̄_s)),  c_t = Σ_s α_ts h̄_s,  h̃_t = tanh(W_c [c_t; h_t])
#
# Without attention (model.attention=none, Sutskever et al. 2014) h̃_t = h_t: all that the decoder
# knows of the source is its first state.
#
# There is no input feeding: h̃_t gives the logits at t and does not enter the next state, so that
# teacher forcing runs the LSTM over a target in one call.


@dataclass(frozen=True, kw_only=True)
class RnnConfig(RecurrentConfig):
    """An LSTM encoder–decoder with Luong's global attention, or without attention."""

    attention: Annotated[
        Literal["global", "none"], "Attention; none: the decoder only starts from the encoder"
    ] = "global"
    kind: ClassVar[str] = "rnn"

    def build(self) -> "Rnn":
        return Rnn(self)


class GlobalAttention(LuongAttention):
    """h̃_t = tanh(W_c [c_t; h_t])."""

    def __init__(self, config: RnnConfig) -> None:
        super().__init__(config.score, config.dim)
        self.combine = nn.Linear(2 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, mask: AttentionMask) -> Tensor:
        context = super().forward(x, memory, mask)
        return torch.tanh(self.combine(torch.cat([context, x], dim=-1)))


class Rnn(BaselineModel):
    """A bidirectional LSTM encoder and an LSTM decoder that attends to its states."""

    config: RnnConfig
    has_host_sync: ClassVar[bool] = True  # for the lengths of its sequences

    def __init__(self, config: RnnConfig) -> None:
        super().__init__(config)
        dim, layers = config.dim, config.layers
        between = config.dropout if layers > 1 else 0.0
        self.encoder = nn.LSTM(
            dim, dim // 2, layers, batch_first=True, dropout=between, bidirectional=True
        )
        self.build_target_table()
        self.first = nn.Linear(dim, 2 * layers * dim)
        self.decoder = nn.LSTM(dim, dim, layers, batch_first=True, dropout=between)
        self.attention = GlobalAttention(config) if config.attention == "global" else None
        self.build_head()

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """[→h; ←h]; neither direction reads padding."""
        x = self.embed(self.tokens, source)
        return EncoderOutput.of(run_bidirectional(self.encoder, x, source_real), source_real)

    def initial_states(self, memory: EncoderOutput) -> States:
        """The decoder's first h and c: a projection of the last state of each direction."""
        states, real = memory.states, memory.mask.padding_mask
        forward, backward = states.chunk(2, dim=-1)
        rows = torch.arange(len(states), device=states.device)
        last = forward[:, -1] if real is None else forward[rows, real.sum(1) - 1]
        both = self.first(torch.cat([last, backward[:, 0]], dim=-1))
        h, c = rearrange(both, "b (k l d) -> k l b d", k=2, d=self.config.dim)
        return torch.tanh(h).contiguous(), c.contiguous()

    def decoder_states(self, target: Tensor, memory: EncoderOutput, cache: Cache | None) -> Hidden:
        """h̃ at each position."""

        def first() -> States:
            beams = target.shape[0] // memory.states.shape[0]
            h, c = self.initial_states(memory)
            return h.repeat_interleave(beams, dim=1), c.repeat_interleave(beams, dim=1)

        x = run_lstm(self.decoder, self.embed(self.target_table, target), cache, first)
        return x if self.attention is None else self.attention(x, memory.states, memory.mask)


# ---------------------------------------------------------------------------------------------
# A deep LSTM encoder–decoder with residual connections (GNMT, Wu et al. 2016)
#
# The encoder's first layer is bidirectional, the others forward. The decoder's lowest layer attends
# to the encoder's top; every layer above it gets the context as a second input:
#
#     c_t = Σ_s α_ts x̄_s,  α_ts = softmax_s(wᵀ tanh(A y_t + B x̄_s))
#     y^{l}_t = LSTM^l([y^{l−1}_t; c_t]) (+ y^{l−1}_t from the third layer on, on either side)
#
# y_t is the lowest layer's output, which gets no context. All states start at zero.


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

    def decoder_states(self, target: Tensor, memory: EncoderOutput, cache: Cache | None) -> Hidden:
        x = run_lstm(self.lowest, self.embed(self.target_table, target), cache)
        context = self.attention(x, memory.states, memory.mask)
        for index, layer in enumerate(self.decoder, start=1):
            y = run_lstm(layer, self.dropout(torch.cat([x, context], dim=-1)), cache)
            x = y + x if index >= RESIDUAL_FROM else y
        return x


# ---------------------------------------------------------------------------------------------
# A language model whose state is all that it knows of the past
#
# h_t = LSTM(h_{t−1}, x_t),  P(x_{t+1} | x_1, …, x_t) = softmax(h_t Eᵀ)


@dataclass(frozen=True, kw_only=True)
class RnnLmConfig(BaselineSizes):
    """An LSTM language model."""

    layers: Annotated[Count, "LSTM layers"] = 2
    max_length: Annotated[Count, "Length of training windows, in tokens"] = 512
    tie: Annotated[Literal["all", "none"], "One matrix for tokens and output, or two"] = "all"
    kind: ClassVar[str] = "rnn-lm"

    def build(self) -> "RnnLm":
        return RnnLm(self)


class RnnLm(Model):
    """logits[:, t] predict the token after tokens[:, t]; every window starts from a zero state.

    Forget-gate biases start at 1, as is usual: an LSTM that forgets half of its state at each
    step takes long to learn to keep it.
    """

    def __init__(self, config: RnnLmConfig) -> None:
        super().__init__()
        self.config = config
        dim, layers = config.dim, config.layers
        between = config.dropout if layers > 1 else 0.0
        self.tokens = nn.Embedding(config.vocabulary, dim)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True, dropout=between)
        self.head = LMHead(config.vocabulary, dim, tied=config.tie == "all", bias="none")
        initialise(self, "xavier", layers)
        initialise_lstms(self)
        self.set_gates(forget=1.0)

    def set_gates(self, forget: float, write: float = 0.0) -> None:
        """Initial biases: a step keeps σ(forget) of the state and adds σ(write) of the new."""
        with torch.no_grad():
            for name, parameter in self.lstm.named_parameters():
                if name.startswith("bias_ih"):
                    gates = parameter.chunk(4)  # input, forget, cell, output
                    gates[0].fill_(write)
                    gates[1].fill_(forget)

    def hidden(
        self,
        tokens: Tokens,
        real: Tensor | None = None,
        cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Hidden:
        """States of the top layer; padding, which follows a text, does not change them."""
        assert documents is None  # refused by the task
        x = self.dropout(self.tokens(tokens) * math.sqrt(self.config.dim))
        states = run_lstm(self.lstm, x, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.dropout(states)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.tokens)

    def forward(self, tokens: Tokens, real: Tensor | None = None) -> Logits:
        return self.logits(self.hidden(tokens, real))


LanguageModel = Gpt | RnnLm
