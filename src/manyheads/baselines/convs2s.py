"""An encoder–decoder of gated convolutions, with attention in every layer that writes.

Convolutional Sequence to Sequence Learning (Gehring et al. 2017). With e the embeddings of a
source and g those of a target, tokens and learned positions, each layer of either side is

    [a; b] = W ∗ h^{l−1},  v = a ⊙ σ(b),  h^l = √½ (v + h^{l−1})

The decoder's are causal, and v becomes √½ (v + W_c c) by asking the encoder's output z first:

    d_i = W_d v_i + b_d + g_i,  α_ij = softmax_j(d_i · z_j),  c_i = √m Σ_j α_ij (z_j + e_j)

for a source of m tokens. Here without weight normalisation, and the gradients of the encoder are
not divided by the number of attentions.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.baselines.baseline import BaselineSizes
from manyheads.baselines.convolution import Convolution, check_kernel
from manyheads.baselines.luong_attention import MemoryAttention, check_exact
from manyheads.baselines.rnn import lengths_of
from manyheads.errors import check_at_least
from manyheads.models.seq2seq import EncoderDecoderBase, EncoderOutput
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Dense
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.masks import AttentionMask, full, make_mask
from manyheads.nn.positions import LearnedPosition
from manyheads.nn.scores import Dot
from manyheads.nn.shapes import Hidden, PaddingMask
from manyheads.nn.states import StateCache

ROOT_HALF = math.sqrt(0.5)  # a sum of two vectors varies as much as each of them


@dataclass(frozen=True, kw_only=True)
class ConvS2SConfig(BaselineSizes):
    """Gated convolutions with attention.

    `dim` is also the width of what is asked and answered, `ffn_dim` that of the convolutions (`dim`
    unless given); `max_length` is the longest text that there are positions for.
    """

    ffn_dim: int | None = None
    layers: int = 4
    kernel: int = 3
    attention: AttentionFunctionConfig = field(default_factory=Dense)
    kind: ClassVar[str] = "convs2s"
    RENAMED: ClassVar[dict[str, str]] = {"hidden": "ffn_dim", "core": "attention"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.ffn_dim", self.ffn_dim, 1)
        check_kernel(self.kernel)
        check_exact(self.attention, "a convolution")

    @property
    def width(self) -> int:
        """Of the convolutions."""
        return self.ffn_dim or self.dim

    def convolution(self, *, causal: bool) -> Convolution:
        """Twice the channels, half of them gates; a gate halves what it lets through."""
        gain = 2 * math.sqrt(1 - self.dropout)
        return Convolution(self.width, 2 * self.width, self.kernel, causal=causal, gain=gain)

    def build(self) -> "ConvS2S":
        return ConvS2S(self)


class StepAttention(MemoryAttention):
    """W_c c of one layer: what its vectors find in the source."""

    def __init__(self, config: ConvS2SConfig) -> None:
        super().__init__(Dot(), config.attention, config.dim, config.max_length)
        self.query = nn.Linear(config.width, config.dim)
        self.output = nn.Linear(config.dim, config.width)

    def forward(self, x: Tensor, asked: Tensor, memory: Tensor, mask: AttentionMask) -> Tensor:
        """`asked` are the embeddings g; `memory` holds z and e side by side."""
        z, e = memory.chunk(2, dim=-1)
        found = self.context(self.query(x) + asked, z, z + e, mask)
        return self.output(found * _roots(memory, mask, len(x)))


def _roots(memory: Tensor, mask: AttentionMask, rows: int) -> Tensor:
    """√m for the source of each row; several may be hypotheses of one."""
    if mask.padding_mask is None:
        return memory.new_tensor(memory.shape[1]).sqrt()
    counted = mask.padding_mask.sum(1).to(memory.dtype).repeat_interleave(rows // len(memory))
    return counted.sqrt()[:, None, None]


class ConvEncoder(nn.Module):
    """z of the embeddings of a source."""

    def __init__(self, config: ConvS2SConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.enter = nn.Linear(config.dim, config.width)
        self.layers = nn.ModuleList(config.convolution(causal=False) for _ in range(config.layers))
        self.leave = nn.Linear(config.width, config.dim)

    def forward(self, e: Hidden, real: PaddingMask | None) -> Hidden:
        h = self.enter(e)
        for layer in self.layers:
            h = ROOT_HALF * (F.glu(layer(self.dropout(h), real)) + h)
        return self.leave(h)


class ConvDecoder(nn.Module):
    """What the head reads, of the embeddings of a target and of the source's z and e."""

    def __init__(self, config: ConvS2SConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.enter = nn.Linear(config.dim, config.width)
        self.layers = nn.ModuleList(config.convolution(causal=True) for _ in range(config.layers))
        self.attentions = nn.ModuleList(StepAttention(config) for _ in range(config.layers))
        self.leave = nn.Linear(config.width, config.dim)

    def forward(self, g: Hidden, memory: EncoderOutput, cache: StateCache | None) -> Hidden:
        h = self.enter(g)
        for layer, attention in zip(self.layers, self.attentions, strict=True):
            v = F.glu(layer(self.dropout(h), None, cache))
            v = ROOT_HALF * (v + attention(v, g, memory.states, memory.mask))
            h = ROOT_HALF * (v + h)
        return self.leave(h)


class ConvS2S(EncoderDecoderBase):
    """Convolutions that read, and causal ones that write and ask in every layer."""

    def __init__(self, config: ConvS2SConfig) -> None:
        super().__init__()
        self.config: ConvS2SConfig = config
        self.dropout = nn.Dropout(config.dropout)
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.encoder_position = LearnedPosition(config.max_length, config.dim, 0)
        self.encoder = ConvEncoder(config)
        if not config.shares_inputs:
            self.target_tokens = nn.Embedding(config.vocabulary, config.dim)
        self.decoder_position = LearnedPosition(config.max_length, config.dim, 0)
        self.decoder = ConvDecoder(config)
        self.head = LMHead(config.vocabulary, config.dim, tied=config.shares_inputs, bias="none")
        initialise(self, "xavier", config.layers)

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """z and e side by side."""
        length = source.shape[1]
        self.encoder_position.check_length(length)
        if source_real is not None:
            lengths_of(source_real)
        mask = make_mask(full, length, padding_mask=source_real, device=source.device)
        e = self.dropout(self.encoder_position.embed(self.tokens(source), mask.query_positions))
        return EncoderOutput(torch.cat([self.encoder(e, source_real), e], dim=-1), mask)

    def decode(
        self,
        target: Tensor,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Hidden:
        """What the head reads; with a cache, at the places after those that it has read."""
        if target_real is not None:
            lengths_of(target_real)  # no place hears of the padding behind it
        start = 0 if cache is None else cache.length
        end = start + target.shape[1]
        self.decoder_position.check_length(end)
        places = torch.arange(start, end, device=target.device)[None]
        g = self.dropout(self.decoder_position.embed(self.target_table(target), places))
        hidden = self.decoder(g, memory, cache)
        if cache is not None:
            cache.advance(target.shape[1])
        return self.dropout(hidden)
