"""An encoder–decoder of dilated convolutions, one stacked on the other, without attention.

Neural Machine Translation in Linear Time (Kalchbrenner et al. 2017). Either side is residual
blocks whose convolutions read vectors 1, 2, 4, 8, 16, 1, 2, … places apart:

    x + W_2 f(C ∗ f(W_1 f(x))),  f(x) = relu(norm(x)),  W_1 to half of the width, W_2 back

There is no attention to find a word by: the decoder reads what the encoder has at its own place t.
A source is therefore unfolded to the length a target may have, |t̂| = a |s| + b; beyond that, a
decoder hears of what was written alone.
"""

import math
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.baselines.baseline import BaselineSizes
from manyheads.baselines.convolution import Convolution, check_kernel, hidden_behind
from manyheads.baselines.rnn import lengths_of
from manyheads.errors import UserError, check_at_least
from manyheads.models.seq2seq import EncoderDecoderBase, EncoderOutput
from manyheads.nn.block import initialise
from manyheads.nn.layers import LMHead
from manyheads.nn.masks import full, make_mask
from manyheads.nn.shapes import Hidden, PaddingMask
from manyheads.nn.states import StateCache

DILATIONS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class ByteNetConfig(BaselineSizes):
    """Dilated convolutions.

    `dim` is also the width between the blocks, which are its `layers`; `stretch` and `more` are the
    a and b of |t̂| = a |s| + b. It has no longest text of its own.
    """

    layers: int = 5
    kernel: int = 3
    stretch: float = 1.2
    more: int = 0
    kind: ClassVar[str] = "bytenet"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.stretch", self.stretch, 1)
        check_at_least("model.more", self.more, 0)
        check_kernel(self.kernel)
        if self.dim % 2:
            raise UserError(f"model.dim={self.dim} must be even: the convolutions have half of it")

    def unfolded(self, length: int) -> int:
        """|t̂|, the places at which a decoder hears of a source of this length."""
        return math.ceil(self.stretch * length + self.more)

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
    """Blocks whose reach doubles, and begins anew after five."""

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


class ByteNet(EncoderDecoderBase):
    """Blocks that read, and causal ones on top of them that write."""

    def __init__(self, config: ByteNetConfig) -> None:
        super().__init__()
        self.config: ByteNetConfig = config
        dim = config.dim
        self.scale = math.sqrt(dim)  # the tables have entries of N(0, 1/d), a sum wants N(0, 1)
        self.dropout = nn.Dropout(config.dropout)
        self.tokens = nn.Embedding(config.vocabulary, dim)
        self.beyond = nn.Embedding(1, dim)  # stands behind a source that is unfolded
        self.encoder = DilatedStack(config, causal=False)
        if not config.shares_inputs:
            self.target_tokens = nn.Embedding(config.vocabulary, dim)
        self.enter = nn.Linear(2 * dim, dim)
        self.decoder = DilatedStack(config, causal=True)
        self.norm = nn.LayerNorm(dim)
        self.leave = nn.Linear(dim, dim)
        self.head = LMHead(config.vocabulary, dim, tied=config.shares_inputs, bias="none")
        initialise(self, "xavier", config.layers)

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """What the decoder will hear at its places, up to |t̂| of each source; then zeros."""
        length = source.shape[1]
        places = torch.arange(self.config.unfolded(length), device=source.device)
        x, real = F.pad(self.tokens(source), (0, 0, 0, len(places) - length)), None
        ends = torch.full_like(source[:, 0], length)
        if source_real is not None:
            ends = lengths_of(source_real)
            # As `unfolded` has it, in the same precision.
            real = places < (self.config.stretch * ends.double() + self.config.more).ceil()[:, None]
        text = (places < ends[:, None])[..., None]
        x = self.dropout(torch.where(text, x, self.beyond.weight) * self.scale)
        states = self.encoder(x, real)
        if real is not None:
            states = hidden_behind(states, real)
        return EncoderOutput(
            states, make_mask(full, len(places), padding_mask=real, device=source.device)
        )

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
        start, length = 0 if cache is None else cache.length, target.shape[1]
        heard = memory.states[:, start : start + length]
        heard = F.pad(heard, (0, 0, 0, length - heard.shape[1]))
        heard = heard.repeat_interleave(len(target) // len(heard), 0)
        x = self.dropout(self.target_table(target) * self.scale)
        x = self.decoder(self.enter(torch.cat([x, heard], dim=-1)), None, cache)
        if cache is not None:
            cache.advance(length)
        return self.dropout(self.leave(F.relu(self.norm(x))))
