"""Encoder–decoders of convolutions: ConvS2S with attention, ByteNet without.

A convolution with kernel size k and dilation δ, with zeros beyond the ends:

    y_t = b + Σ_{j=0}^{k−1} W_j x_{t + (j − a) δ}

Centred: a = (k − 1) / 2. Causal: a = k − 1, so that no output depends on a later input; a step
needs the last (k − 1) δ inputs, which it finds in the cache.
"""

import math
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Annotated, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.baselines.baseline import (
    BaselineModel,
    BaselineSizes,
    LuongAttention,
    text_lengths,
)
from manyheads.config import Between, Count, Natural
from manyheads.errors import UserError
from manyheads.models.seq2seq import EncoderOutput
from manyheads.nn.attention import Cache
from manyheads.nn.masks import AttentionMask
from manyheads.nn.positions import LearnedPosition
from manyheads.nn.scores import Dot
from manyheads.nn.shapes import Hidden, PaddingMask

ROOT_HALF = math.sqrt(0.5)  # keeps the variance of a sum of two vectors
DILATIONS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class ConvolutionSizes(BaselineSizes):
    """Sizes of a model of convolutions."""

    kernel: Annotated[Count, "Kernel size, an odd number"] = 3

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise UserError(
                f"model.kernel={self.kernel} must be odd: the encoder's kernels are centred"
            )


