"""The decoder-only Transformer: a language model (GPT)."""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from manyheads.nn.attention import Cache, next_mask
from manyheads.nn.block import Architecture, Model, Stack, initialise
from manyheads.nn.layers import HeadConfig
from manyheads.nn.masks import AttentionMask, Both, SameDocument, causal
from manyheads.nn.shapes import Hidden, Logits, Positions, Tokens


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Architecture):
    """A decoder without an encoder."""

    tie: Annotated[Literal["all", "none"], "One matrix for tokens and output, or two"] = "all"
    output: Annotated[HeadConfig, "Output layer"] = field(default_factory=HeadConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()


@dataclass(frozen=True, kw_only=True)
class GptConfig(DecoderConfig):
    """A causal language model."""

    kind: ClassVar[str] = "gpt"

    def build(self) -> "Gpt":
        return Gpt(self)


class Decoder(Model):
    """Token embedding, a causal stack and the LM head."""

    def __init__(self, config: DecoderConfig, max_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.embedding = config.embed.build(config.dim, config.dropout)
        self.decoder = Stack(replace(config, max_length=max_length), causal=True)
        self.head = config.output.build(config.vocabulary, config.dim, tied=config.tie == "all")
        initialise(self, config.init, config.layers)

    def decode_tokens(
        self,
        tokens: Tokens,
        mask: AttentionMask,
        cache: Cache | None = None,
        positions: Positions | None = None,
    ) -> Hidden:
        """Hidden states; `positions` are those of the mask unless given."""
        positions = mask.query_positions if positions is None else positions
        x = self.embedding(self.tokens, tokens, self.decoder.position, positions)
        return self.decoder(x, mask, cache=cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.tokens)


class Gpt(Decoder):
    """logits[:, t] predict the token after tokens[:, t]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__(config, config.max_length)
        self.config = config

    def hidden(
        self,
        tokens: Tokens,
        real: Tensor | None = None,
        cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Hidden:
        """With `documents`, the document number of each token, rows are packed documents that do
        not attend to each other."""
        length = tokens.shape[1]
        self.decoder.position.check_length(length if cache is None else cache.end(length))
        packed = None if documents is None else SameDocument(documents)
        rule = causal if packed is None else Both(causal, packed)
        mask = next_mask(cache, rule, length, real, tokens.device)
        hidden = self.decode_tokens(
            tokens, mask, cache, None if packed is None else packed.positions()
        )
        if cache is not None:
            cache.advance()
        return hidden

    def forward(
        self, tokens: Tokens, real: Tensor | None = None, cache: Cache | None = None
    ) -> Logits:
        return self.logits(self.hidden(tokens, real, cache))
