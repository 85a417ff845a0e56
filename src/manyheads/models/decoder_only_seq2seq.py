"""A decoder-only model for translation and summaries: a prefix LM (Transformer-D).

    (x_1, …, x_n, δ, y_1, …, y_m),  P(y | x) = Π_t P(y_t | x, δ, y_<t)    (Liu et al. 2018)

Source and target are one sequence; the separator δ is the target's start token. The model has the
interface of an encoder–decoder: only target tokens are predicted.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import repeat
from jaxtyping import Int
from torch import Tensor

from manyheads.baselines.baseline import text_lengths
from manyheads.baselines.convolution import ByteNet, ByteNetConfig, ConvS2S, ConvS2SConfig
from manyheads.baselines.rnn import Gnmt, GnmtConfig, Rnn, RnnConfig
from manyheads.models.gpt import Decoder, DecoderConfig
from manyheads.models.seq2seq import (
    EncoderDecoderBase,
    EncoderOutput,
    Seq2Seq,
    Seq2SeqConfig,
    Source,
)
from manyheads.nn.attention import Cache
from manyheads.nn.masks import AttentionMask, causal, make_mask
from manyheads.nn.shapes import Hidden, PaddingMask, Tokens

Lengths = Int[Tensor, " b"]


@dataclass(frozen=True, kw_only=True)
class DecoderOnlySeq2SeqConfig(DecoderConfig):
    """A decoder of sources followed by targets, each up to `max_length` tokens."""

    kind: ClassVar[str] = "decoder-only-seq2seq"
    OLD_KINDS: ClassVar[tuple[str, ...]] = ("joined",)

    @property
    def positions(self) -> int:
        """Positions of a source and a target."""
        return 2 * self.max_length

    def build(self) -> "DecoderOnlySeq2Seq":
        return DecoderOnlySeq2Seq(self)


class DecoderOnlySeq2Seq(Decoder, EncoderDecoderBase):
    """A decoder with the interface of an encoder–decoder: `encode` only holds the source."""

    def __init__(self, config: DecoderOnlySeq2SeqConfig) -> None:
        super().__init__(config, config.positions)
        self.config = config

    def encode(self, source: Source, source_real: PaddingMask | None = None) -> EncoderOutput:
        """The source tokens themselves; `decode` puts them before the target."""
        if source_real is not None:
            text_lengths(source_real)  # the target continues where the source's text ends
        return EncoderOutput.of(source, source_real)

    def decode(
        self,
        target: Tokens,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        """Hidden states of the target; with a cache, of the positions after the cached ones."""
        if target_real is not None:
            text_lengths(target_real)  # causal: padding after a text does not change it
        beams = target.shape[0] // memory.states.shape[0]
        source, real = memory.states, memory.mask.padding_mask
        if beams > 1:
            source = source.repeat_interleave(beams, 0)
            real = None if real is None else real.repeat_interleave(beams, 0)
        if cache is not None:
            return self._continue(source, real, target, cache)
        # Reorder each row: source text, target, padding of the source.
        lengths = _lengths(source, real)
        width, length = source.shape[1], target.shape[1]
        order = torch.arange(width + length, device=source.device) - lengths[:, None]
        after = torch.where(order < length, order + width, order + lengths[:, None] - length)
        order = torch.where(order < 0, order + lengths[:, None], after)
        hidden = self.hidden(torch.cat([source, target], dim=1).gather(1, order))
        positions = lengths[:, None] + torch.arange(length, device=source.device)
        return hidden.gather(1, repeat(positions, "b t -> b t d", d=hidden.shape[2]))

    def _continue(
        self, source: Source, real: PaddingMask | None, target: Tokens, cache: Cache
    ) -> Hidden:
        """A decoding step. The cache holds the sources with their padding, then the targets.

        Each token has the position that it would have without that padding.
        """
        width, new = source.shape[1], target.shape[1]
        tokens = target if cache.length else torch.cat([source, target], dim=1)
        generated = max(cache.length - width, 0) + new
        counter = torch.arange(max(width, generated), device=source.device)
        after = _lengths(source, real)[:, None] + counter[:generated]
        positions = torch.cat([counter[:width].expand(len(source), -1), after], dim=1)
        self.decoder.position.check_length(width + generated)
        if real is not None:
            real = torch.cat([real, real.new_ones(len(source), generated)], dim=1)
        mask = AttentionMask(causal, positions[:, -tokens.shape[1] :], positions, real)
        hidden = self.decode_tokens(tokens, mask, cache)
        cache.advance(tokens.shape[1])
        return hidden[:, -new:]

    def hidden(self, tokens: Tokens, real: Tensor | None = None) -> Hidden:
        """Hidden states of one sequence."""
        self.decoder.position.check_length(tokens.shape[1])
        return self.decode_tokens(
            tokens, make_mask(causal, tokens.shape[1], padding_mask=real, device=tokens.device)
        )


def _lengths(source: Source, real: PaddingMask | None) -> Lengths:
    """The length of each source without its padding."""
    if real is None:
        return torch.full((len(source),), source.shape[1], device=source.device)
    return real.sum(1)


# Every encoder–decoder, and its settings.
Baseline = Rnn | Gnmt | ConvS2S | ByteNet
BaselineConfig = RnnConfig | GnmtConfig | ConvS2SConfig | ByteNetConfig
EncoderDecoder = Seq2Seq | DecoderOnlySeq2Seq | Baseline
EncoderDecoderConfig = Seq2SeqConfig | DecoderOnlySeq2SeqConfig | BaselineConfig