class Convolution(nn.Module):
    """A centred or causal convolution; with a cache, it continues after the cached inputs."""

    def __init__(
        self, width: int, outer: int, kernel: int, *, dilation: int = 1, causal: bool, gain: float
    ) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, outer, kernel, dilation=dilation)
        reach = (kernel - 1) * dilation
        self.before, self.after = (reach, 0) if causal else (reach // 2, reach // 2)
        nn.init.normal_(self.inner.weight, std=gain * (kernel * width) ** -0.5)
        nn.init.zeros_(self.inner.bias)  # type: ignore[arg-type]

    def forward(
        self, x: Hidden, real: PaddingMask | None = None, cache: Cache | None = None
    ) -> Tensor:
        if real is not None:
            x = zero_padding(x, real)
        cached = None if cache is None else cache.state(self)
        if cached is None:
            past = x.new_zeros(x.shape[0], self.before, x.shape[2])
        else:
            past = rearrange(cached[0], "p b d -> b p d")
        future = x.new_zeros(x.shape[0], self.after, x.shape[2])
        x = torch.cat([past, x, future], dim=1)
        if cache is not None:
            newest = x[:, x.shape[1] - self.before :]
            cache.set_state(self, (rearrange(newest, "b p d -> p b d"),))
        return rearrange(self.inner(rearrange(x, "b t d -> b d t")), "b d t -> b t d")


def zero_padding(x: Hidden, real: PaddingMask) -> Hidden:
    """Zeros at padding, as beyond the ends of a text without padding."""
    return x.masked_fill(~real[..., None], 0.0)


# ---------------------------------------------------------------------------------------------
# ConvS2S (Gehring et al. 2017)
#
# With e and g the embeddings of source and target (tokens plus learned positions), each layer
# computes
#
#     [a; b] = W ∗ h^{l−1},  v = a ⊙ σ(b),  h^l = √½ (v + h^{l−1})
#
# The decoder is causal; each of its layers attends to the encoder's output z, and v becomes
# √½ (v + W_c c):
#
#     d_i = W_d v_i + b_d + g_i,  α_ij = softmax_j(d_i · z_j),  c_i = √m Σ_j α_ij (z_j + e_j)
#
# for a source of m tokens. Left out: weight normalisation, and scaling the encoder's gradient by
# the number of attention layers.


@dataclass(frozen=True, kw_only=True)
class ConvS2SConfig(ConvolutionSizes):
    """Gated convolutions with attention of width `dim`."""

    ffn_dim: Annotated[Count | None, "Width of the convolutions; none: dim"] = None
    layers: Annotated[Count, "Layers of the encoder, and of the decoder"] = 4
    kind: ClassVar[str] = "convs2s"
    RENAMED: ClassVar[dict[str, str]] = {"hidden": "ffn_dim", **BaselineSizes.RENAMED}

    @property
    def width(self) -> int:
        """Width of the convolutions."""
        return self.ffn_dim or self.dim

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


class GatedStack(nn.Module):
    """Layers of gated convolutions over embeddings; those of a decoder attend to the source."""

    def __init__(self, config: ConvS2SConfig, *, causal: bool) -> None:
        super().__init__()
        width, layers = config.width, range(config.layers)
        gain = 2 * math.sqrt(1 - config.dropout)  # gates halve what they pass
        self.dropout = nn.Dropout(config.dropout)
        self.enter = nn.Linear(config.dim, width)
        self.layers = nn.ModuleList(
            Convolution(width, 2 * width, config.kernel, causal=causal, gain=gain) for _ in layers
        )
        self.attentions = nn.ModuleList(StepAttention(config) for _ in layers if causal)
        self.leave = nn.Linear(width, config.dim)

    def forward(
        self,
        x: Hidden,
        real: PaddingMask | None = None,
        memory: EncoderOutput | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        h = self.enter(x)
        for index, layer in enumerate(self.layers):
            v = F.glu(layer(self.dropout(h), real, cache))
            if memory is not None:
                attended = self.attentions[index](v, x, memory.states, memory.mask)
                v = ROOT_HALF * (v + attended)
            h = ROOT_HALF * (v + h)
        return self.leave(h)


class ConvS2S(BaselineModel):
    """A convolutional encoder, and a causal decoder with attention in every layer."""

    config: ConvS2SConfig

    def __init__(self, config: ConvS2SConfig) -> None:
        super().__init__(config)
        self.encoder_position = LearnedPosition(config.max_length, config.dim, 0)
        self.encoder = GatedStack(config, causal=False)
        self.build_target_table()
        self.decoder_position = LearnedPosition(config.max_length, config.dim, 0)
        self.decoder = GatedStack(config, causal=True)
        self.build_head()

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """[z; e]."""
        if source_real is not None:
            text_lengths(source_real)
        e = self._embedded(self.encoder_position, self.tokens, source, 0)
        return EncoderOutput.of(torch.cat([self.encoder(e, source_real), e], dim=-1), source_real)

    def decoder_states(self, target: Tensor, memory: EncoderOutput, cache: Cache | None) -> Hidden:
        start = 0 if cache is None else cache.length
        g = self._embedded(self.decoder_position, self.target_table, target, start)
        return self.decoder(g, None, memory, cache)

    def _embedded(
        self, position: LearnedPosition, table: nn.Embedding, tokens: Tensor, start: int
    ) -> Hidden:
        """e or g: tokens plus positions from `start` on."""
        end = start + tokens.shape[1]
        position.check_length(end)
        positions = torch.arange(start, end, device=tokens.device)[None]
        embedded: Tensor = self.dropout(position.embed(table(tokens), positions))
        return embedded


# ---------------------------------------------------------------------------------------------
# ByteNet: Neural Machine Translation in Linear Time (Kalchbrenner et al. 2017)
#
# Encoder and decoder are residual blocks with dilations 1, 2, 4, 8, 16, 1, 2, …:
#
#     x + W_2 f(C ∗ f(W_1 f(x))),  f(x) = relu(norm(x)),  W_1 to half of the width, W_2 back
#
# The decoder at position t gets the encoder's output at the same position t. The source is
# therefore unfolded to the length that a target may have, |t̂| = a |s| + b; beyond that, the
# decoder sees only its own tokens.


@dataclass(frozen=True, kw_only=True)
class ByteNetConfig(ConvolutionSizes):
    """Dilated convolutions; `layers` counts blocks."""

    layers: Annotated[Count, "Blocks of the encoder, and of the decoder"] = 5
    length_ratio: Annotated[float, Between(1), "a of the unfolded length a |s| + b"] = 1.2
    length_extra: Annotated[Natural, "b of the unfolded length a |s| + b"] = 0
    kind: ClassVar[str] = "bytenet"

    RENAMED: ClassVar[dict[str, str]] = {"stretch": "length_ratio", "more": "length_extra"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise UserError(f"model.dim={self.dim} must be even: the convolutions are half as wide")

    def unfolded(self, length: int) -> int:
        """|t̂| = ⌈a |s| + b⌉ for a source of this length."""
        return math.ceil(self.length_ratio * length + self.length_extra)

    def build(self) -> "ByteNet":
        return ByteNet(self)


class DilatedBlock(nn.Module):
    """x + W_2 f(C ∗ f(W_1 f(x)))."""

    def __init__(self, config: ByteNetConfig, dilation: int, *, causal: bool) -> None:
        super().__init__()
        dim, half = config.dim, config.dim // 2
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in (dim, half, half))
        self.enter = nn.Linear(dim, half)
        self.convolution = Convolution(
            half, half, config.kernel, dilation=dilation, causal=causal, gain=math.sqrt(2)
        )
        self.leave = nn.Linear(half, dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Hidden, real: PaddingMask | None, cache: Cache | None) -> Hidden:
        first, second, third = self.norms
        y = self.enter(F.relu(first(x)))
        y = self.convolution(F.relu(second(y)), real, cache)
        return x + self.dropout(self.leave(F.relu(third(y))))


class DilatedStack(nn.Module):
    """Blocks with dilations that double and restart after five."""

    def __init__(self, config: ByteNetConfig, *, causal: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            DilatedBlock(config, dilation, causal=causal)
            for dilation in islice(cycle(DILATIONS), config.layers)
        )

    def forward(
        self, x: Hidden, real: PaddingMask | None = None, cache: Cache | None = None
    ) -> Hidden:
        for block in self.blocks:
            x = block(x, real, cache)
        return x


class ByteNet(BaselineModel):
    """Dilated blocks over the unfolded source, and causal ones on top of their output."""

    config: ByteNetConfig

    def __init__(self, config: ByteNetConfig) -> None:
        super().__init__(config)
        dim = config.dim
        self.beyond = nn.Embedding(1, dim)  # the embedding of positions from |s| to |t̂|
        self.encoder = DilatedStack(config, causal=False)
        self.build_target_table()
        self.enter = nn.Linear(2 * dim, dim)
        self.decoder = DilatedStack(config, causal=True)
        self.norm = nn.LayerNorm(dim)
        self.leave = nn.Linear(dim, dim)
        self.build_head()

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """The encoder's output at the first |t̂| positions of each source, then zeros."""
        length = source.shape[1]
        positions = torch.arange(self.config.unfolded(length), device=source.device)
        x, real = F.pad(self.tokens(source), (0, 0, 0, len(positions) - length)), None
        ends = torch.full_like(source[:, 0], length)
        if source_real is not None:
            ends = text_lengths(source_real)
            ratio, extra = self.config.length_ratio, self.config.length_extra
            # As in `unfolded`, in the same precision.
            real = positions < (ratio * ends.double() + extra).ceil()[:, None]
        text = (positions < ends[:, None])[..., None]
        x = self.dropout(torch.where(text, x, self.beyond.weight) * math.sqrt(self.config.dim))
        states = self.encoder(x, real)
        if real is not None:
            states = zero_padding(states, real)
        return EncoderOutput.of(states, real)

    def decoder_states(self, target: Tensor, memory: EncoderOutput, cache: Cache | None) -> Hidden:
        start, length = 0 if cache is None else cache.length, target.shape[1]
        encoded = memory.states[:, start : start + length]
        encoded = F.pad(encoded, (0, 0, 0, length - encoded.shape[1]))
        encoded = encoded.repeat_interleave(len(target) // len(encoded), 0)
        x = torch.cat([self.embed(self.target_table, target), encoded], dim=-1)
        x = self.decoder(self.enter(x), None, cache)
        return self.leave(F.relu(self.norm(x)))
