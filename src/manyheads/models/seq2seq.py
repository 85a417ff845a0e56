"""The encoder–decoder Transformer: reads a source, writes a target (translation, T5, BART)."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from jaxtyping import Bool, Int
from torch import Tensor, nn

from manyheads.errors import UserError, check_at_least, check_share
from manyheads.nn.attention import Cache, CoreConfig
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.embedding import Head, Output
from manyheads.nn.experts import FeedForwardConfig
from manyheads.nn.masks import AttentionMask, causal, full, look
from manyheads.nn.relative import PositionConfig
from manyheads.nn.shapes import Hidden, Logits, Real, Tokens

Source = Int[Tensor, "b s"]
Written = Bool[Tensor, "b t"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side has of its own; the rest is the model's."""

    layers: int | None = None
    heads: int | None = None
    hidden: int | None = None
    position: PositionConfig | None = None
    core: CoreConfig | None = None
    feedforward: FeedForwardConfig | None = None
    dropout: float | None = None

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

    tie: Literal["all", "inputs", "target", "none"] = "all"
    target_vocab_size: int | None = None
    output: Output = dataclasses.field(default_factory=Output)
    encoder: Side = dataclasses.field(default_factory=Side)
    decoder: Side = dataclasses.field(default_factory=Side)
    kind: ClassVar[str] = "seq2seq"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()
        for name, side in (("encoder", self.encoder), ("decoder", self.decoder)):
            for size in ("layers", "heads", "hidden"):
                check_at_least(f"model.{name}.{size}", getattr(side, size), 1)
            check_share(f"model.{name}.dropout", side.dropout)
        check_at_least("model.target_vocab_size", self.target_vocab_size, 1)
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
class Memory:
    """The top of the encoder, and the sight of it that the decoder has."""

    states: Tensor
    sight: AttentionMask


class Tables(Protocol):
    """Settings that say whether source and target tokens are looked up in one table."""

    @property
    def shares_inputs(self) -> bool: ...


class SourceToTarget(nn.Module):
    """Reads a source and writes a target; subclasses say how.

    logits[:, t] predict the token after target[:, t] (teacher forcing).
    """

    config: Tables
    tokens: nn.Embedding
    target_tokens: nn.Embedding  # there where the two are looked up apart
    head: Head

    @property
    def target_table(self) -> nn.Embedding:
        return self.tokens if self.config.shares_inputs else self.target_tokens

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> Memory:
        """What the decoder may ask of a source."""
        raise NotImplementedError

    def decode(self, target: Tensor, memory: Memory, target_real: Tensor | None = None) -> Hidden:
        """What the head reads; each model also takes the kind of cache that it can write with."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.target_table)

    def forward(
        self,
        source: Source,
        target: Tokens,
        source_real: Real | None = None,
        target_real: Written | None = None,
    ) -> Logits:
        return self.logits(self.decode(target, self.encode(source, source_real), target_real))


class Seq2Seq(SourceToTarget):
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
        initialise(self, config.initial, encoder.layers + decoder.layers)

    def encode(self, source: Tensor, source_real: Tensor | None = None) -> Memory:
        length = source.shape[1]
        self.encoder.position.refuse_past(length)
        sight = look(full, length, real=source_real, device=source.device)
        x = self.encoder_embedding(self.tokens, source, self.encoder.position, sight.queries)
        return Memory(self.encoder(x, sight), sight)

    def decode(
        self,
        target: Tensor,
        memory: Memory,
        target_real: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        """Hidden states of the decoder; with a cache, of the positions after the cached ones."""
        length = target.shape[1]
        self.decoder.position.refuse_past(length if cache is None else cache.end(length))
        if cache is None:
            sight = look(causal, length, real=target_real, device=target.device)
        else:
            sight = cache.mask(causal, length, target_real, target.device)
        x = self.decoder_embedding(self.target_table, target, self.decoder.position, sight.queries)
        hidden: Tensor = self.decoder(x, sight, memory.states, memory.sight, cache)
        if cache is not None:
            cache.advance()
        return hidden
