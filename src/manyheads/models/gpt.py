"""The decoder-only Transformer: a language model (GPT)."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from manyheads.models.base import Model
from manyheads.nn.attention import Cache, next_mask
from manyheads.nn.block import Architecture, Stack, initialise
from manyheads.nn.layers import Embedding, HeadConfig
from manyheads.nn.masks import Both, SameDocument, causal
from manyheads.nn.shapes import Hidden, Logits, Tokens


@dataclass(frozen=True, kw_only=True)
class GptConfig(Architecture):
    """A causal language model."""

    tie: Annotated[Literal["all", "none"], "One matrix for tokens and output, or two"] = "all"
    output: Annotated[HeadConfig, "Output layer"] = field(default_factory=HeadConfig)
    kind: ClassVar[str] = "gpt"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_narrow_table()

    def build(self) -> "Gpt":
        return Gpt(self)


class Gpt(Model):
    """logits[:, t] predict the token after tokens[:, t]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.embedding = config.embed.build(config.dim, config.dropout)
        self.decoder = Stack(config, causal=True)
        self.head = config.output.build(config.vocabulary, config.dim, tied=config.tie == "all")
        initialise(self, config.init, config.layers)

    def stacks(self) -> dict[str, Stack]:
        return {"decoder": self.decoder}

    def embeddings(self) -> dict[str, Embedding]:
        return {"decoder": self.embedding}

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
        positions = mask.query_positions if packed is None else packed.positions()
        x = self.embedding(self.tokens, tokens, self.decoder.position, positions)
        hidden: Tensor = self.decoder(x, mask, cache=cache)
        if cache is not None:
            cache.advance()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.tokens)

    def forward(
        self, tokens: Tokens, real: Tensor | None = None, cache: Cache | None = None
    ) -> Logits:
        return self.logits(self.hidden(tokens, real, cache))
