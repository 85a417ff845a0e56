"""The encoder–decoder Transformer (translation, T5, BART)."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from jaxtyping import Bool, Int
from torch import Tensor, nn

from manyheads.config import Count, Probability
from manyheads.errors import UserError
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Cache, next_mask
from manyheads.nn.block import Architecture, Model, Stack, initialise
from manyheads.nn.experts import FeedForwardConfig
from manyheads.nn.layers import HeadConfig, LMHead
from manyheads.nn.masks import AttentionMask, causal, full, make_mask
from manyheads.nn.positions import PositionConfig
from manyheads.nn.shapes import Hidden, Logits, PaddingMask, Tokens

Source = Int[Tensor, "b s"]


@dataclass(frozen=True, kw_only=True)
class StackOverrides:
    """Settings of one stack that differ from the model's."""

    layers: Annotated[Count | None, "Blocks; none: as the model"] = None
    heads: Annotated[Count | None, "Attention heads; none: as the model"] = None
    ffn_dim: Annotated[Count | None, "Feed-forward width; none: as the model"] = None
    position: Annotated[PositionConfig | None, "Position scheme; null: as the model"] = None
    attention: Annotated[
        AttentionFunctionConfig | None, "Attention implementation; none: as the model"
    ] = None
    feedforward: Annotated[FeedForwardConfig | None, "Feed-forward part; none: as the model"] = None
    dropout: Annotated[Probability | None, "Dropout; none: as the model"] = None

    RENAMED: ClassVar[dict[str, str]] = {"hidden": "ffn_dim", "core": "attention"}

    def of(self, shared: Architecture) -> Architecture:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        overrides = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(shared, **overrides)


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(Architecture):
    """An encoder–decoder.

    `tie`: one matrix for source, target and output (all), for source and target (inputs), for
    target and output (target), or none shared.
    """

    tie: Annotated[
        Literal["all", "inputs", "target", "none"],
        "Weights shared by source embedding, target embedding and output",
    ] = "all"
    target_vocab_size: Annotated[Count | None, "Target tokens, if not the source's"] = None
    output: Annotated[HeadConfig, "Output layer"] = dataclasses.field(default_factory=HeadConfig)
    encoder: Annotated[StackOverrides, "Encoder settings that differ from the model's"] = (
        dataclasses.field(default_factory=StackOverrides)
    )
    decoder: Annotated[StackOverrides, "Decoder settings that differ from the model's"] = (
        dataclasses.field(default_factory=StackOverrides)
    )
    kind: ClassVar[str] = "seq2seq"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()
        if self.shares_inputs and self.target_vocab_size not in (None, self.vocab_size):
            raise UserError(
                f"model.target_vocab_size={self.target_vocab_size} needs embeddings that are not "
                f"shared (model.tie={self.tie}): set model.tie=target"
            )

    @property
    def shares_inputs(self) -> bool:
        """True if source and target tokens have one embedding."""
        return self.tie in ("all", "inputs")

    @property
    def target_vocabulary(self) -> int:
        return self.target_vocab_size or self.vocabulary

    def build(self) -> "Seq2Seq":
        return Seq2Seq(self)


@dataclass(eq=False)
class EncoderOutput:
    """The encoder's last hidden states, and the mask of their padding for cross-attention."""

    states: Tensor
    mask: AttentionMask

    @classmethod
    def of(cls, states: Tensor, real: PaddingMask | None) -> "EncoderOutput":
        mask = make_mask(full, states.shape[1], padding_mask=real, device=states.device)
        return cls(states, mask)

    def select(self, rows: Int[Tensor, " rows"]) -> "EncoderOutput":
        """Those of some sentences."""
        padding = self.mask.padding_mask
        mask = replace(self.mask, padding_mask=None if padding is None else padding[rows])
        return EncoderOutput(self.states[rows], mask)


class EncoderDecoderBase(Model):
    """P(target | source); logits[:, t] predict the token after target[:, t] (teacher forcing)."""

    tokens: nn.Embedding
    target_tokens: nn.Embedding  # only if the two embeddings differ
    head: LMHead

    @property
    def target_table(self) -> nn.Embedding:
        return getattr(self, "target_tokens", self.tokens)

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """The encoded source, as the decoder needs it."""
        raise NotImplementedError

    def decode(
        self, target: Tensor, memory: EncoderOutput, target_real: Tensor | None = None
    ) -> Hidden:
        """Hidden states for the head; models also take a cache of the kind that they use."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.target_table)

    def forward(
        self,
        source: Source,
        target: Tokens,
        source_real: PaddingMask | None = None,
        target_real: Bool[Tensor, "b t"] | None = None,
    ) -> Logits:
        return self.logits(self.decode(target, self.encode(source, source_real), target_real))


class Seq2Seq(EncoderDecoderBase):
    """The Transformer: an encoder stack, and a decoder stack with cross-attention to it."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        encoder, decoder = config.encoder.of(config), config.decoder.of(config)
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.encoder_embedding = config.embed.build(config.dim, encoder.dropout)
        self.encoder = Stack(encoder, causal=False)
        if not config.shares_inputs:
            self.target_tokens = nn.Embedding(config.target_vocabulary, config.dim)
        self.decoder_embedding = config.embed.build(config.dim, decoder.dropout)
        self.decoder = Stack(decoder, causal=True, memory_dim=config.dim)
        tied = config.tie in ("all", "target")
        self.head = config.output.build(config.target_vocabulary, config.dim, tied=tied)
        initialise(self, config.init, encoder.layers + decoder.layers)

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        length = source.shape[1]
        self.encoder.position.check_length(length)
        mask = make_mask(full, length, padding_mask=source_real, device=source.device)
        x = self.encoder_embedding(self.tokens, source, self.encoder.position, mask.query_positions)
        return EncoderOutput(self.encoder(x, mask), mask)

    def decode(
        self,
        target: Tensor,
        memory: EncoderOutput,
        target_real: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        """Hidden states of the decoder; with a cache, of the positions after the cached ones."""
        length = target.shape[1]
        self.decoder.position.check_length(length if cache is None else cache.end(length))
        mask = next_mask(cache, causal, length, target_real, target.device)
        positions = mask.query_positions
        x = self.decoder_embedding(self.target_table, target, self.decoder.position, positions)
        hidden: Tensor = self.decoder(x, mask, memory.states, memory.mask, cache)
        if cache is not None:
            cache.advance()
        return hidden
