"""An encoder–decoder of dilated convolutions without attention (ByteNet).

Neural Machine Translation in Linear Time (Kalchbrenner et al. 2017). Encoder and decoder are
residual blocks with dilations 1, 2, 4, 8, 16, 1, 2, …:

    x + W_2 f(C ∗ f(W_1 f(x))),  f(x) = relu(norm(x)),  W_1 to half of the width, W_2 back

The decoder at position t gets the encoder's output at the same position t. The source is therefore
unfolded to the length that a target may have, |t̂| = a |s| + b; beyond that, the decoder sees only
its own tokens.
"""

import math
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.baselines.baseline import BaselineModel, BaselineSizes, text_lengths
from manyheads.baselines.convolution import Convolution, check_kernel, zero_padding
from manyheads.config import Between, Count, Natural
from manyheads.errors import UserError
from manyheads.models.seq2seq import EncoderOutput
from manyheads.nn.attention import StateCache
from manyheads.nn.shapes import Hidden, PaddingMask

DILATIONS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class ByteNetConfig(BaselineSizes):
    """Dilated convolutions; `layers` counts blocks."""

    layers: Annotated[Count, "Blocks of the encoder, and of the decoder"] = 5
    kernel: Annotated[Count, "Kernel size, an odd number"] = 3
    length_ratio: Annotated[float, Between(1), "a of the unfolded length a |s| + b"] = 1.2
    length_extra: Annotated[Natural, "b of the unfolded length a |s| + b"] = 0
    kind: ClassVar[str] = "bytenet"

    RENAMED: ClassVar[dict[str, str]] = {"stretch": "length_ratio", "more": "length_extra"}

    def __post_init__(self) -> None:
        check_kernel(self.kernel)
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

    def forward(self, x: Hidden, real: PaddingMask | None, cache: StateCache | None) -> Hidden:
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
        self, x: Hidden, real: PaddingMask | None = None, cache: StateCache | None = None
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

    def decoder_states(
        self, target: Tensor, memory: EncoderOutput, cache: StateCache | None
    ) -> Hidden:
        start, length = 0 if cache is None else cache.length, target.shape[1]
        encoded = memory.states[:, start : start + length]
        encoded = F.pad(encoded, (0, 0, 0, length - encoded.shape[1]))
        encoded = encoded.repeat_interleave(len(target) // len(encoded), 0)
        x = torch.cat([self.embed(self.target_table, target), encoded], dim=-1)
        x = self.decoder(self.enter(x), None, cache)
        return self.leave(F.relu(self.norm(x)))
