"""An encoder–decoder of gated convolutions, with attention in every decoder layer (ConvS2S).

Gehring et al. 2017. With e and g the embeddings of source and target (tokens plus learned
positions), each layer computes

    [a; b] = W ∗ h^{l−1},  v = a ⊙ σ(b),  h^l = √½ (v + h^{l−1})

The decoder is causal; each of its layers attends to the encoder's output z, and v becomes
√½ (v + W_c c):

    d_i = W_d v_i + b_d + g_i,  α_ij = softmax_j(d_i · z_j),  c_i = √m Σ_j α_ij (z_j + e_j)

for a source of m tokens. Left out: weight normalisation, and scaling the encoder's gradient by
the number of attention layers.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.baselines.baseline import BaselineModel, BaselineSizes, text_lengths
from manyheads.baselines.convolution import Convolution, check_kernel
from manyheads.baselines.luong_attention import LuongAttention
from manyheads.config import Count
from manyheads.models.seq2seq import EncoderOutput
from manyheads.nn.attention import StateCache
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import LearnedPosition
from manyheads.nn.scores import Dot
from manyheads.nn.shapes import Hidden, PaddingMask

ROOT_HALF = math.sqrt(0.5)  # keeps the variance of a sum of two vectors


@dataclass(frozen=True, kw_only=True)
class ConvS2SConfig(BaselineSizes):
    """Gated convolutions with attention of width `dim`."""

    ffn_dim: Annotated[Count | None, "Width of the convolutions; none: dim"] = None
    layers: Annotated[Count, "Layers of the encoder, and of the decoder"] = 4
    kernel: Annotated[Count, "Kernel size, an odd number"] = 3
    kind: ClassVar[str] = "convs2s"
    RENAMED: ClassVar[dict[str, str]] = {"hidden": "ffn_dim", **BaselineSizes.RENAMED}

    def __post_init__(self) -> None:
        check_kernel(self.kernel)

    @property
    def width(self) -> int:
        """Width of the convolutions."""
        return self.ffn_dim or self.dim

    def convolution(self, *, causal: bool) -> Convolution:
        """Twice the channels: half of them are gates, which halve what they pass."""
        gain = 2 * math.sqrt(1 - self.dropout)
        return Convolution(self.width, 2 * self.width, self.kernel, causal=causal, gain=gain)

    def build(self) -> "ConvS2S":
        return ConvS2S(self)


class StepAttention(LuongAttention):
    """W_c c of one layer."""

    def __init__(self, config: ConvS2SConfig) -> None:
        super().__init__(Dot(), config.dim)
        self.query = nn.Linear(config.width, config.dim)
        self.output = nn.Linear(config.dim, config.width)

    def forward(  # type: ignore[override]
        self, v: Tensor, g: Tensor, memory: Tensor, mask: AttentionMask
    ) -> Tensor:
        """`memory` is [z; e]."""
        z, e = memory.chunk(2, dim=-1)
        context = self.context(self.query(v) + g, z, z + e, mask)
        return self.output(context * _root_lengths(memory, mask, len(v)))


def _root_lengths(memory: Tensor, mask: AttentionMask, rows: int) -> Tensor:
    """√m of the source of each row; rows are hypotheses of the sources."""
    if mask.padding_mask is None:
        return memory.new_tensor(memory.shape[1]).sqrt()
    lengths = mask.padding_mask.sum(1).to(memory.dtype).repeat_interleave(rows // len(memory))
    return lengths.sqrt()[:, None, None]


class ConvEncoder(nn.Module):
    """z of the source embeddings e."""

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
    """The last h of the target embeddings g, with attention to z and e."""

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


class ConvS2S(BaselineModel):
    """A convolutional encoder, and a causal decoder with attention in every layer."""

    config: ConvS2SConfig

    def __init__(self, config: ConvS2SConfig) -> None:
        super().__init__(config)
        self.encoder_position = LearnedPosition(config.max_length, config.dim, 0)
        self.encoder = ConvEncoder(config)
        self.build_target_table()
        self.decoder_position = LearnedPosition(config.max_length, config.dim, 0)
        self.decoder = ConvDecoder(config)
        self.build_head()

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """[z; e]."""
        length = source.shape[1]
        self.encoder_position.check_length(length)
        if source_real is not None:
            text_lengths(source_real)
        positions = torch.arange(length, device=source.device)[None]
        e = self.dropout(self.encoder_position.embed(self.tokens(source), positions))
        return EncoderOutput.of(torch.cat([self.encoder(e, source_real), e], dim=-1), source_real)

    def decoder_states(
        self, target: Tensor, memory: EncoderOutput, cache: StateCache | None
    ) -> Hidden:
        start = 0 if cache is None else cache.length
        end = start + target.shape[1]
        self.decoder_position.check_length(end)
        positions = torch.arange(start, end, device=target.device)[None]
        g = self.dropout(self.decoder_position.embed(self.target_table(target), positions))
        return self.decoder(g, memory, cache)
