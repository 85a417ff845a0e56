"""The encoder–decoder that the Transformer replaced: LSTMs with attention between them.

The encoder reads the source in both directions, h̄_s. The decoder's state h_t starts from the
encoder's last state and attends to all h̄ (Luong's global attention):

    α_ts = softmax_s(score(h_t, h̄_s)),  c_t = Σ_s α_ts h̄_s,  h̃_t = tanh(W_c [c_t; h_t])

Without attention (model.attention=none, Sutskever et al. 2014) h̃_t = h_t: all that the decoder
knows of the source is its first state.

There is no input feeding: h̃_t gives the logits at t and does not enter the next state, so that
teacher forcing runs the LSTM over a target in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from manyheads.baselines.baseline import BaselineModel, BaselineSizes, text_lengths
from manyheads.baselines.luong_attention import LuongAttention
from manyheads.errors import UserError
from manyheads.models.seq2seq import EncoderOutput
from manyheads.nn.attention import StateCache, States
from manyheads.nn.masks import AttentionMask
from manyheads.nn.scores import Bilinear, ScoreConfig
from manyheads.nn.shapes import Hidden, PaddingMask


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

    def decoder_states(
        self, target: Tensor, memory: EncoderOutput, cache: StateCache | None
    ) -> Hidden:
        """h̃ at each position."""

        def first() -> States:
            beams = target.shape[0] // memory.states.shape[0]
            h, c = self.initial_states(memory)
            return h.repeat_interleave(beams, dim=1), c.repeat_interleave(beams, dim=1)

        x = run_lstm(self.decoder, self.embed(self.target_table, target), cache, first)
        return x if self.attention is None else self.attention(x, memory.states, memory.mask)


def run_lstm(
    lstm: nn.Module,
    x: Tensor,
    cache: StateCache | None,
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
