"""One causal stack that reads and writes: source and target are one sequence (Transformer-D).

    (x_1, …, x_n, δ, y_1, …, y_m),  P(y | x) = Π_t P(y_t | x, δ, y_<t)    (Liu et al. 2018)

The separator δ is the target's own first token, that which stands before the first written one in
every target; no other is needed. The model has the face of an encoder–decoder: what is asked of
it and what it is trained by are the tokens of the target alone.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from einops import repeat
from jaxtyping import Int
from torch import Tensor, nn

from manyheads.baselines.bytenet import ByteNet, ByteNetConfig
from manyheads.baselines.convs2s import ConvS2S, ConvS2SConfig
from manyheads.baselines.gnmt import Gnmt, GnmtConfig
from manyheads.baselines.rnn import Rnn, RnnConfig, lengths_of
from manyheads.models.seq2seq import (
    EncoderDecoderBase,
    EncoderOutput,
    Seq2Seq,
    Seq2SeqConfig,
    Source,
)
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.layers import Embedding, HeadConfig
from manyheads.nn.masks import AttentionMask, causal, full, make_mask
from manyheads.nn.shapes import Hidden, PaddingMask, Tokens
from manyheads.nn.states import StateCache

Lengths = Int[Tensor, " b"]


@dataclass(frozen=True, kw_only=True)
class DecoderOnlySeq2SeqConfig(Architecture):
    """A decoder that reads a source and goes on with the target.

    `max_length` is the longest source, and the longest target: the stack has room for both, twice
    as many positions. `tie`: one matrix for tokens and output, or one for each.
    """

    tie: Literal["all", "none"] = "all"
    output: HeadConfig = field(default_factory=HeadConfig)
    kind: ClassVar[str] = "decoder-only-seq2seq"
    OLD_KINDS: ClassVar[tuple[str, ...]] = ("joined",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()

    @property
    def positions(self) -> int:
        """Of a source and a target, one behind the other."""
        return 2 * self.max_length

    @property
    def shares_inputs(self) -> bool:
        """Source and target are tokens of one sequence."""
        return True

    def build(self) -> "DecoderOnlySeq2Seq":
        return DecoderOnlySeq2Seq(self)


class DecoderOnlySeq2Seq(EncoderDecoderBase):
    """A decoder with the face of an encoder–decoder: it reads a source when it begins to write."""

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
        """The source itself: it is read when it is joined to a target."""
        if source_real is not None:
            lengths_of(source_real)  # what stands behind a source goes on where its text ends
        return EncoderOutput(
            source, make_mask(full, source.shape[1], padding_mask=source_real, device=source.device)
        )

    def decode(
        self,
        target: Tokens,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: StateCache | None = None,
    ) -> Hidden:
        """Hidden states at the target's places; with a cache, after those that it has read."""
        if target_real is not None:
            lengths_of(target_real)  # no query looks at padding behind it
        beams = target.shape[0] // memory.states.shape[0]
        source, real = memory.states, memory.mask.padding_mask
        if beams > 1:
            source = source.repeat_interleave(beams, 0)
            real = None if real is None else real.repeat_interleave(beams, 0)
        if cache is not None:
            return self._read_on(source, real, target, cache)
        # The text of the source, the target, and what is padding of the source behind both.
        lengths = _lengths(source, real)
        width, room = source.shape[1], target.shape[1]
        order = torch.arange(width + room, device=source.device) - lengths[:, None]
        behind = torch.where(order < room, order + width, order + lengths[:, None] - room)
        order = torch.where(order < 0, order + lengths[:, None], behind)
        hidden = self.hidden(torch.cat([source, target], dim=1).gather(1, order))
        places = lengths[:, None] + torch.arange(room, device=source.device)
        return hidden.gather(1, repeat(places, "b t -> b t d", d=hidden.shape[2]))

    def _read_on(
        self, source: Source, real: PaddingMask | None, target: Tokens, cache: StateCache
    ) -> Hidden:
        """A step of a batch whose sources, padding included, stand before all that is written.

        Each token has the position that it would have without that padding.
        """
        width, new = source.shape[1], target.shape[1]
        tokens = target if cache.length else torch.cat([source, target], dim=1)
        written = max(cache.length - width, 0) + new
        counted = torch.arange(max(width, written), device=source.device)
        after = _lengths(source, real)[:, None] + counted[:written]
        places = torch.cat([counted[:width].expand(len(source), -1), after], dim=1)
        self.decoder.position.check_length(width + written)
        if real is not None:
            real = torch.cat([real, real.new_ones(len(source), written)], dim=1)
        mask = AttentionMask(causal, places[:, -tokens.shape[1] :], places, real)
        x = self.embedding(self.tokens, tokens, self.decoder.position, mask.query_positions)
        hidden: Tensor = self.decoder(x, mask, cache=cache)
        cache.advance(tokens.shape[1])
        return hidden[:, -new:]

    def hidden(self, tokens: Tokens, real: Tensor | None = None) -> Hidden:
        """What the stack has at each position of one sequence."""
        self.decoder.position.check_length(tokens.shape[1])
        mask = make_mask(causal, tokens.shape[1], padding_mask=real, device=tokens.device)
        x = self.embedding(self.tokens, tokens, self.decoder.position, mask.query_positions)
        return self.decoder(x, mask)


def _lengths(source: Source, real: PaddingMask | None) -> Lengths:
    """Of each source, without its padding."""
    if real is None:
        return torch.full((len(source),), source.shape[1], device=source.device)
    return real.sum(1)


# What reads a source and writes a target; those before the Transformer, and what they are told.
Baseline = Rnn | Gnmt | ConvS2S | ByteNet
BaselineConfig = RnnConfig | GnmtConfig | ConvS2SConfig | ByteNetConfig
EncoderDecoder = Seq2Seq | DecoderOnlySeq2Seq | Baseline
EncoderDecoderConfig = Seq2SeqConfig | DecoderOnlySeq2SeqConfig | BaselineConfig
