"""The encoder–decoder that the Transformer replaced: LSTMs with attention between them.

The encoder reads the source in both directions, h̄_s. The decoder's state h_t starts from the
encoder's last state and attends to all h̄ (Luong's global attention):

    α_ts = softmax_s(score(h_t, h̄_s)),  c_t = Σ_s α_ts h̄_s,  h̃_t = tanh(W_c [c_t; h_t])

There is no input feeding: h̃_t gives the logits at t and does not enter the next state, so that
teacher forcing runs the LSTM over a target in one call.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from manyheads import ops
from manyheads.baselines.baseline import BaselineSizes
from manyheads.baselines.luong_attention import LuongAttention, check_exact_attention
from manyheads.errors import UserError
from manyheads.models.seq2seq import EncoderDecoderBase, EncoderOutput
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense, StateCache, States
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.masks import AttentionMask
from manyheads.nn.scores import Bilinear, ScoreConfig
from manyheads.nn.shapes import Hidden, PaddingMask


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(BaselineSizes):
    """An LSTM encoder–decoder with attention; each direction of the encoder has width dim / 2."""

    score: Annotated[ScoreConfig, "Score of a query and a key"] = field(default_factory=Bilinear)
    attention: Annotated[AttentionFunctionConfig, "Attention implementation, an exact one"] = field(
        default_factory=Dense
    )

    RENAMED: ClassVar[dict[str, str]] = {"core": "attention"}

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise UserError(f"model.dim={self.dim} must be even: each direction has half of it")
        check_exact_attention(self.attention, "an LSTM")
        key_size = self.score.key_dim(self.dim)
        if key_size != self.dim:
            raise UserError(
                f"model.score.key_size={key_size} must be model.dim={self.dim}, the width of the "
                "encoder's states: leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class RnnConfig(RecurrentConfig):
    """An LSTM encoder–decoder with Luong's global attention."""

    kind: ClassVar[str] = "rnn"

    def build(self) -> "Rnn":
        return Rnn(self)


class GlobalAttention(LuongAttention):
    """h̃_t = tanh(W_c [c_t; h_t])."""

    def __init__(self, config: RnnConfig) -> None:
        super().__init__(config.score, config.attention, config.dim, config.max_length)
        self.combine = nn.Linear(2 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, mask: AttentionMask) -> Tensor:
        context = self.context(x, memory, memory, mask)
        return torch.tanh(self.combine(torch.cat([context, x], dim=-1)))


class Rnn(EncoderDecoderBase):
    """A bidirectional LSTM encoder and an LSTM decoder that attends to its states."""

    has_host_sync: ClassVar[bool] = True  # for the lengths of its sequences

    def __init__(self, config: RnnConfig) -> None:
        super().__init__()
        self.config: RnnConfig = config
        dim, layers = config.dim, config.layers
        between = config.dropout if layers > 1 else 0.0
        self.scale = math.sqrt(dim)  # embeddings start as N(0, 1/d); gates expect N(0, 1)
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
        """[→h; ←h]; neither direction reads padding."""
        x = self.dropout(self.tokens(source) * self.scale)
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

    def decode(
        self,
        target: Tensor,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Hidden:
        """h̃ at each position; with a cache, at the positions after the cached ones."""
        if target_real is not None:
            text_lengths(target_real)  # padding after a text does not change its states
        states = None if cache is None else cache.state(self.decoder)
        if states is None:
            beams = target.shape[0] // memory.states.shape[0]
            h, c = self.initial_states(memory)
            states = h.repeat_interleave(beams, dim=1), c.repeat_interleave(beams, dim=1)
        x = self.dropout(self.target_table(target) * self.scale)
        x, states = self.decoder(x, states)
        if cache is not None:
            cache.set_state(self.decoder, states)
            cache.advance(target.shape[1])
        return self.dropout(self.attention(x, memory.states, memory.mask))


def run_bidirectional(lstm: nn.LSTM, x: Hidden, real: PaddingMask | None) -> Hidden:
    """[→h; ←h] at each position; no direction reads padding, whose states are zero."""
    if real is None:
        states: Tensor = lstm(x)[0]
        return states
    lengths = text_lengths(real).cpu()
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def text_lengths(real: PaddingMask) -> Int[Tensor, " b"]:
    """The length of each text; refuses an empty text, and padding that is not at the end."""
    lengths = real.sum(1)
    is_prefix = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
    # While a CUDA graph is captured, values cannot be read; the warm-up has checked them.
    if not ops.is_capturing(real) and (not (is_prefix == real).all() or not lengths.all()):
        raise UserError("this model takes texts of at least one token, with padding at the end")
    return lengths


def initialise_lstm(lstm: nn.LSTM) -> None:
    """Xavier-uniform matrices for each gate, with the gain of tanh; biases zero.

    PyTorch's own initial weights are so small that upper layers learn late.
    """
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
            continue
        for gate in parameter.chunk(4):
            nn.init.xavier_uniform_(gate, nn.init.calculate_gain("tanh"))
