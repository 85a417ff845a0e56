"""The encoder–decoder Transformer: reads a source, writes a target (translation, T5, BART)."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

from jaxtyping import Bool, Int
from torch import Tensor, nn

from manyheads.config import Count, Probability
from manyheads.errors import UserError
from manyheads.models.base import Model
from manyheads.nn.attend import AttentionFunctionConfig
from manyheads.nn.attention import Cache, next_mask
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.experts import FeedForwardConfig
from manyheads.nn.layers import Embedding, HeadConfig, LMHead
from manyheads.nn.masks import AttentionMask, causal, full, make_mask
from manyheads.nn.positions import PositionConfig
from manyheads.nn.shapes import Hidden, Logits, PaddingMask, Tokens

Source = Int[Tensor, "b s"]
Written = Bool[Tensor, "b t"]


@dataclass(frozen=True, kw_only=True)
class StackOverrides:
    """What one side has of its own; the rest is the model's."""

    layers: Annotated[Count | None, "Blocks; none: as the model"] = None
    heads: Annotated[Count | None, "Attention heads; none: as the model"] = None
    ffn_dim: Annotated[Count | None, "Feed-forward width; none: as the model"] = None
    position: Annotated[PositionConfig | None, "Position scheme; none: as the model"] = None
    attention: Annotated[
        AttentionFunctionConfig | None, "Attention implementation; none: as the model"
    ] = None
    feedforward: Annotated[FeedForwardConfig | None, "Feed-forward part; none: as the model"] = None
    dropout: Annotated[Probability | None, "Dropout; none: as the model"] = None

    RENAMED: ClassVar[dict[str, str]] = {"hidden": "ffn_dim", "core": "attention"}

    def of(self, shared: Architecture) -> Architecture:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(shared, **given)


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(Architecture):
    """An encoder–decoder.

    `tie`: one matrix for source, target and output (all), for source and target (inputs), for
    target and output (target), or for none. Where source and target do not share one, the target
    may have a vocabulary of another size.
    """

    tie: Annotated[
        Literal["all", "inputs", "target", "none"], "Which embedding and output matrices are one"
    ] = "all"
    target_vocab_size: Annotated[Count | None, "Target tokens, if not the source's"] = None
    output: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    encoder: StackOverrides = dataclasses.field(default_factory=StackOverrides)
    decoder: StackOverrides = dataclasses.field(default_factory=StackOverrides)
    kind: ClassVar[str] = "seq2seq"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()
        if self.shares_inputs and self.target_vocab_size not in (None, self.vocab_size):
            raise UserError(
                f"model.tie={self.tie} shares one table, so model.target_vocab_size="
                f"{self.target_vocab_size} must be left out: or choose model.tie=target"
            )

    @property
    def shares_inputs(self) -> bool:
        """Whether source and target tokens are looked up in one table."""
        return self.tie in ("all", "inputs")

    @property
    def target_vocabulary(self) -> int:
        return self.target_vocab_size or self.vocabulary

    def build(self) -> "Seq2Seq":
        return Seq2Seq(self)


@dataclass(eq=False)
class EncoderOutput:
    """The top of the encoder, and the mask of it that the decoder has."""

    states: Tensor
    mask: AttentionMask


class Tables(Protocol):
    """Settings that say whether source and target tokens are looked up in one table."""

    @property
    def shares_inputs(self) -> bool: ...


class EncoderDecoderBase(Model):
    """Reads a source and writes a target; subclasses say how.

    logits[:, t] predict the token after target[:, t] (teacher forcing).
    """

    config: Tables
    tokens: nn.Embedding
    target_tokens: nn.Embedding  # there where the two are looked up apart
    head: LMHead

    @property
    def target_table(self) -> nn.Embedding:
        return self.tokens if self.config.shares_inputs else self.target_tokens

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> EncoderOutput:
        """What the decoder may ask of a source."""
        raise NotImplementedError

    def decode(
        self, target: Tensor, memory: EncoderOutput, target_real: Tensor | None = None
    ) -> Hidden:
        """What the head reads; each model also takes the kind of cache that it can write with."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.target_table)

    def forward(
        self,
        source: Source,
        target: Tokens,
        source_real: PaddingMask | None = None,
        target_real: Written | None = None,
    ) -> Logits:
        return self.logits(self.decode(target, self.encode(source, source_real), target_real))


class Seq2Seq(EncoderDecoderBase):
    """The Transformer: a stack that reads, and a stack that writes and looks at what was read."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config: Seq2SeqConfig = config
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

    def stacks(self) -> dict[str, Stack]:
        return {"encoder": self.encoder, "decoder": self.decoder}

    def embeddings(self) -> dict[str, Embedding]:
        return {"encoder": self.encoder_embedding, "decoder": self.decoder_embedding}

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
        places = mask.query_positions
        x = self.decoder_embedding(self.target_table, target, self.decoder.position, places)
        hidden: Tensor = self.decoder(x, mask, memory.states, memory.mask, cache)
        if cache is not None:
            cache.advance()
        return hidden
