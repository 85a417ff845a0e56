"""The encoder–decoder that the Transformer replaced: LSTMs, and attention between them.

The encoder reads a source in both directions, h̄_s. The decoder's state h_t begins where the
encoder ended, and asks all of its states (Luong's global attention):

    α_ts = softmax_s(score(h_t, h̄_s)),  c_t = Σ_s α_ts h̄_s,  h̃_t = tanh(W_c [c_t; h_t])

There is no input feeding: h̃_t gives the logits at t and does not enter the state after it, so
that teacher forcing runs a whole target through the LSTM at once.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from manyheads import ops
from manyheads.baselines.baseline import BaselineSizes
from manyheads.baselines.luong_attention import MemoryAttention, check_exact
from manyheads.errors import UserError
from manyheads.models.seq2seq import EncoderDecoderBase, EncoderOutput
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.masks import AttentionMask, full, make_mask
from manyheads.nn.scores import Bilinear, ScoreConfig
from manyheads.nn.shapes import Hidden, PaddingMask
from manyheads.nn.states import StateCache, States


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(BaselineSizes):
    """What every LSTM encoder–decoder with attention is told.

    `dim` is also the width of the decoder, and of both directions of the encoder together. A
    recurrent model has no longest text of its own.
    """

    score: ScoreConfig = field(default_factory=Bilinear)
    RENAMED: ClassVar[dict[str, str]] = {"core": "attention"}
    attention: AttentionFunctionConfig = field(default_factory=Dense)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise UserError(f"model.dim={self.dim} must be even: each direction reads with half")
        check_exact(self.attention, "an LSTM")
        key_size = self.score.key_dim(self.dim)
        if key_size != self.dim:
            raise UserError(
                f"model.score.key_size={key_size}: the keys are the encoder's states, as wide as "
                f"model.dim={self.dim}, so leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class RnnConfig(RecurrentConfig):
    """An LSTM encoder–decoder with Luong's global attention."""

    kind: ClassVar[str] = "rnn"

    def build(self) -> "Rnn":
        return Rnn(self)


class GlobalAttention(MemoryAttention):
    """h̃_t of the states of the decoder: one head, whose keys and values are the memory itself."""

    def __init__(self, config: RnnConfig) -> None:
        super().__init__(config.score, config.attention, config.dim, config.max_length)
        self.combine = nn.Linear(2 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, mask: AttentionMask) -> Tensor:
        context = self.context(x, memory, memory, mask)
        return torch.tanh(self.combine(torch.cat([context, x], dim=-1)))


class Rnn(EncoderDecoderBase):
    """An LSTM that reads both ways, and one that begins where it ended and asks its states."""

    has_host_sync: ClassVar[bool] = True  # for the lengths of its sequences

    def __init__(self, config: RnnConfig) -> None:
        super().__init__()
        self.config: RnnConfig = config
        dim, layers = config.dim, config.layers
        between = config.dropout if layers > 1 else 0.0
        self.scale = math.sqrt(dim)  # the tables have entries of N(0, 1/d), gates want N(0, 1)
        self.dropout = nn.Dropout(config.dropout)
        self.tokens = nn.Embedding(config.vocabulary, dim)
        self.encoder = nn.LSTM(
            dim, dim // 2, layers, batch_first=True, dropout=between, bidirectional=True
        )
        if not config.shares_inputs:
            self.target_tokens = nn.Embedding(config.vocabulary, dim)
        self.first = nn.Linear(dim, 2 * layers * dim)
        self.decoder = nn.LSTM(dim, dim, layers, batch_first=True, dropout=between)
        self.attention = GlobalAttention(config)
        self.head = LMHead(config.vocabulary, dim, tied=config.shares_inputs, bias="none")
        initialise(self, "xavier", layers)
        for lstm in (self.encoder, self.decoder):
            initialise_lstm(lstm)

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """The states of both directions side by side; neither has read any padding."""
        x = self.dropout(self.tokens(source) * self.scale)
        states = read_both_ways(self.encoder, x, source_real)
        return EncoderOutput(
            states, make_mask(full, source.shape[1], padding_mask=source_real, device=source.device)
        )

    def first_states(self, memory: EncoderOutput) -> States:
        """Where the decoder begins: at the last state of each direction, projected."""
        states, real = memory.states, memory.mask.padding_mask
        forward, backward = states.chunk(2, dim=-1)
        rows = torch.arange(len(states), device=states.device)
        last = forward[:, -1] if real is None else forward[rows, real.sum(1) - 1]
        both = self.first(torch.cat([last, backward[:, 0]], dim=-1))
        h, c = rearrange(both, "b (k l d) -> k l b d", k=2, d=self.config.dim)
        return torch.tanh(h).contiguous(), c.contiguous()

    def decode(
        self,
        target: Tensor,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Hidden:
        """h̃ at each position; with a cache, at the positions after those that it has read."""
        if target_real is not None:
            lengths_of(target_real)  # padding behind the text is read after it, and changes nothing
        states = None if cache is None else cache.state(self.decoder)
        if states is None:
            beams = target.shape[0] // memory.states.shape[0]
            h, c = self.first_states(memory)
            states = h.repeat_interleave(beams, dim=1), c.repeat_interleave(beams, dim=1)
        x = self.dropout(self.target_table(target) * self.scale)
        x, states = self.decoder(x, states)
        if cache is not None:
            cache.set_state(self.decoder, states)
            cache.advance(target.shape[1])
        return self.dropout(self.attention(x, memory.states, memory.mask))


def read_both_ways(lstm: nn.LSTM, x: Hidden, real: PaddingMask | None) -> Hidden:
    """The states of both directions side by side; neither reads any padding, which stays zero."""
    if real is None:
        states: Tensor = lstm(x)[0]
        return states
    packed = pack_padded_sequence(x, lengths_of(real).cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def lengths_of(real: PaddingMask) -> Int[Tensor, " b"]:
    """The length of each text; one with padding elsewhere than behind it is refused."""
    lengths = real.sum(1)
    behind = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
    # A recording cannot ask; what it records was computed as it is before.
    recording = ops.is_capturing(real)
    if not recording and (not (behind == real).all() or not lengths.all()):
        raise UserError("this model reads texts of at least a token, with padding behind them")
    return lengths


def initialise_lstm(lstm: nn.LSTM) -> None:
    """Each gate's matrices uniform by their own fans, with the gain of tanh; biases zero.

    PyTorch's own numbers are so small that a second layer hardly hears the first, and learns late.
    """
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            continue
        for gate in parameter.chunk(4):
            nn.init.xavier_uniform_(gate, nn.init.calculate_gain("tanh"))
