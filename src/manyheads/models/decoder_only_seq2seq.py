"""A decoder-only model for translation and summaries: a prefix LM (Transformer-D).

    (x_1, …, x_n, δ, y_1, …, y_m),  P(y | x) = Π_t P(y_t | x, δ, y_<t)    (Liu et al. 2018)

Source and target are one sequence; the separator δ is the target's start token. The model has the
interface of an encoder–decoder: only target tokens are predicted.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from einops import repeat
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.baselines.bytenet import ByteNet, ByteNetConfig
from manyheads.baselines.convs2s import ConvS2S, ConvS2SConfig
from manyheads.baselines.gnmt import Gnmt, GnmtConfig
from manyheads.baselines.rnn import Rnn, RnnConfig, text_lengths
from manyheads.models.seq2seq import (
    EncoderDecoderBase,
    EncoderOutput,
    Seq2Seq,
    Seq2SeqConfig,
    Source,
)
from manyheads.nn.attention import StateCache
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.layers import Embedding, HeadConfig
from manyheads.nn.masks import AttentionMask, causal, make_mask
from manyheads.nn.shapes import Hidden, PaddingMask, Tokens

Lengths = Int[Tensor, " b"]


@dataclass(frozen=True, kw_only=True)
class DecoderOnlySeq2SeqConfig(Architecture):
    """A decoder of sources followed by targets, each up to `max_length` tokens."""

    tie: Annotated[Literal["all", "none"], "One matrix for tokens and output, or two"] = "all"
    output: Annotated[HeadConfig, "Output layer"] = field(default_factory=HeadConfig)
    kind: ClassVar[str] = "decoder-only-seq2seq"
    OLD_KINDS: ClassVar[tuple[str, ...]] = ("joined",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()

    @property
    def positions(self) -> int:
        """Positions of a source and a target."""
        return 2 * self.max_length

    @property
    def shares_inputs(self) -> bool:
        """Always: source and target are one sequence."""
        return True

    def build(self) -> "DecoderOnlySeq2Seq":
        return DecoderOnlySeq2Seq(self)


class DecoderOnlySeq2Seq(EncoderDecoderBase):
    """A decoder with the interface of an encoder–decoder: `encode` only holds the source."""

    def __init__(self, config: DecoderOnlySeq2SeqConfig) -> None:
        super().__init__()
        self.config: DecoderOnlySeq2SeqConfig = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.embedding = config.embed.build(config.dim, config.dropout)
        self.decoder = Stack(replace(config, max_length=config.positions), causal=True)
        self.head = config.output.build(config.vocabulary, config.dim, tied=config.tie == "all")
        initialise(self, config.init, config.layers)

    def stacks(self) -> dict[str, Stack]:
        return {"decoder": self.decoder}

    def embeddings(self) -> dict[str, Embedding]:
        return {"decoder": self.embedding}

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
        cache: StateCache | None = None,
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
        self, source: Source, real: PaddingMask | None, target: Tokens, cache: StateCache
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
        x = self.embedding(self.tokens, tokens, self.decoder.position, mask.query_positions)
        hidden: Tensor = self.decoder(x, mask, cache=cache)
        cache.advance(tokens.shape[1])
        return hidden[:, -new:]

    def hidden(self, tokens: Tokens, real: Tensor | None = None) -> Hidden:
        """Hidden states of one sequence."""
        self.decoder.position.check_length(tokens.shape[1])
        mask = make_mask(causal, tokens.shape[1], padding_mask=real, device=tokens.device)
        x = self.embedding(self.tokens, tokens, self.decoder.position, mask.query_positions)
        return self.decoder(x, mask)


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
